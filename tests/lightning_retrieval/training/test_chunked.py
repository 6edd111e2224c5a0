"""Chunked backpropagation against the plain one, with a control for each promise that shows what breaks without it."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from lightning_retrieval.losses import BlackboxAPLoss, FastAPLoss, ROADMAPLoss, SmoothAPLoss
from lightning_retrieval.training.chunk_size import largest_chunk_size
from lightning_retrieval.training.chunked import chunked_backward
from lightning_retrieval.training.random_state import RandomState
from lightning_retrieval.training.running_statistics import RunningStatistics

LABELS = torch.arange(11) % 4
SIZES = [None, 1, 3, 4, 10, 11, 50]


def net(dropout=0.0, dtype=torch.float64, noise=None):
    noise = nn.Dropout(dropout) if noise is None else noise
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), noise, nn.Linear(8, 3)).to(dtype)


def images(dtype=torch.float64):
    return torch.randn(11, 5, dtype=dtype)


def smooth_ap(embeddings):
    return SmoothAPLoss(tau=0.2)(embeddings, LABELS.to(embeddings.device))


def gradients_of(module):
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return gradients


def chunk_by_chunk(embed, x, loss, size):
    """All chunks' graphs at once, embedded in order: the same random numbers, none of the tricks."""
    value = loss(torch.cat([embed(chunk) for chunk in x.split(size or len(x))]))
    value.backward()
    return value.detach()


@pytest.mark.parametrize("size", SIZES)
def test_same_as_the_plain_backward(size):
    embed, x = net(), images()
    expected = smooth_ap(embed(x))
    expected.backward()
    plain = gradients_of(embed)
    value = chunked_backward(embed, x, smooth_ap, size)
    assert not value.requires_grad
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradients_of(embed), plain)


@pytest.mark.parametrize("size", [1, 3, 11])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "make",
    [SmoothAPLoss, ROADMAPLoss, FastAPLoss, BlackboxAPLoss, lambda: ProxyAnchorLoss(4, 3)],
    ids=lambda make: make.__name__,
)
def test_same_gradient_for_every_loss(make, dtype, most, size):
    embed, x, loss = net(dtype=dtype), images(dtype), make().to(dtype)
    unit = nn.functional.normalize(embed(x).detach())
    scores = (unit @ unit.T)[~torch.eye(11, dtype=torch.bool)].view(11, 10).sort(dim=1).values
    assert scores.diff(dim=1).min() > 1e-5  # no near ties, which the chunks' other rounding in float32 could turn round
    loss(embed(x), LABELS).backward()
    plain = [*gradients_of(embed), *gradients_of(loss)]
    chunked_backward(embed, x, lambda y: loss(y, LABELS), size)
    # One number for each gradient, so that no parameter hides behind a larger one.
    for gradient, expected in zip([*gradients_of(embed), *gradients_of(loss)], plain, strict=True):
        assert expected.norm() > 0
        assert (gradient - expected).norm() <= most * expected.norm()


def test_gradients_are_added_to_those_there():
    embed, x = net(), images()
    chunked_backward(embed, x, smooth_ap, 4)
    once = [p.grad.clone() for p in embed.parameters()]
    chunked_backward(embed, x, smooth_ap, 4)
    torch.testing.assert_close(gradients_of(embed), [2 * gradient for gradient in once])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("noise", [nn.Dropout(0.5), StochasticDepth(0.5, "row"), StochasticDepth(0.5, "batch")])
def test_dropout_draws_the_same_numbers_again(noise, size):
    embed, x = net(noise=noise), images()
    torch.manual_seed(5)
    expected = chunk_by_chunk(embed, x, smooth_ap, size)
    plain, state = gradients_of(embed), torch.get_rng_state()
    torch.manual_seed(5)
    value = chunked_backward(embed, x, smooth_ap, size)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients_of(embed), plain)
    # Whatever comes next sees the random numbers that it would have seen after one embedding of the batch.
    assert torch.equal(torch.get_rng_state(), state)


