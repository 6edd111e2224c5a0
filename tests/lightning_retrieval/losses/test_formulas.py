"""Smooth-AP, ROADMAP, HAP and FastAP: cases worked by hand, bounds of AP, and formulas that equal one another."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torch import nn
from torch.nn.functional import normalize

from lightning_retrieval.losses import (
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    QuantizedAPLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
)
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    OFFICIAL_SLOPES,
    average_precision_losses,
    batch,
    value_and_gradient,
)

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1, 1, 2])


@pytest.mark.parametrize("lambda_", [0.0, 0.1, 1.0])
def test_roadmap(lambda_):
    expected = (1 - lambda_) * SupAPLoss()(X, Y) + lambda_ * CalibrationLoss()(X, Y)
    assert ROADMAPLoss(lambda_)(X, Y).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("settings", [{"reduction": "none"}, {"class_balanced": True}, {"include_self": True}])
def test_roadmap_hands_its_settings_to_its_terms(settings):
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    sup_ap, calibration = SupAPLoss(**settings)(X, labels), CalibrationLoss(**settings)(X, labels)
    value = ROADMAPLoss(0.3, **settings)(X, labels)
    torch.testing.assert_close(value, 0.7 * sup_ap + 0.3 * calibration, equal_nan=True)
    plain = ROADMAPLoss(0.3)(X, labels)
    assert value.shape != plain.shape or not torch.allclose(value, plain)


@settings(deadline=None, max_examples=12)
@given(labels=LABELS, seed=st.integers(0, 10**6))
def test_never_below_1_minus_ap(labels, seed):
    """Without ties: between a positive and a negative that tie, sigma(0) is one half, the step one."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(labels), len(labels), dtype=torch.float64, generator=generator) * 2 - 1
    labels = torch.tensor(labels)
    relevant, candidate = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    expected = average_precision_losses(scores, labels)
    bound = SupAPLoss(reduction="none").from_scores(scores, relevant, candidate)
    assert (bound >= expected - 1e-12)[~expected.isnan()].all()


@pytest.mark.parametrize("pair_mean", ["all", "nonzero"])
def test_gradcheck_of_means_over_all_pairs(pair_mean):
    x, labels = batch([1, 2, 4], dim=4)
    loss = CalibrationLoss(pair_mean=pair_mean)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), x.requires_grad_())


@pytest.mark.parametrize("elements", [1, 30, 1 << 20])
def test_means_over_all_pairs(elements):
    """Pairs of queries without a positive count too, for any size of the blocks."""
    x, labels = batch([1, 2, 4, 1])
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    same = labels[:, None] == labels
    near, far = (0.9 - s[pairs & same]).clamp(min=0), (s[pairs & ~same] - 0.6).clamp(min=0)
    with small_blocks(elements):
        value = CalibrationLoss(pair_mean="all")(x, labels)
        nonzero = CalibrationLoss(pair_mean="nonzero")(x, labels)
    assert value.item() == pytest.approx((near.mean() + far.mean()).item(), abs=1e-12)
    assert nonzero.item() == pytest.approx((near[near > 0].mean() + far[far > 0].mean()).item(), abs=1e-12)


def test_hap_by_hand():
    """One list: a negative at .9, level 2 at .8, level 1 at .7, another level 1 at .2; relevances 2, 1 / 2, 1 / 2."""
    s, levels = torch.tensor([[0.9, 0.8, 0.7, 0.2]], dtype=torch.float64), torch.tensor([[0, 2, 1, 1]])
    beyond = 1 / (1 + math.exp(-5.0)) + 0.5  # H^- at delta, above which its slope is 100
    rank = [
        1 + (100 * 0.05 + beyond) + 1 / (1 + math.exp(10)) + 1 / (1 + math.exp(60)),
        2 + (100 * 0.15 + beyond),
        3 + (100 * 0.65 + beyond),
    ]
    hrank = [2.0, 0.5 + 0.5, 0.5 + 0.5 + 0.5]
    expected = 1 - sum(h / r for h, r in zip(hrank, rank)) / 3
    assert HAPLoss().from_scores(s, levels).item() == pytest.approx(expected, abs=1e-12)


def test_a_coarser_level_is_lower_though_its_relevance_is_higher():
    """One list: the only item of level 1 at .9, two of level 2 at .8 and .7.

    With alpha = 1/2 their relevances are 1, sqrt(2) / 2 and sqrt(2) / 2. In the ranks of the items of level 2, H^-
    counts the item of level 1; in its own rank, the step function counts the others, which are below it.
    """
    s, levels, rel = torch.tensor([[0.9, 0.8, 0.7]], dtype=torch.float64), torch.tensor([[1, 2, 2]]), 0.5**0.5
    beyond = 1 / (1 + math.exp(-5.0)) + 0.5  # H^- at delta, above which its slope is 100
    rank = [1, 1 + (100 * 0.05 + beyond), 2 + (100 * 0.15 + beyond)]
    hrank = [1.0, rel + rel, rel + rel + rel]
    expected = 1 - sum(h / r for h, r in zip(hrank, rank)) / (1 + 2 * rel)
    assert HAPLoss(0.5).from_scores(s, levels).item() == pytest.approx(expected, abs=1e-12)

    # With slopes, the items of level 2 are the higher ones of the item of level 1: 10 t each, t = -.1 and -.2.
    hrank[0] = 1.0 + rel * 10 * (-0.1 - 0.2)
    expected = 1 - sum(h / r for h, r in zip(hrank, rank)) / (1 + 2 * rel)
    loss = HAPLoss(0.5, hrank_slopes=OFFICIAL_SLOPES)
    assert loss.from_scores(s, levels).item() == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=8)
@given(labels=LABELS)
def test_with_one_level_it_is_sup_ap(labels):
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    other = {"tau": 0.05, "rho": 20.0, "delta": 0.1, "offset": 1.44, "start": 0.2}
    for hap_loss, sup_ap_loss in ((HAPLoss(), SupAPLoss()), (HAPLoss(0.7, **other), SupAPLoss(**other))):
        value, gradient = value_and_gradient(hap_loss, x, labels[:, None])
        expected, expected_gradient = value_and_gradient(sup_ap_loss, x, labels[:, None])
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


def test_fast_ap_by_hand():
    """Two bins of d^2, centres 0, 2 and 4. Scores 1, 0.5 and -1 are d^2 of 0, 1 and 4; the second is negative.

    Histograms 1.5, 0.5, 1 and 1, 0, 1 of the positives: AP = (1 / 1.5 + 2 / 3) / 2 = 2 / 3.
    """
    scores, relevant = torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([[True, False, True]])
    assert FastAPLoss(num_bins=2).from_scores(scores, relevant).item() == pytest.approx(1 / 3)


@settings(deadline=None, max_examples=8)
@given(labels=LABELS, num_bins=st.integers(2, 30))
def test_equals_quantized_ap_with_one_more_bin(labels, num_bins):
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    value, gradient = value_and_gradient(FastAPLoss(num_bins), x, labels)
    expected, expected_gradient = value_and_gradient(QuantizedAPLoss(num_bins + 1, low=-1, high=1), x, labels)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


def test_smooth_ap_by_hand():
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
