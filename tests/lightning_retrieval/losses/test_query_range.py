"""Losses of ranges of the queries, as processes compute them: values and gradients add up to those of the batch.

The processes are calls one after another, with `total` answered as an all-reduce would: only where all have a tensor of
one shape.
"""

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import nn

from lightning_retrieval.losses import (
    BlackboxRecallLoss,
    CalibrationLoss,
    NestedLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
    blockwise,
)
from lightning_retrieval.losses.batch_loss import QueryRange, ranked_batch
from lightning_retrieval.losses.lists import EmbeddingLists
from tests.lightning_retrieval.losses.oracles import TABLE, labels_for
from tests.lightning_retrieval.relevance_rules import Coarse


class Learned(SupAPLoss):
    """A subclass with a parameter of its own."""

    def __init__(self, **keywords):
        super().__init__(tau=0.2, **keywords)
        self.stretch = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def query_losses(self, block):
        return super().query_losses(replace(block, scores=block.scores * self.stretch))


class LearnedMargins(CalibrationLoss):
    """A loss over the pairs of all queries, with a parameter of its own."""

    def __init__(self, **keywords):
        super().__init__(pair_mean="nonzero", **keywords)
        self.stretch = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def pair_sums(self, block):
        return super().pair_sums(replace(block, scores=block.scores * self.stretch))


def weighted(**keywords):
    """Two terms that each ask for totals, one of them within another sum."""
    inner = WeightedSum({"all": (0.5, CalibrationLoss(pair_mean="all", **keywords)), "own": (1.0, Learned(**keywords))})
    recall = BlackboxRecallLoss(pair_mean="all", **keywords)
    return WeightedSum({"inner": (2.0, inner), "recall": (-0.3, recall), "ap": (1.0, SmoothAPLoss(0.1, **keywords))})


PER_QUERY = {name: case.make for name, case in TABLE.items()} | {
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
    "nested all": lambda **keywords: NestedLoss(CalibrationLoss(pair_mean="all", **keywords), (2, 5)),
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

    if not references:
        return x, labels_for(name, labels), None, {"ids": ids}
    remembered, of = torch.randn(6, 5, dtype=torch.float64), torch.tensor([1, 1, 2, 3, 5, 5])
    keywords = {"ids": ids, "ref_ids": torch.cat([ids, 50 + torch.arange(6)])}
    ref_labels = labels_for(name, torch.cat([labels, of]))
    return x, labels_for(name, labels), remembered, {"ref_labels": ref_labels, **keywords}


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
    assert totals == {"weighted sum": 2, "nested all": 2}.get(name, int(name in OVER_ALL_PAIRS))


@pytest.mark.parametrize("name", MAKE)
def test_ranges_add_up_with_references(name):
    check(MAKE[name](), *batch(name, references=True))


@pytest.mark.filterwarnings("ignore:.*no row of the batch has a positive")  # before the counts are exchanged
@pytest.mark.parametrize("name", ["smooth_ap", "calibration nonzero", "nested"])
def test_ranges_add_up_under_a_rule(name):
    """Each range counts the positives of its own queries; the counts are exchanged."""
    x, labels, remembered, keywords = batch(name, references=True)
    rule = Coarse(size=2)
    columns, keywords["ref_labels"] = labels[:, None], keywords["ref_labels"][:, None]
    totals = check(MAKE[name](), x, columns, remembered, {**keywords, "relevance": rule})
    assert totals == 1 + (name in OVER_ALL_PAIRS)


@pytest.mark.parametrize("self_counts", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("form", ["batch", "ids", "references", "references with ids"])
def test_positives_are_counted_as_the_masks_say(form, graded, self_counts):
    """Labels and ids repeat, and references have some that no query has."""
    for _ in range(20):
        labels, ref_labels = torch.randint(6, (12,)), torch.randint(8, (17,))
        ids, ref_ids = torch.randint(9, (12,)), torch.randint(12, (17,))
        if graded:
            labels, ref_labels = (torch.stack([values, values // 3], 1) for values in (labels, ref_labels))
        given = {"embeddings": torch.randn(12, 3), "labels": labels}
        if form.endswith("ids"):
            given["ids"] = ids
        if form.startswith("references"):
            given |= {"ref_emb": torch.randn(17, 3), "ref_labels": ref_labels}
        if form == "references with ids":
            given["ref_ids"] = ref_ids
        include_self, self_is_positive = self_counts
        lists = EmbeddingLists(
            ranked_batch(**given), include_self=include_self, self_is_positive=self_is_positive, graded=graded
        )
        relevant, _ = lists.masks(torch.arange(12))
        assert lists.count_positives()[0].tolist() == (relevant > 0).sum(1).tolist()


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


@pytest.mark.refusal
def test_what_has_no_ranges():
    """Each process would add up the whole of a third-party loss."""
    x, labels, _, keywords = batch("", False)
    loss = WeightedSum({"ap": (1.0, SmoothAPLoss()), "pml": (1.0, ContrastiveLoss())})
    keywords["queries"] = QueryRange(0, 5, lambda values: values)
    with pytest.raises(TypeError, match=r"^ContrastiveLoss: a third-party loss is not a sum .*; omit `queries`\."):
        loss(x, labels, **keywords)
    with pytest.raises(ValueError, match=r"^SmoothAPLoss: `reduction` must be 'mean' or 'sum' .* got 'none'\."):
        SmoothAPLoss(reduction="none")(x, labels, **keywords)