def test_without_the_replay_dropout_would_differ(monkeypatch):
    embed, x = net(dropout=0.5), images()
    torch.manual_seed(5)
    chunk_by_chunk(embed, x, smooth_ap, 4)
    plain = gradients_of(embed)
    monkeypatch.setattr(RandomState, "replayed", lambda self: contextlib.nullcontext())
    torch.manual_seed(5)
    chunked_backward(embed, x, smooth_ap, 4)
    assert not torch.allclose(gradients_of(embed)[0], plain[0])


def test_random_state_is_put_back_when_the_embedder_fails():
    embed, x, calls = net(dropout=0.5), images(), []

    def fails(chunk):
        calls.append(len(chunk))
        if len(calls) == 4:  # the first chunk's second time
            torch.rand(7)
            raise RuntimeError("no more")
        return embed(chunk)

    torch.manual_seed(5)
    for chunk in x.split(4):
        embed(chunk)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="no more"):
        chunked_backward(fails, x, smooth_ap, 4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [None, 4])
def test_bf16_autocast(size):
    embed, x = net(dtype=torch.float32), images(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = chunk_by_chunk(embed, x, smooth_ap, size)
    plain = gradients_of(embed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = chunked_backward(embed, x, smooth_ap, size)
    assert torch.equal(value, expected)
    # Every parameter has one: the weights cast to bf16 without a graph in stage 1 were not used again.
    for gradient, expected_gradient in zip(gradients_of(embed), plain):
        assert gradient.abs().sum() > 0
        # Summed over chunks in bf16 or after it: 8 bits.
        torch.testing.assert_close(gradient, expected_gradient, rtol=2**-6, atol=2**-8 * expected_gradient.abs().max())


def test_a_loss_with_parameters_of_its_own():
    class Proxies(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

        def forward(self, embeddings):
            return nn.functional.cross_entropy(embeddings @ self.proxies.T, LABELS)

    embed, x, loss = net(), images(), Proxies()
    loss(embed(x)).backward()
    plain = gradients_of(embed), gradients_of(loss)
    chunked_backward(embed, x, loss, 3)
    torch.testing.assert_close((gradients_of(embed), gradients_of(loss)), plain)


def test_backward_may_scale():
    embed, x = net(), images()
    chunked_backward(embed, x, smooth_ap, 4)
    plain = gradients_of(embed)
    value = chunked_backward(embed, x, smooth_ap, 4, backward=lambda value: (1024 * value).backward())
    assert 0 < value < 1
    torch.testing.assert_close(gradients_of(embed), [1024 * gradient for gradient in plain])


@pytest.mark.parametrize("size", SIZES)
def test_how_often_each_chunk_is_embedded(size):
    embed, x, calls = net(), images(), []

    def counted(chunk):
        calls.append((chunk[0, 0].item(), len(chunk), torch.is_grad_enabled()))
        return embed(chunk)

    chunked_backward(counted, x, smooth_ap, size)
    chunks = [(chunk[0, 0].item(), len(chunk)) for chunk in x.split(size or 11)]
    expected = [(*chunk, False) for chunk in chunks[:-1]]  # without a graph
    expected += [(*chunks[-1], True)]  # the last keeps its own
    expected += [(*chunk, True) for chunk in chunks[:-1]]
    assert calls == expected


@pytest.mark.parametrize(("run", "alive"), [(chunked_backward, 1), (chunk_by_chunk, 3)])
def test_graphs_alive_at_once(run, alive):
    embed, x = net(), images()
    saved, most = weakref.WeakSet(), 0

    class Saved:
        def __init__(self, tensor, call):
            self.tensor, self.call = tensor, call

    calls = 0

    def watched(chunk):
        nonlocal calls
        calls += 1
        call = calls

        def pack(tensor):
            nonlocal most
            note = Saved(tensor, call)
            saved.add(note)
            most = max(most, len({other.call for other in saved}))
            return note

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda note: note.tensor):
            return embed(chunk)

    run(watched, x, smooth_ap, 4)
    assert most == alive
    assert not saved


def test_a_frozen_embedder_lets_the_loss_learn():
    embed, x = net().requires_grad_(False), images()
    scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    value = chunked_backward(embed, x, lambda y: (scale * y).square().mean(), 4)
    assert scale.grad.item() == pytest.approx(value.item())  # d/dk k^2 m = 2 k m = k^2 m at k = 2
    assert all(p.grad is None for p in embed.parameters())


def test_embeddings_of_half_precision():
    embed, x = net(dtype=torch.bfloat16), images(torch.bfloat16)
    value = chunked_backward(embed, x, smooth_ap, 4)
    assert math.isfinite(value)
    assert all(gradient.dtype == torch.bfloat16 and gradient.any() for gradient in gradients_of(embed))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "x", "size"),
    [
        (ValueError, r"`inputs` must hold at least one row, got shape \(0, 5\)", torch.zeros(0, 5), 2),
        (ValueError, r"`chunk_size` must be an integer >= 1, got 0\.", torch.zeros(4, 5), 0),
        (ValueError, r"`chunk_size` must be an integer >= 1, got -3\.", torch.zeros(4, 5), -3),
        (TypeError, r"`chunk_size` must be an integer >= 1, got 2\.5 \(float\)", torch.zeros(4, 5), 2.5),
        (TypeError, r"`chunk_size` must be an integer >= 1, got True \(bool\)", torch.zeros(4, 5), True),
    ],
)
def test_bad_input(error, match, x, size):
    with pytest.raises(error, match=f"^chunked_backward: {match}"):
        chunked_backward(nn.Linear(5, 2), x, torch.sum, size)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("embed", "shape"),
    [
        (lambda x: x.sum(1), r"\(4,\)"),
        (lambda x: x[:1], r"\(2, 5\)"),
        (lambda x: x.repeat(2, 1), r"\(8, 5\)"),
        (lambda x: x[..., None], r"\(4, 5, 1\)"),
    ],
)
def test_embeddings_that_do_not_fit_the_inputs(embed, shape):
    match = f"chunked_backward: `embed` must return one row for each of the 4 inputs, got shape {shape}"
    with pytest.raises(ValueError, match=match):
        chunked_backward(embed, torch.randn(4, 5), torch.sum, 2)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("inputs", "embed", "loss", "error", "sentence"),
    [
        ([1.0], nn.Identity(), torch.sum, TypeError, "`inputs` must be a tensor, got list"),
        (torch.ones(3, 2), lambda x: None, torch.sum, TypeError, "`embed's result` must be a tensor, got NoneType"),
        (torch.ones(3, 2), nn.Identity(), lambda y: 1.0, TypeError, "`loss's value` must be a tensor, got float"),
        (torch.ones(3, 2), nn.Identity(), lambda y: y[0], ValueError, r"`loss` must return a scalar, got shape \(2,\)"),
    ],
)
def test_other_types_and_shapes_raise(inputs, embed, loss, error, sentence):
    with pytest.raises(error, match=f"^chunked_backward: {sentence}"):
        chunked_backward(embed, inputs, loss)


