"""Soft histograms: their weights worked by hand, and the gradient at the ends."""

import pytest
import torch

from lightning_retrieval.losses.fast_ap import binned_ap, soft_histograms
from lightning_retrieval.losses.positives import ScoreBlock

SCORES = torch.tensor([[1.5, 0.75, 0.0, -3.0]], dtype=torch.float64)
RELEVANT = torch.tensor([[False, True, True, False]])
BINS = {"bins": 5, "low": -1.0, "high": 1.0}  # centres 1, 0.5, 0, -0.5, -1


def test_weights_by_hand():
    h, h_pos = soft_histograms(ScoreBlock(SCORES, RELEVANT, torch.ones_like(RELEVANT)), **BINS)
    assert h.tolist() == [[1.5, 0.5, 1.0, 0.0, 1.0]]
    assert h_pos.tolist() == [[0.5, 0.5, 1.0, 0.0, 0.0]]
    h, _ = soft_histograms(ScoreBlock(SCORES, RELEVANT, torch.tensor([[False, True, True, True]])), **BINS)
    assert h.tolist() == [[0.5, 0.5, 1.0, 0.0, 1.0]]


def test_scores_outside_the_range_have_no_gradient():
    scores = SCORES.clone().requires_grad_()
    h, h_pos = soft_histograms(ScoreBlock(scores, RELEVANT, torch.ones_like(RELEVANT)), **BINS)
    weight = torch.arange(5.0, dtype=torch.float64)
    ((h + h_pos) * weight).sum().backward()
    assert scores.grad[0, [0, 3]].tolist() == [0.0, 0.0]
    assert scores.grad[0, 1].item() == -4.0  # -2 bins per unit of score, in each of the two histograms


def test_empty_bins_in_front_do_not_matter():
    h = torch.tensor([[0.0, 2.0, 1.0]])
    h_pos = torch.tensor([[0.0, 1.0, 1.0]])
    assert binned_ap(h, h_pos).item() == pytest.approx((1 / 2 + 2 / 3) / 2)
