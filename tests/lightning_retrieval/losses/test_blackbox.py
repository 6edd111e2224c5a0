"""The gradients of the blackbox losses against Alg. 1 with sorting, and `blackbox_rank`."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.losses import BlackboxAPLoss, BlackboxRecallLoss, blackbox, blackbox_rank, blockwise
from lightning_retrieval.losses.positives import ScoreBlock
from tests.lightning_retrieval.losses.oracles import blackbox_gradient, ranks_by_sorting


def make(kind, lambda_, margin, **keywords):
    if kind == "ap":
        return BlackboxAPLoss(lambda_, margin, **keywords)
    return BlackboxRecallLoss(lambda_, margin, weighting=kind, **keywords)


@pytest.fixture(scope="module", autouse=True, params=[0, 16], ids=["sorted", "compared"])
def most_compared(request):
    """Every test twice: with lists that are sorted and searched, and with positives compared with all negatives."""
    with patch.object(blackbox, "MOST_COMPARED", request.param):
        yield


KIND = pytest.mark.parametrize("kind", ["ap", "log", "loglog"])


def random_lists(queries, gallery):
    scores = torch.rand(queries, gallery, dtype=torch.float64) * 2 - 1
    return scores, torch.rand(queries, gallery) < 0.4, torch.rand(queries, gallery) < 0.8


def gradient_of(loss, scores, *masks, factor=1.0):
    s = scores.clone().requires_grad_()
    (factor * loss.from_scores(s, *masks)).backward()
    return s.grad


@KIND
@pytest.mark.parametrize(("lambda_", "margin"), [(4.0, 0.02), (0.5, 0.0), (20.0, 0.3), (1.0, 0.1)])
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


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(2, 12), st.integers(0, 10**6), st.sampled_from([0.3, 2.0, 10.0]))
def test_gradient_against_sorting_for_all_sizes(queries, gallery, seed, lambda_):
    torch.manual_seed(seed)
    scores, relevant, candidate = random_lists(queries, gallery)
    relevant[0, 0] = candidate[0, 0] = True
    expected = blackbox_gradient(scores.tolist(), relevant.tolist(), candidate.tolist(), lambda_, 0.05, "ap")
    gradient = gradient_of(BlackboxAPLoss(lambda_, 0.05), scores, relevant, candidate)
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


def test_a_large_class_needs_no_cubic_memory():
    labels = torch.arange(340).sub(299).clamp(min=0)
    x = torch.randn(340, 8, requires_grad=True)
    value = BlackboxAPLoss()(x, labels)
    value.backward()
    assert torch.isfinite(x.grad).all()
    assert value.item() == pytest.approx(1 - 299 / 339, abs=0.03)


# `blackbox_rank`.


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
def test_invalid_arguments_of_blackbox_rank(error, match, scores, lambda_):
    with pytest.raises(error, match=f"^blackbox_rank: {match}"):
        blackbox_rank(scores, lambda_)


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
