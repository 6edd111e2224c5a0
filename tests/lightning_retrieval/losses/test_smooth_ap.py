"""Smooth-AP against golden numbers, its formula in loops, a case worked by hand, and its limit for small tau."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize

from lightning_retrieval.losses import SmoothAPLoss

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["cases"]
CASES = [case for case in GOLDEN if case["loss"] == "smooth_ap" and case["match"] != "do_not_reproduce"]
FAULTS = [case for case in GOLDEN if case["loss"] == "smooth_ap" and case["match"] == "do_not_reproduce"]
LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=14).filter(lambda labels: len(set(labels)) < len(labels))


def sigma(x):
    """Does not overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def average_precisions(scores, relevant, candidate, tau):
    """Equations 5-7 as loops over Python floats; None for a query without a positive."""
    values = []
    for s, is_relevant, is_candidate in zip(scores, relevant, candidate):
        listed = [j for j in range(len(s)) if is_candidate[j]]
        positives = [j for j in listed if is_relevant[j]]
        precisions = []
        for i in positives:
            rank = 1 + sum(sigma((s[j] - s[i]) / tau) for j in listed if j != i)
            rank_among_positives = 1 + sum(sigma((s[j] - s[i]) / tau) for j in positives if j != i)
            precisions.append(rank_among_positives / rank)
        values.append(sum(precisions) / len(precisions) if precisions else None)
    return values


def lists_of(embeddings, labels):
    """Scores, relevance and candidates of a batch, without the query itself, as Python lists."""
    rows = [[x / math.hypot(*row) for x in row] for row in embeddings.tolist()]
    scores = [[sum(a * b for a, b in zip(q, r)) for r in rows] for q in rows]
    relevant = [[a == b for b in labels] for a in labels]
    candidate = [[q != r for r in range(len(rows))] for q in range(len(rows))]
    return scores, relevant, candidate


def mean_loss(values):
    values = [1 - value for value in values if value is not None]
    return sum(values) / len(values)


