"""RaMBO: blackbox ranks and their gradient, the losses of AP, of recall and of mAP, and their memories."""

import io
import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxMAPLoss,
    BlackboxRecallLoss,
    blackbox,
    blackbox_rank,
    blockwise,
)
from lightning_retrieval.losses.positives import ScoreBlock
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    average_precision_losses,
    batch,
    blackbox_gradient,
    ranks_by_sorting,
)


def make(kind, lambda_, margin, **keywords):
    if kind == "ap":
        return BlackboxAPLoss(lambda_, margin, **keywords)
    return BlackboxRecallLoss(lambda_, margin, weighting=kind, **keywords)


@pytest.fixture(scope="module", params=[0, 16], ids=["sorted", "compared"])
def most_compared(request):
    """With lists that are sorted and searched, and with positives compared with all negatives."""
    with patch.object(blackbox, "MOST_COMPARED", request.param):
        yield


KIND = pytest.mark.parametrize("kind", ["ap", "log", "loglog"])
BOTH_WAYS = pytest.mark.usefixtures("most_compared")


def random_lists(queries, gallery):
    scores = torch.rand(queries, gallery, dtype=torch.float64) * 2 - 1
    return scores, torch.rand(queries, gallery) < 0.4, torch.rand(queries, gallery) < 0.8


def gradient_of(loss, scores, *masks, factor=1.0):
    s = scores.clone().requires_grad_()
    (factor * loss.from_scores(s, *masks)).backward()
    return s.grad


@BOTH_WAYS
@KIND
@pytest.mark.parametrize(("lambda_", "margin"), [(4.0, 0.02), (0.5, 0.0), (20.0, 0.3)])
@pytest.mark.parametrize("elements", [1, 40, 1 << 21])
def test_gradient_against_sorting(kind, lambda_, margin, elements):
    scores, relevant, candidate = random_lists(6, 15)
    relevant[2] = False  # a query without a positive
    relevant[3] = True
    relevant[4] = torch.arange(15) == 7
    candidate[4] = True
    expected = blackbox_gradient(scores.tolist(), relevant.tolist(), candidate.tolist(), lambda_, margin, kind)
    with patch.object(blockwise, "BLOCK_ELEMENTS", elements):
        gradient = gradient_of(make(kind, lambda_, margin), scores, relevant, candidate)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-12)


@KIND
@pytest.mark.parametrize("factor", [2.0, 65536.0, 2.0**-10])
def test_loss_weight_does_not_change_the_direction_of_the_gradient(kind, factor):
    masks = random_lists(6, 15)
    loss = make(kind, 4.0, 0.02)
    expected = gradient_of(loss, *masks)
    assert expected.any()
    assert torch.equal(gradient_of(loss, *masks, factor=factor), factor * expected)


@KIND
@pytest.mark.parametrize("class_balanced", [False, True])
def test_reductions_are_multiples_of_the_mean(kind, class_balanced):
    x, labels = torch.randn(9, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3])
    gradients = {}
    for reduction in ("mean", "sum", "none"):
        leaf = x.clone().requires_grad_()
        each = make(kind, 4.0, 0.02, reduction=reduction, class_balanced=class_balanced)(leaf, labels)
        (each[:8].sum() if reduction == "none" else each).backward()  # the last query has no positive
        gradients[reduction] = leaf.grad
    assert gradients["mean"].any()
    torch.testing.assert_close(gradients["sum"], 8 * gradients["mean"])
    torch.testing.assert_close(gradients["none"], 8 * gradients["mean"])


@BOTH_WAYS
def test_weights_of_queries_scale_their_gradients():
    """With `reduction="none"`, the gradient of each query is multiplied by the query's weight."""
    scores, relevant, candidate = random_lists(5, 12)
    loss = BlackboxAPLoss(reduction="none")
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    s = scores.clone().requires_grad_()
    (loss.from_scores(s, relevant, candidate) * weights).sum().backward()
    expected = gradient_of(BlackboxAPLoss(reduction="sum"), scores, relevant, candidate) * weights[:, None]
    torch.testing.assert_close(s.grad, expected)


@pytest.mark.parametrize("shape", [(7,), (3, 9), (2, 3, 5)])
def test_rank_against_sorting(shape):
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    ranks = blackbox_rank(scores, lambda_=0.7)
    ranks.backward(upstream)
    length = shape[-1]
    for s, g, rank, gradient in zip(
        *(t.reshape(-1, length).tolist() for t in (scores.detach(), upstream, ranks.detach(), scores.grad))
    ):
        old, new = ranks_by_sorting(s), ranks_by_sorting([a + 0.7 * length * b for a, b in zip(s, g)])
        assert rank == old
        assert gradient == pytest.approx([(b - a) / (length * 0.7) for a, b in zip(old, new)], rel=1e-7)


