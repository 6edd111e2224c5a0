"""Sums of losses, also with weights that change, and one loss for several dimensions."""

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch.nn.functional import normalize

from lightning_retrieval.losses import (
    BlackboxAPLoss,
    CalibrationLoss,
    FastAPLoss,
    NestedLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    Schedule,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)
from tests.lightning_retrieval.losses.oracles import batch, labels_for, make, value_at

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1, 1, 2])
R, Z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 2, 2])
IDS, REF_IDS = torch.arange(6), torch.tensor([9, 2, 8, 7, 6])


def test_weighted_sum():
    parts = {"ap": (0.5, SmoothAPLoss(0.1)), "fast": (2.0, FastAPLoss()), "push": (-1.0, CalibrationLoss())}
    loss = WeightedSum(parts)
    assert loss.losses == parts
    for arguments, keywords in (
        ((X, Y), {"ids": IDS}),
        ((X, Y, R, Z), {}),
        ((X, Y, R, Z), {"ids": IDS, "ref_ids": REF_IDS}),
    ):
        leaf = X.clone().requires_grad_()
        value = loss(leaf, *arguments[1:], **keywords)
        value.backward()
        terms = {name: part(*arguments, **keywords).item() for name, (_, part) in parts.items()}
        assert {name: term.item() for name, term in loss.terms.items()} == terms
        assert not any(term.requires_grad for term in loss.terms.values())
        expected = sum(weight * terms[name] for name, (weight, _) in parts.items())
        assert value.item() == pytest.approx(expected, abs=1e-6)
        total = torch.zeros_like(leaf)
        for weight, part in parts.values():
            single = X.clone().requires_grad_()
            part(single, *arguments[1:], **keywords).backward()
            total += weight * single.grad
        torch.testing.assert_close(leaf.grad, total)


def test_sums_nest_and_accept_third_party_losses():
    inner = WeightedSum({"sup": (1.0, SupAPLoss()), "black": (3.0, BlackboxAPLoss())})
    loss = WeightedSum({"inner": (0.5, inner), "pml": (0.1, pml.ContrastiveLoss()), "map": (1.0, SmoothAPLoss())})
    value = loss(X, Y, ids=IDS)
    ours = 0.5 * (SupAPLoss()(X, Y) + 3 * BlackboxAPLoss()(X, Y)) + SmoothAPLoss()(X, Y)
    assert value.item() == pytest.approx((ours + 0.1 * pml.ContrastiveLoss()(X, Y)).item(), abs=1e-5)
    assert set(inner.terms) == {"sup", "black"}


def test_sum_from_scores():
    scores, relevant, candidate = torch.randn(4, 7), torch.rand(4, 7) < 0.5, torch.rand(4, 7) < 0.8
    loss = WeightedSum({"a": (2.0, SmoothAPLoss(0.3)), "b": (1.0, ROADMAPLoss(0.3))})
    expected = 2 * SmoothAPLoss(0.3).from_scores(scores, relevant, candidate)
    expected += ROADMAPLoss(0.3).from_scores(scores, relevant, candidate)
    assert loss.from_scores(scores, relevant, candidate).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule([(0, 3.0), (0.2, 0)]), {0.0: 3.0, 0.1999: 3.0, 20 / 100: 0.0, 1.0: 0.0}),
        (Schedule([(0, 0), (0.2, -3.0)]), {0.0: 0.0, 0.1999: 0.0, 20 / 100: -3.0, 1.0: -3.0}),
        (Schedule([(0.2, 0.3), (0.6, 0.1)], "linear"), {0.0: 0.3, 0.2: 0.3, 0.4: 0.2, 0.6: 0.1, 1.0: 0.1}),
        (Schedule([(0, 10), (0.5, 0.1)], "geometric"), {0.0: 10.0, 0.25: 1.0, 0.5: 0.1, 1.0: 0.1}),
    ],
    ids=["before", "after", "linear", "geometric"],
)
def test_weights_by_the_fraction_of_the_training(schedule, values):
    assert {fraction: schedule(fraction) for fraction in values} == pytest.approx(values, rel=1e-12)
    for fraction in (0.0, 1.0):
        assert schedule(fraction) == values[fraction]  # exact, so that a weight of 0 is not computed