def batch(sizes, dim=6, dtype=torch.float64, seed=0):
    """Random embeddings of classes of these sizes, in random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    order = torch.randperm(len(labels), generator=generator)
    return torch.randn(len(labels), dim, dtype=dtype, generator=generator), labels[order]


def tangent(gradient, x):
    """The part tangential to the sphere, since the golden gradients are those of a loss that does not normalise."""
    return gradient - (gradient * x).sum(1, keepdim=True) * x


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case):
    x = torch.tensor(case["inputs"]["embeddings"], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor(case["inputs"]["labels"])
    official = case["convention"] in ("official_code", "pml_2.9.0") and "ref_embeddings" not in case["inputs"]
    loss = SmoothAPLoss(tau=case["params"]["tau"], include_self=official)
    r = None
    if "ref_embeddings" in case["inputs"]:
        r = torch.tensor(case["inputs"]["ref_embeddings"], dtype=torch.float64, requires_grad=True)
        ref_labels = torch.tensor(case["inputs"]["ref_labels"])
    if r is None:
        value = loss(x, labels)
    elif case["id"] == "smoothap_batch_plus_ref.loo":  # each query's own copy is removed by its id
        ref_ids = torch.arange(len(x) + len(r))
        value = loss(
            x, labels, torch.cat([x, r]), torch.cat([labels, ref_labels]), ids=ref_ids[: len(x)], ref_ids=ref_ids
        )
    else:
        value = loss(x, labels, r, ref_labels)
    value.backward()
    assert value.item() == pytest.approx(case["expected"]["loss"], abs=1e-10)
    for leaf, name in ((x, "grad_embeddings"), (r, "grad_ref_embeddings")):
        if leaf is not None:
            expected = torch.tensor(case["expected"][name], dtype=torch.float64)
            unit = leaf.detach()
            torch.testing.assert_close(tangent(leaf.grad, unit), tangent(expected, unit), rtol=0, atol=1e-8)
    if "per_query_ap" in case["expected"]:
        each = 1 - SmoothAPLoss(tau=loss.tau, include_self=official, reduction="none")(x.detach(), labels)
        expected = [math.nan if ap is None else ap for ap in case["expected"]["per_query_ap"]]
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case["id"])
@pytest.mark.parametrize("include_self", [False, True])
def test_known_faults_of_other_code_are_not_reproduced(case, include_self):
    x = torch.tensor(case["inputs"]["embeddings"], dtype=torch.float64)
    value = SmoothAPLoss(tau=case["params"]["tau"], include_self=include_self)(
        x, torch.tensor(case["inputs"]["labels"])
    )
    assert abs(value.item() - case["expected"]["loss"]) > 0.05


def test_by_hand():
    # One list with the scores .9 (positive), .8 (negative), .7 (positive), tau .1: differences over tau of 1 and 2,
    # sigma(1) = 0.731058579, sigma(2) = 0.880797078, sigma(-1) = 0.268941421, sigma(-2) = 0.119202922.
    # First positive: rank 1 + .268941421 + .119202922 = 1.388144343, among positives 1 + .119202922.
    # Second:         rank 1 + .880797078 + .731058579 = 2.611855657, among positives 1 + .880797078.
    loss = SmoothAPLoss(tau=0.1)
    value = loss.from_scores(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[True, False, True]]))
    assert value.item() == pytest.approx(1 - (1.119202922 / 1.388144343 + 1.880797078 / 2.611855657) / 2, abs=1e-6)
    # A non-candidate does not count. Without the negative, every precision is 1.
    candidate = torch.tensor([[True, False, True]])
    value = loss.from_scores(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[True, False, True]]), candidate)
    assert value.item() == pytest.approx(0.0, abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(labels=LABELS, tau=st.sampled_from([0.001, 0.01, 0.1, 1.0, 30.0]), seed=st.integers(0, 1000))
def test_against_loops(labels, tau, seed):
    x = torch.randn(len(labels), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = average_precisions(*lists_of(x, labels), tau)
    y = torch.tensor(labels)
    assert SmoothAPLoss(tau)(x, y).item() == pytest.approx(mean_loss(expected), abs=1e-10)
    each = SmoothAPLoss(tau, reduction="none")(x, y)
    expected = torch.tensor([math.nan if ap is None else 1 - ap for ap in expected], dtype=torch.float64)
    torch.testing.assert_close(each, expected, rtol=0, atol=1e-10, equal_nan=True)


def test_scores_and_masks_against_loops():
    scores = torch.randn(9, 17, dtype=torch.float64)
    relevant = torch.rand(9, 17) < 0.3
    candidate = torch.rand(9, 17) < 0.7
    relevant[4] = False
    expected = average_precisions(scores.tolist(), relevant.tolist(), candidate.tolist(), tau=0.3)
    value = SmoothAPLoss(tau=0.3).from_scores(scores, relevant, candidate)
    assert value.item() == pytest.approx(mean_loss(expected), abs=1e-12)
    # The scores of non-candidates do not matter.
    moved = torch.where(candidate, scores, 1e4)
    assert SmoothAPLoss(tau=0.3).from_scores(moved, relevant, candidate).item() == value.item()


def test_ties_count_one_half():
    # All three have the same score, and one is the positive: its rank is 1 + 1/2 + 1/2 = 2.
    value = SmoothAPLoss().from_scores(torch.zeros(1, 3), torch.tensor([[True, False, False]]))
    assert value.item() == pytest.approx(1 - 1 / 2)


def test_small_tau_gives_average_precision():
    x, labels = batch([2, 3, 5, 6])
    scores = normalize(x) @ normalize(x).T
    expected = []
    for q in range(len(x)):
        others = torch.arange(len(x)) != q
        expected.append(average_precision_score(labels[others] == labels[q], scores[q, others]))
    value = SmoothAPLoss(tau=1e-6)(x, labels)
    assert value.item() == pytest.approx(1 - sum(expected) / len(expected), abs=1e-9)


def test_perfect_and_worst_order():
    labels = torch.tensor([0, 0, 1, 1])
    perfect = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.1, 0.99]])
    assert SmoothAPLoss()(perfect, labels).item() == pytest.approx(0.0, abs=1e-4)
    # The only positive of each query comes last of three.
    worst = torch.tensor([[1.0, 0.05], [-1.0, 0.05], [1.0, -0.05], [-1.0, -0.05]])
    assert SmoothAPLoss(tau=1e-4)(worst, torch.tensor([0, 1, 1, 0])).item() == pytest.approx(1 - 1 / 3, abs=1e-6)


def gradcheck(function, *inputs):
    return torch.autograd.gradcheck(function, [x.double().requires_grad_() for x in inputs])


@pytest.mark.parametrize("class_balanced", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck(reduction, class_balanced):
    x, labels = batch([1, 2, 4])
    loss = SmoothAPLoss(tau=0.3, reduction=reduction, class_balanced=class_balanced)
    assert gradcheck(lambda x: loss(x, labels), x)


@pytest.mark.parametrize("class_balanced", [False, True])
def test_gradcheck_of_each_query(class_balanced):
    x, labels = batch([1, 2, 4])
    loss = SmoothAPLoss(tau=0.3, reduction="none", class_balanced=class_balanced)
    has_positive = labels != 0
    assert gradcheck(lambda x: loss(x, labels)[has_positive], x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_with_references(reduction):
    x, labels = batch([2, 3], seed=1)
    r, ref_labels = batch([3, 4, 1], seed=2)
    ids, ref_ids = torch.arange(5), torch.tensor([9, 1, 8, 0, 7, 3, 6, 5])
    loss = SmoothAPLoss(tau=0.3, reduction=reduction)
    assert gradcheck(lambda x, r: loss(x, labels, r, ref_labels, ids=ids, ref_ids=ref_ids), x, r)
    # Only the input that requires a gradient gets one.
    for leaf, other in ((x, r), (r, x)):
        other.requires_grad_(False)
        leaf.requires_grad_(True)
        loss(x, labels, r, ref_labels).sum().backward()
        assert leaf.grad.abs().sum() > 0
        assert other.grad is None
        leaf.grad = None


def test_gradcheck_of_scores_with_candidates():
    scores, relevant = torch.randn(4, 7), torch.rand(4, 7) < 0.5
    candidate = torch.rand(4, 7) < 0.8
    relevant[:, 0] = candidate[:, 0] = True
    candidate[:, 1] = False
    loss = SmoothAPLoss(tau=0.3)
    assert gradcheck(lambda s: loss.from_scores(s, relevant, candidate), scores)
    leaf = scores.clone().requires_grad_()
    loss.from_scores(leaf, relevant, candidate).backward()
    assert not leaf.grad[~candidate].any()
    assert leaf.grad[candidate].any()


def test_gradient_pulls_the_positive_up():
    scores = torch.tensor([[0.50, 0.51]], requires_grad=True)
    SmoothAPLoss().from_scores(scores, torch.tensor([[True, False]])).backward()
    assert scores.grad[0, 0] < 0 < scores.grad[0, 1]
    assert scores.grad.sum().item() == pytest.approx(0, abs=1e-6)  # the loss depends on differences of scores only


@pytest.mark.refusal
@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan])
def test_invalid_tau(tau):
    with pytest.raises(ValueError, match=rf"SmoothAPLoss: `tau` must be a finite number > 0, got {tau}\."):
        SmoothAPLoss(tau=tau)


@pytest.mark.refusal
@pytest.mark.parametrize("tau", ["0.1", None, True])
def test_tau_of_a_wrong_type(tau):
    with pytest.raises(TypeError, match=rf"SmoothAPLoss: `tau` must be a number > 0, got {tau!r}"):
        SmoothAPLoss(tau=tau)


def test_repr_shows_the_settings():
    assert repr(SmoothAPLoss(0.05, reduction="sum", class_balanced=True)) == (
        "SmoothAPLoss(tau=0.05, reduction='sum', class_balanced=True, include_self=False)"
    )
