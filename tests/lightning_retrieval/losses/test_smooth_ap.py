"""Smooth-AP: a case worked by hand, its limit for small tau, and its counts by a step function."""

import functools

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize

from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.losses.roadmap import count_upper
from lightning_retrieval.losses.smooth_ap import count_above, sigmoid_step
from tests.lightning_retrieval.losses.oracles import batch


def test_by_hand():
    # One list with the scores .9 (positive), .8 (negative), .7 (positive), tau .1: differences over tau of 1 and 2,
    # sigma(1) = 0.731058579, sigma(2) = 0.880797078, sigma(-1) = 0.268941421, sigma(-2) = 0.119202922.
    # First positive: rank 1 + .268941421 + .119202922 = 1.388144343, among positives 1 + .119202922.
    # Second:         rank 1 + .880797078 + .731058579 = 2.611855657, among positives 1 + .880797078.
    loss = SmoothAPLoss(tau=0.1)
    value = loss.from_scores(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[True, False, True]]))
    assert value.item() == pytest.approx(1 - (1.119202922 / 1.388144343 + 1.880797078 / 2.611855657) / 2, abs=1e-6)
    # A non-candidate does not count. Without the negative, every precision is 1.
    candidate = torch.tensor([[True, False, True]])
    value = loss.from_scores(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[True, False, True]]), candidate)
    assert value.item() == pytest.approx(0.0, abs=1e-7)


def test_ties_count_one_half():
    # All three have the same score, and one is the positive: its rank is 1 + 1/2 + 1/2 = 2.
    value = SmoothAPLoss().from_scores(torch.zeros(1, 3), torch.tensor([[True, False, False]]))
    assert value.item() == pytest.approx(1 - 1 / 2)


def test_small_tau_gives_average_precision():
    x, labels = batch([2, 3, 5, 6])
    scores = normalize(x) @ normalize(x).T
    expected = []
    for q in range(len(x)):
        others = torch.arange(len(x)) != q
        expected.append(average_precision_score(labels[others] == labels[q], scores[q, others]))
    value = SmoothAPLoss(tau=1e-9)(x, labels)
    assert value.item() == pytest.approx(1 - sum(expected) / len(expected), abs=1e-9)


def test_perfect_and_worst_order():
    labels = torch.tensor([0, 0, 1, 1])
    perfect = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.1, 0.99]])
    assert SmoothAPLoss()(perfect, labels).item() == pytest.approx(0.0, abs=1e-4)
    # The only positive of each query comes last of three.
    worst = torch.tensor([[1.0, 0.05], [-1.0, 0.05], [1.0, -0.05], [-1.0, -0.05]])
    assert SmoothAPLoss(tau=1e-4)(worst, torch.tensor([0, 1, 1, 0])).item() == pytest.approx(1 - 1 / 3, abs=1e-6)


def test_only_the_input_that_requires_a_gradient_gets_one():
    (x, labels), (r, ref_labels) = batch([2, 3]), batch([3, 4, 1])
    for leaf, other in ((x, r), (r, x)):
        other.requires_grad_(False)
        leaf.requires_grad_(True)
        SmoothAPLoss(tau=0.3, reduction="none")(x, labels, r, ref_labels).sum().backward()
        assert leaf.grad.abs().sum() > 0
        assert other.grad is None
        leaf.grad = None


def test_gradcheck_of_scores_with_candidates():
    scores, relevant = torch.randn(4, 7, dtype=torch.float64), torch.rand(4, 7) < 0.5
    candidate = torch.rand(4, 7) < 0.8
    relevant[:, 0] = candidate[:, 0] = True
    candidate[:, 1] = False
    loss = SmoothAPLoss(tau=0.3)
    leaf = scores.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: loss.from_scores(s, relevant, candidate), leaf)
    loss.from_scores(leaf, relevant, candidate).backward()
    assert not leaf.grad[~candidate].any()
    assert leaf.grad[candidate].any()


def test_gradient_pulls_the_positive_up():
    scores = torch.tensor([[0.50, 0.51]], requires_grad=True)
    SmoothAPLoss().from_scores(scores, torch.tensor([[True, False]])).backward()
    assert scores.grad[0, 0] < 0 < scores.grad[0, 1]
    assert scores.grad.sum().item() == pytest.approx(0, abs=1e-6)  # the loss depends on differences of scores only


UPPER = functools.partial(count_upper, tau=0.1, rho=3.0, delta=0.3, offset=1.2, start=0.5)


def three_lists():
    """Scores of three three_lists, of which some items are not counted, and two, none and three positives."""
    scores = torch.randn(3, 9, dtype=torch.float64)
    scores[[0, 1, 2], [4, 5, 6]] = -torch.inf
    return scores, torch.tensor([0, 0, 2, 2, 2]), torch.randn(5, dtype=torch.float64)


@pytest.mark.parametrize("step", [sigmoid_step, UPPER], ids=["sigmoid", "upper"])
def test_gradient_of_a_count(step):
    scores, query, s_i = three_lists()
    counted = scores.isfinite()

    def count(values, s_i):
        return count_above(torch.where(counted, values, -torch.inf), query, s_i, step)

    values = scores.masked_fill(~counted, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(count, (values, s_i.requires_grad_()))
    count(values, s_i).sum().backward()
    assert not values.grad[1].any()
    assert not values.grad[~counted].any()


def test_a_count_of_sigmoids():
    scores, query, s_i = three_lists()
    expected = [torch.sigmoid(scores[q] - s).sum() for q, s in zip(query, s_i)]
    torch.testing.assert_close(count_above(scores, query, s_i, sigmoid_step), torch.stack(expected))
