"""Sums of losses, and what raises at construction and at the call."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from lightning_retrieval import losses
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxMAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    NestedLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1, 1, 2])
R, Z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 2, 2])
IDS, REF_IDS = torch.arange(6), torch.tensor([9, 2, 8, 7, 6])


def test_weighted_sum():
    parts = {"ap": (0.5, SmoothAPLoss(0.1)), "fast": (2.0, FastAPLoss()), "push": (-1.0, CalibrationLoss())}
    loss = WeightedSum(parts)
    assert loss.losses == parts
    for arguments, keywords in (
        ((X, Y), {}),
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


def own_left_out():
    """The pairs of a query and a reference, positive and negative, but for the query's own copy."""
    pairs = [(q, r) for q in range(len(X)) for r in range(len(R)) if IDS[q] != REF_IDS[r]]
    positive = [(q, r) for q, r in pairs if Y[q] == Z[r]]
    negative = [(q, r) for q, r in pairs if Y[q] != Z[r]]
    assert len(pairs) < len(X) * len(R)
    return (*torch.tensor(positive).T, *torch.tensor(negative).T)


def test_sums_nest_and_accept_third_party_losses():
    inner = WeightedSum({"sup": (1.0, SupAPLoss()), "black": (3.0, BlackboxAPLoss())})
    loss = WeightedSum({"inner": (0.5, inner), "pml": (0.1, ContrastiveLoss()), "map": (1.0, SmoothAPLoss())})
    for arguments in ((X, Y), (X, Y, R, Z)):
        leaf = X.clone().requires_grad_()
        value = loss(leaf, *arguments[1:], ids=IDS, ref_ids=REF_IDS if len(arguments) == 4 else None)
        third_party = ContrastiveLoss()(X, Y) if len(arguments) == 2 else ContrastiveLoss()(X, Y, own_left_out(), R, Z)
        assert loss.terms["pml"].item() == pytest.approx(third_party.item())
        assert set(inner.terms) == {"sup", "black"}
        known = {"ids": IDS} | ({"ref_ids": REF_IDS} if len(arguments) == 4 else {})
        parts = [SupAPLoss()(*arguments, **known), BlackboxAPLoss()(*arguments, **known)]
        ours = 0.5 * (parts[0] + 3 * parts[1]) + SmoothAPLoss()(*arguments, **known)
        assert value.item() == pytest.approx((ours + 0.1 * third_party).item(), abs=1e-5)
        value.backward()
        assert torch.isfinite(leaf.grad).all()


def test_sum_from_scores():
    scores, relevant, candidate = torch.randn(4, 7), torch.rand(4, 7) < 0.5, torch.rand(4, 7) < 0.8
    loss = WeightedSum({"a": (2.0, SmoothAPLoss(0.3)), "b": (1.0, ROADMAPLoss(0.3))})
    expected = 2 * SmoothAPLoss(0.3).from_scores(scores, relevant, candidate)
    expected += ROADMAPLoss(0.3).from_scores(scores, relevant, candidate)
    assert loss.from_scores(scores, relevant, candidate).item() == pytest.approx(expected.item(), abs=1e-6)


MADE = [
    SmoothAPLoss(0.2, reduction="sum"),
    FastAPLoss(5, class_balanced=True),
    QuantizedAPLoss(7, low=-0.5, high=0.9, tie_aware="simplified"),
    BlackboxAPLoss(2.0, 0.1),
    BlackboxRecallLoss(2.0, 0.1, weighting="loglog", pair_mean="all"),
    BlackboxMAPLoss(2.0, 0.1, interclass_coef=0.2, batch_memory=3),
    SupAPLoss(0.1, rho=10.0, delta=0.1, offset=1.2, start=0.4),
    CalibrationLoss(0.7, 0.3, pair_mean="nonzero"),
    ROADMAPLoss(0.2, SupAPLoss(0.1)),
    HAPLoss(2.0, tau=0.1, rho=10.0, delta=0.1, offset=1.2, start=0.4, hrank_slopes=(2.0, 0.5, 1.0)),
    RecallAtKLoss((1, 3), tau_rank=0.1, tau_k=(0.5, 2.0)),
    WeightedSum({"a": (1.0, SmoothAPLoss())}),
    NestedLoss(SmoothAPLoss(), (2, 4), weights=(1.0, 0.5)),
]


