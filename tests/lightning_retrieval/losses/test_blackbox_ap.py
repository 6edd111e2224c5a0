"""RaMBO's AP loss: its function, and scikit-learn's AP; its gradients are tested in test_blackbox.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.losses import BlackboxAPLoss
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    average_precision_losses,
)


@settings(deadline=None, max_examples=40)
@given(labels=LABELS, seed=st.integers(0, 10**6), ties=st.booleans())
def test_without_a_margin_it_is_1_minus_ap(labels, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(labels), len(labels), dtype=torch.float64, generator=generator) * 2 - 1
    if ties:
        scores = (scores * 4).round() / 4
    labels = torch.tensor(labels)
    relevant, candidate = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    each = BlackboxAPLoss(margin=0.0, reduction="none").from_scores(scores, relevant, candidate)
    torch.testing.assert_close(each, average_precision_losses(scores, labels), rtol=0, atol=1e-12, equal_nan=True)
