"""Chunked backpropagation against the plain one, with a control for each promise that shows what breaks without it."""

import copy
import functools
import weakref

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_retrieval import SmoothAPLoss, chunked_backward
from tests.lightning_retrieval.training.small_chunks import (
    LABELS,
    batch_norm,
    chunk_by_chunk,
    gradients_of,
    images,
    net,
    net_with,
    smooth_ap,
    statistics_of,
)


@pytest.mark.parametrize("size", [None, 1, 3, 10, 50])
@pytest.mark.parametrize(
    ("make", "dtype", "most"),
    [(SmoothAPLoss, torch.float64, 1e-10), (lambda: ProxyAnchorLoss(4, 3), torch.float32, 1e-5)],
    ids=["smooth-ap", "proxies"],
)
def test_same_as_the_plain_backward(make, dtype, most, size):
    embed, x, loss = net(dtype=dtype), images(dtype), make().to(dtype)
    expected = loss(embed(x), LABELS)
    expected.backward()
    plain = [*gradients_of(embed), *gradients_of(loss)]
    value = chunked_backward(embed, x, lambda y: loss(y, LABELS), size)
    assert not value.requires_grad
    torch.testing.assert_close(value, expected.detach())
    # One number for each gradient, so that no parameter hides behind a larger one.
    for gradient, wanted in zip([*gradients_of(embed), *gradients_of(loss)], plain, strict=True):
        assert wanted.norm() > 0
        assert (gradient - wanted).norm() <= most * wanted.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("size", "keep_graphs"), [(2, 0), (2, 2), (None, 0)])
def test_gradients_are_the_same_bit_for_bit_however_many_graphs_are_kept(size, keep_graphs, autocast):
    """With dropout and BatchNorm, whose statistics are updated once, too."""
    embed, x = nn.Sequential(net_with(batch_norm(0.1)), nn.Dropout(0.5)).float(), images(torch.float32)
    start, results = copy.deepcopy(embed.state_dict()), []
    for kept in (1, keep_graphs):
        embed.load_state_dict(start)
        embed.zero_grad()
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = chunked_backward(embed, x, smooth_ap, size, keep_graphs=kept)
        results.append([value, *gradients_of(embed), *embed.buffers(), torch.rand(1)])
        results[-1] = [tensor.clone() for tensor in results[-1]]
    for tensor, expected in zip(*results, strict=True):
        assert torch.equal(tensor, expected)
    assert results[0][1].any()


def test_gradients_are_added_to_those_there():
    embed, x = net(), images()
    chunked_backward(embed, x, smooth_ap, 4)
    once = [p.grad.clone() for p in embed.parameters()]
    chunked_backward(embed, x, smooth_ap, 4)
    torch.testing.assert_close(gradients_of(embed), [2 * gradient for gradient in once])


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


def test_backward_may_scale():
    embed, x = net(), images()
    chunked_backward(embed, x, smooth_ap, 4)
    plain = gradients_of(embed)
    value = chunked_backward(embed, x, smooth_ap, 4, backward=lambda value: (1024 * value).backward())
    assert 0 < value < 1
    torch.testing.assert_close(gradients_of(embed), [1024 * gradient for gradient in plain])


TWO_GRAPHS = functools.partial(chunked_backward, keep_graphs=2)


@pytest.mark.parametrize(("run", "alive"), [(chunked_backward, 1), (TWO_GRAPHS, 2), (chunk_by_chunk, 3)])
def test_graphs_alive_at_once(run, alive):
    embed, x = net(), images()
    saved, calls, most = weakref.WeakSet(), [], []

    class Saved:
        def __init__(self, tensor, call):
            self.tensor, self.call = tensor, call

    def watched(chunk):
        calls.append(chunk)
        call = len(calls)

        def pack(tensor):
            note = Saved(tensor, call)
            saved.add(note)
            most.append(len({other.call for other in saved}))
            return note

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda note: note.tensor):
            return embed(chunk)

    run(watched, x, smooth_ap, 4)
    assert max(most) == alive
    assert not saved


