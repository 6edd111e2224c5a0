"""Sums of losses, also with weights that change, of one loss for several dimensions, and what raises."""

import math

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.losses import ContrastiveLoss
from torch.nn.functional import normalize

from lightning_retrieval import CrossBatchMemory, OtherCamera, SupervisedWhitening
from lightning_retrieval.losses import (
    After,
    Before,
    BlackboxAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    NestedLoss,
    QuantizedAPLoss,
    Ramp,
    RecallAtKLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)
from lightning_retrieval.losses.batch_loss import ranked_batch
from lightning_retrieval.losses.third_party import ThirdPartyLoss, as_batch_loss
from tests.lightning_retrieval.losses.oracles import TABLE, batch, labels_for, make

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1, 1, 2])
R, Z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 2, 2])
T = (1.0, SmoothAPLoss())  # a term
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


def test_sums_nest_and_accept_third_party_losses():
    inner = WeightedSum({"sup": (1.0, SupAPLoss()), "black": (3.0, BlackboxAPLoss())})
    loss = WeightedSum({"inner": (0.5, inner), "pml": (0.1, ContrastiveLoss()), "map": (1.0, SmoothAPLoss())})
    for arguments, known in (((X, Y), {"ids": IDS}), ((X, Y, R, Z), {"ids": IDS, "ref_ids": REF_IDS})):
        value = loss(*arguments, **known)
        third_party = as_batch_loss(ContrastiveLoss())(*arguments, **known)
        parts = [SupAPLoss()(*arguments, **known), BlackboxAPLoss()(*arguments, **known)]
        ours = 0.5 * (parts[0] + 3 * parts[1]) + SmoothAPLoss()(*arguments, **known)
        assert value.item() == pytest.approx((ours + 0.1 * third_party).item(), abs=1e-5)
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
        (Before(0.2, 3.0), {0.0: 3.0, 0.1999: 3.0, 20 / 100: 0.0, 1.0: 0.0}),
        (After(0.2, -3.0), {0.0: 0.0, 0.1999: 0.0, 20 / 100: -3.0, 1.0: -3.0}),
        (Ramp(0.3, 0.1, start=0.2, end=0.6), {0.0: 0.3, 0.2: 0.3, 0.4: 0.2, 0.6: 0.1, 1.0: 0.1}),
        (Ramp(10.0, 0.1, end=0.5, geometric=True), {0.0: 10.0, 0.25: 1.0, 0.5: 0.1, 1.0: 0.1}),
    ],
    ids=["before", "after", "linear", "geometric"],
)
def test_weights_by_the_fraction_of_the_training(schedule, values):
    assert {fraction: schedule(fraction) for fraction in values} == pytest.approx(values, rel=1e-12)
    for fraction in (0.0, 1.0):
        assert schedule(fraction) == values[fraction]  # exact, so that a weight of 0 is not computed


class Counting(SmoothAPLoss):
    """Counts its calls."""

    calls = 0

    def of_batch(self, batch):
        self.calls += 1
        return super().of_batch(batch)


def changing():
    """Pairs of another library at first, then AP; the inner sum changes too. What is left at each fraction."""
    inner = WeightedSum({"fast": (Ramp(1.0, 0.0, end=0.5), FastAPLoss()), "push": (0.5, CalibrationLoss())})
    loss = WeightedSum(
        {"pairs": (Before(0.25, 2.0), ContrastiveLoss()), "ap": (After(0.25), Counting()), "inner": (3.0, inner)}
    )
    push = {"push": (0.5, CalibrationLoss())}
    left = {
        0.0: {"pairs": (2.0, ContrastiveLoss()), "inner": (3.0, WeightedSum({"fast": (1.0, FastAPLoss()), **push}))},
        0.25: {"ap": (1.0, SmoothAPLoss()), "inner": (3.0, WeightedSum({"fast": (0.5, FastAPLoss()), **push}))},
        1.0: {"ap": (1.0, SmoothAPLoss()), "inner": (3.0, WeightedSum(push))},
    }
    return loss, left


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_a_sum_that_changes_is_that_of_the_terms_whose_weight_is_not_zero(fraction, nested):
    loss, left = changing()
    expected, counting = WeightedSum(left[fraction]), loss.losses["ap"][1]
    found = loss
    if nested:
        found, expected = NestedLoss(loss, (2, 4)), NestedLoss(expected, (2, 4))
    gradients = []
    for each in (found, expected):
        leaf = X.clone().requires_grad_()
        each.of_batch(ranked_batch(leaf, Y, fraction=fraction)).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert loss.terms.keys() == left[fraction].keys()
    assert counting.calls == (1 + nested) * (fraction > 0)
    assert found.splits_by_query(fraction) == (fraction > 0)
    wanted = {"pairs": 2.0 * (fraction < 0.25), "ap": float(fraction >= 0.25), "inner/fast": max(1 - 2 * fraction, 0)}
    assert found.scheduled_weights(fraction) == wanted


