"""SupAP: its function, H^-, and the bound that it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.losses import SupAPLoss
from lightning_retrieval.losses.roadmap import upper_step
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    average_precision_losses,
)


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
