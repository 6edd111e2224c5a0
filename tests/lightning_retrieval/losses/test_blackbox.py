"""The black-box losses' gradients against Alg. 1 with sorting, the ranking alone, and the mAP of score matrices."""

import io
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.losses import BlackboxAPLoss, BlackboxMAPLoss, BlackboxRecallLoss, blackbox_rank, blockwise


def ranks_by_sorting(scores):
    """1 for the highest, of a list of numbers."""
    order = sorted(range(len(scores)), key=lambda j: -scores[j])
    return [order.index(j) + 1 for j in range(len(scores))]


def slow_gradient(scores, relevant, candidate, lambda_, margin, kind):
    """Alg. 1 for each list: forward ranks, the gradient at them, ranks of the moved scores; for the mean over lists."""
    gradient = [[0.0] * len(row) for row in scores]
    lists = [q for q in range(len(scores)) if any(r and c for r, c in zip(relevant[q], candidate[q]))]
    for q in lists:
        kept = [j for j in range(len(scores[q])) if candidate[q][j]]
        s = [scores[q][j] + (-margin / 2 if relevant[q][j] else margin / 2) for j in kept]
        positive = [relevant[q][j] for j in kept]
        ranks = ranks_by_sorting(s)
        among = [sum(p and other <= rank for p, other in zip(positive, ranks)) for rank in ranks]
        at_ranks = [0.0] * len(s)
        for i in range(len(s)):
            if positive[i]:
                above = ranks[i] - among[i]
                slope = {
                    "ap": among[i] / ranks[i] ** 2,  # of 1 - among / rank
                    "log": 1 / (1 + above),
                    "loglog": 1 / ((1 + math.log(1 + above)) * (1 + above)),
                }[kind]
                at_ranks[i] = slope / sum(positive) / len(lists)
        # On ranks divided by the length L: the gradient there is L times the one at the ranks.
        moved = ranks_by_sorting([value + lambda_ * len(s) * g for value, g in zip(s, at_ranks)])
        for j, old, new in zip(kept, ranks, moved):
            gradient[q][j] = -(old - new) / (len(s) * lambda_)
    return torch.tensor(gradient, dtype=torch.float64)


def make(kind, lambda_, margin, **keywords):
    if kind == "ap":
        return BlackboxAPLoss(lambda_, margin, **keywords)
    return BlackboxRecallLoss(lambda_, margin, kind, **keywords)


KIND = pytest.mark.parametrize("kind", ["ap", "log", "loglog"])


def problem(queries, gallery):
    scores = torch.rand(queries, gallery, dtype=torch.float64) * 2 - 1
    return scores, torch.rand(queries, gallery) < 0.4, torch.rand(queries, gallery) < 0.8


def gradient_of(loss, scores, *masks, factor=1.0):
    s = scores.clone().requires_grad_()
    (factor * loss.from_scores(s, *masks)).backward()
    return s.grad


@KIND
@pytest.mark.parametrize(("lambda_", "margin"), [(4.0, 0.02), (0.5, 0.0), (20.0, 0.3), (1.0, 0.1)])
@pytest.mark.parametrize("elements", [1, 40, 1 << 21])
def test_against_sorting(kind, lambda_, margin, elements):
    scores, relevant, candidate = problem(6, 15)
    relevant[2] = False  # a query without a positive
    relevant[3] = True
    relevant[4] = torch.arange(15) == 7
    candidate[4] = True
    expected = slow_gradient(scores.tolist(), relevant.tolist(), candidate.tolist(), lambda_, margin, kind)
    with patch.object(blockwise, "BLOCK_ELEMENTS", elements):
        gradient = gradient_of(make(kind, lambda_, margin), scores, relevant, candidate)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(2, 12), st.integers(0, 10**6), st.sampled_from([0.3, 2.0, 10.0]))
