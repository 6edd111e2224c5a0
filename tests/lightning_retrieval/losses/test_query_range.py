"""Losses of ranges of the queries, as processes compute them: values and gradients add up to those of the batch.

The processes are calls one after another, with `total` answered as an all-reduce would: only where all have a tensor of
one shape.
"""

import functools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import nn

from lightning_retrieval import losses
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    LogRankLoss,
    NestedLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
    blockwise,
)
from lightning_retrieval.losses.batch_loss import QueryRange


class Learned(SupAPLoss):
    """A subclass with a parameter of its own."""

    def __init__(self, **keywords):
        super().__init__(tau=0.2, **keywords)
        self.stretch = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def query_losses(self, lists):
        return super().query_losses(replace(lists, scores=lists.scores * self.stretch))


class LearnedMargins(CalibrationLoss):
    """A loss over the pairs of all queries, with a parameter of its own."""

    def __init__(self, **keywords):
        super().__init__(pair_mean="nonzero", **keywords)
        self.stretch = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def pair_sums(self, lists):
        return super().pair_sums(replace(lists, scores=lists.scores * self.stretch))


def weighted(**keywords):
    """Two terms that each ask for totals, one of them within another sum."""
    inner = WeightedSum({"all": (0.5, CalibrationLoss(pair_mean="all", **keywords)), "own": (1.0, Learned(**keywords))})
    recall = BlackboxRecallLoss(pair_mean="all", **keywords)
    return WeightedSum({"inner": (2.0, inner), "recall": (-0.3, recall), "ap": (1.0, SmoothAPLoss(0.1, **keywords))})


PER_QUERY = {
    "smooth_ap": functools.partial(SmoothAPLoss, 0.1),
    "sup_ap": SupAPLoss,
    "hap": HAPLoss,
    "hap slopes": functools.partial(HAPLoss, 2.0, hrank_slopes=(25.0, 0.5, 10.0)),
    "fast_ap": functools.partial(FastAPLoss, 7),
    "quantized_ap": functools.partial(QuantizedAPLoss, 13),
    "quantized_ap simplified": functools.partial(QuantizedAPLoss, tie_aware="simplified"),
    "quantized_ap full": functools.partial(QuantizedAPLoss, 4, tie_aware="full"),
    "blackbox_ap": BlackboxAPLoss,
    "blackbox_recall": functools.partial(BlackboxRecallLoss, 4.0, 0.1, weighting="loglog"),
    "calibration": CalibrationLoss,
    "recall_at_k": functools.partial(RecallAtKLoss, (1, 2, 30), tau_rank=0.05, tau_k=(1.0, 0.5, 2.0)),
    "log_rank": functools.partial(LogRankLoss, 0.1),
    "roadmap": functools.partial(ROADMAPLoss, 0.3),
    "learned": Learned,
    "nested": lambda **keywords: NestedLoss(SmoothAPLoss(0.1, **keywords), (2, 5), weights=(0.5, 2.0)),
}
OVER_ALL_PAIRS = {
    "blackbox_recall all": functools.partial(BlackboxRecallLoss, pair_mean="all"),
    "calibration all": functools.partial(CalibrationLoss, pair_mean="all"),
    "calibration nonzero": functools.partial(CalibrationLoss, pair_mean="nonzero"),
    "roadmap over all pairs": lambda **keywords: ROADMAPLoss(
        0.3, SupAPLoss(**keywords), CalibrationLoss(pair_mean="nonzero", **keywords)
    ),
    "learned margins": LearnedMargins,
    "weighted sum": weighted,
}
MAKE = PER_QUERY | OVER_ALL_PAIRS
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "class_balanced": {"class_balanced": True},
    "include_self": {"include_self": True},
}
CASES = [
    (name, option)
    for name in MAKE
    for option, settings in OPTIONS.items()
    if not settings or name in ("smooth_ap", "calibration", "blackbox_ap", "learned", "nested")
]
ROWS = 11
CUT = [(0, 5), (5, 6), (6, 6), (6, ROWS)]  # unequal, and one without a row


