"""Statistics of normalisation layers, updated once for all chunks of a step."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_retrieval.training.chunked import RunningStatistics, chunked_backward
from tests.lightning_retrieval.training.small_chunks import (
    batch_norm,
    chunk_by_chunk,
    gradients_of,
    images,
    net,
    net_with,
    smooth_ap,
    statistics_of,
)


def sync_batch_norm(momentum):
    return nn.SyncBatchNorm(8, momentum=momentum)


def instance_norm(momentum):
    return nn.InstanceNorm1d(8, momentum=momentum, track_running_stats=True)


EMBEDDERS = {
    "module": lambda module: module,
    "method": lambda module: module.forward,
    "function": lambda m: lambda x: m(x),
}


def test_chunks_that_are_repeated_do_not_count():
    embed = net_with(batch_norm(0.1))
    repeated, x = copy.deepcopy(embed), images()
    chunked_backward(embed, x, smooth_ap, 4)
    chunked_backward(repeated, x, smooth_ap, 4, least_chunks=5)
    for found, expected in zip(repeated[2].buffers(), embed[2].buffers()):
        assert torch.equal(found, expected)
    torch.testing.assert_close(gradients_of(repeated), gradients_of(embed), rtol=0, atol=1e-15)


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


class OwnSequential(nn.Sequential):
    """torch 2.6 compiles a network in place only if its `forward` is not one of torch's own."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("form", ["method", "module"])
def test_a_compiled_embedder_is_not_compiled_again_at_each_step(form):
    compiled, batches = [], images()

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    embed = OwnSequential(*net_with(batch_norm(0.1)))
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
