"""The batch of all processes: its rows, the gradients that flow back, and batches that do not match."""

import re

import pytest
import torch

from lightning_retrieval.training.step import Dimensions, LocalRows, gather_batch, gather_labels

ROWS = 40
SHARDS = {2: [3, 37], 3: [3, 36, 1]}  # rows of each process


def whole_batch():
    """Rows and labels of two levels, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (ROWS,), generator=generator)
    return torch.randn(ROWS, 8, generator=generator, dtype=torch.float64), torch.stack([labels, labels // 3], 1)


def gathered(this, world, device="cpu"):
    """The batch of all processes, and the gradients that come back where each one weights all rows by its number."""
    if device == "cuda":
        torch.cuda.set_device(this)
    rows, labels = whole_batch()
    own = torch.arange(ROWS).split(SHARDS[world])[this]
    own_rows = rows[own].to(device).requires_grad_()
    batch_of_own = (own_rows, labels[own].to(device), own.to(device))
    gradients = {}
    for local in (True, False):
        embeddings, batch = gather_batch(*batch_of_own, gather=True, local_queries=local)
        weighted = (embeddings * (this + 1)).sum()
        gradients[local] = torch.autograd.grad(weighted, own_rows)[0].cpu()
    return gradients, [part.detach().cpu() for part in (embeddings, batch.labels, batch.ids)], batch.counts


def assert_gathered(results):
    """In rank order. The gradients are summed, or a process's own, which belong to its fraction of the loss."""
    world = len(results)
    for this, (gradients, batch, counts) in enumerate(results):
        assert all(map(torch.equal, batch, (*whole_batch(), torch.arange(ROWS))))
        assert counts == SHARDS[world]
        assert (gradients[True] == sum(range(1, world + 1))).all()
        assert (gradients[False] == world * (this + 1)).all()


def message_of(embeddings, labels, ids, gather=True):
    """The error message of a batch, the same on all processes."""
    with pytest.raises((ValueError, TypeError)) as error:
        gather_batch(embeddings, labels, ids, gather=gather, local_queries=True)
    return type(error.value), str(error.value)


def message_of_no_rows(labels):
    """The error message where a process has no rows before its forward pass."""
    with pytest.raises(ValueError, match="at least one row") as error:
        gather_labels([LocalRows(labels, inputs=labels)], gather=True)
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
        "no rows": message_of_no_rows(labels[: 2 * is_first]),
        "rows": message_of(*more_rows, None, gather=False),
        "labels that are not integers": message_of(embeddings, floats_but_on_the_first, labels),
        "ids of another shape": message_of(embeddings, labels, column_but_on_the_first),
        "labels that are texts": message_of(embeddings, ("a", "b"), labels),
        "ids that are texts": message_of(embeddings, labels, ("a", "b")),
    }


def message_of_a_later_step(this):
    """The error of a network that returns its inputs, in a later step, in which one process has wider inputs."""
    dimensions = Dimensions()

    def compare(width):
        inputs = torch.ones(2, width)
        rows = gather_labels([LocalRows(torch.zeros(2).long(), inputs=inputs)], gather=True)
        dimensions.compare([inputs], rows)

    for width in (3, 3, 4, 4, 3):
        compare(width)
    with pytest.raises(ValueError, match="dimension") as error:
        compare(3 + (this == 1))
    return ValueError, str(error.value)


def in_each_process(this, world):
    messages = {**messages_of_batches_that_do_not_match(this), "a later step": message_of_a_later_step(this)}
    return {"gathered": gathered(this, world), "messages": messages}


@pytest.fixture(scope="module")
def ranks(run_processes):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, 3)


def test_rows_and_gradients_travel_between_processes(ranks):
    assert_gathered([result["gathered"] for result in ranks])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_and_gradients_travel_between_gpus(run_processes):
    assert_gathered(run_processes(gathered, 2, "cuda", backend="nccl"))


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("dimension", r"embeddings of all processes .* same dimension, got \[\[3\], \[4\], \[3\]\] in rank order"),
        ("a later step", r"embeddings of all processes .* same dimension, got \[\[3\], \[4\], \[3\]\] in rank order"),
        ("ids", r"batches may differ only .* \[\(0, 0\), \(0, 1\), \(0, 1\)\] in rank order"),
        ("no rows", r"each process needs at least one row, got \[2, 0, 0\] rows in rank order; use larger batches"),
        ("rows", r"gather=False .* batches of equal size, got \[2, 3, 4\] rows in rank order"),
    ],
)
def test_batches_that_do_not_match_raise_on_every_rank(ranks, case, sentence):
    for result in ranks:
        error, message = result["messages"][case]
        assert issubclass(error, ValueError)
        assert re.match(f".*{sentence}", message)


INVALID = ["labels that are not integers", "ids of another shape", "labels that are texts", "ids that are texts"]


@pytest.mark.parametrize("case", INVALID)
def test_labels_and_ids_that_are_invalid_on_one_rank_raise_on_every_rank(ranks, case):
    for this, result in enumerate(ranks):
        error, message = result["messages"][case]
        assert issubclass(error, TypeError)
        assert message.startswith("labels must be integers of shape (rows,) or (rows, levels) and ids integers")
        assert message.endswith(f"on rank {this}.")


def test_one_process_keeps_its_batch_as_it_is():
    rows, labels = torch.randn(3, 2, requires_grad=True), torch.arange(3)
    embeddings, batch = gather_batch(rows, labels, None, gather=True, local_queries=True)
    assert embeddings is rows
    assert batch.labels is labels
    assert (batch.ids, batch.counts) == (None, [3])
