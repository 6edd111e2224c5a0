"""Evaluation in shards: all results of several processes are bit-equal to those of one, and none has all embeddings."""

import pytest
import torch
import torch.distributed as dist

from lightning_retrieval import DatabaseAugmentation, GalleryOnly, QueryExpansion, SharedTags
from lightning_retrieval.callbacks.ap_monitor import decomposability_gap
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics, nearest_scores
from lightning_retrieval.metrics.curves import mean_precision, pair_counts
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import LargestTensor, nearest_of
from tests.lightning_retrieval.relevance_rules import NearInTime

ROWS, DIM = 450, 12  # several pieces of the gallery, rounds of queries, and parts of the batches
QUERIES = 30  # of the revisited set


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


def tags():
    """Up to three tags of each image, of which some are frequent, some are repeated, and some images have none."""
    generator = torch.Generator().manual_seed(5)
    found = torch.randint(0, 60, (ROWS, 3), generator=generator) ** 2 // 60 + 1_000_000
    found[torch.rand(ROWS, 3, generator=generator) < 0.3] = -1
    return found


def revisited(**settings):
    """Easy, hard and junk images of each query, some of which the gallery does not have."""
    lists = []
    for offset in (0, 150, 300):
        lists.append({query: [(query * 37 + offset + 11 * i) % 499 + QUERIES for i in range(5)] for query in range(30)})
    return RevisitedMetrics(*lists, **settings)


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
        "both directions of tags": (RetrievalMetrics(**both, reverse=True, relevance=SharedTags()), x, tags(), roles()),
        "levels": (RetrievalMetrics(), x, levels, {}),
        "instances": (RetrievalMetrics(), x, labels[instances], {"instances": instances}),
        "cameras": (RetrievalMetrics(), x, labels, {"cameras": torch.arange(ROWS) % 4}),
        "float64": (RetrievalMetrics(), *points(dtype=torch.float64), {}),
        "float16": (RetrievalMetrics(), x.half(), labels, roles()),
        "half in one class": (RetrievalMetrics(), *points(half_in_one_class=True), {}),
        "expanded, with roles": (RetrievalMetrics(**both), x, labels, roles()),
        "expanded by all rows": (RetrievalMetrics(**every_row), x[:100], labels[:100] // 30, {}),
        "expanded by ties": (RetrievalMetrics(**both, embeddings_on_cpu=True), *tied_points(), {}),
        "a user's class": (
            RetrievalMetrics(query_expansion=Doubled(k=4), database_augmentation=centred),
            x,
            labels,
            roles(),
        ),
        "random galleries": (RandomGalleryMetrics(draws=2, relevance=NearInTime()), x, in_time, {}),
        "revisited, expanded": (revisited(**both), x, labels, {"roles": torch.where(is_query, 1, 2)}),
        "tags": (RetrievalMetrics(**more, relevance=SharedTags()), x, tags(), {}),
        "tags of instances": (
            RetrievalMetrics(relevance=SharedTags(at_least=2)),
            x,
            tags()[instances],
            {"instances": instances},
        ),
        "a user's rule": (RetrievalMetrics(relevance=NearInTime()), x, in_time, roles()),
        "a rule with few candidates": (RetrievalMetrics(relevance=GalleryOnly()), x, in_roles, {}),
        "no positive": (RetrievalMetrics(), x[:5], torch.arange(5), {}),
    }


def centred(gallery):
    """A user's own augmentation: rows that are not of unit length."""
    return gallery - gallery.mean(0)


def rows_of_process(this, world, rows):
    """A third, the rest, and none; the first rows are on two processes."""
    if world == 1:
        return torch.arange(rows)
    third = rows // 3
    rest = torch.cat([torch.arange(third, rows), torch.arange(min(rows, 4))])
    return [torch.arange(third), rest, torch.arange(0)][this]


def pictures(metrics):
    """What callbacks and thresholds show of an evaluation set."""
    nearest = nearest_of(metrics, metrics.per_query()["ids"][:5], 6)
    scores = nearest_scores(metrics)
    drawn = {
        "precision": mean_precision(metrics),
        "pairs": pair_counts(metrics, 40),
        "nearest": torch.tensor([list(hits) for hits in nearest.values()]),
        "of negatives": scores.negatives,
        "of positives": scores.positives,
    }
    if metrics.relevance is None or metrics.relevance.has_classes:
        drawn["gap"] = decomposability_gap(metrics, 8, 4)
    return drawn


