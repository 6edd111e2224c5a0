"""RaMBO's recall loss: its function, and the mean over all pairs; its gradients are tested in test_blackbox.py."""

import pytest
import torch
from torch import nn

from lightning_retrieval.losses import BlackboxRecallLoss, blockwise
from lightning_retrieval.losses.blackbox_recall import blackbox_recall_sums
from tests.lightning_retrieval.losses.oracles import batch, make, random_lists


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("blackbox_recall", {"margin": 0.02, "weighting": "log"}),
        ("blackbox_recall loglog", {"margin": 0.0, "weighting": "loglog"}),
    ],
)
def test_function_is_the_loss(name, settings):
    scores, relevant, candidate = random_lists(7, 11, name)
    relevant &= candidate
    relevant[:, 0] = candidate[:, 0] = True
    sums, counts = blackbox_recall_sums(scores, relevant, candidate, lambda_=4.0, **settings)
    expected = make(name, reduction="none").from_scores(scores, relevant, candidate)
    torch.testing.assert_close((sums / counts).sum(1), expected)


@pytest.mark.parametrize("elements", [1, 30, 1 << 21])
def test_mean_over_all_pairs(elements, monkeypatch):
    """The mean over the positives of all queries, for any size of the blocks."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    x, labels = batch([1, 2, 4, 1])
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    same = labels[:, None] == labels
    above = torch.tensor([float((s[q, pairs[q] & ~same[q]] >= s[q, i]).sum()) for q, i in (pairs & same).nonzero()])
    value = BlackboxRecallLoss(margin=0.0, pair_mean="all")(x, labels)
    assert value.item() == pytest.approx(above.log1p().mean().item(), abs=1e-6)
