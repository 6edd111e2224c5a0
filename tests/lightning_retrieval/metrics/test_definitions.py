"""Metrics against golden numbers, torchmetrics, pytorch-metric-learning, the code of Market-1501 and plain loops."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch.nn.functional import normalize
from torchmetrics.functional import retrieval

from lightning_retrieval.metrics import RetrievalMetrics
from tests.lightning_retrieval.metrics.helpers import compute, numbers, quarters

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["cases"]
GOLDEN = {case["id"]: case for case in GOLDEN if case["loss"] == "metrics"}
# Golden cases and numbers that are not compared here, because RetrievalMetrics does not compute them:
# - metrics.hap.*: compared in test_hierarchical.py, like the graded NDCG;
# - metrics.torchmetrics_nonpositive_scores: it has scores without embeddings, and documents an error of torchmetrics;
#   only its correct AP is compared, in test_golden_scores_below_zero;
# - ndcg_graded_linear: our gain is 2^level - 1; precision_at_1 is recall_at_1;
# - mean_over_all_queries_lone_as_zero: queries without a positive are skipped here, never counted as 0.
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


def check_golden(case, found):
    expected = case["expected"]
    for golden_name, name in NAMES.items():
        assert found[name] == pytest.approx(expected["mean_over_queries_with_positives"][golden_name], abs=1e-12), name
    assert found["skipped_queries"] == expected["num_queries_without_positives"] > 0


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
        metrics.update(x, inputs[f"{kind}_labels"], roles=torch.full((len(x),), 1 if kind == "query" else 2))
    check_golden(case, numbers(metrics.compute()))


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
    found = compute(x, labels, roles=torch.where(is_query, 1, 2))
    assert found["mAP"] == pytest.approx(case["expected"]["average_precision"], abs=1e-12)


def test_by_hand():
    # Scores of the query (1, 0): .8 (relevant), .6 and .6 (a relevant and an irrelevant one tied), 0 (relevant).
    x = torch.tensor([[1.0, 0], [4, 3], [3, 4], [3, -4], [0, 1]])
    labels = torch.tensor([1, 1, 1, 0, 1])
    is_query = torch.arange(5) == 0
    found = compute(x, labels, ks=(1, 2), roles=2 + is_query)
    # Ranks 1, 3 (the tie counts against us), 4 with 1, 2, 3 positives at least as high; R = 3.
    assert found["mAP"] == pytest.approx((1 / 1 + 2 / 3 + 3 / 4) / 3)
    assert found["mAP@R"] == pytest.approx((1 / 1 + 2 / 3) / 3)
    assert found["R-Precision"] == pytest.approx(2 / 3)
    assert (found["MRR"], found["R@1"], found["skipped_queries"]) == (1.0, 1.0, 0.0)
    # Without the .8, the first hit is tied with an irrelevant one: it comes second.
    found = compute(x[[0, 2, 3, 4]], labels[[0, 2, 3, 4]], ks=(1, 2), roles=2 + is_query[:4])
    assert (found["MRR"], found["R@1"], found["R@2"]) == (0.5, 0.0, 1.0)


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


@settings(deadline=None, max_examples=12)
@given(
    roles=st.lists(st.integers(0, 3), max_size=25),
    cameras=st.none() | st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3, unique=True),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loops(roles, cameras, dtype):
    """Rows that are queries, in the gallery, both or neither; images of the query's label and camera are not listed."""
    roles = torch.tensor([1, 2, 3, *roles])
    size = len(roles)
    x, labels = quarters(size, dtype), torch.randint(-1, 2, (size,))
    labels[:3] = 1  # one query at least has a positive
    given = {"roles": roles}
    same_camera = torch.zeros(size, size, dtype=torch.bool)
    if cameras is not None:
        given["cameras"] = torch.tensor(cameras)[[0, 1, 1, *torch.randint(0, 3, (size - 3,)).tolist()]]
        same_camera = given["cameras"][:, None] == given["cameras"]
    same_label = labels[:, None] == labels
    listed = ~(same_label & same_camera) & ~torch.eye(size, dtype=torch.bool)
    is_query, is_image = roles % 2 > 0, roles // 2 > 0
    expected = by_loops(*(part[is_query][:, is_image].tolist() for part in (x @ x.T, same_label, listed)))
    assert compute(x, labels, **given) == pytest.approx(expected, abs=1e-12)


def market_1501(unit, labels, cameras, queries, gallery, k):
    """The protocol of Market-1501 as re-identification code computes it, one sorted list at a time."""
    first, aps, skipped = [], [], 0
    for query in queries:
        order = gallery[np.argsort(-(unit[gallery] @ unit[query]))]
        removed = (labels[order] == labels[query]) & (cameras[order] == cameras[query])
        hits = (labels[order] == labels[query])[~removed]
        if not hits.any():
            skipped += 1
            continue
        first.append(hits[:k].any())
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        aps.append(precision[hits].mean())
    return {"mAP": np.mean(aps), f"R@{k}": np.mean(first), "skipped_queries": skipped}


def test_market_1501():
    random = np.random.default_rng(5)
    labels, cameras = random.integers(0, 40, 300), random.integers(0, 4, 300)
    labels[40:60], cameras[40:60] = -1, 9  # distractors, which are no queries
    labels[7], cameras[labels == labels[7]] = 5, 2  # one person under one camera only
    x = random.normal(size=(300, 6))
    queries, gallery = np.arange(40), np.arange(40, 300)
    expected = market_1501(x / np.linalg.norm(x, axis=1, keepdims=True), labels, cameras, queries, gallery, 4)
    is_query = torch.arange(300) < 40
    given = {"roles": torch.where(is_query, 1, 2), "cameras": torch.tensor(cameras)}
    found = compute(torch.tensor(x), torch.tensor(labels), ks=(4,), **given)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert expected["skipped_queries"] > 0
    assert abs(compute(torch.tensor(x), torch.tensor(labels), ks=(4,), roles=2 + is_query)["mAP"] - found["mAP"]) > 1e-3


