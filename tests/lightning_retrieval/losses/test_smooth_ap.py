"""Smooth-AP: a case worked by hand, its limit for small tau, and which inputs have a gradient."""

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize

from lightning_retrieval.losses import SmoothAPLoss
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


def test_small_tau_gives_average_precision():
    x, labels = batch([2, 3, 5, 6])
    scores = normalize(x) @ normalize(x).T
    expected = []
    for q in range(len(x)):
        others = torch.arange(len(x)) != q
        expected.append(average_precision_score(labels[others] == labels[q], scores[q, others]))
    value = SmoothAPLoss(tau=1e-9)(x, labels)
    assert value.item() == pytest.approx(1 - sum(expected) / len(expected), abs=1e-9)


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
