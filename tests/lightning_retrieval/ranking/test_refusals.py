"""Invalid calls of the rules of relevance and of query expansion."""

import torch

from lightning_retrieval import (
    DatabaseAugmentation,
    GalleryOnly,
    OtherCamera,
    QueryExpansion,
    Relevance,
    RetrievalMetrics,
    SharedTags,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue
from tests.lightning_retrieval.official_cases import rows
from tests.refusals import refusal_test

LABELS, CAMERAS = torch.tensor([4, 9]), torch.tensor([7, 8])
QUERIES, GALLERY, NAN = rows(2, 3), rows(5, 3), torch.full((2, 3), torch.nan)


class Returns(Relevance):
    """A user's rule that returns the same masks for all images."""

    def __init__(self, masks):
        self.found = masks

    def masks(self, queries, references):
        return self.found


def metrics_by(masks):
    RetrievalMetrics(relevance=Returns(masks)).update(torch.randn(4, 3), torch.zeros(4, 1).long())


def derived(**attributes):
    """A user's rule with such class attributes."""
    type("Derived", (Relevance,), attributes)


MASK = torch.ones(1, 1, dtype=torch.bool)
TABLE = {
    "SharedTags": [
        (lambda: SharedTags(0), InvalidValue, "at_least"),
        (lambda: SharedTags(1.5), InvalidType, "at_least"),
        (lambda: SharedTags().columns(LABELS, {}), InvalidValue, "batch"),
        (lambda: SharedTags().columns(LABELS, {"tags": LABELS / 2}), InvalidType, "tags"),
    ],
    "OtherCamera": [
        (lambda: OtherCamera().columns(LABELS, {"labels": LABELS}), InvalidValue, "batch"),
        (lambda: OtherCamera().columns(LABELS, (LABELS, CAMERAS)), InvalidType, "batch"),
        (lambda: OtherCamera().columns(LABELS, {"cameras": CAMERAS[:1]}), InvalidValue, "cameras"),
        (lambda: OtherCamera().columns(LABELS / 2, {"cameras": CAMERAS}), InvalidType, "labels"),
    ],
    "GalleryOnly": [
        (lambda: GalleryOnly().columns(LABELS, {"roles": [1, 2]}), InvalidType, "roles"),
        (lambda: GalleryOnly().columns(LABELS, {"roles": CAMERAS[:, None]}), InvalidValue, "roles"),
    ],
    "Returns": [
        (lambda: metrics_by(MASK), InvalidType, "masks"),
        (lambda: metrics_by((MASK.float(), None)), InvalidType, "masks"),
        (lambda: metrics_by((MASK[:, :0], None)), InvalidValue, "masks"),
    ],
    "Derived": [(lambda: derived(reads="cameras"), InvalidType, "reads")],
    "QueryExpansion": [
        (lambda: QueryExpansion(k=0), InvalidValue, "k"),
        (lambda: QueryExpansion(k=1.5), InvalidType, "k"),
        (lambda: QueryExpansion(alpha=-1), InvalidValue, "alpha"),
        (lambda: QueryExpansion()(QUERIES, rows(5, 4)), InvalidValue, "gallery"),
        (lambda: QueryExpansion()(QUERIES, GALLERY.float()), InvalidValue, "gallery"),
        (lambda: QueryExpansion()(NAN, GALLERY.float()), InvalidValue, "queries"),
        (lambda: QueryExpansion()(QUERIES, GALLERY, torch.tensor([0, 5])), InvalidValue, "self_index"),
        (lambda: QueryExpansion()(QUERIES, GALLERY, torch.tensor([-2, 1])), InvalidValue, "self_index"),
        (lambda: QueryExpansion()(QUERIES, GALLERY, torch.tensor([1.0, 2.0])), InvalidType, "self_index"),
    ],
    "DatabaseAugmentation": [
        (lambda: DatabaseAugmentation(k=0), InvalidValue, "k"),
        (lambda: DatabaseAugmentation(alpha=-1), InvalidValue, "alpha"),
        (lambda: DatabaseAugmentation()(NAN), InvalidValue, "gallery"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
