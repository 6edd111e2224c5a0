"""ROADMAP: SupAP is a bound of AP, the means of the calibration, and how the sum hands settings to both."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_retrieval.losses import CalibrationLoss, ROADMAPLoss, SupAPLoss, blockwise
from lightning_retrieval.losses.roadmap import upper_step
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    average_precision_losses,
    batch,
)

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1, 1, 2])


@pytest.mark.parametrize("lambda_", [0.0, 0.1, 0.5, 1.0])
def test_roadmap(lambda_):
    parts = {"sup_ap": SupAPLoss(offset=1.44), "calibration": CalibrationLoss(0.8, 0.5)}
    loss = ROADMAPLoss(lambda_, **parts)
    expected = (1 - lambda_) * parts["sup_ap"](X, Y) + lambda_ * parts["calibration"](X, Y)
    assert loss(X, Y).item() == pytest.approx(expected.item(), abs=1e-6)
    assert (loss.sup_ap, loss.calibration, loss.lambda_) == (parts["sup_ap"], parts["calibration"], lambda_)
    plain = ROADMAPLoss(lambda_)
    assert plain.sup_ap is None
    assert plain.calibration is None
    expected = (1 - lambda_) * SupAPLoss()(X, Y) + lambda_ * CalibrationLoss()(X, Y)
    assert plain(X, Y).item() == pytest.approx(expected.item(), abs=1e-6)


def test_official_roadmap():
    expected = SupAPLoss(offset=1.44, include_self=True)(X, Y) + CalibrationLoss(pair_mean="nonzero")(X, Y)
    assert ROADMAPLoss.official()(X, Y).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("settings", [{"reduction": "none"}, {"class_balanced": True}, {"include_self": True}])
def test_roadmap_hands_its_settings_to_its_terms(settings):
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    sup_ap, calibration = SupAPLoss(**settings)(X, labels), CalibrationLoss(**settings)(X, labels)
    value = ROADMAPLoss(0.3, **settings)(X, labels)
    torch.testing.assert_close(value, 0.7 * sup_ap + 0.3 * calibration, equal_nan=True)
    plain = ROADMAPLoss(0.3)(X, labels)
    assert value.shape != plain.shape or not torch.allclose(value, plain)


@pytest.mark.refusal
def test_roadmap_settings_beside_both_terms():
    with pytest.raises(ValueError, match=r"^ROADMAPLoss: if both terms are given, .* got .*'class_balanced': True"):
        ROADMAPLoss(0.3, SupAPLoss(), CalibrationLoss(), class_balanced=True)


def test_h_minus_is_never_below_the_step_and_continuous_at_delta():
    t = torch.linspace(-0.5, 0.5, 2001, dtype=torch.float64)
    h_minus, _ = upper_step(t, tau=0.01, rho=100.0, delta=0.05, offset=None, start=0.5)
    assert (h_minus >= (t > 0)).all()
    around_delta = torch.tensor([0.05, 0.05 + 1e-12], dtype=torch.float64)
    (below, above), _ = upper_step(around_delta, tau=0.01, rho=100.0, delta=0.05, offset=None, start=0.5)
    assert below.item() == pytest.approx(above.item(), abs=1e-9)


@settings(deadline=None, max_examples=40)
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


@pytest.mark.parametrize("elements", [1, 30, 1 << 21])
def test_means_over_all_pairs(elements, monkeypatch):
    """Pairs of queries without a positive count too, for any size of the blocks."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    x, labels = batch([1, 2, 4, 1])
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    same = labels[:, None] == labels
    near, far = (0.9 - s[pairs & same]).clamp(min=0), (s[pairs & ~same] - 0.6).clamp(min=0)
    value = CalibrationLoss(pair_mean="all")(x, labels)
    assert value.item() == pytest.approx((near.mean() + far.mean()).item(), abs=1e-12)
    value = CalibrationLoss(pair_mean="nonzero")(x, labels)
    assert value.item() == pytest.approx((near[near > 0].mean() + far[far > 0].mean()).item(), abs=1e-12)
