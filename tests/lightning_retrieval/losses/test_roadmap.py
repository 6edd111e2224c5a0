"""ROADMAP: the weighted sum of SupAP and calibration, and how its settings reach both terms."""

import pytest
import torch

from lightning_retrieval.losses import CalibrationLoss, ROADMAPLoss, SupAPLoss

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
