"""Metrics on a device without float64 agree with those on the CPU."""

import pytest
import torch

from lightning_retrieval import DatabaseAugmentation, PCAWhitening, QueryExpansion
from lightning_retrieval.callbacks.ap_monitor import decomposability_gap, sums_of_ap
from lightning_retrieval.callbacks.gallery import choose_queries, nearest_images, query_ap
from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.losses.batch_loss import RankedBatch
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics
from lightning_retrieval.metrics.curves import mean_precision, pair_counts
from lightning_retrieval.ranking.rows import float64_device, to_float64
from tests.lightning_retrieval.device_without_float64 import DEVICE, DeviceWithoutFloat64

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


def filled(metrics, device, **given):
    """These metrics of the rows on a device, in two updates."""
    for part in (slice(0, 100), slice(100, None)):
        keywords = {name: values[part].to(device) for name, values in given.items()}
        metrics.update(X[part].to(device), keywords.pop("labels", LABELS[part].to(device)), **keywords)
    return metrics


def every_query(device):
    return filled(RetrievalMetrics((1, 10), (5,)), device, ids=IDS)


def with_roles(device, **settings):
    metrics = RetrievalMetrics((1, 10), (5,), **settings)
    return filled(metrics, device, ids=IDS, roles=torch.where(IS_QUERY, 1, 2))


def several_levels(device):
    levels = torch.stack([LABELS, LABELS // 4, LABELS // 12], 1)
    return filled(RetrievalMetrics((1, 10), alpha=2.0), device, labels=levels, ids=IDS)


def instances(device):
    return filled(RetrievalMetrics(), device, ids=IDS, instances=LABELS * 2 + IDS % 2)


def cameras(device):
    extra = ("mINP", "precision@3", "recall@3", "MRR@3", "NDCG@3")
    metrics = RetrievalMetrics((1,), (5,), map_divisor="hits", extra_metrics=extra)
    return filled(metrics, device, ids=IDS, cameras=IDS % 3)


def empty_gallery(device):
    return filled(RetrievalMetrics(), device, ids=IDS, roles=torch.ones(ROWS, dtype=torch.int64))


def expanded(device):
    return with_roles(device, query_expansion=QueryExpansion(k=3), database_augmentation=DatabaseAugmentation(k=2))


def on_cpu(device):
    return with_roles(device, embeddings_on_cpu=True)


def random_galleries(device):
    return filled(RandomGalleryMetrics(draws=3), device, ids=IDS)


def revisited(device):
    return filled(RevisitedMetrics(**LISTS), device, ids=IDS, roles=torch.where(IS_QUERY, 1, 2))


def revisited_without_gallery(device):
    return filled(RevisitedMetrics(**LISTS), device, ids=IDS, roles=IS_QUERY.long())


def sums_of_batch(device):
    labels = LABELS.to(device)
    return sums_of_ap(SmoothAPLoss(), RankedBatch(X.to(device), labels, ids=IDS.to(device)))


def drawn_images(device):
    metrics = with_roles(device)
    lists = metrics.query_gallery(metrics.gather()[0])
    chosen = choose_queries(*query_ap(metrics, lists.query_ids), 5, "hardest").to(lists.query_ids.device)
    return torch.tensor([[hit.id for hit in hits] for _, hits in nearest_images(metrics, lists, chosen, 4)])


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


@pytest.mark.parametrize(
    "metrics", [every_query, with_roles, several_levels, instances, cameras, expanded, on_cpu, random_galleries]
)
def test_metrics_and_values_of_each_query(metrics):
    def values(device):
        filled_metrics = metrics(device)
        return {**filled_metrics.compute(), **filled_metrics.per_query()}

    assert_equal_everywhere(values)


def test_lists_of_revisited_oxford():
    assert_equal_everywhere(lambda device: revisited(device).compute())


@pytest.mark.parametrize("metrics", [empty_gallery, revisited_without_gallery])
@pytest.mark.filterwarnings("ignore:RetrievalMetrics. none of the", "ignore:RevisitedMetrics. no query has")
def test_no_candidates(metrics):
    assert_equal_everywhere(lambda device: metrics(device).compute())


def test_curves_and_gap():
    assert_equal_everywhere(lambda device: mean_precision(with_roles(device)))
    assert_equal_everywhere(lambda device: pair_counts(cameras(device), 50).cpu())
    assert_equal_everywhere(lambda device: decomposability_gap(with_roles(device), classes=12, samples=5))


@pytest.mark.parametrize("compute", [sums_of_batch, drawn_images, whitened])
def test_what_else_uses_float64(compute):
    assert_equal_everywhere(compute)


def test_other_devices_compute_float64_themselves():
    for name in ("cpu", "cuda:1", "meta"):
        assert float64_device(torch.device(name)) == torch.device(name)
    assert to_float64(torch.tensor([3], device="meta")).device.type == "meta"
    assert float64_device(DEVICE) == torch.device("cpu")


def test_the_pretended_device_has_no_float64():
    with DeviceWithoutFloat64():
        x = torch.zeros(3, device=DEVICE)
        assert (x + 1).device == x.device == DEVICE
        assert x.cpu().device == torch.zeros(3).device == torch.device("cpu")
        with pytest.raises(TypeError, match="no float64"):
            x.double()
        with pytest.raises(TypeError, match="no float64"):
            torch.zeros(3, dtype=torch.float64, device=DEVICE)
        with pytest.raises(TypeError, match="no float64"):
            x.sum(dtype=torch.float64)
        with pytest.raises(TypeError, match="NumPy"):
            x.numpy()
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(3)
