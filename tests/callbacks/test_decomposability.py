"""The decomposability gap against loops, and on two processes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from lightning_retrieval.callbacks.ap_monitor import cut_into_batches, decomposability_gap
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from tests.lightning_retrieval.metrics.evaluation_set import IDS, SIZE, filled, lists, points


def test_a_set_is_cut_into_batches_like_those_of_training():
    labels = points()[1]
    batches = cut_into_batches(labels, 5, 4)
    assert len(batches) > 8
    every = torch.cat(batches)
    assert len(every.unique()) == len(every)
    assert len(every) > SIZE - 20  # but the last, smaller batch
    for batch in batches:
        assert len(batch) <= 5 * 4
    assert len(labels[batches[0]].unique()) == 5
    assert torch.equal(torch.cat(cut_into_batches(labels, 5, 4)), every)
    assert len(torch.cat(cut_into_batches(labels, 10_000, 4))) == SIZE  # one batch is all there is
    alike = torch.arange(48) // 4
    assert len(cut_into_batches(alike, 3, 4)) == 4
    for batch in cut_into_batches(alike, 3, 4):
        assert torch.unique(alike[batch], return_counts=True)[1].tolist() == [4, 4, 4]


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_the_gap_is_mean_ap_of_batches_minus_ap_of_the_set(kind):
    def aps(chosen=None):
        return [average_precision_score(relevant, scores) for scores, relevant in lists(kind, chosen) if relevant.any()]

    by_id = IDS.argsort()  # the metric has its rows in the order of their ids
    batches = cut_into_batches(points()[1][by_id], 5, 4)
    within = [ap for batch in batches for ap in aps(by_id[batch])]
    expected = np.mean(within) - np.mean(aps())
    assert float(decomposability_gap(filled(kind), 5, 4)) == pytest.approx(expected, abs=1e-9)
    assert expected > 0.1


@pytest.mark.parametrize("expanded", [False, True])
def test_there_is_no_gap_where_the_batch_is_the_set(expanded):
    metrics = filled("all")
    if expanded:
        metrics.query_expansion, metrics.database_augmentation = QueryExpansion(k=5), DatabaseAugmentation(k=5)
    assert float(decomposability_gap(metrics, 10_000, 10_000)) == pytest.approx(0, abs=1e-12)


def test_batches_exclude_the_same_camera_too():
    metrics, (rows, labels) = RetrievalMetrics((1,)), points()
    metrics.update(rows, labels, IDS, cameras=IDS % 3)
    assert float(decomposability_gap(metrics, 10_000, 10_000)) == pytest.approx(0, abs=1e-12)


def test_gap_does_not_rank_the_whole_set_again(monkeypatch):
    """Nor does it expand all its queries: it is of batches."""
    metrics = filled("all")
    metrics.compute()
    rankings = []
    monkeypatch.setattr(metrics, "query_gallery", rankings.append)
    decomposability_gap(metrics, 5, 4)
    assert not rankings


def _gap_of_a_shard(rank, world):
    """Rank 0 has two thirds of the rows, and one image is on both ranks."""
    part = slice(0, 200) if rank == 0 else slice(199, None)
    return decomposability_gap(filled("all", part), 5, 4)


def test_two_processes_have_the_same_gap(run_processes):
    expected = decomposability_gap(filled("all"), 5, 4)
    first, second = run_processes(_gap_of_a_shard, 2)
    assert torch.equal(first, second)
    assert torch.allclose(first, expected, rtol=0, atol=1e-12)
