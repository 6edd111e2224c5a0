"""The calibration loss: its function, and the means over all pairs of the batch."""

import pytest
import torch
from torch import nn

from lightning_retrieval.losses import CalibrationLoss, blockwise
from tests.lightning_retrieval.losses.oracles import batch


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
