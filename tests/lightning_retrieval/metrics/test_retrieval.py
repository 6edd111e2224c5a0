"""Retrieval metrics against golden numbers, scikit-learn, torchmetrics, pytorch-metric-learning and plain loops."""

import copy
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics.functional import retrieval
from tqdm import tqdm

from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.ranking import ranks

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["cases"]
GOLDEN = {case["id"]: case for case in GOLDEN if case["loss"] == "metrics"}
# Golden cases and numbers that are left out, since RetrievalMetrics does not give them:
# - metrics.hap.*: in test_metrics_levels.py, with the graded NDCG;
# - metrics.torchmetrics_nonpositive_scores: its scores come without embeddings; only its right AP is compared (with the
#   ranks, below), not the fault of torchmetrics that it documents;
# - ndcg_graded_linear: our gain is 2^level - 1; precision_at_1 is recall_at_1;
# - mean_over_all_queries_lone_as_zero: queries without a positive are dropped here, never counted as 0.
NAMES = {
    "average_precision": "mAP",
    "map_at_r": "mAP@R",
    "r_precision": "R-Precision",
    "recall_at_1": "R@1",
    "recall_at_2": "R@2",
    "recall_at_4": "R@4",
    "recall_at_8": "R@8",
    "precision_at_1": "R@1",
    "ndcg": "NDCG",
}
KS = (1, 2, 4, 8)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gives back."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def compute(embeddings, labels, ks=KS, **kwargs):
    metrics = RetrievalMetrics(ks=ks)
    metrics.update(embeddings, labels, **kwargs)
    return {name: value.item() for name, value in metrics.compute().items()}


def by_loops(scores, relevant, candidate, ks=KS):
    """The conventions of the module, one query and one candidate at a time; the mean over the queries."""
    totals, counted = {}, 0
    for s, is_relevant, is_candidate in zip(scores, relevant, candidate):
        listed = [j for j in range(len(s)) if is_candidate[j]]
        positives = [j for j in listed if is_relevant[j]]
        if not positives:
            continue
        counted += 1
        size = len(positives)
        values = dict.fromkeys(["mAP", "mAP@R", "R-Precision"], 0.0)
        for i in positives:
            rank = sum(s[j] >= s[i] for j in listed)
            precision = sum(s[j] >= s[i] for j in positives) / rank
            values["mAP"] += precision / size
            values["mAP@R"] += precision / size if rank <= size else 0.0
            values["R-Precision"] += 1 / size if rank <= size else 0.0
        best = max(s[i] for i in positives)
        first_hit = 1 + sum(s[j] >= best for j in listed if not is_relevant[j])
        above = sorted(sum(s[j] >= s[i] for j in listed if not is_relevant[j]) for i in positives)
        gain = sum(1 / math.log2(1 + i + wrong) for i, wrong in enumerate(above, 1))
        values["NDCG"] = gain / sum(1 / math.log2(1 + i) for i in range(1, size + 1))
        values["MRR"] = 1 / first_hit
        values.update({f"R@{k}": float(first_hit <= k) for k in ks})
        totals = {name: totals.get(name, 0.0) + value for name, value in values.items()}
    return {
        **{name: total / counted for name, total in totals.items()},
        "skipped_queries": float(len(scores) - counted),
    }


def leave_one_out(labels):
    relevant = [[a == b for b in labels] for a in labels]
    return relevant, [[q != r for r in range(len(labels))] for q in range(len(labels))]


def quarters(rows, dtype=torch.float32):
    """Rows of six coordinates, four of them +-1: cosine scores are multiples of 1/4, exactly, with many ties."""
    x = torch.zeros(rows, 6, dtype=dtype)
    for row in x:
        row[torch.randperm(6)[:4]] = torch.randint(0, 2, (4,)).to(dtype) * 2 - 1
    return x


# Golden numbers and a case by hand.


def test_golden_leave_one_out():
    case = GOLDEN["metrics.leave_one_out"]
    embeddings = torch.tensor(case["inputs"]["embeddings"], dtype=torch.float64)
    found = compute(embeddings, torch.tensor(case["inputs"]["labels"]))
    check_golden(case, found)


