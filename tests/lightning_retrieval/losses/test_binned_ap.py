"""FastAP and AP_Q: a case worked by hand, their relation, and their soft histograms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.losses import FastAPLoss, QuantizedAPLoss
from lightning_retrieval.losses.binned_ap import binned_ap, soft_histograms
from lightning_retrieval.losses.positives import ScoreBlock
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    value_and_gradient,
)


def test_by_hand():
    """Two bins of d^2, centres 0, 2 and 4. Scores 1, 0.5 and -1 are d^2 of 0, 1 and 4; the second is negative.

    Histograms 1.5, 0.5, 1 and 1, 0, 1 of the positives: AP = (1 / 1.5 + 2 / 3) / 2 = 2 / 3.
    """
    scores, relevant = torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([[True, False, True]])
    assert FastAPLoss(num_bins=2).from_scores(scores, relevant).item() == pytest.approx(1 / 3)


@settings(deadline=None, max_examples=20)
@given(labels=LABELS, num_bins=st.integers(2, 30))
def test_equals_quantized_ap_with_one_more_bin(labels, num_bins):
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    value, gradient = value_and_gradient(FastAPLoss(num_bins), x, labels)
    expected, expected_gradient = value_and_gradient(QuantizedAPLoss(num_bins + 1, low=-1, high=1), x, labels)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


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
