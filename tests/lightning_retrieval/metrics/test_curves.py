"""Precision at each recall, counts of pairs and the decomposability gap: against loops, and over two processes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve
from torch import nn

from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import mean_precision, pair_counts
from lightning_retrieval.metrics.decomposability import cut_into_batches, decomposability_gap
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.ranking.roles import Role, has_role

SIZE = 301  # two blocks of queries, the last one smaller
IDS = torch.randperm(4 * SIZE, generator=torch.Generator().manual_seed(7))[:SIZE]


def points(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of one to many images, some of which are one and the same, so that scores tie."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 12, (size,), generator=generator) ** 2 // 4 * 3 - 20
    labels[6] = 999
    centres = torch.randn(150, 4, dtype=torch.float64, generator=generator)
    rows = centres[labels % 150] + torch.randn(size, 4, dtype=torch.float64, generator=generator)
    rows[::7] = rows[0]
    return rows, labels


def roles_of(kind: str, size: int = SIZE) -> torch.Tensor:
    both = torch.full((size,), int(Role.BOTH))
    return both if kind == "all" else torch.where(torch.arange(size) % 3 == 0, int(Role.QUERY), int(Role.GALLERY))


def filled(kind: str, part: slice = slice(None), **settings) -> RetrievalMetrics:
    rows, labels = points()
    metrics, roles = RetrievalMetrics((1,), **settings), roles_of(kind)
    is_query, is_gallery = has_role(roles, Role.QUERY), has_role(roles, Role.GALLERY)
    metrics.update(rows[part], labels[part], IDS[part], is_query[part], is_gallery[part])
    return metrics


def lists(kind: str, chosen=None):
    """Scores and relevance of each query's candidates, one query at a time."""
    rows, labels = points()
    unit, roles = nn.functional.normalize(rows, dim=1).numpy(), roles_of(kind).numpy()
    labels, chosen = labels.numpy(), np.arange(SIZE) if chosen is None else np.asarray(chosen)
    for query in chosen[roles[chosen] & Role.QUERY > 0]:
        others = chosen[(roles[chosen] & Role.GALLERY > 0) & (chosen != query)]
        yield (unit[others] @ unit[query]).round(12), labels[others] == labels[query]


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_mean_precision_is_that_of_scikit_learn_interpolated(kind):
    expected, left_out = [], 0
    for scores, relevant in lists(kind):
        if not relevant.any():
            left_out += 1
            continue
        precision, recall, _ = precision_recall_curve(relevant, scores)
        precision, recall = precision[:-1], recall[:-1]  # without scikit-learn's own point of recall 0
        expected.append([precision[recall >= level / 100 - 1e-12].max() for level in range(101)])
    assert left_out > 0
    found = mean_precision(filled(kind)).numpy()
    assert found == pytest.approx(np.mean(expected, axis=0), abs=1e-9)
    assert 0.2 < found[50] < found[0] < 1


def test_mean_precision_of_one_list_by_hand():
    """Right, wrong, right: precision 1 up to a recall of 1/2, then 2/3."""
    metrics = RetrievalMetrics((1,))
    angle = torch.tensor([0.0, 0.1, 0.2, 0.3])
    is_query = torch.tensor([True, False, False, False])
    metrics.update(torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([1, 1, 2, 1]), None, is_query, ~is_query)
    assert mean_precision(metrics, steps=4).tolist() == pytest.approx([1, 1, 1, 2 / 3, 2 / 3])


def test_mean_precision_is_nan_without_any_positive():
    metrics = RetrievalMetrics((1,))
    metrics.update(torch.eye(3), torch.arange(3))
    assert mean_precision(metrics).isnan().all()


def test_mean_precision_looks_at_the_finest_level():
    rows, labels = points()
    with_levels = RetrievalMetrics((1,))
    with_levels.update(rows, torch.stack([labels, labels // 20], 1), IDS)
    assert torch.equal(mean_precision(with_levels), mean_precision(filled("all")))


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_every_pair_is_counted_once(kind):
    bins = 20
    counts = pair_counts(filled(kind), bins)
    expected = np.zeros((2, bins), dtype=int)
    near_an_edge = 0
    for scores, relevant in lists(kind):
        place = np.clip(np.floor((scores + 1) * bins / 2), 0, bins - 1).astype(int)
        near_an_edge += int((np.abs((scores + 1) * bins / 2 - np.round((scores + 1) * bins / 2)) < 1e-5).sum())
        for positive in (True, False):
            expected[0 if positive else 1] += np.bincount(place[relevant == positive], minlength=bins)
    assert counts.sum(1).tolist() == expected.sum(1).tolist()
    assert np.abs(counts.numpy() - expected).sum() <= 2 * near_an_edge


def test_pairs_are_counted_in_pieces_of_the_gallery(monkeypatch):
    whole = pair_counts(filled("all"), 50)
    monkeypatch.setattr("lightning_retrieval.metrics.curves._BLOCK_GALLERY", 100)
    assert pair_counts(filled("all"), 50).sum(1).tolist() == whole.sum(1).tolist()
    assert (pair_counts(filled("all"), 50) - whole).abs().sum() <= 20  # another shape, other last digits


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


def test_gap_does_not_rank_the_whole_set_again(monkeypatch):
    """Nor does it expand all its queries: it is of batches."""
    metrics = filled("all")
    metrics.compute()
    rankings = []
    monkeypatch.setattr(metrics, "query_gallery", rankings.append)
    decomposability_gap(metrics, 5, 4)
    assert not rankings


def _of_a_share(rank, world):
    """Rank 0 has two thirds, and an image that rank 1 has too."""
    part = slice(0, 200) if rank == 0 else slice(199, None)
    metrics = filled("all", part)
    return mean_precision(metrics), pair_counts(metrics, 50), decomposability_gap(metrics, 5, 4)


def test_two_processes_find_the_same(run_processes):
    metrics = filled("all")
    expected = mean_precision(metrics), pair_counts(metrics, 50), decomposability_gap(metrics, 5, 4)
    first, second = run_processes(_of_a_share, 2)
    for alone, one, other in zip(expected, first, second):
        assert torch.equal(one, other)
        assert torch.allclose(one.double(), alone.double(), rtol=0, atol=1e-12)