def test_golden_query_gallery():
    case = GOLDEN["metrics.query_gallery"]
    inputs = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    metrics = RetrievalMetrics(ks=KS)
    for kind in ("query", "gallery"):
        x = torch.tensor(case["inputs"][f"{kind}_embeddings"], dtype=torch.float64)
        flag = torch.ones(len(x), dtype=torch.bool)
        metrics.update(
            x, inputs[f"{kind}_labels"], is_query=flag & (kind == "query"), is_gallery=flag & (kind != "query")
        )
    check_golden(case, {name: value.item() for name, value in metrics.compute().items()})


def check_golden(case, found):
    expected = case["expected"]
    for golden_name, name in NAMES.items():
        assert found[name] == pytest.approx(expected["mean_over_queries_with_positives"][golden_name], abs=1e-12), name
    assert found["skipped_queries"] == expected["num_queries_without_positives"] > 0


def test_golden_scores_below_zero():
    """Scores given as they are: one query at an angle to each of the references, in a plane for each."""
    case = GOLDEN["metrics.torchmetrics_nonpositive_scores"]
    scores = torch.tensor(case["inputs"]["scores"], dtype=torch.float64)
    relevant = torch.tensor(case["inputs"]["targets"]).bool()
    n = len(scores)
    x = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    x[0, 0] = 1.0
    x[1:, 0] = scores
    x[range(1, n + 1), range(1, n + 1)] = (1 - scores**2).sqrt()
    labels = torch.cat([torch.tensor([1]), relevant.long()])
    is_query = torch.arange(n + 1) == 0
    found = compute(x, labels, is_query=is_query, is_gallery=~is_query)
    assert found["mAP"] == pytest.approx(case["expected"]["average_precision"], abs=1e-12)


def test_by_hand():
    # Scores of the query (1, 0): .8 (relevant), .6 and .6 (a relevant and an irrelevant one tied), 0 (relevant).
    x = torch.tensor([[1.0, 0], [4, 3], [3, 4], [3, -4], [0, 1]])
    labels = torch.tensor([1, 1, 1, 0, 1])
    is_query = torch.arange(5) == 0
    found = compute(x, labels, ks=(1, 2), is_query=is_query)
    # Ranks 1, 3 (the tie counts against us), 4 with 1, 2, 3 positives at least as high; R = 3.
    assert found["mAP"] == pytest.approx((1 / 1 + 2 / 3 + 3 / 4) / 3)
    assert found["mAP@R"] == pytest.approx((1 / 1 + 2 / 3) / 3)
    assert found["R-Precision"] == pytest.approx(2 / 3)
    assert (found["MRR"], found["R@1"], found["skipped_queries"]) == (1.0, 1.0, 0.0)
    # Without the .8, the first hit is tied with an irrelevant one: it comes second.
    found = compute(x[[0, 2, 3, 4]], labels[[0, 2, 3, 4]], ks=(1, 2), is_query=is_query[:4])
    assert (found["MRR"], found["R@1"], found["R@2"]) == (0.5, 0.0, 1.0)


# Independent witnesses.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sklearn_with_ties(dtype):
    x, labels = quarters(90, dtype), torch.randint(0, 7, (90,))
    scores = ((x @ x.T) / 4).numpy()
    expected = []
    for q in range(90):
        others = np.arange(90) != q
        expected.append(average_precision_score((labels == labels[q]).numpy()[others], scores[q, others]))
    assert compute(x, labels)["mAP"] == pytest.approx(np.mean(expected), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sklearn_with_duplicates(dtype):
    """Each embedding up to four times, under different labels; only copies tie."""
    distinct = torch.randn(40, 7, dtype=dtype)
    which = torch.randint(0, 40, (110,))
    labels = torch.randint(0, 6, (110,))
    exact = (normalize(distinct.double()) @ normalize(distinct.double()).T)[which][:, which].numpy()
    expected = []
    for q in range(110):
        others = np.arange(110) != q
        expected.append(average_precision_score((labels == labels[q]).numpy()[others], exact[q, others]))
    assert compute(distinct[which], labels)["mAP"] == pytest.approx(np.mean(expected), abs=1e-12)


def test_torchmetrics():
    x, labels = torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 9, (60,))
    scores = normalize(x) @ normalize(x).T + 2  # it takes positives that score <= 0 for negatives
    values = {name: [] for name in ("mAP", "R-Precision", "MRR", "R@1", "R@4")}
    for q in range(60):
        others = torch.arange(60) != q
        s, relevant = scores[q, others], labels[others] == labels[q]
        if relevant.any():
            values["mAP"].append(retrieval.retrieval_average_precision(s, relevant))
            values["R-Precision"].append(retrieval.retrieval_r_precision(s, relevant))
            values["MRR"].append(retrieval.retrieval_reciprocal_rank(s, relevant))
            values["R@1"].append(retrieval.retrieval_hit_rate(s, relevant, top_k=1))
            values["R@4"].append(retrieval.retrieval_hit_rate(s, relevant, top_k=4))
    found = compute(x, labels)
    for name, each in values.items():
        assert found[name] == pytest.approx(torch.stack(each).double().mean().item(), abs=1e-6)  # it works in float32


