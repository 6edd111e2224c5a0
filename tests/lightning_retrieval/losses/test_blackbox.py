"""RaMBO: blackbox ranks and their gradient, the losses of AP, of recall and of mAP, and their memories."""

import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_retrieval.losses import BlackboxAPLoss, BlackboxMAPLoss, BlackboxRecallLoss, blackbox_rank
from tests.lightning_retrieval.blocks import small_blocks
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


KIND = pytest.mark.parametrize("kind", ["ap", "log", "loglog"])
# Few positives are compared with all negatives; with more, lists are sorted and searched.
LENGTH = pytest.mark.parametrize("length", [15, 70], ids=["compared", "sorted"])


def random_lists(queries, gallery):
    scores = torch.rand(queries, gallery, dtype=torch.float64) * 2 - 1
    return scores, torch.rand(queries, gallery) < 0.4, torch.rand(queries, gallery) < 0.8


def gradient_of(loss, scores, *masks, factor=1.0):
    s = scores.clone().requires_grad_()
    (factor * loss.from_scores(s, *masks)).backward()
    return s.grad


@LENGTH
@KIND
@pytest.mark.parametrize(("lambda_", "margin"), [(4.0, 0.02), (0.5, 0.0), (20.0, 0.3)])
def test_gradient_against_sorting(kind, lambda_, margin, length):
    scores, relevant, candidate = random_lists(6, length)
    relevant[2] = False  # a query without a positive
    relevant[3] = True
    relevant[4] = torch.arange(length) == 7
    candidate[4] = True
    expected = blackbox_gradient(scores.tolist(), relevant.tolist(), candidate.tolist(), lambda_, margin, kind)
    assert expected.any()
    for elements in (1, 2 * length, 1 << 20):
        with small_blocks(elements):
            gradient = gradient_of(make(kind, lambda_, margin), scores, relevant, candidate)
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


def test_sorting_and_comparing_count_ties_alike():
    """Scores and many moved scores are multiples of 1/4. All lists are sorted if one of them has many positives."""
    scores = torch.randint(-32, 33, (16, 32)) / 4
    compared = torch.zeros(16, 32, dtype=torch.bool)
    compared[:, :4] = True
    is_sorted = compared.clone()
    is_sorted[15, :20] = True
    loss, found = BlackboxRecallLoss(lambda_=1.0, margin=0.0, reduction="none"), []
    for relevant in (compared, is_sorted):
        s = scores.clone().requires_grad_()
        each = loss.from_scores(s, relevant)
        each.sum().backward()
        found.append((each[:15].detach(), s.grad[:15]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].any()


@settings(deadline=None, max_examples=15)
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


@pytest.mark.parametrize("sizes", [[1, 2, 4, 1], [1, 2, 20, 1]])  # positives are compared, and lists are sorted
def test_mean_over_all_pairs(sizes):
    """The mean over the positives of all queries, for any size of the blocks."""
    x, labels = batch(sizes)
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(len(x), dtype=torch.bool)
    same = labels[:, None] == labels
    above = torch.tensor([float((s[q, pairs[q] & ~same[q]] >= s[q, i]).sum()) for q, i in (pairs & same).nonzero()])
    for elements in (1, 30, 1 << 20):
        with small_blocks(elements):
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
        assert scores.grad.any()
        past = [*past, now][-batch_memory:] if batch_memory else []


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
    assert not torch.equal(values[0], fresh)
    loaded.reset()
    assert torch.equal(loaded(scores, targets), fresh)
