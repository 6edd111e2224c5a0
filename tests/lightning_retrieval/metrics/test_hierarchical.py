"""Metrics of labels with several levels, against golden numbers and plain loops."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from lightning_retrieval.losses import HAPLoss
from lightning_retrieval.metrics import RetrievalMetrics
from tests.lightning_retrieval.metrics.helpers import quarters

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["cases"]
GOLDEN = {case["id"]: case for case in GOLDEN if case["loss"] == "metrics"}


def of_levels(case):
    inputs = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    embeddings = torch.tensor(case["inputs"]["embeddings"], dtype=torch.float64)
    return embeddings, torch.stack([inputs["labels"], inputs["coarse_of_class"][inputs["labels"]]], 1)


def by_loops(scores, levels, candidate, depth, alpha):
    """{name: mean}. Of images that tie, those that share the fewest levels come first."""
    results = {"H-AP": [], "ASI": [], "NDCG-levels": []}
    for s, level, listed in zip(scores, levels, candidate):
        listed = [j for j in range(len(s)) if listed[j]]
        related = [j for j in listed if level[j] > 0]
        if not related:
            continue
        exactly = {v: sum(level[j] == v for j in listed) for v in range(1, depth + 1)}
        rel = {j: (level[j] / depth) ** alpha / exactly[level[j]] for j in related}
        total = 0.0
        for i in related:
            rank = sum(s[j] >= s[i] for j in listed)
            total += sum(min(rel[i], rel[j]) for j in related if s[j] >= s[i]) / rank
        results["H-AP"].append(total / sum(rel.values()))
        ranked = sorted(listed, key=lambda j: (-s[j], level[j]))
        ideal = sorted((level[j] for j in listed), reverse=True)
        fractions = []
        for n in range(1, len(related) + 1):
            found = [level[j] for j in ranked[:n]]
            fractions.append(sum(min(found.count(v), ideal[:n].count(v)) for v in range(1, depth + 1)) / n)
        results["ASI"].append(sum(fractions) / len(related))
        gain = sum((2 ** level[j] - 1) / math.log2(1 + position) for position, j in enumerate(ranked, 1))
        results["NDCG-levels"].append(gain / sum((2**v - 1) / math.log2(1 + n) for n, v in enumerate(ideal, 1)))
    return {name: sum(values) / len(values) for name, values in results.items()}


def random_levels(rows, depth):
    """A tree: each label within one of the next level."""
    labels = [torch.randint(0, 3 * 2**depth, (rows,))]
    for _ in range(depth - 1):
        labels.append(labels[-1] // 2)
    return torch.stack(labels, 1)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_metrics_of_one_level_are_those_of_its_labels_alone(depth):
    """With ties, and queries that have positives at coarse levels only. INP sees the hardest positive of the finest."""
    levels = random_levels(70, depth)
    x = quarters(70)
    metrics = RetrievalMetrics(ks=(1,), extra_metrics=("mINP", "NDCG@5"))
    metrics.update(x, levels)
    for level in range(depth):
        alone = RetrievalMetrics(ks=(1,), extra_metrics=("mINP", "NDCG@5"))
        alone.update(x, levels[:, level])
        name = f"AP/level{level}" if level else "AP"
        expected = alone.per_query()["AP"]
        torch.testing.assert_close(metrics.per_query()[name], expected, rtol=0, atol=1e-12, equal_nan=True)
        assert metrics.compute()[f"m{name}"].item() == pytest.approx(alone.compute()["mAP"].item(), abs=1e-12)
        if level == 0:
            for extra in ("mINP", "NDCG@5"):
                assert metrics.compute()[extra].item() == pytest.approx(alone.compute()[extra].item(), abs=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_golden_hap(alpha):
    case = GOLDEN[f"metrics.hap.leave_one_out.alpha{alpha}"]
    embeddings, labels = of_levels(case)
    metrics = RetrievalMetrics(ks=(1,), alpha=alpha)
    metrics.update(embeddings, labels)
    assert metrics.compute()["H-AP"].item() == pytest.approx(case["expected"]["hap"], abs=1e-12)
    found = metrics.per_query()["H-AP"].tolist()
    assert found == pytest.approx([math.nan if v is None else v for v in case["expected"]["per_query"]], nan_ok=True)


def test_golden_of_the_finest_level_and_graded_ndcg():
    case = GOLDEN["metrics.leave_one_out"]
    embeddings, labels = of_levels(case)
    metrics = RetrievalMetrics(ks=(1, 2, 4, 8))
    metrics.update(embeddings, labels)
    found = metrics.compute()
    flat = RetrievalMetrics(ks=(1, 2, 4, 8))
    flat.update(embeddings, labels[:, 0])
    for name, value in flat.compute().items():  # levels change nothing of what looks at classes
        assert found[name].item() == pytest.approx(value.item(), abs=1e-12), name
    of_query = [q["ndcg_graded_exp"] for q in case["expected"]["per_query"] if q is not None]
    ours = metrics.per_query()
    counted = ours["NDCG-levels"][~ours["AP"].isnan()]
    assert counted.tolist() == pytest.approx(of_query, abs=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ties", "no ties", "cameras"])
def test_loops(kind, depth):
    """Images of the query's finest label and camera are not in its list."""
    x = quarters(60) if kind != "no ties" else torch.randn(60, 5, dtype=torch.float64)
    labels = random_levels(60, depth)
    labels[7] = 10_000  # shares no label with any other row
    scores = (x @ x.T).tolist() if kind != "no ties" else (normalize(x) @ normalize(x).T).tolist()
    levels = (labels[:, None] == labels).sum(2).tolist()
    candidate = ~torch.eye(60, dtype=torch.bool)
    given = {}
    if kind == "cameras":
        cameras = given["cameras"] = torch.randint(0, 2, (60,))
        candidate &= (labels[:, :1] != labels[:, 0]) | (cameras[:, None] != cameras)
    metrics = RetrievalMetrics(ks=(1,), alpha=1.5)
    metrics.update(x, labels, **given)
    found = metrics.compute()
    expected = by_loops(scores, levels, candidate.tolist(), depth, 1.5)
    if depth == 1:
        assert not set(expected) & set(found)
        assert found["NDCG"].item() == pytest.approx(expected["NDCG-levels"], abs=1e-12)
        assert found["mAP"].item() == pytest.approx(expected["H-AP"], abs=1e-12)
        return
    assert {name: found[name].item() for name in expected} == pytest.approx(expected, abs=1e-12)