def test_pytorch_metric_learning():
    x, labels = torch.randn(80, 8), torch.randint(0, 9, (80,))
    calculator = AccuracyCalculator(
        include=("mean_average_precision_at_r", "r_precision", "precision_at_1", "mean_reciprocal_rank"),
        k=79,
        knn_func=CustomKNN(CosineSimilarity()),
    )
    expected = calculator.get_accuracy(x, labels)
    found = compute(x, labels)
    for name, theirs in (
        ("mAP@R", "mean_average_precision_at_r"),
        ("R-Precision", "r_precision"),
        ("R@1", "precision_at_1"),
    ):
        assert found[name] == pytest.approx(expected[theirs], abs=1e-6)
    assert found["MRR"] == pytest.approx(expected["mean_reciprocal_rank"], abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    labels=st.lists(st.integers(-2, 3), min_size=2, max_size=25).filter(lambda labels: len(set(labels)) < len(labels)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loops_leave_one_out(labels, dtype):
    x = quarters(len(labels), dtype)
    expected = by_loops((x @ x.T).tolist(), *leave_one_out(labels))
    assert compute(x, torch.tensor(labels)) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), rows=st.integers(2, 25))
def test_loops_by_role(data, rows):
    """Rows that are queries, in the gallery, both or neither."""
    roles = data.draw(st.lists(st.sampled_from([(1, 0), (0, 1), (1, 1), (0, 0)]), min_size=rows, max_size=rows))
    is_query, is_gallery = torch.tensor([(1, 0), (0, 1), (1, 1), *roles]).bool().unbind(1)
    x, labels = quarters(rows + 3), torch.randint(0, 3, (rows + 3,))
    labels[:3] = 1  # one query at least has a positive
    queries, gallery = is_query.nonzero()[:, 0].tolist(), is_gallery.nonzero()[:, 0].tolist()
    scores = (x @ x.T).tolist()
    expected = by_loops(
        [[scores[q][g] for g in gallery] for q in queries],
        [[bool(labels[q] == labels[g]) for g in gallery] for q in queries],
        [[q != g for g in gallery] for q in queries],
    )
    assert compute(x, labels, is_query=is_query, is_gallery=is_gallery) == pytest.approx(expected, abs=1e-12)


def test_loops_over_several_blocks():
    x, labels = quarters(330), torch.randint(0, 40, (330,))
    expected = by_loops((x @ x.T).tolist(), *leave_one_out(labels.tolist()))
    assert compute(x, labels) == pytest.approx(expected, abs=1e-12)


# Limits.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [3, 128])
@pytest.mark.parametrize("rows", [6, 385, 700])
def test_collapsed_model_scores_what_chance_would(rows, dim, dtype):
    x = torch.randn(1, dim, dtype=dtype).expand(rows, dim)
    labels = torch.arange(rows) % 3
    found = compute(x, labels, ks=(1, rows - 1))
    # All n - 1 candidates tie: every positive has that rank, and all irrelevant ones come before the first hit.
    n, sizes = rows - 1, [int((labels == label).sum()) - 1 for label in labels]
    assert found["mAP"] == pytest.approx(np.mean([size / n for size in sizes]), abs=1e-12)
    assert found["MRR"] == pytest.approx(np.mean([1 / (1 + n - size) for size in sizes]), abs=1e-12)
    assert (found["mAP@R"], found["R-Precision"], found["R@1"], found[f"R@{n}"]) == (0.0, 0.0, 0.0, 1.0)