def test_a_constant_loss_has_a_gradient_of_zero():
    embed = nn.Linear(2, 2)
    assert chunked_backward(embed, torch.ones(3, 2), lambda y: torch.zeros(()), 2) == 0
    assert embed.weight.grad.tolist() == [[0, 0], [0, 0]]


def batch_norm(momentum):
    return nn.BatchNorm1d(8, momentum=momentum)


def sync_batch_norm(momentum):
    return nn.SyncBatchNorm(8, momentum=momentum)


def instance_norm(momentum):
    return nn.InstanceNorm1d(8, momentum=momentum, track_running_stats=True)


def net_with(norm):
    """The norm's input is linear in the images, so its mean over the batch does not depend on the chunks."""
    layers = nn.Linear(5, 16), nn.Unflatten(1, (8, 2)), norm, nn.Flatten(), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


def statistics_of(norm):
    return {name: buffer.clone() for name, buffer in norm.named_buffers()}


EMBEDDERS = {
    "module": lambda module: module,
    "method": lambda module: module.forward,
    "function": lambda m: lambda x: m(x),
}


@pytest.mark.parametrize("form", sorted(EMBEDDERS))
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("make", [batch_norm, sync_batch_norm, instance_norm])
def test_running_statistics_are_updated_once_per_step(make, momentum, form):
    embed = net_with(make(momentum))
    plain = copy.deepcopy(embed)
    variance = torch.ones(8, dtype=torch.float64)
    for step in (1, 2):
        x = images()
        plain(x)
        chunked_backward(EMBEDDERS[form](embed), x, smooth_ap, 4)
        hidden, m = embed[:2](x).detach(), momentum  # (11, 8, 2)
        if make is instance_norm:
            m = 0.0 if momentum is None else momentum  # as torch has it
            own = hidden.var(2).mean(0)
        else:
            m = 1 / step if momentum is None else momentum
            own = sum(len(chunk) * chunk.transpose(0, 1).flatten(1).var(1) for chunk in hidden.split(4)) / 11
        variance = (1 - m) * variance + m * own
        assert embed[2].num_batches_tracked == (0 if make is instance_norm else step)
        torch.testing.assert_close(embed[2].running_mean, plain[2].running_mean)
        torch.testing.assert_close(embed[2].running_var, variance)
        assert embed[2].momentum == momentum


