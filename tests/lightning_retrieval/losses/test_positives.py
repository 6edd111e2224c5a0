"""Positives that are found without waiting for the device, against loops."""

import pytest
import torch

from lightning_retrieval.losses import positives
from lightning_retrieval.losses.positives import MaskFacts, attach_facts, find_positives, joined, levels_in

RELEVANT = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8)
LISTED = [(0, 1), (0, 3), (2, 0), (2, 1), (2, 2)]  # query and index of each positive


@pytest.fixture(params=["as on a CPU", "as on an accelerator"], autouse=True)
def kind_of_device(request, monkeypatch):
    on_accelerator = request.param == "as on an accelerator"
    monkeypatch.setattr(positives, "is_accelerator", lambda device: on_accelerator)


@pytest.mark.parametrize("mask", [RELEVANT, RELEVANT > 0], ids=["levels", "mask"])
@pytest.mark.parametrize("known", [False, True])
def test_positives_come_in_the_order_of_queries_and_references(mask, known):
    mask = mask.clone()
    if known:
        attach_facts(mask, MaskFacts(torch.tensor([2, 0, 3]), (1, 2)))
    found = find_positives(mask)
    assert list(zip(found.query.tolist(), found.index.tolist())) == LISTED
    assert found.counts.tolist() == [2, 0, 3]
    assert found.most == 3
    assert found.column().tolist() == [0, 1, 0, 1, 2]


def test_pairs_are_all_ordered_pairs_of_positives_of_a_query():
    found = find_positives(RELEVANT)
    pairs = [(i, j) for i, (query, _) in enumerate(LISTED) for j, (other, _) in enumerate(LISTED) if query == other]
    assert list(zip(*(part.tolist() for part in found.pairs()))) == pairs


def test_a_mask_without_positives_has_no_pairs():
    found = find_positives(torch.zeros(2, 3, dtype=torch.bool))
    assert (len(found.query), found.most, len(found.pairs()[0])) == (0, 0, 0)
    assert find_positives(torch.zeros(0, 3, dtype=torch.bool)).most == 0


def test_positives_of_several_lists_are_joined_by_query():
    first, second = find_positives(RELEVANT), find_positives(RELEVANT.flip(0))
    both, order = joined([first, second])
    assert both.query.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert order.tolist() == [0, 1, 5, 6, 7, 2, 3, 4, 8, 9]
    assert both.index.tolist() == [1, 3, 0, 1, 2, 0, 1, 2, 1, 3]
    assert both.counts.tolist() == [5, 0, 5]


def test_levels_are_those_that_occur_or_those_that_are_known():
    assert levels_in(RELEVANT) == (1, 2)
    assert levels_in(attach_facts(RELEVANT.clone(), MaskFacts(torch.tensor([2, 0, 3]), (1, 2, 3)))) == (1, 2, 3)