def test_perfect_model():
    labels = torch.arange(40) % 5
    found = compute(torch.eye(5)[labels] + 0.01 * torch.randn(40, 5), labels)
    assert found == {**dict.fromkeys(found, 1.0), "skipped_queries": 0.0}


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_order_cut_and_names_do_not_matter(data):
    x, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    expected = compute(x, labels)
    order = torch.tensor(data.draw(st.permutations(range(30))))
    names = torch.tensor(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=4, max_size=4, unique=True)))
    scale = 2.0 ** torch.randint(-8, 8, (30, 1))
    metrics = RetrievalMetrics(ks=KS)
    for part in order.split(data.draw(st.integers(1, 30))):
        metrics.update((scale * x)[part], names[labels][part], ids=part)
    found = {name: value.item() for name, value in metrics.compute().items()}
    assert found == pytest.approx(expected, abs=1e-12)


def test_labels_and_ids_that_float64_could_not_tell_apart():
    x = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]])
    found = compute(x, torch.tensor([2**62, 2**62 + 1, 2**62 + 1, -(2**62)]), ids=torch.arange(4) + 2**62)
    assert found["skipped_queries"] == 2.0
    assert found["mAP"] == pytest.approx((1 / 2 + 1 / 3) / 2)  # row 1 has 0 before it, row 2 has 3 and then 1


def test_float64_stays_float64():
    # References whose scores float32 cannot tell apart.
    x = torch.tensor([[1.0, 0.0], [1.0, 1e-6], [1.0, 2e-6]], dtype=torch.float64)
    flags = {"is_query": torch.tensor([True, False, False]), "is_gallery": torch.tensor([False, True, True])}
    labels = torch.tensor([1, 1, 0])
    assert compute(x, labels, **flags)["R@1"] == 1.0
    assert compute(x.float(), labels, **flags)["R@1"] == 0.0  # a tie, so it counts against us
    metrics = RetrievalMetrics()
    metrics.update(x, labels, **flags)
    assert {value.dtype for value in metrics.compute().values()} == {torch.float64}


def test_autocast_does_not_narrow():
    x, labels = torch.randn(50, 8), torch.randint(0, 5, (50,))
    expected = compute(x, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute(x, labels) == expected


# Images, ids, roles.


def test_an_image_that_comes_twice_counts_once():
    x, labels = torch.randn(20, 4), torch.randint(0, 3, (20,))
    expected = compute(x, labels, ids=torch.arange(20))
    again = torch.cat([torch.arange(20), torch.tensor([3, 3, 19, 0])])
    assert compute(x[again], labels[again], ids=again) == expected
    assert compute(x[again], labels[again]) != expected  # without ids they are different images


def test_roles_of_one_image_in_different_rows_are_merged():
    x, labels, ids = torch.randn(20, 4), torch.randint(0, 3, (20,)), torch.arange(20)
    both, none = torch.ones(20, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x, labels, ids, is_query=both, is_gallery=none)
    metrics.update(x, labels, ids, is_query=none, is_gallery=both)
    merged = {name: value.item() for name, value in metrics.compute().items()}
    assert merged == compute(x, labels, ids=ids)  # no query meets its own copy


def test_skipped_queries_are_counted():
    found = compute(torch.randn(7, 3), torch.tensor([1, 1, 2, 3, 4, 4, 5]))
    assert found["skipped_queries"] == 3.0


@pytest.mark.parametrize(
    ("kwargs", "queries"),
    [
        ({}, 4),
        ({"is_query": torch.zeros(4, dtype=torch.bool)}, 0),
        ({"is_gallery": torch.zeros(4, dtype=torch.bool)}, 4),
    ],
)
def test_no_query_with_a_positive(kwargs, queries):
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(torch.randn(4, 3), torch.arange(4), **kwargs)
    match = f"RetrievalMetrics: none of the {queries} queries has a relevant candidate, so the metrics are NaN"
    with pytest.warns(UserWarning, match=match):
        found = metrics.compute()
    assert found.pop("skipped_queries").item() == queries
    assert all(value.isnan() for value in found.values())


def test_nothing_is_as_large_as_the_score_matrix(monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_BLOCK_SCORES", 1)
    x, labels = torch.randn(1500, 4), torch.arange(1500) % 300
    metrics = RetrievalMetrics()
    metrics.update(x, labels)
    with Largest() as largest:
        metrics.compute()
    assert largest.elements <= 64 * 1536  # 64 queries, the gallery padded to whole multiples of 384


def test_map_at_k():
    """Divided by min(k, R), against scikit-learn where k is the whole list, and a loop elsewhere."""
    x, labels = torch.randn(60, 5, dtype=torch.float64), torch.randint(0, 6, (60,))
    metrics = RetrievalMetrics(ks=(1,), map_ks=(1, 7, 59))
    metrics.update(x, labels)
    found = metrics.compute()
    unit = normalize(x)
    scores = (unit @ unit.T).fill_diagonal_(-2)
    expected = {1: [], 7: [], 59: []}
    for query in range(60):
        hits = (labels[scores[query].argsort(descending=True)] == labels[query])[:-1].tolist()
        for k, values in expected.items():
            precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(k) if hits[i]]
            values.append(sum(precisions) / min(k, sum(hits)))
    for k, values in expected.items():
        assert found[f"mAP@{k}"].item() == pytest.approx(sum(values) / 60, abs=1e-12)
    assert found["mAP@59"] == pytest.approx(found["mAP"].item(), abs=1e-12)
    assert found["mAP@1"] == found["R@1"]


def test_per_query():
    """One row for each query in the order of the ids, whatever order they came in."""
    x, labels = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 20, (40,))
    labels[3] = 77  # alone
    ids = torch.randperm(40) * 3
    metrics = RetrievalMetrics(ks=(1, 4), map_ks=(2,))
    metrics.update(x[:11], labels[:11], ids[:11], is_query=torch.arange(11) > 1)
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