def test_without_care_running_statistics_would_be_updated_by_each_run(monkeypatch):
    embed, x = net_with(batch_norm(0.1)), images()
    plain = copy.deepcopy(embed)
    plain(x)
    monkeypatch.setattr(RunningStatistics, "collected", lambda self, rows: contextlib.nullcontext())
    chunked_backward(embed, x, smooth_ap, 4)
    assert embed[2].num_batches_tracked == 5  # three chunks, two of them twice
    assert (embed[2].running_mean - plain[2].running_mean).norm() > plain[2].running_mean.norm()


def test_a_layer_that_runs_twice_is_updated_twice():
    norm, x = nn.BatchNorm1d(5).double(), images()
    plain = copy.deepcopy(norm)
    plain(x)
    plain(3 * x + 1)
    chunked_backward(lambda chunk: norm(chunk) + norm(3 * chunk + 1), x, smooth_ap, 4)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_mean, plain.running_mean)


@pytest.mark.parametrize("form", sorted(EMBEDDERS))
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_layer_that_is_skipped_for_a_chunk_counts_the_other_rows(skipped, form):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5, momentum=0.5).double()

        def forward(self, chunk):
            return self.norm.weight * chunk if chunk[0, 0] == x[4 * skipped, 0] else self.norm(chunk)

    embed, x = Skips(), images()
    chunked_backward(EMBEDDERS[form](embed), x, smooth_ap, 4)
    seen = torch.cat([chunk for k, chunk in enumerate(x.split(4)) if k != skipped])
    assert embed.norm.num_batches_tracked == 1
    torch.testing.assert_close(embed.norm.running_mean, 0.5 * seen.sum(0) / 11)


def test_one_chunk_is_a_plain_step():
    embed, x, own = net_with(batch_norm(0.1)), images(), []
    plain, mean = copy.deepcopy(embed), embed[2].running_mean
    plain(x)
    embed[2].register_forward_hook(lambda module, args, output: own.append(module.running_mean is mean))
    chunked_backward(embed, x, smooth_ap, 11)
    assert own == [True]
    for name, value in statistics_of(plain[2]).items():
        assert torch.equal(getattr(embed[2], name), value)


def test_gradients_through_batch_norm_are_those_of_the_chunks():
    embed, x = net_with(batch_norm(0.1)), images()
    chunk_by_chunk(embed, x, smooth_ap, 4)
    plain = gradients_of(embed)
    chunked_backward(embed, x, smooth_ap, 4)
    torch.testing.assert_close(gradients_of(embed), plain)


