"""Losses of some queries of a batch, as each of several processes computes them: values and gradients add up to those
of the batch.

The processes are calls one after another; a sum over all processes is answered as an all-reduce would.
"""

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_retrieval.losses import (
    BlackboxRecallLoss,
    CalibrationLoss,
    NestedLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.losses.oracles import TABLE, labels_for, value_of_queries
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


MAKE = {name: case.make for name, case in TABLE.items()} | {
    "roadmap": functools.partial(ROADMAPLoss, 0.3),
    "learned": Learned,
    "nested": lambda **keywords: NestedLoss(SmoothAPLoss(0.1, **keywords), (2, 5), weights=(0.5, 2.0)),
    # over all pairs, which are counted over all processes
    "blackbox_recall all": functools.partial(BlackboxRecallLoss, pair_mean="all"),
    "calibration all": functools.partial(CalibrationLoss, pair_mean="all"),
    "calibration nonzero": functools.partial(CalibrationLoss, pair_mean="nonzero"),
    "learned margins": LearnedMargins,
    "nested all": lambda **keywords: NestedLoss(CalibrationLoss(pair_mean="all", **keywords), (2, 5)),
    "weighted sum": weighted,
}
OPTIONS = ({"reduction": "sum"}, {"class_balanced": True}, {"include_self": True})
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


def evaluate(loss, x, labels, remembered, keywords, queries=None):
    """Value, and the gradients of the embeddings and of the loss's parameters."""
    x = x.clone().requires_grad_()
    if remembered is not None:
        keywords = {**keywords, "ref_emb": torch.cat([x, remembered])}
    compute = loss
    if queries is not None:
        compute = functools.partial(value_of_queries, *queries, loss)
    value = compute(x, labels, **keywords)
    gradients = torch.autograd.grad(value, [x, *loss.parameters()])
    return value.detach(), *gradients


def parts_of(loss, *arguments):
    """The results of each range: first to record what it sums over all, then with the sums."""
    results, recorded = [], []
    for begin, end in CUT:
        recorded.append([])

        def record(values, own=recorded[-1]):
            own.append(values.clone())
            return values

        results.append(evaluate(loss, *arguments, (begin, end, record)))
    # A process that asks for another number of sums than the others would wait for ever.
    totals = [torch.stack(parts).sum(0) for parts in zip(*recorded, strict=True)]
    if not totals:
        return results
    return [evaluate(loss, *arguments, (begin, end, functools.partial(next_of, iter(totals)))) for begin, end in CUT]


def next_of(totals, values):
    return next(totals)


def check(loss, *arguments):
    whole = evaluate(loss, *arguments)
    for value, *parts in zip(whole, *parts_of(loss, *arguments), strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), value, rtol=0, atol=1e-12)
        assert value.abs().sum() > 0


@pytest.mark.parametrize("name", MAKE)
def test_ranges_add_up(name):
    """Value, gradient of the embeddings and of parameters, alone and with references."""
    for references in (False, True):
        check(MAKE[name](), *batch(name, references))


@pytest.mark.parametrize("name", ["smooth_ap", "calibration", "blackbox_ap", "learned", "nested"])
def test_ranges_add_up_for_each_reduction(name):
    for option in OPTIONS:
        check(MAKE[name](**option), *batch(name, references=False))


@pytest.mark.filterwarnings("ignore:.*no row of the batch has a positive")  # before the counts are exchanged
@pytest.mark.parametrize("name", ["smooth_ap", "calibration nonzero", "nested"])
def test_ranges_add_up_under_a_rule(name):
    """Each range counts the positives of its own queries; the counts are exchanged."""
    x, labels, remembered, keywords = batch(name, references=True)
    columns, keywords["ref_labels"] = labels[:, None], keywords["ref_labels"][:, None]
    check(MAKE[name](), x, columns, remembered, {**keywords, "relevance": Coarse(size=2)})


def test_the_terms_of_a_sum_add_up_too():
    loss, arguments = ROADMAPLoss(0.3), batch("roadmap", True)
    evaluate(loss, *arguments)
    whole, parts = loss.terms, []
    for begin, end in CUT:
        evaluate(loss, *arguments, (begin, end, lambda values: values))
        parts.append(loss.terms)
    for name, value in whole.items():
        assert sum(part[name] for part in parts).item() == pytest.approx(value.item(), abs=1e-12)


@pytest.mark.parametrize("name", ["smooth_ap", "calibration nonzero", "blackbox_ap", "learned margins"])
def test_ranges_add_up_where_each_is_computed_in_blocks(name):
    with small_blocks(40):
        check(MAKE[name](), *batch(name, references=True))


@pytest.mark.parametrize("name", ["smooth_ap", "hap", "calibration", "nested"])
def test_a_range_without_any_positive_gives_zero(name):
    """Rows 1 to 3 have no positive, so they take part in no mean; the batch has some, so nobody warns."""
    loss = MAKE[name]()
    x, labels, _, keywords = batch(name, False)
    labels = labels.clone()
    labels[1:4] = torch.tensor([[7, 7], [8, 8], [9, 9]]) if labels.ndim == 2 else torch.tensor([7, 8, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, *gradients = evaluate(loss, x, labels, None, keywords, (1, 4, lambda values: values))
    assert value.item() == 0
    for gradient in gradients:
        assert not gradient.any()