def test_the_images_of_an_instance_count_as_their_mean():
    x, labels = torch.randn(50, 5), torch.arange(50) % 7
    instances = torch.where(torch.arange(50) < 21, labels, 100 + torch.arange(50))  # three images of each, then one
    ids = torch.randperm(50)
    metrics = RetrievalMetrics(ks=(1, 3))
    for part in torch.arange(50).split(13):
        metrics.update(x[part], labels[part], ids[part], instances=instances[part])
    unit = normalize(x)
    means = torch.stack([unit[instances == i].mean(0) for i in instances.unique()])
    of_mean = [int(labels[instances == i][0]) for i in instances.unique()]
    expected = compute(means, torch.tensor(of_mean), ks=(1, 3))
    assert {name: value.item() for name, value in metrics.compute().items()} == pytest.approx(expected, abs=1e-12)
    least = [int(ids[instances == i].min()) for i in instances.unique()]
    assert metrics.per_query()["ids"].tolist() == sorted(least)


def test_post_processing_comes_before_ranking():
    """The gallery first, then the queries, which see it and their own place in it."""
    seen = []

    def halve(gallery):
        seen.append(gallery.clone())
        return gallery.flip(0)

    def expand(queries, gallery, own):
        seen.append((queries, gallery, own))
        return queries.roll(1, 1)

    x, labels = normalize(torch.randn(12, 4)), torch.arange(12) % 3
    is_query = torch.arange(12) < 9
    metrics = RetrievalMetrics((1,), query_expansion=expand, database_augmentation=halve)
    metrics.update(x, labels, is_query=is_query, is_gallery=torch.arange(12) > 2)
    found = {name: value.item() for name, value in metrics.compute().items()}
    gallery, (queries, augmented, own) = seen
    assert torch.equal(augmented, gallery.flip(0))
    assert len(gallery) == 9
    assert len(queries) == 9
    assert (own >= 0).sum() == 6
    torch.testing.assert_close(queries[own >= 0], gallery[own[own >= 0]])
    order = torch.arange(12)[3:][labels[3:].argsort(stable=True)]
    expected = RetrievalMetrics((1,))
    expected.update(gallery.flip(0), labels[order], order + 100, is_query=torch.zeros(9, dtype=torch.bool))
    asked = torch.arange(9)[labels[:9].argsort(stable=True)]
    expected.update(queries.roll(1, 1), labels[asked], asked, is_gallery=torch.zeros(9, dtype=torch.bool))
    if (own < 0).all():  # else a query would find itself
        assert found == {name: value.item() for name, value in expected.compute().items()}


