"""Metrics over random galleries against plain loops over the same draws."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics


def test_the_mean_over_the_draws():
    """Each draw has one image of each label in the gallery and all others as queries, which the table tells."""
    x, labels, ids = torch.randn(60, 5), torch.randint(0, 9, (60,)), torch.randperm(60)
    labels[0] = 50  # alone: always in the gallery
    metrics = RandomGalleryMetrics(ks=(1, 3), draws=4, seed=2)
    for part in torch.arange(60).split(17):
        metrics.update(x[part], labels[part], ids[part])
    found, table = metrics.compute(), metrics.per_query()
    per_draw = 60 - len(labels.unique())
    assert len(table["AP"]) == 4 * per_draw
    unit, galleries, means = normalize(x), [], []
    of_id = {int(i): row for row, i in enumerate(ids)}
    for draw in range(4):
        queries = [of_id[int(i)] for i in table["ids"][draw * per_draw : (draw + 1) * per_draw]]
        gallery = sorted(set(range(60)) - set(queries))
        assert sorted(labels[gallery].tolist()) == sorted(labels.unique().tolist())
        galleries.append(tuple(gallery))
        hits = []
        for query in queries:
            order = (unit[gallery] @ unit[query]).argsort(descending=True)
            hits.append(1 + (labels[gallery][order] == labels[query]).nonzero()[0, 0].item())
        means.append((sum(1 / h for h in hits) / len(hits), sum(h <= 3 for h in hits) / len(hits)))
    assert len(set(galleries)) == 4
    assert found["mAP"].item() == pytest.approx(sum(m[0] for m in means) / 4, abs=1e-12)
    assert found["R@3"].item() == pytest.approx(sum(m[1] for m in means) / 4, abs=1e-12)
    assert found["skipped_queries"] == 0


def test_draws_follow_from_seed_and_ids():
    """Not from the order or the cut of the updates."""
    x, labels = torch.randn(40, 5), torch.arange(40) % 8
    found = []
    for order, seed in ((torch.arange(40), 0), (torch.randperm(40), 0), (torch.arange(40), 1)):
        metrics = RandomGalleryMetrics(ks=(1,), draws=3, seed=seed)
        metrics.update(x[order], labels[order], order)
        found.append(metrics.compute()["mAP"].item())
    assert found[0] == found[1] != found[2]


def test_rows_without_a_role_are_skipped():
    x, labels = torch.randn(30, 5), torch.arange(30) % 5
    kept = torch.arange(30) % 7 != 3
    whole, part = RandomGalleryMetrics(ks=(1,)), RandomGalleryMetrics(ks=(1,))
    whole.update(x, labels, torch.arange(30), roles=3 * kept)
    part.update(x[kept], labels[kept], torch.arange(30)[kept])
    assert torch.equal(whole.per_query()["ids"], part.per_query()["ids"])
    assert whole.compute()["mAP"] == part.compute()["mAP"]


def test_cameras_exclude_the_only_positive():
    """Each list has one positive; under the query's own camera it is not in the list, and the query is skipped."""
    x, labels = torch.randn(30, 5), torch.arange(30) % 5
    metrics = RandomGalleryMetrics(ks=(1,), draws=2)
    metrics.update(x, labels, torch.arange(30), cameras=torch.arange(30) // 15)
    everything = RandomGalleryMetrics(ks=(1,), draws=2)
    everything.update(x, labels, torch.arange(30))
    skipped = metrics.per_query()["AP"].isnan()
    assert skipped.any()
    assert torch.equal(metrics.per_query()["AP"][~skipped], everything.per_query()["AP"][~skipped])
    of_gallery = everything.per_query()["ids"]
    for draw, values in zip(of_gallery.split(25), skipped.split(25)):
        gallery = sorted(set(range(30)) - set(draw.tolist()))
        camera_of_label = {row % 5: row // 15 for row in gallery}
        assert values.tolist() == [camera_of_label[row % 5] == row // 15 for row in draw.tolist()]


def test_labels_with_a_single_image_only():
    metrics = RandomGalleryMetrics(ks=(1,))
    metrics.update(torch.randn(4, 3), torch.arange(4))
    with pytest.warns(UserWarning, match="none of the 0 queries has a relevant candidate"):
        assert math.isnan(metrics.compute()["mAP"].item())
    assert isinstance(metrics, RetrievalMetrics)