def test_against_sorting_in_general(queries, gallery, seed, lambda_):
    torch.manual_seed(seed)
    scores, relevant, candidate = problem(queries, gallery)
    relevant[0, 0] = candidate[0, 0] = True
    expected = slow_gradient(scores.tolist(), relevant.tolist(), candidate.tolist(), lambda_, 0.05, "ap")
    gradient = gradient_of(BlackboxAPLoss(lambda_, 0.05), scores, relevant, candidate)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-12)


@KIND
@pytest.mark.parametrize("factor", [2.0, 65536.0, 2.0**-10])
def test_weight_of_the_loss_does_not_change_the_direction(kind, factor):
    masks = problem(6, 15)
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
        (each[:8].sum() if reduction == "none" else each).backward()  # the last has no value
        gradients[reduction] = leaf.grad
    assert gradients["mean"].any()
    torch.testing.assert_close(gradients["sum"], 8 * gradients["mean"])
    torch.testing.assert_close(gradients["none"], 8 * gradients["mean"])


def test_weights_that_arrive_later():
    """Of `none`, each query's gradient is its own times its weight."""
    scores, relevant, candidate = problem(5, 12)
    loss = BlackboxAPLoss(reduction="none")
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    s = scores.clone().requires_grad_()
    (loss.from_scores(s, relevant, candidate) * weights).sum().backward()
    expected = gradient_of(BlackboxAPLoss(reduction="sum"), scores, relevant, candidate) * weights[:, None]
    torch.testing.assert_close(s.grad, expected)


def test_a_large_class_costs_no_cube():
    labels = torch.arange(340).sub(299).clamp(min=0)
    x = torch.randn(340, 8, requires_grad=True)
    value = BlackboxAPLoss()(x, labels)
    value.backward()
    assert torch.isfinite(x.grad).all()
    assert value.item() == pytest.approx(1 - 299 / 339, abs=0.03)


# The ranking alone.


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


def test_equal_scores_rank_in_their_order():
    assert blackbox_rank(torch.tensor([0.5, 0.7, 0.5, 0.5])).tolist() == [2.0, 1.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ranks_of_half_precision_are_exact(dtype):
    scores = torch.linspace(1, -1, 3000, dtype=dtype, requires_grad=True)
    ranks = blackbox_rank(scores)
    assert torch.equal(ranks.detach(), torch.arange(1.0, 3001))
    ranks.sum().backward()
    assert scores.grad.dtype == dtype


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "scores", "lambda_"),
    [
        (TypeError, "`scores` must be a tensor, got list", [1.0], 1.0),
        (TypeError, r"`scores` must be floating point .* got torch.int64 of shape \(2,\)", torch.tensor([1, 2]), 1.0),
        (TypeError, r"`scores` must be .* got torch.float32 of shape \(\)", torch.tensor(1.0), 1.0),
        (ValueError, "`scores` must hold finite numbers only", torch.tensor([1.0, math.nan]), 1.0),
        (ValueError, "`lambda_` must be a finite number > 0, got 0.0", torch.ones(2), 0.0),
        (ValueError, "`lambda_` must be a finite number > 0, got nan", torch.ones(2), math.nan),
        (TypeError, "`lambda_` must be a number > 0, got '1'", torch.ones(2), "1"),
    ],
)
def test_bad_rank(error, match, scores, lambda_):
    with pytest.raises(error, match=f"^blackbox_rank: {match}"):
        blackbox_rank(scores, lambda_)


# The mAP of score matrices.


def slow_map(scores, targets, margin):
    """1 - mean over the columns that have a positive of AP, loops over lists."""
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
    loss = BlackboxMAPLoss(4.0, 0.1, interclass_coef, batch_memory)
    past = []
    for step in range(6):
        scores = torch.randn(5 + step % 3, 4, dtype=torch.float64, requires_grad=True)  # batches of several sizes
        targets = torch.rand(scores.shape) < 0.4
        targets[0, 0] = True
        now = (scores.tolist(), targets.tolist())
        lists, marks = ([row for part in [*past, now] for row in part[k]] for k in (0, 1))
        own = [[value] for row in now[0] for value in row], [[value] for row in now[1] for value in row]
        expected = (1 - interclass_coef) * slow_map(lists, marks, 0.1) + interclass_coef * slow_map(*own, 0.1)
        value = loss(scores, targets)
        assert value.item() == pytest.approx(expected, abs=1e-12)
        value.backward()
        assert scores.grad.shape == scores.shape
        past = [*past, now][-batch_memory:] if batch_memory else []
        assert [entry[0].tolist() for entry in loss.memory] == [entry[0] for entry in past]
        assert not any(entry[0].requires_grad for entry in loss.memory)


