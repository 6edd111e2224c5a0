"""Evaluation in shards: all results of several processes are bit-equal to those of one, and none has all embeddings."""

import pytest
import torch
import torch.distributed as dist

from lightning_retrieval import DatabaseAugmentation, GalleryOnly, QueryExpansion, SharedTags
from lightning_retrieval.callbacks.ap_monitor import decomposability_gap
from lightning_retrieval.callbacks.gallery import nearest_images
from lightning_retrieval.metrics import (
    RandomGalleryMetrics,
    RetrievalMetrics,
    RevisitedMetrics,
    curves,
    gathering,
)
from lightning_retrieval.metrics import revisited as revisited_module
from lightning_retrieval.ranking import entries, expansion, ranked_lists
from tests.lightning_retrieval.metrics.helpers import LargestTensor
from tests.lightning_retrieval.relevance_rules import NearInTime

ROWS, DIM = 900, 12
QUERIES = 30  # of the revisited set
SIZES = [  # small ones, so that there are several pieces of the gallery, rounds of queries, and parts of the batches
    (ranked_lists, "_CPU_PRODUCTS", 1),
    (ranked_lists, "_MAX_GROUP_POSITIVES", 1 << 13),
    (entries, "_MAX_BLOCK_POSITIVES", 1 << 12),
    (entries, "_MAX_PAIRS", 20_000),  # 22 queries, which do not divide a block
    (ranked_lists, "_CPU_COLUMNS", 384),
    (revisited_module, "_BLOCK_COLUMNS", 384),
    (curves, "_BLOCK_GALLERY", 200),
    (gathering, "_BLOCK_NUMBERS", 1 << 11),
    (expansion, "_BLOCK_ROWS", 64),
    (expansion, "_BLOCK_NUMBERS", 20 * 5 * DIM),  # 20 rows, which do not divide a block
]


def points(half_in_one_class=False, dtype=torch.float32):
    """Embeddings, of which many are equal, and labels of one to many images."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 100, (ROWS,), generator=generator) * 3 - 50
    if half_in_one_class:
        labels[torch.rand(ROWS, generator=generator) < 0.5] = 7
    centres = torch.randn(400, DIM, generator=generator, dtype=dtype)
    x = centres[labels + 60] + 1.5 * torch.randn(ROWS, DIM, generator=generator, dtype=dtype)
    x[::37] = x[3]
    return x, labels


def roles():
    generator = torch.Generator().manual_seed(2)
    is_query = torch.rand(ROWS, generator=generator) < 0.3
    is_gallery = torch.rand(ROWS, generator=generator) < 0.8
    return {"roles": is_query + 2 * is_gallery}


def tied_points():
    """Embeddings whose similarities are multiples of 1/4, so that most neighbours are chosen among equal ones."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 100, (ROWS,), generator=generator)
    places = torch.rand(ROWS, 6, generator=generator).argsort(1)[:, :4]
    signs = torch.randint(0, 2, (ROWS, 4), generator=generator) * 2.0 - 1
    return torch.zeros(ROWS, DIM).scatter(1, places, signs), labels


def revisited(**settings):
    """Easy, hard and junk images of each query, some of which the gallery does not have."""
    lists = []
    for offset in (0, 300, 600):
        lists.append({query: [(query * 37 + offset + 11 * i) % 999 + QUERIES for i in range(5)] for query in range(30)})
    return RevisitedMetrics(*lists, **settings)


def centred(gallery):
    """A user's own augmentation: rows that are not of unit length."""
    return gallery - gallery.mean(0)


class Doubled(QueryExpansion):
    """A user's own class, derived from the library's."""

    def __call__(self, queries, gallery, self_index=None):
        return super().__call__(queries * 2 - gallery.mean(0), gallery, self_index)


