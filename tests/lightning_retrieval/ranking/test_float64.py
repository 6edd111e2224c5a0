"""Metrics on a device without float64 agree with those on the CPU."""

import pytest
import torch

from lightning_retrieval import DatabaseAugmentation, PCAWhitening, QueryExpansion
from lightning_retrieval.callbacks.ap_monitor import decomposability_gap, sums_of_ap
from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.losses.batch_loss import ranked_batch
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics
from lightning_retrieval.metrics.curves import mean_precision, pair_counts
from tests.lightning_retrieval.device_without_float64 import DEVICE, DeviceWithoutFloat64
from tests.lightning_retrieval.metrics.helpers import nearest_of

ROWS = 301  # two blocks of queries, the last one smaller
GENERATOR = torch.Generator().manual_seed(3)
LABELS = torch.randint(0, 12, (ROWS,), generator=GENERATOR) ** 2 // 4
LABELS[6] = 999  # without a relevant candidate
X = torch.randn(1000, 8, generator=GENERATOR)[LABELS] + torch.randn(ROWS, 8, generator=GENERATOR)
X[::7] = X[0]  # ties
IDS = torch.randperm(4 * ROWS, generator=GENERATOR)[:ROWS]
IS_QUERY = torch.arange(ROWS) % 3 == 0
LISTS = {name: {} for name in ("easy", "hard", "junk")}
for query in IDS[IS_QUERY].tolist():
    others = IDS[~IS_QUERY][torch.randperm(200, generator=GENERATOR)[:12]].tolist()
    LISTS["easy"][query], LISTS["hard"][query], LISTS["junk"][query] = others[:3], others[3:8], others[8:]


ROLES = torch.where(IS_QUERY, 1, 2)
EXTRA = ("mINP", "precision@3", "recall@3", "MRR@3", "NDCG@3")
METRICS = {
    "every query": (RetrievalMetrics, {"ks": (1, 10), "map_ks": (5,)}, {}),
    "roles": (RetrievalMetrics, {"ks": (1, 10)}, {"roles": ROLES}),
    "levels": (RetrievalMetrics, {"alpha": 2.0}, {"labels": torch.stack([LABELS, LABELS // 4, LABELS // 12], 1)}),
    "instances": (RetrievalMetrics, {}, {"instances": LABELS * 2 + IDS % 2}),
    "cameras": (
        RetrievalMetrics,
        {"map_ks": (5,), "map_divisor": "hits", "extra_metrics": EXTRA},
        {"cameras": IDS % 3},
    ),
    "expanded": (
        RetrievalMetrics,
        {"query_expansion": QueryExpansion(k=3), "database_augmentation": DatabaseAugmentation(k=2)},
        {"roles": ROLES},
    ),
    "random galleries": (RandomGalleryMetrics, {"draws": 2}, {}),
    "revisited": (RevisitedMetrics, LISTS, {"roles": ROLES}),
}


def filled(name, device):
    """These metrics of the rows on a device, in two updates."""
    kind, settings, given = METRICS[name]
    metrics = kind(**settings)
    columns = {"labels": LABELS, "ids": IDS, **given}
    for part in (slice(0, 100), slice(100, None)):
        metrics.update(X[part].to(device), **{name: values[part].to(device) for name, values in columns.items()})
    return metrics


def errors_of_a_loss(device):
    """What `APMonitor` sums over a batch."""
    return sums_of_ap(SmoothAPLoss(), ranked_batch(X.to(device), LABELS.to(device), ids=IDS.to(device)))


def drawn_images(device):
    metrics = filled("roles", device)
    queries = metrics.per_query()["ids"][:5].to(device)
    return torch.tensor([list(hits) for hits in nearest_of(metrics, queries, 4).values()])


def whitened(device):
    x = X.to(device)
    return PCAWhitening(dim=3).fit(x)(x).cpu()


def assert_equal_everywhere(compute):
    """The result on the device without float64 is that on the CPU, on the CPU."""
    expected = compute(torch.device("cpu"))
    with DeviceWithoutFloat64():
        found = compute(DEVICE)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_and_values_of_each_query(name):
    def values(device):
        metrics = filled(name, device)
        if isinstance(metrics, RevisitedMetrics):
            return metrics.compute()
        return {**metrics.compute(), **metrics.per_query()}

    assert_equal_everywhere(values)


def test_curves_and_gap():
    assert_equal_everywhere(lambda device: mean_precision(filled("roles", device)))
    assert_equal_everywhere(lambda device: pair_counts(filled("cameras", device), 50).cpu())
    assert_equal_everywhere(lambda device: decomposability_gap(filled("roles", device), classes=12, samples=5))


@pytest.mark.parametrize("compute", [errors_of_a_loss, drawn_images, whitened])
def test_what_else_uses_float64(compute):
    assert_equal_everywhere(compute)