def test_frozen_batch_norm_is_left_alone_and_exact():
    embed, x = net_with(batch_norm(0.1)), images()
    embed(images())  # statistics of some kind
    embed[2].eval()
    before, buffers = statistics_of(embed[2]), list(embed[2].buffers())
    smooth_ap(embed(x)).backward()
    plain = gradients_of(embed)
    chunked_backward(embed, x, smooth_ap, 4)
    torch.testing.assert_close(gradients_of(embed), plain)
    for name, value in before.items():
        assert torch.equal(getattr(embed[2], name), value)
    assert all(now is then for now, then in zip(embed[2].buffers(), buffers, strict=True))


def test_statistics_of_checkpointed_layers_are_updated_once():
    embed, x = net_with(batch_norm(0.1)), images()
    plain = copy.deepcopy(embed)
    plain(x)
    chunked_backward(lambda chunk: checkpoint(embed, chunk, use_reentrant=False), x, smooth_ap, 4)
    assert embed[2].num_batches_tracked == 1
    torch.testing.assert_close(embed[2].running_mean, plain[2].running_mean)


def test_the_loss_keeps_statistics_of_its_own():
    norm, x = nn.BatchNorm1d(3).double(), images()
    chunked_backward(net(), x, lambda y: smooth_ap(norm(y)), 4)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("form", sorted(EMBEDDERS))
@pytest.mark.parametrize("call", [2, 4])  # in the middle of the first stage, and of the last
def test_layers_have_their_own_statistics_back_when_the_embedder_fails(call, form):
    embed, x, calls = net_with(batch_norm(0.1)), images(), []
    before, buffers = statistics_of(embed[2]), list(embed[2].buffers())

    def fails(module, args):
        calls.append(args)
        if len(calls) == call:
            raise RuntimeError("no more")

    embed[4].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no more"):
        chunked_backward(EMBEDDERS[form](embed), x, smooth_ap, 4)
    assert all(now is then for now, then in zip(embed[2].buffers(), buffers, strict=True))
    assert embed[2].num_batches_tracked == (0 if call == 2 else 1)
    assert torch.equal(embed[2].running_mean, before["running_mean"]) == (call == 2)
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("form", ["method", "module"])
def test_a_compiled_embedder_is_not_compiled_again_at_each_step(form):
    compiled, batches = [], images()

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    embed = net_with(batch_norm(0.1))
    if form == "method":
        embed.compile(backend=backend)
        embedder = embed.__call__
    else:
        embedder = torch.compile(embed, backend=backend)
    try:
        chunked_backward(embedder, batches, smooth_ap, 4)
        first = len(compiled)
        for _ in range(3):
            chunked_backward(embedder, batches, smooth_ap, 4)
    finally:
        torch.compiler.reset()
    assert 0 < first == len(compiled)
    assert embed[2].num_batches_tracked == 4


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.fails = len(x) > most
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient, None


