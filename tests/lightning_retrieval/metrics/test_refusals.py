"""Invalid settings and rows of the metrics."""

import torch

from lightning_retrieval import GalleryOnly, SharedTags
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics, nearest_scores
from tests.lightning_retrieval.relevance_rules import NearInTime
from tests.refusals import refusal_test

X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
WITH_NAN = X.index_fill(0, torch.tensor([2]), torch.nan)
UNREAD = torch.tensor([0, 1, 4, 3])
THREE_LEVELS = torch.tensor([[0, 4, 7], [1, 4, 8], [2, 5, 8], [3, 5, 8]])


def update(embeddings, labels, ids=None, *, then=None, settings=None, **columns):
    """An update of metrics with these settings, and perhaps a second one, for which some arguments change."""
    metrics = RetrievalMetrics(**settings or {})
    first = {"embeddings": embeddings, "labels": labels, "ids": ids, **columns}
    metrics.update(**first)
    if then is not None:
        metrics.update(**{**first, **then})
    return metrics


def compute(labels, **columns):
    """Rows that contradict each other."""
    return update(X, labels, **{name: torch.tensor(values) for name, values in columns.items()}).compute()


def joined(**second):
    """Two batches of `forward`, which forgets the first while it computes the second."""
    metrics = RetrievalMetrics()
    metrics(X, Y)
    metrics(X, Y, **second)
    return metrics.compute()


def post_processed(name, result):
    """The rows that a function of the user's returns."""
    update(X, Y, settings={name: lambda *rows: result}).compute()


def revisited(easy=(), hard=(), junk=(), **settings):
    return RevisitedMetrics({5: list(easy)}, {5: list(hard)}, {5: list(junk)}, **settings)


def without_lists():
    metrics = revisited()
    metrics.update(torch.randn(5, 2), torch.zeros(5).long(), torch.arange(5), torch.tensor([2, 2, 2, 1, 1]))
    metrics.compute()


def one_class():
    return nearest_scores(update(torch.eye(3), torch.zeros(3).long()))


def two_classes():
    return nearest_scores(update(X, Y))


