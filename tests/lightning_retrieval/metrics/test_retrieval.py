"""RetrievalMetrics: the values of each query, skipped queries, memory, both directions; random galleries."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from torchmetrics import MetricCollection

from lightning_retrieval import QueryExpansion, SharedTags
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import LargestTensor, compute, numbers, quarters

KS = (1, 2, 4, 8)
X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("kind", "roles", "queries"),
    [(RetrievalMetrics, 3, 4), (RetrievalMetrics, 2, 0), (RetrievalMetrics, 1, 4), (RandomGalleryMetrics, 3, 0)],
)
def test_no_query_with_a_positive(kind, roles, queries):
    metrics = kind(ks=(1,))
    metrics.update(torch.randn(4, 3), torch.arange(4), roles=torch.full((4,), roles))
    with pytest.warns(UserWarning, match=kind.__name__):
        found = metrics.compute()
    assert found.pop("skipped_queries").item() == queries
    assert all(value.isnan() for value in found.values())


def test_no_tensor_is_as_large_as_the_score_matrix():
    x, labels = torch.randn(700, 4), torch.arange(700) % 300
    metrics = RetrievalMetrics()
    metrics.update(x, labels)
    with small_blocks(), LargestTensor() as largest:
        metrics.compute()
    assert largest.elements <= 64 * 768  # 64 queries, the gallery padded to whole multiples of 384


def test_per_query():
    """One row for each query in the order of the ids, whatever order they came in."""
    x, labels = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 20, (40,))
    labels[3] = 77  # alone
    ids = torch.randperm(40) * 3
    metrics = RetrievalMetrics(ks=(1, 4), map_ks=(2,))
    metrics.update(x[:11], labels[:11], ids[:11], roles=2 + (torch.arange(11) > 1))
    metrics.update(x[11:], labels[11:], ids[11:])
    table = metrics.per_query()
    order = ids[2:].argsort()
    assert table["ids"].tolist() == ids[2:][order].tolist()
    assert table["labels"].tolist() == labels[2:][order].tolist()
    unit = normalize(x)
    scores = (unit @ unit.T).fill_diagonal_(-2)
    for row, query in enumerate((order + 2).tolist()):
        hits = (labels == labels[query])[scores[query].argsort(descending=True)][:-1]
        if not hits.any():
            assert table["AP"][row].isnan()
            continue
        expected = average_precision_score(hits.numpy(), -np.arange(39))
        assert table["AP"][row].item() == pytest.approx(expected, abs=1e-12)
        assert table["first_hit"][row] == hits.nonzero()[0, 0] + 1
    means = metrics.compute()
    assert means["mAP"].item() == table["AP"].nanmean().item()
    assert means["skipped_queries"] == table["AP"].isnan().sum() > 0
    metrics.update(x, labels, ids + 1)
    assert len(metrics.per_query()["AP"]) == 78  # not the table of before
    metrics.reset()
    metrics(x[:20], labels[:20], ids[:20])  # which also computes the metrics of this batch alone
    metrics(x[20:], labels[20:], ids[20:])
    assert metrics.per_query()["ids"].tolist() == ids.sort().values.tolist()


@pytest.mark.parametrize(
    ("classes", "kept", "embeddings_on_cpu"),
    [(30, 4, False), (3, 0, True), (3, 4, False)],  # 3: the positives of a query are in several tiles
)
def test_a_gallery_in_tiles(classes, kept, embeddings_on_cpu):
    x, labels = torch.randn(500, 6), torch.randint(0, classes, (500,))
    x[::50] = x[0]  # ties of images in different tiles
    metrics = RetrievalMetrics(ks=KS, embeddings_on_cpu=embeddings_on_cpu)
    metrics.update(x, labels)
    with small_blocks(queries=256, kept_tiles=kept):
        assert numbers(metrics.compute()) == pytest.approx(compute(x, labels), abs=1e-12)


def test_number_of_ranked_images():
    metrics = RetrievalMetrics(ks=(1, 3))
    metrics.update(X, Y)
    metrics.compute()
    assert metrics.ranked_images == 3  # the others
    metrics.update(X, Y, roles=torch.where(Y > 0, 1, 2))
    metrics.compute()
    assert metrics.ranked_images == 6


def test_metrics_of_the_first_dimensions():
    """The same as of shortened embeddings, whose instances are averaged after they are shortened."""
    x, labels, ids = torch.randn(60, 8, dtype=torch.float64), torch.arange(60) // 5, torch.arange(60) * 3
    given = {"ids": ids, "instances": torch.arange(60) // 2, "cameras": torch.arange(60) // 2 % 3}
    labels = labels // 2 * 2  # whole instances
    metrics = RetrievalMetrics(KS, map_ks=(3,), dims=(2, 5, 8))
    for part in torch.arange(60).split(25):
        metrics.update(x[part], labels[part], **{name: values[part] for name, values in given.items()})
    found = metrics.compute()
    expected = {}
    for dim in (2, 5, 8):
        shortened = RetrievalMetrics(KS, map_ks=(3,))
        shortened.update(x[:, :dim], labels, **given)
        values = shortened.compute()
        skipped = values.pop("skipped_queries")
        expected |= {f"{name}/{dim}d": value for name, value in values.items()}
        if dim == 8:
            expected |= values | {"skipped_queries": skipped}
    assert found.keys() == expected.keys()
    assert found == expected
    assert len({float(found[f"mAP/{dim}d"]) for dim in (2, 5, 8)}) == 3
    per_query = metrics.per_query()["AP"]
    assert per_query[~per_query.isnan()].mean() == found["mAP"]


# --- the other direction: queries are ranked for each gallery image


def two_sides(size=60):
    """Scores with many ties, and labels, ids, roles, cameras and tags of rows of which some are junk or on both sides.

    The last label is of queries only, and the last tags are of one row each.
    """
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 7, (size,), generator=generator)
    roles = torch.randint(1, 3, (size,), generator=generator)
    roles[:5], roles[5:9] = 3, 0
    labels[9:11], roles[9:11] = 99, 1
    tags = torch.randint(0, 25, (size, 3), generator=generator)
    rows = {"ids": torch.randperm(size, generator=generator) * 2, "roles": roles}
    return quarters(size), labels, rows, torch.randint(0, 3, (size,), generator=generator), tags


@pytest.mark.parametrize("case", ["labels", "cameras", "tags", "expanded", "dims"])
def test_both_directions_are_those_of_two_metrics_with_swapped_roles(case):
    x, labels, rows, cameras, tags = two_sides()
    settings = {"map_ks": (3,), "extra_metrics": ("mINP", "NDCG@5")}
    if case == "cameras":
        rows["cameras"] = cameras
    if case == "tags":
        labels, settings["relevance"] = tags, SharedTags()
    if case == "expanded":
        settings["query_expansion"] = QueryExpansion(k=3)
    if case == "dims":
        settings["dims"] = (2, 6)
    swapped = {**rows, "roles": torch.tensor([0, 2, 1, 3])[rows["roles"]]}
    both, forward, reverse = (RetrievalMetrics(KS, **settings, reverse=on) for on in (True, False, False))
    both.update(x, labels, **rows)
    forward.update(x, labels, **rows)
    reverse.update(x, labels, **swapped)
    expected = {**forward.compute(), **{f"reverse/{name}": value for name, value in reverse.compute().items()}}
    assert both.compute() == expected
    assert expected["mAP"] != expected["reverse/mAP"]
    assert (both.ranked_images, both.ranked_queries) == (forward.ranked_images, reverse.ranked_images)
    for found, of_one in ((both.per_query(), forward), (both.per_query(reverse=True), reverse)):
        for name, values in of_one.per_query().items():
            assert torch.equal(found[name].nan_to_num(-1.0), values.nan_to_num(-1.0)), name


def test_values_of_queries_follow_the_states_that_a_collection_shares():
    """In a `MetricCollection`, only the first of some metrics with equal states is updated."""
    collection = MetricCollection({"few": RetrievalMetrics((1,)), "many": RetrievalMetrics(KS)})
    for rows in range(1, 4):
        collection.update(X, Y, torch.arange(4) + 4 * rows)
        collection.compute()
        assert [len(metrics.per_query()["AP"]) for metrics in collection.values()] == [4 * rows, 4 * rows]
    collection.update(X, Y, torch.arange(4))
    assert [len(metrics.per_query()["AP"]) for metrics in collection.values()] == [16, 16]


def test_the_other_direction_must_be_asked_for():
    metrics = RetrievalMetrics((1,))
    metrics.update(X, Y)
    assert not any(name.startswith("reverse/") for name in metrics.compute())


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


@pytest.mark.parametrize("levels", [1, 3])
def test_names_and_order_of_the_means(levels):
    metrics = RetrievalMetrics((1, 5), (3,), extra_metrics=("mINP", "NDCG@3", "MRR@3"))
    metrics.update(torch.randn(12, 3), torch.stack([torch.arange(12) // 2**level for level in range(1, 1 + levels)], 1))
    flat = ["mAP", "mAP@R", "R-Precision", "MRR", "NDCG", "mAP@3", "mINP", "NDCG@3", "MRR@3"]
    of_levels = ["H-AP", "ASI", "NDCG-levels", "mAP/level1", "mAP/level2"] if levels == 3 else []
    assert list(metrics.compute()) == [*flat, *of_levels, "R@1", "R@5", "skipped_queries"]