def test_a_sum_that_changes_is_called_with_the_weights_of_the_end():
    loss, left = changing()
    assert loss(X, Y).item() == WeightedSum(left[1.0])(X, Y).item()
    scores, relevant = torch.randn(4, 7), torch.rand(4, 7) < 0.5
    assert loss.from_scores(scores, relevant).item() == WeightedSum(left[1.0]).from_scores(scores, relevant).item()


DIMS, WEIGHTS = (2, 5, 8), (1.0, 0.5, 2.0)


def own_losses():
    """Every loss of the library by name, and sums of losses."""
    made = {name: lambda name=name: make(name) for name in TABLE}
    made["roadmap"] = ROADMAPLoss
    made["all pairs"] = lambda: CalibrationLoss(pair_mean="all")
    made["sum"] = lambda: WeightedSum({"ap": (1.0, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())})
    made["sum with a third-party loss"] = lambda: WeightedSum(
        {"a": (1.0, SmoothAPLoss()), "b": (1.0, pml.SupConLoss())}
    )
    return made


OWN = own_losses()
THIRD_PARTY = {"ContrastiveLoss": pml.ContrastiveLoss, "MultiSimilarityLoss": pml.MultiSimilarityLoss}
NAMES = ["smooth_ap", "fast_ap", "hap", "blackbox_ap", "recall_at_k", *list(OWN)[len(TABLE) :]]


def loss_of(name):
    return (OWN | THIRD_PARTY)[name]()


def expected(loss, x, labels, **keywords):
    """The sum by its definition; references are shortened as the batch is."""
    total = 0.0
    for dim, weight in zip(DIMS, WEIGHTS):
        shortened = dict(keywords)
        if "ref_emb" in keywords:
            shortened["ref_emb"] = normalize(keywords["ref_emb"][:, :dim])
        total = total + weight * loss(normalize(x[:, :dim]), labels, **shortened)
    return total