def test_gradient_of_long_lists():
    """That of the lists with memory, of which only the batch's own rows learn."""
    loss = BlackboxMAPLoss(2.0, 0.05, batch_memory=1)
    first, second = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    marks = torch.rand(10, 3) < 0.5
    marks[0] = True
    loss(first, marks[:6])
    s = second.clone().requires_grad_()
    loss(s, marks[6:]).backward()
    columns, ones = torch.cat([first, second]).T.tolist(), [[True] * 10] * 3
    expected = slow_gradient(columns, marks.T.tolist(), ones, 2.0, 0.05, "ap")
    torch.testing.assert_close(s.grad, expected.T[6:], rtol=1e-7, atol=1e-12)


def test_memory_outlives_a_checkpoint_and_can_be_forgotten():
    loss, again = BlackboxMAPLoss(batch_memory=2), BlackboxMAPLoss(batch_memory=2)
    targets = torch.eye(4, dtype=torch.bool)
    for _ in range(3):
        loss(torch.randn(4, 4), targets)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    scores = torch.randn(4, 4)
    fresh = BlackboxMAPLoss(batch_memory=2)(scores, targets)
    values = [loss(scores, targets), again(scores, targets)]
    assert torch.equal(*values)
    assert len(again.memory) == 2
    assert not torch.equal(values[0], fresh)
    again.reset()
    assert again.memory == []
    assert torch.equal(again(scores, targets), fresh)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "`lambda_` must be a finite number > 0, got -1", {"lambda_": -1}),
        (ValueError, "`margin` must be a finite number >= 0, got -0.1", {"margin": -0.1}),
        (ValueError, r"`interclass_coef` must be from 0 to 1, got 1\.5", {"interclass_coef": 1.5}),
        (ValueError, "`interclass_coef` must be a finite number, got nan", {"interclass_coef": math.nan}),
        (TypeError, "`interclass_coef` must be a number, got None", {"interclass_coef": None}),
        (ValueError, "`batch_memory` must be an integer >= 0, got -1", {"batch_memory": -1}),
        (TypeError, "`batch_memory` must be an integer >= 0, got 1.0", {"batch_memory": 1.0}),
    ],
)
def test_bad_map_loss(error, match, arguments):
    with pytest.raises(error, match=f"^BlackboxMAPLoss: {match}"):
        BlackboxMAPLoss(**arguments)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "scores", "targets"),
    [
        (TypeError, "`scores` must be a tensor, got list", [[1.0]], torch.ones(1, 1, dtype=torch.bool)),
        (ValueError, r"`scores` must have shape .* got \(3,\)", torch.ones(3), torch.ones(3, dtype=torch.bool)),
        (TypeError, "`targets` must be bool, got torch.int64", torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64)),
        (ValueError, r"`targets` must have the shape of `scores` \(3, 2\), got \(2, 3\)", torch.ones(3, 2),
         torch.ones(2, 3, dtype=torch.bool)),
        (ValueError, "`scores` must hold finite numbers only", torch.full((3, 2), math.inf),
         torch.ones(3, 2, dtype=torch.bool)),
        (ValueError, r"`scores` must have as many classes as those in memory, 2, got shape \(2, 3\); call reset",
         torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)),
    ],
)  # fmt: skip
def test_bad_scores_of_classes(error, match, scores, targets):
    loss = BlackboxMAPLoss(batch_memory=1)
    loss(torch.randn(3, 2), torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(error, match=f"^BlackboxMAPLoss: {match}"):
        loss(scores, targets)
    assert len(loss.memory) == 1
    assert loss.memory[0][0].shape == (3, 2)