def test_embeddings_on_the_cpu_and_a_gallery_in_pieces(monkeypatch):
    x, labels = torch.randn(900, 6), torch.randint(0, 30, (900,))
    whole = compute(x, labels)
    monkeypatch.setattr(ranks, "_GALLERY_CHUNK", 384)
    monkeypatch.setattr(ranks, "_rows_of_a_chunk", lambda gallery, device: ranks._GALLERY_CHUNK)
    metrics = RetrievalMetrics(ks=KS, embeddings_on_cpu=True)
    metrics.update(x, labels)
    assert {name: value.item() for name, value in metrics.compute().items()} == whole


def test_how_many_are_ranked():
    metrics = RetrievalMetrics(ks=(1, 3))
    metrics.update(X, Y)
    metrics.compute()
    assert metrics.ranked_images == 3  # the others
    metrics.update(X, Y, is_query=B, is_gallery=~B)
    metrics.compute()
    assert metrics.ranked_images == 6


# The life of a metric.


def test_reset_update_and_compute_again():
    x, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x[:10], labels[:10], ids=torch.arange(10))
    first = metrics.compute()
    metrics.update(x[10:], labels[10:], ids=torch.arange(10, 30))
    second = metrics.compute()
    assert first != second
    metrics.reset()
    metrics.update(x[:10], labels[:10])  # without ids this time
    assert {k: v.item() for k, v in metrics.compute().items()} == {k: v.item() for k, v in first.items()}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda metrics: pickle.loads(pickle.dumps(metrics))])
def test_copies_go_on_by_themselves(clone):
    x, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x[:10], labels[:10])
    other = clone(metrics)
    other.update(x[10:], labels[10:])
    found = {name: value.item() for name, value in other.compute().items()}
    assert found == compute(x, labels)
    assert metrics.compute()["mAP"].item() == compute(x[:10], labels[:10])["mAP"]


@pytest.mark.parametrize("with_ids", [False, True])
def test_forward_gives_the_batch_and_keeps_it(with_ids):
    x, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    metrics = RetrievalMetrics(ks=KS)
    for part in torch.arange(30).split(11):
        found = metrics(x[part], labels[part], part if with_ids else None)
        assert found["mAP"].item() == compute(x[part], labels[part])["mAP"]
    assert {name: value.item() for name, value in metrics.compute().items()} == compute(x, labels)


def test_embeddings_lose_their_graph():
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(torch.randn(4, 3, requires_grad=True), torch.tensor([0, 0, 1, 1]))
    assert not metrics.embeddings[0].requires_grad
    assert not metrics.compute()["mAP"].requires_grad


def test_an_empty_batch_changes_nothing():
    x, labels = torch.randn(10, 4), torch.arange(10) % 2
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x[:0], labels[:0])
    metrics.update(x, labels, ids=torch.arange(10))
    metrics.update(x[:0], labels[:0])
    assert {name: value.item() for name, value in metrics.compute().items()} == compute(x, labels)


# What is refused.

X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
B = Y.bool()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (TypeError, "`embeddings` must be a tensor, got list", ([[1.0]], Y)),
        (TypeError, "`embeddings` must be floating point, got torch.int64", (X.long(), Y)),
        (ValueError, r"`embeddings` must have shape \(rows, D\) with D > 0, got \(4,\)", (X[:, 0], Y)),
        (ValueError, r"`embeddings` must have shape .* got \(4, 0\)", (X[:, :0], Y)),
        (ValueError, r"`embeddings` must hold finite .* in 4 of 4 rows \(0, 1, 2, 3\)", (X * math.nan, Y)),
        (ValueError, r"`embeddings` must hold finite .* in 4 of 4 rows", (X * math.inf, Y)),
        (TypeError, "`labels` must be integers, got torch.float32", (X, Y.float())),
        (ValueError, r"`labels` must have shape \(4,\), one for each row of `embeddings`, got \(3,\)", (X, Y[:3])),
        (TypeError, "`ids` must be integers, got torch.float32", (X, Y, Y.float())),
        (ValueError, r"`ids` must have shape \(4,\), .* got \(2,\)", (X, Y, Y[:2])),
        (TypeError, "`is_query` must be a tensor, got list", (X, Y, None, B.tolist())),
        (ValueError, r"`is_query` must be bool of shape \(4,\), got torch.int64 of shape \(4,\)", (X, Y, None, Y)),
        (ValueError, r"`is_gallery` must be bool of shape \(4,\), got torch.bool of shape \(3,\)",
         (X, Y, None, None, B[:3])),
    ],
)  # fmt: skip
def test_bad_input(error, match, args):
    metrics = RetrievalMetrics()
    with pytest.raises(error, match=f"^RetrievalMetrics: {match}"):
        metrics.update(*args)
    assert metrics.embeddings == metrics.labels == metrics.ids == metrics.roles == []


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "ks"),
    [
        (ValueError, r"`ks` must hold at least one k, such as \(1, 10\), got \(\)", ()),
        (ValueError, "`ks` must be an integer >= 1, got 0", (1, 0)),
        (TypeError, r"`ks` must be an integer >= 1, got 1.5 \(float\)", (1.5,)),
        (ValueError, r"`ks` must hold at least one k, such as \(1, 10\), got None", None),
    ],
)
def test_bad_ks(error, match, ks):
    with pytest.raises(error, match=f"^RetrievalMetrics: {match}"):
        RetrievalMetrics(ks=ks)