def out_of_memory_above(most, embed, calls, in_backward=False):
    def embed_or_fail(x):
        calls.append(len(x))
        y = embed(x)
        if in_backward:
            return FailsInBackward.apply(y, most)
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return y

    return embed_or_fail


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("most", "tried"),
    [
        (11, [11]),
        (50, [11]),
        (10, [11, 6]),
        (5, [11, 6, 3]),
        (3, [11, 6, 3]),
        (2, [11, 6, 3, 2]),
        (1, [11, 6, 3, 2, 1]),
    ],
)
def test_largest_chunk_is_found_by_halving(most, tried, in_backward):
    calls = []
    assert largest_chunk_size(out_of_memory_above(most, net(), calls, in_backward), images()) == tried[-1]
    assert list(dict.fromkeys(calls)) == tried


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("most", [11, 3])
def test_looking_for_the_largest_chunk_leaves_no_trace(most, in_backward):
    embed, x = nn.Sequential(net_with(batch_norm(0.1)), nn.Dropout(0.5)), images()
    free = torch.ones(3, dtype=torch.float64, requires_grad=True)  # a leaf in no module
    x.requires_grad_()
    smooth_ap(embed[0](images()))
    embed[0][0].weight.grad = torch.ones_like(embed[0][0].weight)
    leaves = [*embed.parameters(), free, x]
    gradients, before, buffers = [p.grad for p in leaves], statistics_of(embed[0][2]), list(embed.buffers())
    state = torch.get_rng_state()

    def embedder(chunk):  # the graph does not show what a reentrant checkpoint runs
        return free * checkpoint(embed, chunk, use_reentrant=True)

    with torch.no_grad():
        assert largest_chunk_size(out_of_memory_above(most, embedder, [], in_backward), x) == most
    assert all(p.grad is gradient for p, gradient in zip(leaves, gradients, strict=True))
    assert torch.equal(gradients[0], torch.ones(16, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(now is then for now, then in zip(embed.buffers(), buffers, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(embed.buffers(), before.values(), strict=True))
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_trial_has_a_graph_and_meets_the_gradients_of_a_chunk_before():
    embed, seen, reserved = net(), [], 54321

    def watched(x):
        held = any(
            type(o) is torch.Tensor and o.dtype == torch.uint8 and o.nbytes == reserved for o in gc.get_objects()
        )
        seen.append((torch.is_grad_enabled(), embed[0].weight.grad is not None, held))
        return embed(x)

    with torch.no_grad():
        largest_chunk_size(watched, images(), reserve=reserved)
    assert seen == [(True, False, True), (True, True, True)]


def test_largest_chunk_under_autocast():
    embed, x = net(dtype=torch.float32), images(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = chunked_backward(embed, x, smooth_ap, 3)
    plain = gradients_of(embed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            assert largest_chunk_size(out_of_memory_above(3, embed, []), x) == 3
        assert torch.equal(chunked_backward(embed, x, smooth_ap, 3), expected)
    assert all(torch.equal(gradient, then) for gradient, then in zip(gradients_of(embed), plain, strict=True))


OF_CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
OF_CUDNN = "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
NO_ENGINE = "FIND was unable to find an engine to execute this computation"


def fails_above(most, message):
    embed = net()

    def embed_or_fail(x):
        if len(x) > most:
            raise RuntimeError(message)
        return embed(x)

    return embed_or_fail


@pytest.mark.parametrize("message", [OF_CUBLAS, OF_CUDNN, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", NO_ENGINE])
def test_failed_allocations_of_other_libraries_make_chunks_smaller(message):
    assert largest_chunk_size(fails_above(5, message), images()) == 3


@pytest.mark.parametrize("message", [OF_CUBLAS, OF_CUDNN])
def test_one_row_for_which_another_library_cannot_allocate(message):
    with pytest.raises(torch.OutOfMemoryError, match="not even one input") as caught:
        largest_chunk_size(fails_above(0, message), images())
    assert str(caught.value.__cause__) == message


@pytest.mark.parametrize("message", [NO_ENGINE, "CUDA error: device-side assert triggered"])
def test_errors_that_are_not_about_memory_are_raised(message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        largest_chunk_size(fails_above(0, message), images())


def test_largest_chunk_of_a_frozen_embedder():
    assert largest_chunk_size(net().requires_grad_(False), images()) == 11


@pytest.mark.refusal
def test_not_even_one_row_fits():
    match = (
        r"^largest_chunk_size: not even one input of shape \(5,\) fits the memory of cpu in addition to the 7 reserved "
        "bytes; use smaller inputs, a smaller network or half precision"
    )
    with pytest.raises(torch.OutOfMemoryError, match=match):
        largest_chunk_size(out_of_memory_above(0, net(), []), images(), reserve=7)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "sentence", "inputs", "reserve"),
    [
        (ValueError, r"`inputs` must hold at least one row, got shape \(0, 5\)\.", torch.zeros(0, 5), 0),
        (TypeError, r"`inputs` must be a tensor, got list\.", [1.0], 0),
        (ValueError, r"`reserve` must be an integer >= 0, got -1\.", torch.zeros(4, 5), -1),
        (TypeError, r"`reserve` must be an integer >= 0, got 0\.5 \(float\)\.", torch.zeros(4, 5), 0.5),
    ],
)
def test_bad_input_to_largest_chunk_size(error, sentence, inputs, reserve):
    with pytest.raises(error, match=f"^largest_chunk_size: {sentence}"):
        largest_chunk_size(nn.Linear(5, 2), inputs, reserve=reserve)


@pytest.mark.refusal
def test_an_embedder_without_a_tensor_has_no_largest_chunk():
    with pytest.raises(TypeError, match=r"^largest_chunk_size: `embed's result` must be a tensor, got NoneType"):
        largest_chunk_size(lambda x: None, images())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [None, 4])
def test_dropout_on_a_gpu_draws_the_same_numbers_again(size):
    embed, x = net(dropout=0.5).cuda(), images().cuda()
    torch.manual_seed(5)
    expected = chunk_by_chunk(embed, x, smooth_ap, size)
    plain, state = gradients_of(embed), torch.cuda.get_rng_state()
    torch.manual_seed(5)
    value = chunked_backward(embed, x, smooth_ap, size)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients_of(embed), plain)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_dropout_draws_the_same_numbers_again_on_a_gpu_without_inputs(device, size):
    # The images lie on the CPU, and the network on a GPU that need not be the current one.
    layers, x = net(dropout=0.5).to(device), images()

    def embed(chunk):
        return layers(chunk.to(device))

    torch.manual_seed(5)
    expected = chunk_by_chunk(embed, x, smooth_ap, size)
    plain, state = gradients_of(layers), torch.cuda.get_rng_state(device)
    torch.manual_seed(5)
    value = chunked_backward(embed, x, smooth_ap, size)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients_of(layers), plain)
    assert torch.equal(torch.cuda.get_rng_state(device), state)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [None, 4])
def test_fp16_gradients_are_scaled_once(size):
    embed, x = net(dtype=torch.float32).cuda(), images(torch.float32).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        chunked_backward(embed, x, smooth_ap, size)
    plain = gradients_of(embed)
    optimizer, scaler = torch.optim.SGD(embed.parameters(), lr=0.1), torch.amp.GradScaler("cuda", init_scale=1024.0)
    with torch.autocast("cuda", dtype=torch.float16):
        chunked_backward(embed, x, smooth_ap, size, backward=lambda value: scaler.scale(value).backward())
    scaler.unscale_(optimizer)
    for gradient, expected in zip(gradients_of(embed), plain, strict=True):
        # Half precision has 10 bits, and small gradients lose some of them where they are not scaled.
        assert (gradient - expected).norm() <= 2**-6 * expected.norm()
        assert expected.norm() > 0


@pytest.mark.gpu
def test_largest_chunk_on_a_gpu():
    mib = 1 << 20
    x = torch.rand(64, mib // 4, device="cuda")  # 1 MiB for each row
    scale = torch.ones((), device="cuda", requires_grad=True)

    def embed(chunk):
        for _ in range(8):  # each keeps its result for the backward pass
            chunk = (scale * chunk).tanh()
        return chunk[:, :3]

    def step(size):
        scale.grad = None
        return chunked_backward(embed, x, lambda y: y.square().mean(), size)

    step(1)  # so that what the first use allocates is there
    scale.grad = None
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 448 * mib) / total)
    try:
        size = largest_chunk_size(embed, x)
        assert 1 < size < 64
        assert scale.grad is None
        assert largest_chunk_size(embed, x, reserve=336 * mib) < size
        torch.cuda.empty_cache()
        step(size)
        with pytest.raises(torch.OutOfMemoryError):
            step(2 * size)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
