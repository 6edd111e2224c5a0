"""The lists of the queries of Revisited Oxford and Paris."""

import pytest
import torch

from lightning_retrieval.metrics import RevisitedMetrics
from lightning_retrieval.metrics.revisited import Kind, QueryLists

LISTS = QueryLists(easy={7: [3, 9]}, hard={7: [5]}, junk={7: [0]})


def test_listed_images_are_found_in_the_gallery():
    """Image 9 is not in the gallery, and the query itself counts as junk."""
    listed = LISTS.find([7], torch.tensor([0, 7, 5, 3, 2]))
    assert LISTS.images(7) == [3, 9, 5, 0, 7]
    assert listed.kind.tolist() == [[Kind.EASY, Kind.NOT_LISTED, Kind.HARD, Kind.JUNK, Kind.JUNK]]
    assert listed.column[0, [0, 2, 3, 4]].tolist() == [3, 2, 0, 1]


def test_number_of_positives_includes_missing_images():
    assert LISTS.positives(7, [Kind.EASY]) == 2
    assert LISTS.positives(7, [Kind.EASY, Kind.HARD]) == 3
    assert LISTS.positives(7, [Kind.HARD]) == 1


INVALID_LISTS = {
    "no mapping": (([[0]], {5: []}, {5: []}), TypeError, "`easy` must map each query's id to ids of images, got list"),
    "no list": (({5: None}, {5: []}, {5: []}), TypeError, "`easy` must map integers .*, got None for 5"),
    "no integers": (({5: [0.5]}, {5: []}, {5: []}), TypeError, r"`easy` must map integers .*, got \[0.5\] for 5"),
    "other queries": (
        ({5: [0]}, {6: []}, {5: []}),
        ValueError,
        "`hard` must have the same queries as .* query 5",
    ),
    "image twice": (({5: [0]}, {5: [1]}, {5: [0]}), ValueError, "once for a query, .* got image 0 twice for query 5"),
    "query": (({5: [5]}, {5: [1]}, {5: [0]}), ValueError, "and not the query itself, got image 5 twice for query 5"),
}


@pytest.mark.refusal
@pytest.mark.parametrize("case", INVALID_LISTS)
def test_invalid_lists(case):
    lists, kind, message = INVALID_LISTS[case]
    with pytest.raises(kind, match=f"RevisitedMetrics: .*{message}"):
        RevisitedMetrics(*lists)
