"""The detection loss against loops over softmax scores, its memory, several processes, and what it warns of."""

import math
import warnings

import pytest
import torch
from torch.nn.functional import one_hot

from lightning_retrieval.detection import DetectionAPLoss
from tests.lightning_retrieval.losses.oracles import blackbox_gradient


def ap_loss_by_loops(scores, marks):
    """1 - the AP of one list."""
    positives = [i for i in range(len(scores)) if marks[i]]
    precisions = []
    for i in positives:
        rank_among_positives = sum(scores[j] >= scores[i] for j in positives)
        precisions.append(rank_among_positives / sum(score >= scores[i] for score in scores))
    return 1 - sum(precisions) / len(positives)


def softmax_by_loops(logits):
    rows = []
    for row in logits.tolist():
        total = sum(map(math.exp, row))
        rows.append([math.exp(value) / total for value in row])
    return rows


def loss_by_loops(batches, interclass_coef):
    """The loss of the last of some batches (logits, labels), with the others as its memory."""
    score_rows, labels = [], []
    for logits, of_batch in batches:
        score_rows += softmax_by_loops(logits)
        labels += of_batch.tolist()
    classes = range(1, len(score_rows[0]))
    of_classes = []
    for k in classes:
        if k in labels:
            of_classes.append(ap_loss_by_loops([row[k] for row in score_rows], [label == k for label in labels]))
    rows = len(batches[-1][1])
    one_list = [(row[k], label == k) for row, label in zip(score_rows[-rows:], labels[-rows:]) for k in classes]
    L_APC = ap_loss_by_loops(*zip(*one_list)) if any(labels[-rows:]) else 0.0
    return (1 - interclass_coef) * sum(of_classes) / len(of_classes) + interclass_coef * L_APC


def make_batch(rows, classes=3, dtype=torch.float64):
    labels = torch.randint(0, classes + 1, (rows,))
    labels[0] = 1
    return torch.randn(rows, classes + 1, dtype=dtype, requires_grad=True), labels


@pytest.mark.parametrize(("batch_memory", "interclass_coef"), [(0, 1 / 3), (2, 1 / 3), (3, 0.0)])
def test_value_is_that_of_loops(batch_memory, interclass_coef):
    loss = DetectionAPLoss(batch_memory=batch_memory, interclass_coef=interclass_coef, weight=2.5)
    seen = []
    for step in range(5):
        seen.append(make_batch(12 + step))
        expected = 2.5 * loss_by_loops(seen[-1 - batch_memory :], interclass_coef)
        assert loss(*seen[-1]).item() == pytest.approx(expected, abs=1e-12)


def test_gradient_is_that_of_the_algorithm_through_the_softmax():
    logits, labels = make_batch(20)
    loss = DetectionAPLoss(lambda_=0.4, margin=0.01, interclass_coef=0.0, weight=3.0)
    loss(logits, labels).backward()
    scores = logits.detach().softmax(1)
    marks = one_hot(labels, 4)[:, 1:].bool().T.tolist()
    at_scores = torch.zeros_like(scores)
    at_scores[:, 1:] = blackbox_gradient(scores[:, 1:].T.tolist(), marks, [[True] * 20] * 3, 0.4, 0.01, "ap").T
    # Of the softmax: dL/dx = p (g - sum of p g).
    expected = 3.0 * scores * (at_scores - (scores * at_scores).sum(1, keepdim=True))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(logits.grad, expected, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision(dtype):
    labels = torch.tensor([1, 2, 0, 0, 3, 1])
    logits = torch.randn(6, 4).to(dtype)
    value = DetectionAPLoss()(logits.requires_grad_(), labels)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(DetectionAPLoss()(logits.double(), labels).item(), abs=1e-6)
    value.backward()
    assert logits.grad.dtype == dtype


def test_a_batch_without_objects_is_ranked_below_the_objects_in_memory():
    """Section 4.3 of the paper; such a batch has no list of L_APC."""
    loss, background = DetectionAPLoss(weight=2.5), torch.zeros(6, dtype=torch.long)
    nothing = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert loss(nothing, background).item() == 0  # there are no objects yet
    past, logits = make_batch(8), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    loss(*past)
    value = loss(logits, background)
    whole = [(nothing.detach(), background), past, (logits.detach(), background)]
    assert value.item() == pytest.approx(2.5 * loss_by_loops(whole, 1 / 3), abs=1e-12)
    value.backward()
    # A gradient step raises the scores of the background, of those RoIs that come before an object.
    assert (logits.grad[:, 0] <= 0).all()
    assert (logits.grad[:, 0] < 0).any()
    assert len(loss.map_loss.memory) == 3


def test_a_batch_without_regions_has_no_loss_and_leaves_the_memory():
    loss = DetectionAPLoss()
    loss(*make_batch(5))
    logits = torch.randn(0, 4, requires_grad=True)
    value = loss(logits, torch.zeros(0, dtype=torch.long))
    value.backward()
    assert value.item() == 0
    assert logits.grad.shape == (0, 4)
    assert len(loss.map_loss.memory) == 1
    loss.reset()
    assert loss.map_loss.memory == []


def test_a_gradient_of_exactly_zero_is_warned_of_once():
    labels = torch.tensor([1, 2] + 62 * [0])
    loss = DetectionAPLoss(margin=0.15)
    logits = 0.01 * torch.randn(64, 3)
    with pytest.warns(UserWarning, match="margin=0.15"):
        loss(logits.requires_grad_(), labels).backward()
    assert logits.grad.count_nonzero() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(logits, labels).backward()
        DetectionAPLoss()(logits, labels).backward()  # without a margin there is a gradient
        DetectionAPLoss(margin=0.15)(8.0 * one_hot(labels, 3).double().requires_grad_(), labels).backward()  # no loss


def losses_of_shards(rank, world_size):
    """Three steps with unequal shards: values, gradients of the local rows, and what is in the memory."""
    torch.manual_seed(0)
    loss = DetectionAPLoss(batch_memory=1)
    local_lists = DetectionAPLoss(gather=False)
    found = []
    for _ in range(3):
        logits, labels = make_batch(13)
        rows = slice(0, 13) if world_size == 1 else (slice(0, 9), slice(9, 13))[rank]
        own = logits.detach()[rows].clone().requires_grad_()
        value = loss(own, labels[rows])
        value.backward()
        of_process = local_lists(own.detach(), labels[rows]).item()
        assert len(local_lists.map_loss.memory[-1][0]) == len(own)
        found.append((value.item(), own.grad, loss.map_loss.memory[-1][0], of_process))
    return found


def test_lists_are_those_of_the_global_batch(run_processes):
    alone = losses_of_shards(0, 1)
    shards = run_processes(losses_of_shards, 2)
    for step, (value, gradient, memory, _) in enumerate(alone):
        assert [shard[step][0] for shard in shards] == [value, value]
        # DistributedDataParallel divides by the number of processes.
        together = torch.cat([shard[step][1] for shard in shards]) / 2
        torch.testing.assert_close(together, gradient, rtol=1e-12, atol=1e-15)
        assert all(torch.equal(shard[step][2], memory) for shard in shards)
        assert shards[0][step][3] != shards[1][step][3]