@pytest.mark.parametrize("references", [False, True])
@pytest.mark.parametrize("name", [*NAMES, *THIRD_PARTY])
def test_the_sum_by_its_definition(name, references):
    x, labels = batch([2, 3, 1, 4], dim=8)
    r, ref_labels = batch([3, 1, 2], dim=8)
    x.requires_grad_()
    given = {}
    if references and "third-party" not in name and name not in THIRD_PARTY:
        given = {"ref_emb": r, "ref_labels": labels_for(name, ref_labels)}
        given |= {"ids": torch.arange(10), "ref_ids": torch.tensor([50, 3, 51, 0, 52, 53])}
    y = labels_for(name, labels)
    wanted = expected(loss_of(name), x, y, **given)
    found = NestedLoss(loss_of(name), DIMS, weights=WEIGHTS)(x, y, **given)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    gradients = [torch.autograd.grad(value, x)[0] for value in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_terms_are_the_unweighted_values():
    x, labels = batch([2, 3, 4], dim=8)
    loss = NestedLoss(SmoothAPLoss(), DIMS, weights=WEIGHTS)
    loss(x, labels)
    assert list(loss.terms) == ["2d", "5d", "8d"]
    for dim in DIMS:
        torch.testing.assert_close(loss.terms[f"{dim}d"], SmoothAPLoss()(x[:, :dim], labels))


@pytest.mark.parametrize(("loss", "reads"), [(SmoothAPLoss, 1), (ROADMAPLoss, 1), (HAPLoss, 2)])
def test_what_follows_from_the_labels_is_read_once(loss, reads, monkeypatch):
    from lightning_retrieval.losses import lists

    found = []
    monkeypatch.setattr(lists, "to_host", lambda values: found.append(1) or values.detach())
    x, labels = batch([2, 3, 4], dim=8)
    y = torch.stack([labels, labels // 2], 1) if loss is HAPLoss else labels
    NestedLoss(loss(), (1, 2, 3, 4, 5, 6, 7, 8))(x, y)
    assert len(found) == reads


def test_a_second_batch_is_read_again():
    loss = NestedLoss(SmoothAPLoss(), (2, 8))
    for sizes in ([2, 3, 4], [5, 4], [1, 8]):
        x, labels = batch(sizes, dim=8)
        torch.testing.assert_close(loss(x, labels), SmoothAPLoss()(x, labels) + SmoothAPLoss()(x[:, :2], labels))


def test_losses_that_count_different_positives_do_not_share_their_reads():
    """With `include_self` a query is its own positive for Smooth-AP, and is none for Recall@k."""
    x, labels = batch([1, 1, 2, 3], dim=8)

    def loss():
        return WeightedSum(
            {"ap": (1.0, SmoothAPLoss(include_self=True)), "recall": (1.0, RecallAtKLoss((1,), include_self=True))}
        )

    torch.testing.assert_close(NestedLoss(loss(), DIMS, weights=WEIGHTS)(x, labels), expected(loss(), x, labels))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("cls", "error", "match", "arguments"),
    [
        (QuantizedAPLoss, ValueError, r"`low` must be below `high`, got 1\.0 and 1\.0", {"low": 1.0}),
        (BlackboxRecallLoss, ValueError, "`pair_mean` 'all' .*'none'", {"pair_mean": "all", "reduction": "none"}),
        (
            CalibrationLoss,
            ValueError,
            "`pair_mean` .* class_balanced=True",
            {"pair_mean": "all", "class_balanced": True},
        ),
        (HAPLoss, ValueError, r"`hrank_slopes` must be .* got \(1.0, 2.0\)", {"hrank_slopes": (1.0, 2.0)}),
        (RecallAtKLoss, ValueError, "`tau_k` must be .* 2 ks, got 3", {"ks": (1, 2), "tau_k": (1.0, 1.0, 1.0)}),
        (WeightedSum, TypeError, r"`losses` must map .* got list; pass \{", {"losses": [SmoothAPLoss()]}),
        (WeightedSum, ValueError, r"`losses\['a'\]` .* got nan", {"losses": {"a": (math.nan, SmoothAPLoss())}}),
        (WeightedSum, TypeError, r"`losses` must map .* got .*'f'.* for 'a'", {"losses": {"a": (1.0, "f")}}),
        (WeightedSum, TypeError, r"`losses\['a'\]` .* a schedule, got '1'", {"losses": {"a": ("1", SmoothAPLoss())}}),
        (
            WeightedSum,
            ValueError,
            r"`losses` must have a weight .* got \{'a': Before\(.* all 0 at the fraction 0\.2 of",
            {"losses": {"a": (Before(0.2), SmoothAPLoss()), "b": (After(0.3), SmoothAPLoss())}},
        ),
        (
            WeightedSum,
            ValueError,
            r"`losses` must have a weight .* got \{'a': Ramp\(.* all 0 at the fraction 0 of",
            {"losses": {"a": (Ramp(0.0, 1.0), SmoothAPLoss())}},
        ),
        *[
            (
                WeightedSum,
                ValueError,
                f"`losses` must not have the names of .* got '{name}'; give",
                {"losses": {name: T}},
            )
            for name in ("forward", "training", "keys", "type", "half", "pop", "_modules")
        ],
        *[
            (WeightedSum, ValueError, "`losses` must have names .* no dot, got", {"losses": {name: T}})
            for name in ("", "a.b", 3)
        ],
        (Ramp, ValueError, r"`last` must be a finite number > 0, got 0", {"first": 1, "last": 0, "geometric": True}),
        (
            Ramp,
            ValueError,
            r"`start` must be below `end`, got 0\.5 and",
            {"first": 1, "last": 0, "start": 0.5, "end": 0.5},
        ),
        (NestedLoss, ValueError, r"`dims` must be .* ascending order, got \(4, 2\)", {"dims": (4, 2)}),
        (NestedLoss, ValueError, "`weights` must hold one .* 2 dims", {"dims": (2, 4), "weights": (1.0,)}),
        (NestedLoss, TypeError, "`loss` must not learn proxies, .* got ArcFaceLoss", {"loss": pml.ArcFaceLoss(3, 8)}),
    ],
)
def test_bad_settings(cls, error, match, arguments):
    if cls is NestedLoss:
        arguments = {"loss": SmoothAPLoss(), **arguments}
    with pytest.raises(error, match=f"^{cls.__name__}: {match}"):
        cls(**arguments)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        (r"level 0 within one of level 1, got label 0 within \[0, 1\]",
         (X, torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1], [2, 1], [2, 1]]))),
        (r"level 1 within one of level 2, got label 4 within \[7, 8\]",
         (X, torch.tensor([[0, 4, 7], [0, 4, 7], [1, 4, 8], [1, 4, 8], [2, 5, 7], [2, 5, 7]]))),
        (r"got label 1 within \[0, 5\]",  # only together with the references
         (X, torch.stack([Y, Y * 0], 1), R, torch.tensor([[1, 5]] * 5))),
        (r"got `labels` \(6, 2\) and `ref_labels` \(5, 1\)", (X, torch.stack([Y, Y], 1), R, Z)),
    ],
)  # fmt: skip
def test_bad_levels(match, arguments):
    with pytest.raises(ValueError, match=f"^HAPLoss: .*{match}"):
        HAPLoss()(*arguments)