def changing():
    """Pairs of another library at first, then AP; the inner sum changes too. What is left at each fraction."""
    inner = WeightedSum(
        {"fast": (Schedule([(0, 1), (0.5, 0)], "linear"), FastAPLoss()), "push": (0.5, CalibrationLoss())}
    )
    loss = WeightedSum(
        {
            "pairs": (Schedule([(0, 2.0), (0.25, 0)]), pml.ContrastiveLoss()),
            "ap": (Schedule([(0, 0), (0.25, 1)]), SmoothAPLoss()),
            "inner": (3.0, inner),
        }
    )
    push = {"push": (0.5, CalibrationLoss())}
    left = {
        0.0: {
            "pairs": (2.0, pml.ContrastiveLoss()),
            "inner": (3.0, WeightedSum({"fast": (1.0, FastAPLoss()), **push})),
        },
        0.25: {"ap": (1.0, SmoothAPLoss()), "inner": (3.0, WeightedSum({"fast": (0.5, FastAPLoss()), **push}))},
        1.0: {"ap": (1.0, SmoothAPLoss()), "inner": (3.0, WeightedSum(push))},
    }
    return loss, left


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_a_sum_that_changes_is_that_of_the_terms_whose_weight_is_not_zero(fraction, nested):
    loss, left = changing()
    found, expected = loss, WeightedSum(left[fraction])
    if nested:
        found, expected = NestedLoss(loss, (2, 4)), NestedLoss(expected, (2, 4))
    gradients = []
    for each in (found, expected):
        leaf = X.clone().requires_grad_()
        value_at(fraction, each, leaf, Y).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert loss.terms.keys() == left[fraction].keys()
    wanted = {"pairs": 2.0 * (fraction < 0.25), "ap": float(fraction >= 0.25), "inner/fast": max(1 - 2 * fraction, 0)}
    assert found.scheduled_weights(fraction) == wanted


def test_a_sum_that_changes_is_called_with_the_weights_of_the_end():
    loss, left = changing()
    assert loss(X, Y).item() == WeightedSum(left[1.0])(X, Y).item()
    scores, relevant = torch.randn(4, 7), torch.rand(4, 7) < 0.5
    assert loss.from_scores(scores, relevant).item() == WeightedSum(left[1.0]).from_scores(scores, relevant).item()


DIMS, WEIGHTS = (2, 5, 8), (1.0, 0.5, 2.0)
NESTED = {
    **{name: lambda name=name: make(name) for name in ("smooth_ap", "fast_ap", "hap", "blackbox_ap", "recall_at_k")},
    "roadmap": ROADMAPLoss,
    "all pairs": lambda: CalibrationLoss(pair_mean="all"),
    "sum": lambda: WeightedSum({"ap": (1.0, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())}),
    "sum with a third-party loss": lambda: WeightedSum({"a": (1.0, SmoothAPLoss()), "b": (1.0, pml.SupConLoss())}),
    "third-party": pml.ContrastiveLoss,
}


def expected(loss, x, labels, **keywords):
    """The sum by its definition; references are shortened as the batch is."""
    total = 0.0
    for dim, weight in zip(DIMS, WEIGHTS):
        shortened = dict(keywords)
        if "ref_emb" in keywords:
            shortened["ref_emb"] = normalize(keywords["ref_emb"][:, :dim])
        total = total + weight * loss(normalize(x[:, :dim]), labels, **shortened)
    return total


@pytest.mark.parametrize("name", NESTED)
def test_the_sum_of_several_dimensions_by_its_definition(name):
    """Alone and, where the loss of another library is called with other arguments, not with references."""
    x, labels = batch([2, 3, 1, 4], dim=8)
    r, ref_labels = batch([3, 1, 2], dim=8)
    x.requires_grad_()
    y = labels_for(name, labels)
    cases = [{}]
    if "third-party" not in name:
        ids = {"ids": torch.arange(10), "ref_ids": torch.tensor([50, 3, 51, 0, 52, 53])}
        cases.append({"ref_emb": r, "ref_labels": labels_for(name, ref_labels), **ids})
    for given in cases:
        wanted = expected(NESTED[name](), x, y, **given)
        found = NestedLoss(NESTED[name](), DIMS, weights=WEIGHTS)(x, y, **given)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
        gradients = [torch.autograd.grad(value, x)[0] for value in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_terms_are_the_unweighted_values_of_each_batch():
    loss = NestedLoss(SmoothAPLoss(), DIMS, weights=WEIGHTS)
    for sizes in ([2, 3, 4], [5, 4], [1, 8]):
        x, labels = batch(sizes, dim=8)
        loss(x, labels)
        assert list(loss.terms) == ["2d", "5d", "8d"]
        for dim in DIMS:
            torch.testing.assert_close(loss.terms[f"{dim}d"], SmoothAPLoss()(x[:, :dim], labels))


def test_losses_that_count_different_positives_in_one_batch():
    """With `include_self` a query is its own positive for Smooth-AP, and is none for Recall@k."""
    x, labels = batch([1, 1, 2, 3], dim=8)

    def loss():
        return WeightedSum(
            {"ap": (1.0, SmoothAPLoss(include_self=True)), "recall": (1.0, RecallAtKLoss((1,), include_self=True))}
        )

    torch.testing.assert_close(NestedLoss(loss(), DIMS, weights=WEIGHTS)(x, labels), expected(loss(), x, labels))
