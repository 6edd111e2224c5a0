"""The largest chunk that fits into memory, found by trial without a trace, also in a run."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_retrieval import RetrievalModule, SmoothAPLoss, chunked_backward, largest_chunk_size
from tests.lightning_retrieval.training.small_chunks import (
    batch_norm,
    gradients_of,
    images,
    net,
    net_with,
    smooth_ap,
    statistics_of,
)
from tests.lightning_retrieval.training.small_training import SGD, assert_same, batches, fit
from tests.lightning_retrieval.training.small_training import net as trained_net


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


def out_of_memory_above(most, embed, in_backward=False):
    def embed_or_fail(x):
        y = embed(x)
        if in_backward:
            return FailsInBackward.apply(y, most)
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return y

    return embed_or_fail


@pytest.mark.parametrize(("most", "size"), [(1, 1), (3, 2), (7, 7), (33, 26), (100, 51), (101, 101)])
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_batch_is_halved_until_its_chunks_fit(most, size, in_backward):
    rows = torch.zeros(101, 1, requires_grad=True)
    assert largest_chunk_size(out_of_memory_above(most, nn.Identity(), in_backward), rows) == size


@pytest.mark.parametrize(("keep_graphs", "size"), [(1, 6), (2, 3), (6, 1), (20, 1)])
def test_the_graphs_of_all_kept_chunks_must_fit(keep_graphs, size):
    """A device whose memory holds the graphs of 7 rows."""
    alive = []

    def embed(x):
        rows = sum(len(tensor) for tensor in (reference() for reference in alive) if tensor is not None)
        if rows + len(x) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        y = layer(x)
        alive.append(weakref.ref(y))
        return y

    layer = net()
    if keep_graphs > 7:
        with pytest.raises(torch.OutOfMemoryError, match="not even"):
            largest_chunk_size(embed, images(), keep_graphs=keep_graphs)
    else:
        assert largest_chunk_size(embed, images(), keep_graphs=keep_graphs) == size


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("most", [11, 3])
def test_looking_for_the_largest_chunk_leaves_no_trace(most, in_backward):
    embed, x = nn.Sequential(net_with(batch_norm(0.1)), nn.Dropout(0.5)), images()
    smooth_ap(embed[0](images()))
    embed[0][0].weight.grad = torch.ones_like(embed[0][0].weight)
    leaves = list(embed.parameters())
    gradients, before, buffers = [p.grad for p in leaves], statistics_of(embed[0][2]), list(embed.buffers())
    state = torch.get_rng_state()

    def embedder(chunk):  # the graph does not show what a reentrant checkpoint runs
        return checkpoint(embed, chunk.requires_grad_(), use_reentrant=True)

    with torch.no_grad():
        assert largest_chunk_size(out_of_memory_above(most, embedder, in_backward), x) == most
    assert all(p.grad is gradient for p, gradient in zip(leaves, gradients, strict=True))
    assert torch.equal(gradients[0], torch.ones(16, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(now is then for now, then in zip(embed.buffers(), buffers, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(embed.buffers(), before.values(), strict=True))


def test_largest_chunk_under_autocast():
    embed, x = net(dtype=torch.float32), images(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = chunked_backward(embed, x, smooth_ap, 3)
    plain = gradients_of(embed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            assert largest_chunk_size(out_of_memory_above(3, embed), x) == 3
        assert torch.equal(chunked_backward(embed, x, smooth_ap, 3), expected)
    assert all(torch.equal(gradient, then) for gradient, then in zip(gradients_of(embed), plain, strict=True))


@pytest.mark.parametrize(
    ("message", "is_certain", "is_possible"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True, True),
        ("CUDA error: out of memory", True, True),
        ("GET was unable to find an engine to execute this computation", False, True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", False, False),
    ],
)
def test_which_errors_of_other_libraries_are_about_memory(message, is_certain, is_possible):
    """Of those that are only possible, the error itself is raised where one row fails."""

    def fails_above(most):
        def embed_or_fail(x):
            if len(x) > most:
                raise RuntimeError(message)
            return x

        return embed_or_fail

    if is_possible:
        assert largest_chunk_size(fails_above(5), images()) == 3
    with pytest.raises(RuntimeError) as caught:
        largest_chunk_size(fails_above(0), images())
    assert isinstance(caught.value, torch.OutOfMemoryError) == is_certain


def test_not_even_one_row_fits():
    with pytest.raises(torch.OutOfMemoryError, match="not even"):
        largest_chunk_size(out_of_memory_above(0, net()), images())
    assert largest_chunk_size(net().requires_grad_(False), images()) == 11


@pytest.mark.gpu
def test_a_backward_pass_that_fails_has_freed_its_memory_before_the_next_trial():
    """A layer whose backward pass is in Python, as that of checkpointed layers, fails on the device's own thread."""
    x = torch.rand(64, 1 << 12, device="cuda")  # 16 KiB for each row
    scale, allocated = torch.ones((), device="cuda", requires_grad=True), []

    def embed(chunk):
        allocated.append(torch.cuda.memory_allocated())
        return FailsInBackward.apply(scale * chunk, 4)

    gc.freeze()  # a short collection leaves the device's thread no time to let go by itself
    for _ in range(10):
        assert largest_chunk_size(embed, x, reserve=1 << 20) == 4
    assert max(allocated) - min(allocated) < 1 << 14


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


class Small(nn.Module):
    """A network on a device whose memory holds five images; it keeps how many it could embed."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.embedded = trained_net(0.3), set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 5:
            raise torch.OutOfMemoryError(f"{len(images)} images")
        self.embedded.add(len(images))
        return self.net(images)


def test_auto_takes_a_chunk_that_fits():
    """Also of a longer batch, in a later step, and then of a shorter one."""
    data = batches(2)
    longer = [torch.cat(pair) for pair in zip(*batches(2))]
    auto, fixed = (
        RetrievalModule(Small(), SmoothAPLoss(tau=0.1), chunk_size=size, optimizer=SGD, seed=3) for size in ("auto", 5)
    )
    for module in (auto, fixed):
        fit(module, [*data, longer, data[0]])
    assert max(auto.embedder.embedded) == 5
    assert_same(auto, fixed)
