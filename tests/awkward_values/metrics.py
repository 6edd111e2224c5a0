"""Valid calls of the metrics, and of query expansion and database augmentation."""

import torch

from lightning_retrieval import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.metrics import (
    EmbeddingMetric,
    RandomGalleryMetrics,
    RetrievalMetrics,
    RevisitedMetrics,
    nearest_scores,
)
from tests.awkward_values.calls import Call, constructor

COMMON = {
    "query_expansion": QueryExpansion(k=1),
    "database_augmentation": DatabaseAugmentation(k=1),
    "relevance": None,
}
TABLE = {"extra_metrics": ("precision@2", "mINP"), "map_divisor": "R", "dims": (1, 2)}


class OwnMetric(EmbeddingMetric):
    """A user's own metric: the mean score of the gallery."""

    def compute(self):
        rows, _ = self.gather()
        lists = self.ranking_input(rows)
        return (lists.queries @ lists.gallery.T).mean()


def batch():
    """Six images, three of each label; each is a query and in the gallery."""
    embeddings = torch.tensor([[1.0, 0.1], [0.8, 0.6], [0.9, 0.3], [0.1, 1.0], [0.6, 0.8], [0.3, 0.9]])
    return {
        "embeddings": embeddings,
        "labels": torch.tensor([7, 7, 7, 3, 3, 3]),
        "ids": torch.arange(6),
        "roles": torch.full((6,), 3),
        "instances": torch.arange(6),
        "cameras": torch.arange(6),
    }


def revisited_lists():
    return {"easy": {0: [1], 1: [0]}, "hard": {0: [2], 1: [2]}, "junk": {0: [3], 1: []}}


def revisited_batch():
    return {**batch(), "roles": 2 + (torch.arange(6) < 2)}


def value(metric, rows=batch):
    metric.update(**rows())
    return metric.compute()


def value_of_lists(metric):
    return value(metric, revisited_batch)


def calls(metric, settings, rows=batch):
    """The constructor with all settings, and a batch."""

    def update_and_compute(**arguments):
        made = metric(**settings)
        made.update(**arguments)
        return made.compute()

    name = metric.__name__
    return [
        Call(name, metric, lambda: {**settings, **COMMON}, use=lambda made: value(made, rows)),
        Call(name, update_and_compute, rows, signature=metric.update),
    ]


def filled():
    """The argument of `nearest_scores`."""
    metrics = RetrievalMetrics((1,))
    metrics.update(**batch())
    return {"metrics": metrics}


def rows_to_expand():
    gallery = torch.tensor([[1.0, 0.1], [0.6, 0.8], [-1.0, 0.5], [0.1, 1.0]])
    return {"queries": torch.eye(2), "gallery": gallery, "self_index": torch.tensor([0, -1])}


def rows_to_augment():
    return {"gallery": rows_to_expand()["gallery"]}


CALLS = {
    "EmbeddingMetric": calls(OwnMetric, {}),
    "RetrievalMetrics": calls(RetrievalMetrics, {"ks": (1, 2), "map_ks": (2,), "alpha": 1.0, "reverse": True, **TABLE}),
    "RandomGalleryMetrics": calls(
        RandomGalleryMetrics, {"ks": (1, 2), "draws": 2, "seed": 0, "map_ks": (2,), "alpha": 1.0, **TABLE}
    ),
    "RevisitedMetrics": calls(RevisitedMetrics, {**revisited_lists(), "ks": (1, 2)}, revisited_batch),
    "nearest_scores": [Call("nearest_scores", nearest_scores, filled, use=lambda scores: scores.negatives)],
    "QueryExpansion": [
        constructor("QueryExpansion", use=lambda expand: expand(**rows_to_expand())),
        Call("QueryExpansion", QueryExpansion(k=2), rows_to_expand, signature=QueryExpansion.__call__),
    ],
    "DatabaseAugmentation": [
        constructor("DatabaseAugmentation", use=lambda augment: augment(**rows_to_augment())),
        Call(
            "DatabaseAugmentation",
            DatabaseAugmentation(k=2),
            rows_to_augment,
            signature=DatabaseAugmentation.__call__,
        ),
    ],
}