def test_hap_loss_converges_to_one_minus_hap():
    """1 - HAPLoss with a small tau, where no scores are near each other."""
    x, labels = torch.randn(30, 5, dtype=torch.float64), random_levels(30, 3)
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(x, labels)
    loss = HAPLoss(tau=1e-7, rho=1e-9, delta=1e-6, offset=1.0, start=0.0)(x, labels)
    assert metrics.compute()["H-AP"].item() == pytest.approx(1 - loss.item(), abs=1e-4)


@pytest.mark.parametrize("alpha", [1e-9, 1.0, 5000.0])
def test_hap_of_queries_that_share_only_the_coarse_level_is_ap_of_that_level_for_every_alpha(alpha):
    """(1 / 2)^5000 is 0 in float64, though the images of the coarse level are the best that these queries have."""
    x, coarse = torch.randn(30, 5), torch.arange(30) % 4
    metrics, of_coarse = RetrievalMetrics(ks=(1,), alpha=alpha), RetrievalMetrics(ks=(1,))
    metrics.update(x, torch.stack([torch.arange(30), coarse], 1))
    of_coarse.update(x, coarse)
    with pytest.warns(UserWarning, match="RetrievalMetrics"):
        found = metrics.compute()
    assert found["H-AP"].item() == pytest.approx(of_coarse.compute()["mAP"].item(), abs=1e-12)
