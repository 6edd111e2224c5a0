"""The batch of all processes: its rows, the gradients that flow back, and batches that do not match."""

import re

import pytest
import torch
from torch import nn

from lightning_retrieval.distributed import sum_over_ranks
from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.losses.batch_loss import QueryRange
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.step import gather_batch

ROWS = 40
SHARDS = [3, 36, 1]  # rows of each process


def whole_batch():
    """Inputs and labels, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (ROWS,), generator=generator)


def network():
    generator = torch.Generator().manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return net


def gradients_of_a_step(this, world, local_queries):
    """Each process has its shard of the rows, and computes the loss of its own queries or a fraction of the loss."""
    x, labels = whole_batch()
    own = torch.arange(ROWS).split(SHARDS)[this]
    levels = torch.stack([labels, labels // 3], 1)
    net = network()
    batch = gather_batch("Owner", net(x[own]), levels[own], own, gather=True, local_queries=local_queries)
    loss = SmoothAPLoss(tau=0.2)
    if local_queries:
        begin = sum(batch.counts[:this])
        queries = QueryRange(begin, begin + len(own), sum_over_ranks)
        part = loss(batch.embeddings, batch.labels[:, 0], queries=queries)
    else:
        part = loss(batch.embeddings, batch.labels[:, 0]) / world
    part.backward()
    before_the_sum = [parameter.grad.clone() for parameter in net.parameters()]
    value = GradientSum(net.parameters()).finish(part.detach()[None])
    return {
        "batch": (batch.labels, batch.ids, batch.counts),
        "before the sum": before_the_sum,
        "gradients": [parameter.grad for parameter in net.parameters()],
        "value": value,
    }


def message_of(embeddings, labels, ids, gather=True):
    """The error message of a batch, the same on all processes."""
    with pytest.raises((ValueError, TypeError)) as error:
        gather_batch("Owner", embeddings, labels, ids, gather=gather, local_queries=True)
    return type(error.value), str(error.value)


def messages_of_batches_that_do_not_match(this):
    """Batches that differ between the processes, or that are invalid on all but the first."""
    is_first = this == 0
    embeddings, labels = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    narrower_or_wider = torch.ones(2, 3 + (this == 1))
    ids_but_on_the_first = None if is_first else labels
    floats_but_on_the_first = labels if is_first else labels.double()
    column_but_on_the_first = labels if is_first else labels[:, None]
    more_rows = torch.ones(2 + this, 3), torch.zeros(2 + this, dtype=torch.int64)
    return {
        "dimension": message_of(narrower_or_wider, labels, labels),
        "ids": message_of(embeddings, labels, ids_but_on_the_first),
        "rows": message_of(*more_rows, None, gather=False),
        "labels that are not integers": message_of(embeddings, floats_but_on_the_first, labels),
        "ids of another shape": message_of(embeddings, labels, column_but_on_the_first),
    }


def rows_without_gathering():
    embeddings, labels = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    batch = gather_batch("Owner", embeddings, labels, None, gather=False, local_queries=True)
    return len(batch.embeddings), batch.counts


def in_each_process(this, world):
    return {
        "own queries": gradients_of_a_step(this, world, local_queries=True),
        "whole loss": gradients_of_a_step(this, world, local_queries=False),
        "messages": messages_of_batches_that_do_not_match(this),
        "rows without gathering": rows_without_gathering(),
    }


@pytest.fixture(scope="module")
def ranks(run_processes):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, len(SHARDS))


@pytest.mark.parametrize("form", ["own queries", "whole loss"])
def test_labels_and_ids_come_in_rank_order_and_gradients_are_those_of_one_process(ranks, form):
    x, labels = whole_batch()
    net = network()
    loss = SmoothAPLoss(tau=0.2)(net(x), labels)
    loss.backward()
    expected = [parameter.grad for parameter in net.parameters()]
    for result in ranks:
        step = result[form]
        levels, ids, counts = step["batch"]
        assert torch.equal(levels, torch.stack([labels, labels // 3], 1))
        assert torch.equal(ids, torch.arange(ROWS))
        assert counts == SHARDS
        torch.testing.assert_close(step["gradients"], expected, rtol=0, atol=1e-13)
        assert step["value"].item() == pytest.approx(loss.item(), abs=1e-13)
        assert all(map(torch.equal, step["gradients"], ranks[0][form]["gradients"]))
        assert not torch.allclose(step["before the sum"][0], expected[0])  # no rank had all of it alone


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("dimension", r"batches may differ only .* \[\(3, 0, 1\), \(4, 0, 1\), \(3, 0, 1\)\] in rank order"),
        ("ids", r"batches may differ only .* \[\(3, 0, 0\), \(3, 0, 1\), \(3, 0, 1\)\] in rank order"),
        ("rows", r"gather=False .* batches of equal size, got \[2, 3, 4\] rows in rank order"),
    ],
)
def test_batches_that_do_not_match_raise_on_every_rank(ranks, case, sentence):
    for result in ranks:
        error, message = result["messages"][case]
        assert error is ValueError
        assert re.match(f"Owner: .*{sentence}", message)


def test_batches_of_equal_size_need_not_be_gathered(ranks):
    assert [result["rows without gathering"] for result in ranks] == [(2, [2, 2, 2])] * 3


@pytest.mark.parametrize("case", ["labels that are not integers", "ids of another shape"])
def test_labels_and_ids_that_are_invalid_on_one_rank_raise_on_every_rank(ranks, case):
    for this, result in enumerate(ranks):
        error, message = result["messages"][case]
        assert error is TypeError
        assert message.startswith("Owner: labels must be integers of shape (rows,) or (rows, levels) and ids integers")
        assert message.endswith(f"on rank {this}.")


def test_one_process_keeps_its_batch_as_it_is():
    rows, labels = torch.randn(3, 2, requires_grad=True), torch.arange(3)
    batch = gather_batch("Owner", rows, labels, None, gather=True, local_queries=True)
    assert batch.embeddings is rows
    assert batch.labels is labels
    assert (batch.ids, batch.counts) == (None, [3])


def on_gpus(this, world):
    """A gathered batch and the gradients that come back, each process on a GPU of its own."""
    device = torch.device("cuda", this)
    torch.cuda.set_device(device)
    own = torch.arange(10).split([3, 7])[this]
    rows = whole_batch()[0][own].to(device).requires_grad_()
    gradients = {}
    for local in (True, False):
        batch = gather_batch("Owner", rows, own.to(device) % 3, own.to(device), gather=True, local_queries=local)
        weighted = (batch.embeddings * (this + 1)).sum()
        gradients[local] = torch.autograd.grad(weighted, rows)[0].cpu()
    return gradients, batch.embeddings.detach().cpu(), batch.labels.cpu(), batch.ids.cpu()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_and_gradients_travel_between_gpus(run_processes):
    for this, (gradients, rows, labels, ids) in enumerate(run_processes(on_gpus, 2, backend="nccl")):
        assert torch.equal(rows, whole_batch()[0][:10])
        assert torch.equal(labels, torch.arange(10) % 3)
        assert torch.equal(ids, torch.arange(10))
        assert (gradients[True] == 3).all()  # the sum of both processes
        assert (gradients[False] == 2 * (this + 1)).all()  # its own, which belongs to half of the loss