NAMES = tuple(cases())
WITH_PICTURES = ("plain", "tags", "a user's rule")


def tables(this, world, group=None, names=NAMES):
    """All results of these cases, by the processes of a group."""
    results = {}
    every = cases()
    with small_blocks():
        for name in names:
            metrics, x, labels, given = every[name]
            metrics.process_group = group
            for part in rows_of_process(this, world, len(x)).split(100):
                metrics.update(x[part], labels[part], part, **{key: rows[part] for key, rows in given.items()})
            results[name] = dict(metrics.compute())
            if isinstance(metrics, RetrievalMetrics):
                for reverse in {False, metrics.reverse}:
                    of_each = metrics.per_query(reverse=reverse)
                    results[name] |= {f"{column} of each, {reverse=}": values for column, values in of_each.items()}
            if name in WITH_PICTURES:
                results[name] |= pictures(metrics)
    return results


@pytest.fixture(scope="module")
def alone():
    with pytest.warns(UserWarning, match="RetrievalMetrics"):
        return tables(0, 1)


@pytest.fixture(scope="module")
def processes(run_processes):
    return run_processes(tables, 3, timeout=300)


def assert_bit_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].nan_to_num(-1.0), values.nan_to_num(-1.0)), name


@pytest.mark.parametrize("case", NAMES)
def test_tables_are_bit_equal_to_those_of_one_process(case, processes, alone):
    for found in processes:
        assert_bit_equal(found[case], alone[case])


def group_and_loner(this, world):
    """Two of three processes share one evaluation; the first has its own, and a shard that it keeps to itself."""
    pair, loner = dist.new_group([1, 2]), dist.new_group([0])
    if this > 0:
        return tables(this - 1, 2, pair, ("tags",))
    x, labels = points()
    found = []
    for settings in ({"process_group": loner}, {"sync_on_compute": False}):
        metrics = RetrievalMetrics(**settings)
        metrics.update(x, labels, torch.arange(ROWS))
        found.append(metrics.compute())
    return found


def test_a_group_of_the_processes_has_its_own_evaluation(run_processes, alone):
    loners, *pair = run_processes(group_and_loner, 3, timeout=300)
    for found in pair:
        assert_bit_equal(found["tags"], alone["tags"])
    for found in loners:
        assert {name: values for name, values in found.items() if values != alone["plain"][name]} == {}


def largest_tensors(this, world):
    """Elements of the largest tensor in an evaluation, and of the embeddings that this process is given."""
    ids = torch.arange(this, 1500, world)
    both = {"query_expansion": QueryExpansion(k=4), "database_augmentation": DatabaseAugmentation(k=4)}
    metrics = RetrievalMetrics((1,), **both)
    metrics.update(torch.randn(len(ids), 256), ids // 5, ids, roles=2 + (ids % 50 == 0))
    with small_blocks(numbers=64 * 4 * 256), LargestTensor() as largest:
        metrics.compute()
    return largest.elements, len(ids) * 256


def test_no_process_has_the_embeddings_of_all(run_processes):
    for largest, given in run_processes(largest_tensors, 3):
        assert largest <= 1.2 * given


def metrics_of(rows, labels, ids, **settings):
    metrics = RetrievalMetrics((1,), **settings)
    metrics.update(rows, labels, ids)
    return metrics


def errors(this, world):
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
        "settings": metrics_of(rows, of_rows, shared, query_expansion=QueryExpansion(k=4 + this)),
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
    (found, _), *others = results = run_processes(errors, 3)
    assert all(of_other == found for of_other, _ in others)
    named = {
        "no ids": "`ids`",
        "two labels": "id 4",
        "two images": "ids (4)",
        "not finite": "rank 1",
        "dimension": "dim=5",
        "settings": "QueryExpansion(alpha=2.0, k=6)",
    }
    for case, part in named.items():
        assert part in found[case]
    x, labels = points()
    expected = metrics_of(x[:100], labels[:100], torch.arange(100)).compute()["mAP"].item()
    assert [mean for _, mean in results] == [expected] * 3
