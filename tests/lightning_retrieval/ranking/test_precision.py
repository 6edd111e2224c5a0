"""Products whose order decides run in IEEE float32, whatever precision the process has chosen for training.

Promise 1: the numbers are those of one process on a CPU. A CPU has no TF32, so what is seen here is the setting that
holds whenever a matrix product runs.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_retrieval import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.metrics import RetrievalMetrics, RevisitedMetrics, nearest_scores
from lightning_retrieval.metrics.curves import mean_precision, pair_counts
from lightning_retrieval.search.store.index import measure_recall

PRODUCTS = ("mm", "bmm", "addmm", "mv", "matmul")
LABELS = torch.arange(12) // 3


class PrecisionOfProducts(TorchDispatchMode):
    """Records the precision that is set whenever a matrix product runs."""

    def __init__(self, precision=torch.get_float32_matmul_precision):
        super().__init__()
        self.precision, self.seen = precision, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name.split("::")[1] in PRODUCTS:
            self.seen.append(self.precision())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def reduced_precision():
    torch.set_float32_matmul_precision("high")
    yield "high"
    torch.set_float32_matmul_precision("highest")


def filled(labels=LABELS, **settings):
    metrics = RetrievalMetrics((1,), **settings)
    metrics.update(torch.randn(12, 4), labels, torch.arange(12))
    return metrics


def revisited():
    easy, hard = {0: [4], 1: [5], 2: [6]}, {0: [7], 1: [8], 2: [9]}
    metrics = RevisitedMetrics(easy, hard, {0: [], 1: [], 2: []}, ks=(1,))
    is_query = torch.arange(12) < 3
    metrics.update(torch.randn(12, 4), torch.zeros(12).long(), torch.arange(12), torch.where(is_query, 1, 2))
    return metrics.compute()


def recall_of_an_index():
    rows, ids = torch.randn(20, 4), np.arange(20)
    return measure_recall(lambda queries, k: (None, torch.zeros(len(queries), k).long()), rows, ids)


RANKED = {
    "metrics": lambda: filled().compute(),
    "metrics of levels": lambda: filled(torch.stack([LABELS, LABELS // 2], 1)).compute(),
    "metrics of revisited sets": revisited,
    "thresholds": lambda: nearest_scores(filled()),
    "precision at each recall": lambda: mean_precision(filled()),
    "counts of pairs": lambda: pair_counts(filled(), 10),
    "query expansion": lambda: QueryExpansion(k=2)(torch.randn(3, 4), torch.randn(9, 4)),
    "database augmentation": lambda: DatabaseAugmentation(k=2)(torch.randn(9, 4)),
    "recall of an index": recall_of_an_index,
}


@pytest.mark.parametrize("name", RANKED)
def test_the_precision_inside_the_product_is_the_highest(reduced_precision, name):
    with PrecisionOfProducts() as products:
        RANKED[name]()
        torch.ones(2, 3) @ torch.ones(3, 2)  # a product that is not guarded is seen as well
    *guarded, last = products.seen
    assert set(guarded) == {"highest"}
    assert last == reduced_precision


@pytest.fixture
def backends():
    """Where torch keeps the precision of each backend; restored afterwards."""
    found = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    before = [backend.fp32_precision for backend in found]
    yield found
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(found, before):
        backend.fp32_precision = precision


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "fp32_precision"), reason="torch has one setting for all")
def test_a_setting_of_one_backend_is_overridden_and_restored(backends):
    torch.set_float32_matmul_precision("high")
    for changed, precision in zip(backends, ("tf32", "ieee")):  # the first contradicts the setting of all backends
        changed.fp32_precision = precision
        before = [backend.fp32_precision for backend in backends]
        with PrecisionOfProducts(lambda: [backend.fp32_precision for backend in backends]) as products:
            filled().compute()
        assert products.seen
        assert all(seen == ["ieee", "ieee"] for seen in products.seen)
        assert [backend.fp32_precision for backend in backends] == before


def values_on_a_gpu():
    torch.manual_seed(1)
    metrics = RetrievalMetrics((1,), query_expansion=QueryExpansion(k=2)).to("cuda")
    metrics.update(torch.randn(12, 4).cuda(), LABELS.cuda(), torch.arange(12).cuda())
    return {name: value.item() for name, value in metrics.compute().items()}


@pytest.mark.gpu
def test_a_gpu_ranks_without_tf32(reduced_precision, stand_in_for_kernels):
    before = tf32_products(stand_in_for_kernels)
    found = values_on_a_gpu()
    assert tf32_products(stand_in_for_kernels) == before
    torch.set_float32_matmul_precision("highest")
    assert values_on_a_gpu() == found


def tf32_products(kernels):
    """The number of products in TF32 so far, which only a pretend GPU counts."""
    if kernels is None:
        return 0
    from pretend import counters

    return counters()["tf32"]