def batch(name, references):
    """Classes of 1, 2, 3 and 5 rows; and the arguments of a call, with a memory's references where wanted."""
    labels = torch.tensor([2, 0, 3, 1, 1, 3, 2, 3, 2, 3, 3])
    x, ids = torch.randn(ROWS, 5, dtype=torch.float64), torch.arange(ROWS)

    def levels(labels):
        return torch.stack([labels, labels // 2], 1) if name.startswith("hap") else labels

    if not references:
        return x, levels(labels), None, {"ids": ids}
    remembered, of = torch.randn(6, 5, dtype=torch.float64), torch.tensor([1, 1, 2, 3, 5, 5])
    keywords = {"ids": ids, "ref_ids": torch.cat([ids, 50 + torch.arange(6)])}
    return x, levels(labels), remembered, {"ref_labels": levels(torch.cat([labels, of])), **keywords}


def evaluate(loss, x, labels, remembered, keywords, queries):
    """Value, and the gradients of the embeddings and of the loss's parameters."""
    x = x.clone().requires_grad_()
    if remembered is not None:
        keywords = {**keywords, "ref_emb": torch.cat([x, remembered])}
    parameters = list(loss.parameters())
    value = loss(x, labels, queries=queries, **keywords)
    gradients = torch.autograd.grad(value, [x, *parameters])
    return value.detach(), *gradients


def parts_of(loss, *arguments):
    """The results of each range: first to record what it sums over all, then with the sums; and the number of sums."""
    recorded = []
    for begin, end in CUT:
        recorded.append([])

        def record(values, own=recorded[-1]):
            own.append(values.clone())
            return values

        first = evaluate(loss, *arguments, QueryRange(begin, end, record))
        recorded[-1] = recorded[-1], first
    totals = [
        torch.stack(parts).sum(0) for parts in zip(*(own for own, _ in recorded), strict=True)
    ]  # all of one shape
    if not totals:
        return [first for _, first in recorded], 0
    results = []
    for (begin, end), (own, _) in zip(CUT, recorded):
        left = iter(zip(own, totals, strict=True))

        def total(values, left=left):
            had, summed = next(left)
            assert torch.equal(values, had)
            return summed

        results.append(evaluate(loss, *arguments, QueryRange(begin, end, total)))
        assert next(left, None) is None
    return results, len(totals)


def test_every_loss_is_made_above():
    made = {type(make()).__name__ for make in MAKE.values()} - {"Learned", "LearnedMargins"}
    other = {"BlackboxMAPLoss", "PairLoss", "RetrievalLoss", "blackbox_rank"}  # the first takes no embeddings
    assert made | other == set(losses.__all__)


def check(loss, *arguments):
    whole = evaluate(loss, *arguments, None)
    results, totals = parts_of(loss, *arguments)
    for value, *parts in zip(whole, *results, strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), value, rtol=0, atol=1e-12)
        assert value.abs().sum() > 0
    return totals


@pytest.mark.parametrize(("name", "option"), CASES)
def test_ranges_add_up(name, option):
    """Value, gradient of the embeddings and of parameters; the pairs are counted over all ranges."""
    totals = check(MAKE[name](**OPTIONS[option]), *batch(name, references=False))
    assert totals == {"weighted sum": 2}.get(name, int(name in OVER_ALL_PAIRS))


@pytest.mark.parametrize("name", MAKE)
def test_ranges_add_up_with_references(name):
    check(MAKE[name](), *batch(name, references=True))


def test_the_terms_of_a_sum_add_up_too():
    loss, arguments = ROADMAPLoss(0.3), batch("roadmap", True)
    evaluate(loss, *arguments, None)
    whole, parts = loss.terms, []
    for begin, end in CUT:
        evaluate(loss, *arguments, QueryRange(begin, end, lambda values: values))
        parts.append(loss.terms)
    for name, value in whole.items():
        assert sum(part[name] for part in parts).item() == pytest.approx(value.item(), abs=1e-12)


@pytest.mark.parametrize("name", ["smooth_ap", "calibration nonzero", "blackbox_ap", "learned margins"])
def test_ranges_add_up_where_each_is_computed_in_blocks(name, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 40)
    check(MAKE[name](), *batch(name, references=True))


@pytest.mark.parametrize("name", ["smooth_ap", "hap", "fast_ap", "blackbox_recall", "calibration", "nested"])
def test_a_range_without_any_positive_gives_zero(name):
    """Rows 1 to 3 have no positive, so they take part in no mean; the batch has some, so nobody warns."""
    loss = MAKE[name]()
    x, labels, _, keywords = batch(name, False)
    labels = labels.clone()
    labels[1:4] = torch.tensor([[7, 7], [8, 8], [9, 9]]) if labels.ndim == 2 else torch.tensor([7, 8, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, *gradients = evaluate(loss, x, labels, None, keywords, QueryRange(1, 4, lambda values: values))
    assert value.item() == 0
    for gradient in gradients:
        assert not gradient.any()


def test_each_range_depends_on_its_own_queries_only():
    """The others' rows are in its lists, but no query of theirs is: their lists may be anything."""
    x, labels, remembered, keywords = batch("smooth_ap", True)
    loss, query_range = SmoothAPLoss(0.1), QueryRange(0, 5, lambda values: values)
    each = SmoothAPLoss(0.1, reduction="none")(
        x, labels, torch.cat([x, remembered]), keywords["ref_labels"], ids=keywords["ids"], ref_ids=keywords["ref_ids"]
    )
    value = evaluate(loss, x, labels, remembered, keywords, query_range)[0]
    valid = ~each.isnan()
    assert value.item() == pytest.approx(each[:5][valid[:5]].sum().item() / int(valid.sum()), abs=1e-12)
    assert math.isfinite(value)


@pytest.mark.refusal
def test_third_party_losses_have_no_ranges():
    """Each process would add up the whole of it."""
    loss = WeightedSum({"ap": (1.0, SmoothAPLoss()), "pml": (1.0, ContrastiveLoss())})
    x, labels, _, keywords = batch("", False)
    with pytest.raises(
        TypeError, match=r"^ContrastiveLoss: a third-party loss is not a sum over queries, .*; omit `queries`\."
    ):
        loss(x, labels, queries=QueryRange(0, 5, lambda values: values), **keywords)


@pytest.mark.refusal
def test_values_of_each_query_cannot_be_added_up():
    x, labels, _, keywords = batch("", False)
    with pytest.raises(ValueError, match=r"^SmoothAPLoss: `reduction` must be 'mean' or 'sum' .* got 'none'\."):
        SmoothAPLoss(reduction="none")(x, labels, queries=QueryRange(0, 5, lambda values: values), **keywords)
