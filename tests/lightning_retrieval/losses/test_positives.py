"""Positives that are found without waiting for the device, against loops."""

import pytest
import torch

from lightning_retrieval.losses import positives
from lightning_retrieval.losses.positives import ScoreBlock, joined

RELEVANT = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8)
LISTED = [(0, 1), (0, 3), (2, 0), (2, 1), (2, 2)]  # query and index of each positive


@pytest.fixture(params=["as on a CPU", "as on an accelerator"], autouse=True)
def kind_of_device(request, monkeypatch):
    on_accelerator = request.param == "as on an accelerator"
    monkeypatch.setattr(positives, "is_accelerator", lambda device: on_accelerator)


def positives_of(mask, counts=None):
    return ScoreBlock(torch.zeros(mask.shape), mask, torch.ones_like(mask, dtype=torch.bool), counts).positives


@pytest.mark.parametrize("mask", [RELEVANT, RELEVANT > 0], ids=["levels", "mask"])
@pytest.mark.parametrize("known", [False, True])
def test_positives_come_in_the_order_of_queries_and_references(mask, known):
    found = positives_of(mask, torch.tensor([2, 0, 3]) if known else None)
    assert list(zip(found.query.tolist(), found.index.tolist())) == LISTED
    assert found.counts.tolist() == [2, 0, 3]
    assert found.most == 3
    assert found.column().tolist() == [0, 1, 0, 1, 2]


def test_pairs_are_all_ordered_pairs_of_positives_of_a_query():
    found = positives_of(RELEVANT)
    pairs = [(i, j) for i, (query, _) in enumerate(LISTED) for j, (other, _) in enumerate(LISTED) if query == other]
    assert list(zip(*(part.tolist() for part in found.pairs()))) == pairs


def test_a_mask_without_positives_has_no_pairs():
    found = positives_of(torch.zeros(2, 3, dtype=torch.bool))
    assert (len(found.query), found.most, len(found.pairs()[0])) == (0, 0, 0)
    assert positives_of(torch.zeros(0, 3, dtype=torch.bool)).most == 0


def test_positives_of_several_lists_are_joined_by_query():
    first, second = positives_of(RELEVANT), positives_of(RELEVANT.flip(0))
    both, order = joined([first, second])
    assert both.query.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert order.tolist() == [0, 1, 5, 6, 7, 2, 3, 4, 8, 9]
    assert both.index.tolist() == [1, 3, 0, 1, 2, 0, 1, 2, 1, 3]
    assert both.counts.tolist() == [5, 0, 5]