ONE_HOT = torch.nn.functional.one_hot(Y, 3)
MULTI_HOT = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]])


def with_memory(labels):
    return SmoothAPLoss().of_batch(CrossBatchMemory(9).references(X, labels, IDS))


def with_rule(labels):
    return SmoothAPLoss()(X, OtherCamera().columns(labels, {"cameras": IDS}), relevance=OtherCamera())


CALLS = {
    "memory": with_memory,
    "rule": with_rule,
    "references": lambda labels: SmoothAPLoss()(X, labels, R, labels[:5]),
    "nested": lambda labels: NestedLoss(SmoothAPLoss(), (2, 4))(X, labels),
    "whitening": lambda labels: SupervisedWhitening().fit(X, labels),
    **{name: lambda labels, name=name: as_batch_loss(loss_of(name))(X, labels) for name in (*OWN, *THIRD_PARTY)},
}


@pytest.mark.refusal
@pytest.mark.parametrize("labels", [ONE_HOT, MULTI_HOT], ids=["one-hot", "multi-hot"])
@pytest.mark.parametrize("name", CALLS)
def test_one_hot_and_multi_hot_labels_raise(name, labels):
    """Their first column is not the finest level of a class."""
    cure = r"give one-hot labels as labels.argmax\(1\), and multi-hot labels as tags with the rule SharedTags"
    with pytest.raises(ValueError, match=rf"^\w+: label levels must nest, .*; {cure}"):
        CALLS[name](labels)
    for other in (labels.float(), labels.bool()):
        with pytest.raises(TypeError, match=rf"^\w+: `labels` must be integers, got {other.dtype}; {cure}"):
            CALLS[name](other)


class Calling(torch.nn.Module):
    """Calls a loss with embeddings and labels, as a wrapper with a miner does."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss


@pytest.mark.refusal
def test_a_sum_that_changes_must_be_told_the_fraction():
    loss, _ = changing()
    with pytest.raises(ValueError, match=r"^Calling: a WeightedSum whose weights .* weights of pairs, ap, inner/fast;"):
        ThirdPartyLoss(Calling(loss))
    with pytest.raises(ValueError, match=r"^WeightedSum: `fraction` must be from 0 to 1, got 30\."):
        loss.of_batch(ranked_batch(X, Y, fraction=30))


@pytest.mark.refusal
def test_invalid_calls():
    with pytest.raises(ValueError, match=r"^HAPLoss: `relevant` must be levels >= 0, got -2\."):
        HAPLoss().from_scores(torch.randn(2, 3), torch.tensor([[0, 1, 2], [0, -2, 1]]))
    with pytest.raises(ValueError, match=r"^NestedLoss: `dims` must be at most .* embeddings, 4, got 8;"):
        NestedLoss(SmoothAPLoss(), (2, 8))(X, Y)
    with pytest.raises(TypeError, match=r"^NestedLoss: a nested loss cannot be computed from a score matrix"):
        NestedLoss(SmoothAPLoss(), (2,)).from_scores(torch.rand(2, 3), torch.rand(2, 3) > 0.5)
    infinite = X.clone()
    infinite[1, 3] = torch.inf
    with pytest.raises(ValueError, match=r"^SmoothAPLoss: `embeddings` must hold finite numbers"):
        NestedLoss(SmoothAPLoss(), (2, 4))(infinite, Y)
