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
    RetrievalLoss,
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


NUMBERS = [
    *((cls, name) for cls in (SupAPLoss, HAPLoss) for name in ("tau", "rho", "delta")),
    (HAPLoss, "alpha"),
    (BlackboxAPLoss, "lambda_"),
    (BlackboxRecallLoss, "lambda_"),
    (RecallAtKLoss, "tau_rank"),
    (RecallAtKLoss, "tau_k"),
]


@pytest.mark.refusal
@pytest.mark.parametrize(("cls", "name"), NUMBERS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_numbers_above_zero(cls, name, value):
    with pytest.raises(ValueError, match=rf"^{cls.__name__}: `{name}` must be a finite number > 0, got {value}\."):
        cls(**{name: value})


@pytest.mark.refusal
@pytest.mark.parametrize(("cls", "name"), NUMBERS)
@pytest.mark.parametrize("value", ["0.1", True, None])
def test_numbers_of_a_wrong_type(cls, name, value):
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: `{name}` must be a number > 0, got {value!r}"):
        cls(**{name: value})


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("cls", "error", "match", "arguments"),
    [
        (FastAPLoss, ValueError, "`num_bins` must be an integer >= 2, got 1", {"num_bins": 1}),
        (FastAPLoss, TypeError, "`num_bins` must be an integer >= 2, got 10.0", {"num_bins": 10.0}),
        (QuantizedAPLoss, ValueError, "`num_bins` must be an integer >= 2, got 0", {"num_bins": 0}),
        (QuantizedAPLoss, ValueError, r"`low` must be below `high`, got 1\.0 and 1\.0", {"low": 1.0}),
        (QuantizedAPLoss, ValueError, "`low` must be a finite number, got nan", {"low": math.nan}),
        (QuantizedAPLoss, ValueError, "`high` must be a finite number, got inf", {"high": math.inf}),
        (QuantizedAPLoss, TypeError, "`high` must be a number, got '1'", {"high": "1"}),
        (QuantizedAPLoss, ValueError, "`tie_aware` must be one of False, 'simplified', 'full', got True",
         {"tie_aware": True}),
        (BlackboxAPLoss, ValueError, "`margin` must be a finite number >= 0, got -0.01", {"margin": -0.01}),
        (BlackboxAPLoss, ValueError, "`margin` must be a finite number, got nan", {"margin": math.nan}),
        (BlackboxRecallLoss, ValueError, "`margin` must be a finite number >= 0, got -1", {"margin": -1}),
        (BlackboxRecallLoss, ValueError, "`weighting` must be one of 'log', 'loglog', got 'exp'",
         {"weighting": "exp"}),
        (BlackboxRecallLoss, ValueError, "`pair_mean` must be one of 'query', 'all', got 'nonzero'",
         {"pair_mean": "nonzero"}),
        (BlackboxRecallLoss, ValueError, "`pair_mean` 'all' is a mean over the pairs .* got reduction='none'",
         {"pair_mean": "all", "reduction": "none"}),
        (CalibrationLoss, ValueError, "`pair_mean` must be one of 'query', 'all', 'nonzero', got 'pooled'",
         {"pair_mean": "pooled"}),
        (CalibrationLoss, ValueError, "`pair_mean` 'nonzero' is .* class_balanced=True; set pair_mean='query'",
         {"pair_mean": "nonzero", "class_balanced": True}),
        (CalibrationLoss, ValueError, "`alpha` must be a finite number, got inf", {"alpha": math.inf}),
        (CalibrationLoss, TypeError, "`beta` must be a number, got None", {"beta": None}),
        *((cls, ValueError, "`offset` must be a finite number, got nan", {"offset": math.nan})
          for cls in (SupAPLoss, HAPLoss)),
        *((cls, TypeError, "`offset` must be a number, got '1'", {"offset": "1"}) for cls in (SupAPLoss, HAPLoss)),
        *((cls, ValueError, "`start` must be a finite number, got inf", {"start": math.inf})
          for cls in (SupAPLoss, HAPLoss)),
        *((cls, TypeError, "`start` must be a number, got None", {"start": None}) for cls in (SupAPLoss, HAPLoss)),
        (HAPLoss, ValueError, r"`hrank_slopes` must be \(beta, gamma, leak\) or None, got \(1.0, 2.0\)",
         {"hrank_slopes": (1.0, 2.0)}),
        (HAPLoss, ValueError, "`hrank_slopes` must be a finite number, got nan",
         {"hrank_slopes": (1.0, math.nan, 1.0)}),
        (RecallAtKLoss, ValueError, "`ks` must hold at least one k, got none", {"ks": ()}),
        (RecallAtKLoss, ValueError, "`ks` must be an integer >= 1, got 0", {"ks": (1, 0)}),
        (RecallAtKLoss, TypeError, "`ks` must be a sequence of integers, got 5", {"ks": 5}),
        (RecallAtKLoss, TypeError, "`ks` must be an integer >= 1, got 1.5", {"ks": (1.5,)}),
        (RecallAtKLoss, ValueError, "`tau_k` must be one number or one for each of the 2 ks, got 3",
         {"ks": (1, 2), "tau_k": (1.0, 1.0, 1.0)}),
        (RecallAtKLoss, ValueError, "`tau_k` must be a finite number > 0, got -1.0", {"ks": (1,), "tau_k": (-1.0,)}),
        (ROADMAPLoss, ValueError, r"`lambda_` must be from 0 to 1, got 1\.5", {"lambda_": 1.5}),
        (ROADMAPLoss, ValueError, "`lambda_` must be a finite number, got nan", {"lambda_": math.nan}),
        (ROADMAPLoss, TypeError, "`lambda_` must be a number, got None", {"lambda_": None}),
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


OTHERS = [loss for loss in MADE if isinstance(loss, RetrievalLoss)]


def with_nan(x):
    return torch.cat([x[:-1], torch.full_like(x[:1], math.nan)])


@pytest.mark.refusal
@pytest.mark.parametrize("loss", OTHERS, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (TypeError, "`embeddings` must be floating point, got torch.int64", lambda x, y: (x.long(), y)),
        (ValueError, r"`embeddings` must hold finite numbers .* in 1 of 6 rows \(5\)", lambda x, y: (with_nan(x), y)),
        (TypeError, "`labels` must be integers, got torch.float32", lambda x, y: (x, y.float())),
        (TypeError, "`labels` must be integers, got torch.bool", lambda x, y: (x, y.bool())),
        (ValueError, r"`labels` must have shape \(6,\), one for each row of `embeddings`, got \(4,\)",
         lambda x, y: (x, y[:4])),
        (ValueError, "`ref_emb` was given without `ref_labels`", lambda x, y: (x, y, x)),
        (ValueError, r"`ref_emb` must have the dimension of `embeddings`", lambda x, y: (x, y, x[:, :2], y)),
        (TypeError, "`ref_labels` must be integers, got torch.float32", lambda x, y: (x, y, x, y.float())),
    ],
)  # fmt: skip
def test_bad_input_of_every_loss(loss, error, match, change):
    y = torch.stack([Y, Y * 0], 1) if isinstance(loss, HAPLoss) else Y
    with pytest.raises(error, match=f"^{type(loss).__name__}: {match}"):
        loss(*change(X, y))


@pytest.mark.refusal
@pytest.mark.parametrize("loss", OTHERS, ids=lambda loss: type(loss).__name__)
def test_bad_scores_of_every_loss(loss):
    graded = isinstance(loss, HAPLoss)
    scores, relevant = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.int64 if graded else torch.bool)
    owner = type(loss).__name__
    plain = copy.deepcopy(loss)
    plain.class_balanced = False
    with pytest.raises(TypeError, match=rf"^{owner}: `relevant` must be .*, got torch.float32"):
        plain.from_scores(scores, relevant.float())
    with pytest.raises(
        ValueError, match=rf"^{owner}: `relevant` must have the shape of `scores` \(2, 3\), got \(3, 2\)"
    ):
        plain.from_scores(scores, relevant.T)
    with pytest.raises(ValueError, match=rf"^{owner}: `scores` must hold finite numbers only"):
        plain.from_scores(scores * math.inf, relevant)
    plain.class_balanced = True
    with pytest.raises(ValueError, match=rf"^{owner}: `class_balanced` needs labels"):
        plain.from_scores(scores, relevant)


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