def cases():
    """Metric, embeddings, labels and what else `update` takes, by the name of the case."""
    x, labels = points()
    levels = torch.stack([labels, labels // 7, labels // 42], 1)
    instances = torch.randint(0, ROWS // 3, (ROWS,), generator=torch.Generator().manual_seed(3))
    expanded, augmented = QueryExpansion(k=4), DatabaseAugmentation(k=3, alpha=0.5)
    is_query = torch.arange(ROWS) < QUERIES
    more = {"map_ks": (3,), "extra_metrics": ("mINP", "NDCG@10"), "dims": (4, DIM)}
    both = {"query_expansion": expanded, "database_augmentation": augmented}
    in_time, in_roles = torch.stack([labels, torch.arange(ROWS) % 7], 1), torch.stack([labels, roles()["roles"]], 1)
    every_row = {"query_expansion": QueryExpansion(k=101)}  # more than there are
    return {
        "plain": (RetrievalMetrics(**more), x, labels, {}),
        "roles and junk": (RetrievalMetrics(embeddings_on_cpu=True), x, labels, roles()),
        "both directions": (RetrievalMetrics(**more, reverse=True), x, labels, roles()),
        "both directions, expanded": (RetrievalMetrics(**both, reverse=True), x, labels, roles()),
        "both directions of tags": (RetrievalMetrics(reverse=True, relevance=SharedTags()), x, tags(), roles()),
        "levels": (RetrievalMetrics(), x, levels, {}),
        "instances": (RetrievalMetrics(), x, labels[instances], {"instances": instances}),
        "cameras": (RetrievalMetrics(), x, labels, {"cameras": torch.arange(ROWS) % 4}),
        "float64": (RetrievalMetrics(), *points(dtype=torch.float64), {}),
        "float16": (RetrievalMetrics(), x.half(), labels, roles()),
        "half in one class": (RetrievalMetrics(), *points(half_in_one_class=True), {}),
        "expanded, with roles": (RetrievalMetrics(**both), x, labels, roles()),
        "augmented gallery": (RetrievalMetrics(database_augmentation=augmented), x, labels, roles()),
        "expanded, in main memory": (RetrievalMetrics(**both, embeddings_on_cpu=True), x, labels // 6, roles()),
        "expanded by all rows": (RetrievalMetrics(**every_row), x[:100], labels[:100] // 30, {}),
        "expanded by ties": (RetrievalMetrics(**both), *tied_points(), {}),
        "a user's class": (RetrievalMetrics(query_expansion=Doubled(k=4)), x, labels, roles()),
        "a user's function and expansion": (
            RetrievalMetrics(query_expansion=expanded, database_augmentation=centred),
            x,
            labels,
            roles(),
        ),
        "random galleries": (RandomGalleryMetrics(draws=2), x, labels, {}),
        "revisited, expanded": (revisited(**both), x, labels, {"roles": torch.where(is_query, 1, 2)}),
        "tags": (RetrievalMetrics(**more, relevance=SharedTags()), x, tags(), {}),
        "tags, expanded, with roles": (
            RetrievalMetrics(**both, relevance=SharedTags(at_least=2), embeddings_on_cpu=True),
            x,
            tags(),
            roles(),
        ),
        "tags of instances": (
            RetrievalMetrics(relevance=SharedTags()),
            x,
            tags()[instances],
            {"instances": instances},
        ),
        "a user's rule": (RetrievalMetrics(relevance=NearInTime()), x, in_time, roles()),
        "a rule with few candidates": (RetrievalMetrics(relevance=GalleryOnly()), x, in_roles, {}),
        "random galleries under a rule": (RandomGalleryMetrics(draws=2, relevance=NearInTime()), x, in_time, {}),
        "no positive": (RetrievalMetrics(), x[:5], torch.arange(5), {}),
    }


def tags():
    """Up to three tags of each image, of which some are frequent, some are repeated, and some images have none."""
    generator = torch.Generator().manual_seed(5)
    found = torch.randint(0, 60, (ROWS, 3), generator=generator) ** 2 // 60 + 1_000_000
    found[torch.rand(ROWS, 3, generator=generator) < 0.3] = -1
    return found


def rows_of_process(this, world, rows):
    """A third, the rest, and none; the first rows are on two processes."""
    if world == 1:
        return torch.arange(rows)
    third = rows // 3
    rest = torch.cat([torch.arange(third, rows), torch.arange(min(rows, 4))])
    return [torch.arange(third), rest, torch.arange(0)][this]


def pictures(metrics):
    """What callbacks show of an evaluation set."""
    lists = metrics.ranking_input(metrics.gather()[0])
    nearest = nearest_images(lists, lists.query_ids.sort().values[:5], 6)
    drawn = {
        "precision": curves.mean_precision(metrics),
        "pairs": curves.pair_counts(metrics, 40),
        "nearest": torch.tensor([[hit.id for hit in hits] for _, hits in nearest]),
    }
    if metrics.relevance is None or metrics.relevance.has_classes:
        drawn["gap"] = decomposability_gap(metrics, 8, 4)
    return drawn


NAMES = tuple(cases())
WITH_PICTURES = ("plain", "expanded, with roles", "tags", "a user's rule")


def tables(this, world, group=None, names=NAMES):
    """All results of these cases, by the processes of a group."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in SIZES:
            patch.setattr(module, name, size)
        results = {}
        every = cases()
        for name in names:
            metrics, x, labels, given = every[name]
            metrics.process_group = group
            for part in rows_of_process(this, world, len(x)).split(100):
                metrics.update(x[part], labels[part], part, **{key: rows[part] for key, rows in given.items()})
            results[name] = dict(metrics.compute())
            if isinstance(metrics, RetrievalMetrics):
                results[name] |= metrics.per_query()
                if metrics.reverse:
                    for column, values in metrics.per_query(reverse=True).items():
                        results[name][f"{column} of the gallery"] = values
            if name in WITH_PICTURES:
                results[name] |= pictures(metrics)
        return results


@pytest.fixture(scope="module")
def alone():
    with pytest.warns(UserWarning, match="none of the 5 queries has a relevant candidate"):
        return tables(0, 1)


@pytest.fixture(scope="module")
def processes(run_processes):
    return run_processes(tables, 3, timeout=300)


@pytest.mark.parametrize("case", NAMES)
def test_tables_are_bit_equal_to_those_of_one_process(case, processes, alone):
    expected = alone[case]
    for found in processes:
        assert found[case].keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(found[case][name].nan_to_num(-1.0), values.nan_to_num(-1.0)), name


def group_and_loner(this, world):
    """Two of three processes share one evaluation; the first has its own, and a shard that it keeps to itself."""
    pair, loner = dist.new_group([1, 2]), dist.new_group([0])
    if this > 0:
        return tables(this - 1, 2, pair, WITH_PICTURES)
    x, labels = points()
    ids = torch.arange(ROWS)
    refused = RetrievalMetrics(process_group=loner)
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: `ids` must "):
        refused.update(x, labels, ids[1:])
    found = []
    for settings in ({"process_group": loner}, {"sync_on_compute": False}):
        metrics = RetrievalMetrics(**settings)
        metrics.update(x, labels, ids)
        found.append(pictures(metrics))
    return found


def test_a_group_of_the_processes_has_its_own_evaluation(run_processes, alone):
    loners, *pair = run_processes(group_and_loner, 3, timeout=300)
    assert len(pair) == 2
    for found in pair:
        for case in WITH_PICTURES:
            for name, values in alone[case].items():
                assert torch.equal(found[case][name].nan_to_num(-1.0), values.nan_to_num(-1.0)), (case, name)
    for found in loners:
        for name, values in found.items():
            assert torch.equal(values, alone["plain"][name]), name


def largest_tensors(this, world):
    """Elements of the largest tensor in an evaluation, and of the embeddings that this process is given and keeps."""
    ids = torch.arange(this, 2100, world)
    both = {"query_expansion": QueryExpansion(k=4), "database_augmentation": DatabaseAugmentation(k=4)}
    metrics = RetrievalMetrics((1,), **both)
    metrics.update(torch.randn(len(ids), 256), ids // 5, ids, roles=2 + (ids % 50 == 0))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in SIZES:
            patch.setattr(module, name, size)
        patch.setattr(expansion, "_BLOCK_NUMBERS", 64 * 4 * 256)  # 64 rows
        with LargestTensor() as largest:
            metrics.compute()
    return largest.elements, len(ids) * 256, sum(map(torch.numel, metrics.embeddings))


def test_no_process_has_the_embeddings_of_all(run_processes):
    for largest, given, kept in run_processes(largest_tensors, 3):
        assert largest <= 1.2 * given
        assert kept == given


def metrics_of(rows, labels, ids, **settings):
    metrics = RetrievalMetrics((1,), **settings)
    metrics.update(rows, labels, ids)
    return metrics


def messages(this, world):
    """The errors of processes that disagree, and the metrics that one of them computes afterwards."""
    x, labels = points()
    own = torch.arange(this, 100, world)
    shared = torch.cat([own, torch.tensor([4])])
    rows, of_rows, is_first = x[shared], labels[shared], this == 0
    with_nan = rows.clone()
    with_nan[2, 0] = torch.nan if this == 1 else 0.0
    disagreeing = {
        "no ids": metrics_of(rows, of_rows, None),
        "two labels": metrics_of(rows, of_rows + this * (shared == 4), shared),
        "two images": metrics_of(torch.where(shared[:, None] == 4, rows.roll(this, 1), rows), of_rows, shared),
        "not finite": metrics_of(with_nan, of_rows, shared),
        "dimension": metrics_of(rows if is_first else rows[:, :5], of_rows, shared),
        "dtype": metrics_of(rows if is_first else rows.double(), of_rows, shared),
        "dims": metrics_of(rows, of_rows, shared, dims=(5,) if is_first else (4,)),
        "expansion": metrics_of(rows, of_rows, shared, query_expansion=QueryExpansion(k=4 + this)),
    }
    found = {}
    for name, metrics in disagreeing.items():
        with pytest.raises(ValueError, match="RetrievalMetrics: ") as error:
            metrics.compute()
        found[name] = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    metrics = disagreeing["not finite"]
    metrics.reset()
    metrics.update(x[own], labels[own], own)
    return found, metrics.compute()["mAP"].item()


@pytest.mark.refusal
def test_processes_that_disagree_raise_the_same_error(run_processes):
    """And can be used after it."""
    (found, _), *others = results = run_processes(messages, 3)
    assert all(of_other == found for of_other, _ in others)
    form = "RowFormat(dim=12, dtype='torch.{}', label_shape=(), has_ids=True, columns=('roles',))"
    starts = {
        "no ids": "`ids` must be given if there are several processes, got none on 3",
        "two labels": "`ids` must have one label each, got id 4 with two different labels; if two sets, ",
        "two images": "rows with the same id must be the same image, got different embeddings for 1 of 100 ids (4), ",
        "not finite": "`embeddings` must hold finite numbers only, got NaN or inf in 1 of 34 rows (ids 7).\n"
        "This happened on rank 1.",
        "dimension": "rows must have the same format on all processes, got [RowFormat(dim=5, dtype='torch.float32', ",
        "dtype": f"rows must have the same format on all processes, got [{form.format('float32')}, "
        f"{form.format('float64')}]",
        "dims": "the settings must be the same on all processes, got ",
        "expansion": "the settings must be the same on all processes, got ",
    }
    for case, start in starts.items():
        assert found[case].startswith(f"RetrievalMetrics: {start}")
    for k in (4, 6):
        assert f"query_expansion: QueryExpansion(alpha=2.0, k={k}), " in found["expansion"]
    x, labels = points()
    expected = metrics_of(x[:100], labels[:100], torch.arange(100)).compute()["mAP"].item()
    assert [mean for _, mean in results] == [expected] * 3