def test_a_frozen_embedder_lets_the_loss_learn():
    embed, x = net().requires_grad_(False), images()
    scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    value = chunked_backward(embed, x, lambda y: (scale * y).square().mean(), 4)
    assert scale.grad.item() == pytest.approx(value.item())  # d/dk k^2 m = 2 k m = k^2 m at k = 2
    assert all(p.grad is None for p in embed.parameters())


def test_a_constant_loss_has_a_gradient_of_zero():
    embed = nn.Linear(2, 2)
    assert chunked_backward(embed, torch.ones(3, 2), lambda y: torch.zeros(()), 2) == 0
    assert embed.weight.grad.tolist() == [[0, 0], [0, 0]]


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


def instance_norm(momentum):
    return nn.InstanceNorm1d(8, momentum=momentum, track_running_stats=True)


EMBEDDERS = {
    "module": lambda module: module,
    "method": lambda module: module.forward,
    "function": lambda m: lambda x: m(x),
}


@pytest.mark.parametrize(
    ("make", "momentum", "form"),
    [
        (batch_norm, 0.1, "module"),
        (batch_norm, 1.0, "method"),
        (batch_norm, None, "function"),
        (instance_norm, 0.1, "function"),
    ],
)
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
            own = hidden.var(2).mean(0)
        else:
            m = 1 / step if momentum is None else momentum
            own = sum(len(chunk) * chunk.transpose(0, 1).flatten(1).var(1) for chunk in hidden.split(4)) / 11
        variance = (1 - m) * variance + m * own
        assert embed[2].num_batches_tracked == (0 if make is instance_norm else step)
        torch.testing.assert_close(embed[2].running_mean, plain[2].running_mean)
        torch.testing.assert_close(embed[2].running_var, variance)
        assert embed[2].momentum == momentum


def test_a_layer_that_runs_twice_is_updated_twice():
    norm, x = nn.BatchNorm1d(5).double(), images()
    plain = copy.deepcopy(norm)
    plain(x)
    plain(3 * x + 1)
    chunked_backward(lambda chunk: norm(chunk) + norm(3 * chunk + 1), x, smooth_ap, 4)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_mean, plain.running_mean)


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_layer_that_is_skipped_for_a_chunk_counts_the_other_rows(skipped):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5, momentum=0.5).double()

        def forward(self, chunk):
            return self.norm.weight * chunk if chunk[0, 0] == x[4 * skipped, 0] else self.norm(chunk)

    embed, x = Skips(), images()
    chunked_backward(embed, x, smooth_ap, 4)
    seen = torch.cat([chunk for k, chunk in enumerate(x.split(4)) if k != skipped])
    assert embed.norm.num_batches_tracked == 1
    torch.testing.assert_close(embed.norm.running_mean, 0.5 * seen.sum(0) / 11)


def test_one_chunk_is_a_plain_step():
    embed, x = net_with(batch_norm(0.1)), images()
    plain = copy.deepcopy(embed)
    plain(x)
    chunked_backward(embed, x, smooth_ap, 11)
    for name, value in statistics_of(plain[2]).items():
        assert torch.equal(getattr(embed[2], name), value)


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


@pytest.mark.parametrize("call", [2, 4])  # in the middle of the first stage, and of the last
def test_layers_have_their_own_statistics_back_when_the_embedder_fails(call):
    embed, x, calls = net_with(batch_norm(0.1)), images(), []
    before, buffers = statistics_of(embed[2]), list(embed[2].buffers())

    def fails(module, args):
        calls.append(args)
        if len(calls) == call:
            raise RuntimeError("no more")

    embed[4].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no more"):
        chunked_backward(embed, x, smooth_ap, 4)
    assert all(now is then for now, then in zip(embed[2].buffers(), buffers, strict=True))
    assert embed[2].num_batches_tracked == (0 if call == 2 else 1)
    assert torch.equal(embed[2].running_mean, before["running_mean"]) == (call == 2)
