"""HAP: its function, a case worked by hand, three levels, and its relation to SupAP."""

import math

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from lightning_retrieval.losses import HAPLoss, SupAPLoss
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    OFFICIAL_SLOPES,
    value_and_gradient,
    values_by_loops,
)


def test_by_hand():
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


def test_three_levels():
    labels = torch.tensor([[0, 10, 5], [0, 10, 5], [1, 10, 5], [2, 11, 5], [3, 12, 6], [3, 12, 6]])
    x = torch.randn(6, 4, dtype=torch.float64)
    level = (labels[:, None] == labels[None]).sum(2)
    candidate = ~torch.eye(6, dtype=torch.bool)
    scores = nn.functional.normalize(x) @ nn.functional.normalize(x).T
    expected = values_by_loops("hap", scores.tolist(), level.tolist(), candidate.tolist())
    torch.testing.assert_close(HAPLoss(reduction="none")(x, labels), expected, rtol=1e-9, atol=1e-10)


@settings(deadline=None, max_examples=20)
@given(labels=LABELS)
def test_with_one_level_it_is_sup_ap(labels):
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    other = {"tau": 0.05, "rho": 20.0, "delta": 0.1, "offset": 1.44, "start": 0.2}
    for hap_loss, sup_ap_loss in ((HAPLoss(), SupAPLoss()), (HAPLoss(0.7, **other), SupAPLoss(**other))):
        value, gradient = value_and_gradient(hap_loss, x, labels[:, None])
        expected, expected_gradient = value_and_gradient(sup_ap_loss, x, labels[:, None])
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-11)