@pytest.mark.parametrize("loss", MADE, ids=lambda loss: type(loss).__name__)
def test_arguments_are_attributes_and_copies_alike(loss):
    """Checkpoints describe a loss by its class and its arguments, and make it again of them."""
    arguments = {name: getattr(loss, name) for name in inspect.signature(type(loss)).parameters}
    again = type(loss)(**arguments)
    for other in (again, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert repr(other) == repr(loss)
    for name in set(arguments) - {
        "loss",
        "losses",
        "sup_ap",
        "calibration",
        "reduction",
        "class_balanced",
        "include_self",
    }:
        assert f"{name}=" in repr(loss) or "weights=" in repr(loss)


def test_every_loss_is_made_above():
    classes = {thing for thing in vars(losses).values() if inspect.isclass(thing) and not inspect.isabstract(thing)}
    assert {type(loss) for loss in MADE} == {c for c in classes if issubclass(c, torch.nn.Module)}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("cls", "error", "match", "arguments"),
    [
        (QuantizedAPLoss, ValueError, r"`low` must be below `high`, got 1\.0 and 1\.0", {"low": 1.0}),
        (BlackboxRecallLoss, ValueError, "`pair_mean` 'all' is a mean over the pairs .* got reduction='none'",
         {"pair_mean": "all", "reduction": "none"}),
        (CalibrationLoss, ValueError, "`pair_mean` 'nonzero' is .* class_balanced=True; set pair_mean='query'",
         {"pair_mean": "nonzero", "class_balanced": True}),
        (HAPLoss, ValueError, r"`hrank_slopes` must be \(beta, gamma, leak\) or None, got \(1.0, 2.0\)",
         {"hrank_slopes": (1.0, 2.0)}),
        (RecallAtKLoss, ValueError, "`ks` must hold at least one k, got none", {"ks": ()}),
        (RecallAtKLoss, ValueError, "`tau_k` must be one number or one for each of the 2 ks, got 3",
         {"ks": (1, 2), "tau_k": (1.0, 1.0, 1.0)}),
        (ROADMAPLoss, ValueError, r"`lambda_` must be from 0 to 1, got 1\.5", {"lambda_": 1.5}),
        (ROADMAPLoss, TypeError, r"`sup_ap` must be an instance of Module, got 3 \(int\)", {"sup_ap": 3}),
        (WeightedSum, ValueError, r"`losses` must hold at least one term, got \{\}", {"losses": {}}),
        (WeightedSum, TypeError, r"`losses` must map a name to \(weight, loss\), got list; pass \{",
         {"losses": [SmoothAPLoss()]}),
        (WeightedSum, ValueError, r"`losses\['a'\]` must be a finite number, got nan",
         {"losses": {"a": (math.nan, SmoothAPLoss())}}),
        (WeightedSum, TypeError, r"`losses` must map a name to \(weight, loss\), got .*'f'.* for 'a'",
         {"losses": {"a": (1.0, "f")}}),
    ],
)  # fmt: skip
def test_bad_settings(cls, error, match, arguments):
    with pytest.raises(error, match=f"^{cls.__name__}: {match}"):
        cls(**arguments)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"label levels must nest, .* of level 0 within one of level 1, got label 0 within \[0, 1\]",
         (X, torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1], [2, 1], [2, 1]]))),
        (ValueError, r"label levels must nest, .* of level 1 within one of level 2, got label 4 within \[7, 8\]",
         (X, torch.tensor([[0, 4, 7], [0, 4, 7], [1, 4, 8], [1, 4, 8], [2, 5, 7], [2, 5, 7]]))),
        (ValueError, r"label levels must nest, .* got label 1 within \[0, 5\]",  # only together with the references
         (X, torch.stack([Y, Y * 0], 1), R, torch.tensor([[1, 5]] * 5))),
        (ValueError, r"labels must have shape .* got `labels` \(6, 2\) and `ref_labels` \(5, 1\)",
         (X, torch.stack([Y, Y], 1), R, Z)),
    ],
)  # fmt: skip
def test_bad_levels(error, match, arguments):
    with pytest.raises(error, match=f"^HAPLoss: {match}"):
        HAPLoss()(*arguments)


@pytest.mark.refusal
def test_bad_levels_of_scores():
    with pytest.raises(ValueError, match=r"^HAPLoss: `relevant` must be levels >= 0, got -2\."):
        HAPLoss().from_scores(torch.randn(2, 3), torch.tensor([[0, 1, 2], [0, -2, 1]]))