TABLE = {
    "RetrievalMetrics": [
        (lambda: RetrievalMetrics(ks=(0,)), InvalidValue, "ks"),
        (lambda: RetrievalMetrics(ks=(1.5,)), InvalidType, "ks"),
        (lambda: RetrievalMetrics(ks=()), InvalidValue, "ks"),
        (lambda: RetrievalMetrics(map_ks=(0,)), InvalidValue, "map_ks"),
        (lambda: RetrievalMetrics(map_divisor="k"), InvalidValue, "map_divisor"),
        (lambda: RetrievalMetrics(extra_metrics=("R@1",)), InvalidValue, "extra_metrics"),
        (lambda: RetrievalMetrics(extra_metrics=("recall@0",)), InvalidValue, "extra_metrics"),
        (lambda: RetrievalMetrics(extra_metrics="mINP"), InvalidType, "extra_metrics"),
        (lambda: RetrievalMetrics(dims=(4, 2)), InvalidValue, "dims"),
        (lambda: RetrievalMetrics(dims=64), InvalidValue, "dims"),
        (lambda: RetrievalMetrics(alpha=0), InvalidValue, "alpha"),
        (lambda: update(X.tolist(), Y), InvalidType, "embeddings"),
        (lambda: update(X.long(), Y), InvalidType, "embeddings"),
        (lambda: update(X[:, 0], Y), InvalidValue, "embeddings"),
        (lambda: update(X * torch.nan, Y), InvalidValue, "embeddings"),
        (lambda: update(WITH_NAN, Y, torch.tensor([10, 20, 30, 40])), InvalidValue, "embeddings", "30"),
        (lambda: update(X, Y.float()), InvalidType, "labels"),
        (lambda: update(X, Y[:3]), InvalidValue, "labels"),
        (lambda: update(X, Y, Y[:2]), InvalidValue, "ids"),
        (lambda: update(X, Y, roles=Y[:3]), InvalidValue, "roles"),
        (lambda: update(X, Y, roles=UNREAD), InvalidValue, "roles"),
        (lambda: update(X, Y, cameras=Y[:3]), InvalidValue, "cameras"),
        (lambda: update(X, Y, settings={"dims": (2, 4)}), InvalidValue, "dims"),
        (lambda: update(X, Y, settings={"relevance": NearInTime()}), InvalidValue, "labels"),
        (lambda: update(X, THREE_LEVELS, settings={"relevance": GalleryOnly()}), InvalidValue, "labels"),
        (
            lambda: update(X, THREE_LEVELS[:, :2], cameras=Y, settings={"relevance": NearInTime()}),
            InvalidValue,
            "cameras",
        ),
        # later updates that differ
        (lambda: update(X, Y, then={"embeddings": X[:, :2]}), InvalidValue, "embeddings"),
        (lambda: update(X, Y, then={"embeddings": X.double()}), InvalidValue, "embeddings"),
        (lambda: update(X, Y, then={"labels": THREE_LEVELS}), InvalidValue, "labels"),
        (lambda: update(X, Y, then={"ids": Y}), InvalidValue, "ids"),
        (lambda: update(X, Y, cameras=Y, then={"cameras": None}), InvalidValue, "cameras"),
        (lambda: joined(instances=torch.arange(4)), InvalidValue, "instances"),
        # rows that contradict each other
        (lambda: compute(Y, ids=[5, 6, 7, 6]), InvalidValue, "ids"),
        (lambda: compute(Y, instances=[1, 2, 2, 3]), InvalidValue, "instances"),
        (lambda: compute(Y * 0, ids=[5, 6, 7, 5], cameras=[0, 1, 2, 3]), InvalidValue, "ids"),
        (lambda: compute(Y * 0, instances=[1, 2, 1, 2], roles=[1, 1, 2, 2]), InvalidValue, "instances"),
        (lambda: compute(THREE_LEVELS[:, :2].flip(1)), InvalidValue, ""),
        (lambda: compute(THREE_LEVELS), InvalidValue, ""),
        (lambda: update(X, Y).per_query(reverse=True), InvalidValue, "reverse"),
        (lambda: post_processed("query_expansion", None), InvalidType, "query_expansion's result"),
        (lambda: post_processed("query_expansion", torch.ones(4, 2)), InvalidValue, "", "query_expansion"),
        (lambda: post_processed("database_augmentation", X.double()), InvalidValue, "", "database_augmentation"),
    ],
    "RandomGalleryMetrics": [
        (lambda: RandomGalleryMetrics(ks=(0,)), InvalidValue, "ks"),
        (lambda: RandomGalleryMetrics(draws=0), InvalidValue, "draws"),
        (lambda: RandomGalleryMetrics(seed=-1), InvalidValue, "seed"),
        (lambda: RandomGalleryMetrics(reverse=True), InvalidValue, "reverse"),
        (lambda: RandomGalleryMetrics(relevance=SharedTags()), InvalidValue, "relevance"),
    ],
    "RevisitedMetrics": [
        (lambda: revisited(ks=(0,)), InvalidValue, "ks"),
        (lambda: RevisitedMetrics({5: []}, {6: []}, {5: []}), InvalidValue, "hard"),
        (lambda: revisited(easy=[0], junk=[0]), InvalidValue, "", "image 0 twice"),
        (lambda: revisited(easy=[5]), InvalidValue, "", "query 5"),
        (without_lists, InvalidValue, "", "query 3"),
    ],
    "NearestScores": [
        (lambda: two_classes().threshold(1.1), InvalidValue, "false_match_rate"),
        (lambda: two_classes().threshold(-0.1), InvalidValue, "false_match_rate"),
        (lambda: two_classes().miss_rates(torch.nan), InvalidValue, "thresholds"),
        (lambda: one_class().threshold(0.1), InvalidValue, "negatives"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