def test_equal_scores_are_ranked_in_their_order():
    assert blackbox_rank(torch.tensor([0.5, 0.7, 0.5, 0.5])).tolist() == [2.0, 1.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ranks_of_half_precision_are_exact(dtype):
    scores = torch.linspace(1, -1, 3000, dtype=dtype, requires_grad=True)
    ranks = blackbox_rank(scores)
    assert torch.equal(ranks.detach(), torch.arange(1.0, 3001))
    ranks.sum().backward()
    assert scores.grad.dtype == dtype


def test_sorting_and_comparing_count_ties_alike(monkeypatch):
    """All scores, before and after the move, are multiples of 1/4, so that many are equal."""
    scores = torch.randint(-8, 9, (6, 32)) / 4
    relevant = torch.zeros(6, 32, dtype=torch.bool)
    relevant[:, :5] = True
    moves = torch.randint(-8, 9, (30,)) / 4
    found = []
    for most in (0, 16):
        monkeypatch.setattr(blackbox, "MOST_COMPARED", most)
        x = scores.clone().requires_grad_()
        lists = blackbox.sort_lists(ScoreBlock(x, relevant, torch.ones_like(relevant)), margin=0.0)
        assert (lists.column is None) == (most == 16)
        _, ranks, _ = blackbox.positive_ranks(x, lists, lambda_=1.0)
        ranks.backward(moves / 32)  # lambda is multiplied by the length
        found.append((ranks.detach(), x.grad))
    for one, other in zip(*found):
        assert torch.equal(one, other)


@BOTH_WAYS
@settings(deadline=None, max_examples=40)
@given(labels=LABELS, seed=st.integers(0, 10**6), ties=st.booleans())
def test_without_a_margin_it_is_1_minus_ap(labels, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(labels), len(labels), dtype=torch.float64, generator=generator) * 2 - 1
    if ties:
        scores = (scores * 4).round() / 4
    labels = torch.tensor(labels)
    relevant, candidate = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    each = BlackboxAPLoss(margin=0.0, reduction="none").from_scores(scores, relevant, candidate)
    torch.testing.assert_close(each, average_precision_losses(scores, labels), rtol=0, atol=1e-12, equal_nan=True)


@BOTH_WAYS
@pytest.mark.parametrize("elements", [1, 30, 1 << 21])
def test_mean_over_all_pairs(elements, monkeypatch):
    """The mean over the positives of all queries, for any size of the blocks."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    x, labels = batch([1, 2, 4, 1])
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    same = labels[:, None] == labels
    above = torch.tensor([float((s[q, pairs[q] & ~same[q]] >= s[q, i]).sum()) for q, i in (pairs & same).nonzero()])
    value = BlackboxRecallLoss(margin=0.0, pair_mean="all")(x, labels)
    assert value.item() == pytest.approx(above.log1p().mean().item(), abs=1e-6)


def official_losses(sequence, batch_memory, weight, lambda_=4.0, margin=0.02):
    """`BatchMemoryRecallLoss` of the official code: the rows of past scores are joined to those of the batch.

    Args:
        sequence: the scores and the targets of each step.
        batch_memory: number of past batches whose rows are kept.
        weight: the weighting l.
    """
    past = []
    for s, relevant in sequence:
        scores = torch.cat([s, *(scores for scores, _ in past)])
        targets = torch.cat([relevant, *(targets for _, targets in past)]).double()
        rank = blackbox_rank(scores - margin * (targets - 0.5), lambda_) / scores.shape[1]
        above_all = scores.detach() - margin * (targets - 0.5) + 1000 * targets
        rank_among_positives = blackbox_rank(above_all) / scores.shape[1]
        negatives_above = len(scores) * (rank - rank_among_positives)[targets > 0]
        yield weight(negatives_above).sum() / targets.sum()
        past = [(s.detach(), relevant), *past][:batch_memory]


def loglog(x):
    return torch.log1p(torch.log1p(x))


GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())["cases"]
MEMORY_CASES = [case for case in GOLDEN if case["id"].startswith("rambo_recall_batchmemory.")]


@pytest.mark.parametrize("case", MEMORY_CASES, ids=lambda case: case["id"])
def test_official_memory_of_this_file_against_golden_numbers(case):
    scores = [torch.tensor(s, dtype=torch.float64).requires_grad_() for s in case["inputs"]["scores_sequence"]]
    targets = [torch.tensor(relevant) > 0 for relevant in case["inputs"]["targets_sequence"]]
    losses = list(official_losses(zip(scores, targets), case["params"]["batch_memory"], torch.log1p))
    for s, loss, value, gradient in zip(scores, losses, *(list(case["expected"].values())[:2])):
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(s.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("weighting", "weight"), [("log", torch.log1p), ("loglog", loglog)])
@pytest.mark.parametrize("batch_memory", [0, 1, 4])
def test_gradient_is_that_of_the_official_memory(batch_memory, weighting, weight):
    """Once the memory is full, for batches of the same numbers of queries and positives; their scores do not matter."""
    labels = torch.arange(12) // 3
    sequence = [(torch.rand(12, 12, dtype=torch.float64) * 2 - 1, labels[:, None] == labels) for _ in range(6)]
    s = sequence[-1][0].requires_grad_()
    *_, official = official_losses(sequence, batch_memory, weight)
    (expected,) = torch.autograd.grad(official, s)

    loss = BlackboxRecallLoss(weighting=weighting, batch_memory=batch_memory, pair_mean="all")
    (gradient,) = torch.autograd.grad(loss.from_scores(s, sequence[-1][1]), s)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)

    if batch_memory:
        (without,) = torch.autograd.grad(BlackboxRecallLoss(weighting=weighting).from_scores(s, sequence[-1][1]), s)
        assert not torch.allclose(gradient, without)


def map_by_loops(scores, targets, margin):
    """1 - the mean AP over the columns that have a positive, in loops over lists."""
    losses = []
    for column in range(len(scores[0])):
        s = [row[column] + (-margin / 2 if t[column] else margin / 2) for row, t in zip(scores, targets)]
        positives = [i for i in range(len(s)) if targets[i][column]]
        if positives:
            precisions = [sum(s[j] >= s[i] for j in positives) / sum(o >= s[i] for o in s) for i in positives]
            losses.append(1 - sum(precisions) / len(positives))
    return sum(losses) / len(losses)


@BOTH_WAYS
@pytest.mark.parametrize(("batch_memory", "interclass_coef"), [(0, 0.0), (1, 0.0), (2, 0.3), (3, 1.0)])
def test_memory_of_scores(batch_memory, interclass_coef):
    loss = BlackboxMAPLoss(4.0, 0.1, interclass_coef=interclass_coef, batch_memory=batch_memory)
    past = []
    for step in range(6):
        scores = torch.randn(5 + step % 3, 4, dtype=torch.float64, requires_grad=True)  # batches of different sizes
        targets = torch.rand(scores.shape) < 0.4
        targets[0, 0] = True
        now = (scores.tolist(), targets.tolist())
        lists, marks = ([row for part in [*past, now] for row in part[k]] for k in (0, 1))
        own = [[value] for row in now[0] for value in row], [[value] for row in now[1] for value in row]
        expected = (1 - interclass_coef) * map_by_loops(lists, marks, 0.1) + interclass_coef * map_by_loops(*own, 0.1)
        value = loss(scores, targets)
        assert value.item() == pytest.approx(expected, abs=1e-12)
        value.backward()
        assert scores.grad.shape == scores.shape
        past = [*past, now][-batch_memory:] if batch_memory else []
        assert [entry[0].tolist() for entry in loss.memory] == [entry[0] for entry in past]
        assert not any(entry[0].requires_grad for entry in loss.memory)


def test_memory_is_part_of_checkpoints_and_can_be_reset():
    loss, loaded = BlackboxMAPLoss(batch_memory=2), BlackboxMAPLoss(batch_memory=2)
    targets = torch.eye(4, dtype=torch.bool)
    for _ in range(3):
        loss(torch.randn(4, 4), targets)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    scores = torch.randn(4, 4)
    fresh = BlackboxMAPLoss(batch_memory=2)(scores, targets)
    values = [loss(scores, targets), loaded(scores, targets)]
    assert torch.equal(*values)
    assert len(loaded.memory) == 2
    assert not torch.equal(values[0], fresh)
    loaded.reset()
    assert loaded.memory == []
    assert torch.equal(loaded(scores, targets), fresh)


@pytest.mark.refusal
def test_what_is_invalid():
    """More classes than before, infinite scores of a checkpoint, integers as scores; a raise leaves the memory."""
    loss, targets = BlackboxMAPLoss(batch_memory=1), torch.ones(3, 2, dtype=torch.bool)
    loss(torch.randn(3, 2), targets)
    with pytest.raises(ValueError, match=r"^BlackboxMAPLoss: `scores` must have .* memory, 2, got shape \(2, 3\)"):
        loss(torch.ones(2, 3), targets.T)
    with pytest.raises(ValueError, match=r"^BlackboxMAPLoss: `scores` must hold finite numbers only"):
        loss(torch.full((3, 2), math.inf), targets)
    assert [entry[0].shape for entry in loss.memory] == [(3, 2)]
    damaged = loss.state_dict()
    damaged["_extra_state"]["memory"][0][0][2, 1] = math.inf
    with pytest.raises(ValueError, match=r"^BlackboxMAPLoss: `state` must hold finite numbers only, .* 1 of 3 rows"):
        BlackboxMAPLoss(batch_memory=2).load_state_dict(damaged)
    with pytest.raises(TypeError, match=r"^blackbox_rank: `scores` must be .* got torch.int64 of shape \(2,\)"):
        blackbox_rank(torch.tensor([1, 2]))