EXTRA = ("mINP", *(f"{kind}@{k}" for kind in ("precision", "recall", "MRR", "NDCG") for k in (1, 3, 10)))


def extra_by_loops(scores, relevant, candidate, divisor):
    """The extra metrics and mAP@3 from a list in which irrelevant candidates come first among those that tie."""
    values = {name: [] for name in (*EXTRA, "mAP@3")}
    for s, is_relevant, is_candidate in zip(scores, relevant, candidate):
        listed = [j for j in range(len(s)) if is_candidate[j]]
        hits = [is_relevant[j] for j in sorted(listed, key=lambda j, s=s, right=is_relevant: (-s[j], right[j]))]
        positives = sum(hits)
        if not positives:
            continue
        last = max(place for place, hit in enumerate(hits, 1) if hit)
        values["mINP"].append(positives / last)
        for k in (1, 3, 10):
            found = sum(hits[:k])
            values[f"precision@{k}"].append(found / k)
            values[f"recall@{k}"].append(found / positives)
            values[f"MRR@{k}"].append(1 / (1 + hits.index(True)) if found else 0.0)
            gain = sum(1 / math.log2(1 + place) for place, hit in enumerate(hits[:k], 1) if hit)
            values[f"NDCG@{k}"].append(gain / sum(1 / math.log2(1 + n) for n in range(1, min(k, positives) + 1)))
        total, within = 0.0, 0
        for i in listed:
            rank = sum(s[j] >= s[i] for j in listed)
            if is_relevant[i] and rank <= 3:
                total += sum(s[j] >= s[i] for j in listed if is_relevant[j]) / rank
                within += 1
        values["mAP@3"].append(
            total / {"min(k, R)": min(3, positives), "hits": max(within, 1), "R": positives}[divisor]
        )
    return {name: sum(each) / len(each) for name, each in values.items()}


@settings(deadline=None, max_examples=8)
@given(
    labels=st.lists(st.integers(-2, 3), min_size=2, max_size=25).filter(lambda labels: len(set(labels)) < len(labels)),
    divisor=st.sampled_from(["min(k, R)", "hits", "R"]),
)
def test_loops_of_extra_metrics_with_ties(labels, divisor):
    x = quarters(len(labels))
    expected = extra_by_loops((x @ x.T).tolist(), *leave_one_out(labels), divisor)
    metrics = RetrievalMetrics(ks=(1,), map_ks=(3,), map_divisor=divisor, extra_metrics=EXTRA)
    metrics.update(x, torch.tensor(labels))
    found = metrics.compute()
    assert {name: found[name].item() for name in expected} == pytest.approx(expected, abs=1e-12)
    assert found["precision@1"] == found["R@1"] == found["MRR@1"]


@pytest.mark.parametrize(
    ("rows", "dim", "dtype"),
    [
        (6, 3, torch.float64),
        (385, 37, torch.float32),
        (385, 128, torch.bfloat16),
    ],
)
def test_collapsed_model_scores_what_chance_would(rows, dim, dtype):
    """Wherever a candidate stands: the last columns may be computed by another kernel of the product."""
    x = torch.randn(1, dim, dtype=dtype).expand(rows, dim)
    labels = torch.arange(rows) % 3
    found = compute(x, labels, ks=(1, rows - 1))
    # All n - 1 candidates tie: every positive has that rank, and all irrelevant ones come before the first hit.
    n, sizes = rows - 1, [int((labels == label).sum()) - 1 for label in labels]
    assert found["mAP"] == pytest.approx(np.mean([size / n for size in sizes]), abs=1e-12)
    assert found["MRR"] == pytest.approx(np.mean([1 / (1 + n - size) for size in sizes]), abs=1e-12)
    assert (found["mAP@R"], found["R-Precision"], found["R@1"], found[f"R@{n}"]) == (0.0, 0.0, 0.0, 1.0)


def test_labels_and_ids_that_float64_could_not_tell_apart():
    x = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]])
    found = compute(x, torch.tensor([2**62, 2**62 + 1, 2**62 + 1, -(2**62)]), ids=torch.arange(4) + 2**62)
    assert found["skipped_queries"] == 2.0
    assert found["mAP"] == pytest.approx((1 / 2 + 1 / 3) / 2)  # row 1 has 0 before it, row 2 has 3 and then 1


def test_float64_stays_float64():
    # References whose scores float32 cannot tell apart.
    x = torch.tensor([[1.0, 0.0], [1.0, 1e-6], [1.0, 2e-6]], dtype=torch.float64)
    roles, labels = torch.tensor([1, 2, 2]), torch.tensor([1, 1, 0])
    assert compute(x, labels, roles=roles)["R@1"] == 1.0
    assert compute(x.float(), labels, roles=roles)["R@1"] == 0.0  # a tie, so it counts against us
    metrics = RetrievalMetrics()
    metrics.update(x, labels, roles=roles)
    assert {value.dtype for value in metrics.compute().values()} == {torch.float64}


def test_autocast_does_not_narrow():
    x, labels = torch.randn(50, 8), torch.randint(0, 5, (50,))
    expected = compute(x, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute(x, labels) == expected