@pytest.mark.refusal
def test_embeddings_that_are_not_finite_are_named_by_their_ids():
    x = X.clone()
    x[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"`embeddings` must hold finite .* in 1 of 4 rows \(ids 30\)"):
        RetrievalMetrics().update(x, Y, torch.tensor([10, 20, 30, 40]))


@pytest.mark.refusal
def test_one_instance_with_two_labels():
    metrics = RetrievalMetrics()
    metrics.update(X, Y, torch.arange(4), instances=torch.tensor([1, 2, 2, 3]))
    with pytest.raises(ValueError, match="`instances` must have one label each, got instance 2 with two different"):
        metrics.compute()


@pytest.mark.refusal
@pytest.mark.parametrize("first", [None, torch.arange(4)])
def test_ids_with_some_updates_only(first):
    match = "RetrievalMetrics: `ids` must be given with every update or with none, got both"
    second = torch.arange(4, 8) if first is None else None
    metrics = RetrievalMetrics()
    metrics.update(X, Y, first)
    with pytest.raises(ValueError, match=match):
        metrics.update(X, Y, second)
    metrics.reset()
    metrics(X, Y, first)
    metrics(X, Y, second)  # which forgets the first while it computes the second
    with pytest.raises(ValueError, match=match):
        metrics.compute()


@pytest.mark.refusal
def test_one_id_with_two_labels():
    metrics = RetrievalMetrics()
    metrics.update(X, Y, torch.tensor([5, 6, 7, 6]))
    with pytest.raises(
        ValueError, match="RetrievalMetrics: `ids` must have one label each, got id 6 with two different"
    ):
        metrics.compute()


@pytest.mark.refusal
def test_updates_of_different_dimension():
    metrics = RetrievalMetrics()
    metrics.update(X, Y)
    match = r"RetrievalMetrics: `embeddings` must have shape \(rows, 3\) as in earlier updates, got \(4, 2\)"
    with pytest.raises(ValueError, match=match):
        metrics.update(X[:, :2], Y)


@pytest.mark.refusal
def test_updates_of_different_type():
    metrics = RetrievalMetrics()
    metrics.update(X, Y)
    with pytest.raises(ValueError, match=r"`embeddings` must have the dtype of earlier updates, torch.float32, got"):
        metrics.update(X.double(), Y)


@pytest.mark.refusal
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric RetrievalMetrics was called before")
def test_nothing_to_compute():
    with pytest.raises(ValueError, match="RetrievalMetrics: there is nothing to compute; call update"):
        RetrievalMetrics().compute()


def test_ranking_shows_how_far_it_is(monkeypatch, capsys):
    class ForATerminal(tqdm):
        def __init__(self, **settings):
            assert settings["disable"] is None
            super().__init__(**{**settings, "disable": False, "delay": 0, "mininterval": 0, "miniters": 1})

    monkeypatch.setattr("lightning_retrieval.metrics.retrieval.tqdm", ForATerminal)
    metrics = RetrievalMetrics()
    metrics.update(torch.randn(600, 4), torch.arange(600) // 3)
    metrics.compute()
    shown = capsys.readouterr().err
    assert [f"| {done}/600 [" in shown for done in (256, 512, 600)] == [True] * 3
