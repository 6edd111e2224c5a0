"""Losses by a rule of relevance are those of the score matrix with the rule's masks, which are made pair by pair."""

import functools

import pytest
import torch

from lightning_retrieval import SharedTags
from lightning_retrieval.losses import (
    BlackboxRecallLoss,
    CalibrationLoss,
    NestedLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    WeightedSum,
)
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.losses.oracles import TABLE, is_graded
from tests.lightning_retrieval.relevance_rules import RULES, masks_by_pairs, random_columns

MAKE = {name: case.make for name, case in TABLE.items() if not is_graded(name)} | {
    "roadmap": functools.partial(ROADMAPLoss, 0.3),
    "calibration all": functools.partial(CalibrationLoss, pair_mean="all"),
    "calibration nonzero": functools.partial(CalibrationLoss, pair_mean="nonzero"),
    "blackbox_recall all": functools.partial(BlackboxRecallLoss, pair_mean="all"),
    "weighted sum": lambda **settings: WeightedSum(
        {"pairs": (0.5, CalibrationLoss(pair_mean="all")), "ap": (2.0, SmoothAPLoss(0.1, **settings))}
    ),
}
ROWS, REMEMBERED = 17, 9
BY_RULE = pytest.mark.parametrize("rule", RULES)


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


class Case:
    """A batch, alone or with the rows of a memory; `relevant` and `candidate` are the masks of the whole matrix."""

    def __init__(self, rule, with_memory, include_self=False):
        self.x, self.memory = torch.randn(ROWS, 5).double().requires_grad_(), torch.randn(REMEMBERED, 5).double()
        self.columns, self.ids = random_columns(rule, ROWS), torch.arange(ROWS)
        self.settings = {"relevance": RULES[rule].rule}
        ref_columns, ref_ids = self.columns, self.ids
        self.with_memory = with_memory
        if with_memory:
            ref_columns = torch.cat([self.columns, random_columns(rule, REMEMBERED)])
            ref_ids = torch.cat([self.ids, torch.tensor([0, 3, 3, 50, 51, 52, 53, 54, 55])])
            self.settings |= {"ref_labels": ref_columns, "ids": self.ids, "ref_ids": ref_ids}
        self.relevant, self.candidate = masks_by_pairs(rule, self.columns, ref_columns)
        if not include_self:
            self.candidate = self.candidate & (self.ids[:, None] != ref_ids)
            self.relevant = self.relevant & self.candidate

    def references(self, dim=None):
        references = self.x[:, :dim]
        if self.with_memory:
            references = torch.cat([references, self.memory[:, :dim]])
        return references

    def by_rule(self, loss):
        """Value and gradient by the rule."""
        settings = self.settings
        if self.with_memory:
            settings = {**settings, "ref_emb": self.references()}
        value = loss(self.x, self.columns, **settings)
        return value, *torch.autograd.grad(value.nansum(), self.x)

    def of_scores(self, loss, dim=None):
        """Value and gradient of the score matrix of the first `dim` dimensions."""
        value = loss.from_scores(unit(self.x[:, :dim]) @ unit(self.references(dim)).T, self.relevant, self.candidate)
        return value, *torch.autograd.grad(value.nansum(), self.x)


def assert_same(found, expected):
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=1e-12, equal_nan=True)
        assert other.nan_to_num().abs().sum() > 0


@pytest.mark.parametrize("name", MAKE)
def test_every_loss_is_that_of_the_whole_matrices(name):
    """Tags, which two images share in many ways, and lists that are empty for some queries."""
    for rule in ("two shared tags", "gallery only"):
        for with_memory in (False, True):
            case, loss = Case(rule, with_memory), MAKE[name]()
            assert_same(case.by_rule(loss), case.of_scores(loss))


@BY_RULE
def test_every_rule_and_the_settings_of_a_loss(rule):
    """In blocks of a few queries, too."""
    for settings in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"include_self": True}):
        for elements in (60, 1 << 20):
            case, loss = Case(rule, True, include_self="include_self" in settings), SmoothAPLoss(0.1, **settings)
            with small_blocks(elements):
                assert_same(case.by_rule(loss), case.of_scores(loss))


def test_prefixes_of_embeddings():
    case, inner = Case("shared tags", True), SmoothAPLoss(0.1)
    parts = [case.of_scores(inner, dim) for dim in (2, 5)]
    expected = [part + 0.5 * other for part, other in zip(*parts)]
    assert_same(case.by_rule(NestedLoss(inner, (2, 5), weights=(1.0, 0.5))), expected)


@pytest.mark.parametrize("rule", ["other camera", "gallery only", "near in time"])
def test_each_class_has_the_same_weight(rule):
    case = Case(rule, True)
    value, _ = case.by_rule(SmoothAPLoss(0.1, class_balanced=True))
    each, _ = case.of_scores(SmoothAPLoss(0.1, reduction="none"))
    by_class = [each[case.columns[:, 0] == label].nanmean() for label in case.columns[:, 0].unique()]
    assert value.item() == pytest.approx(torch.stack(by_class).nanmean().item(), abs=1e-12)


@pytest.mark.refusal  # labels are annotated as signed integers
def test_labels_of_every_kind_of_integer_are_columns():
    case = Case("other camera", True)
    case.columns = case.columns.int()
    case.settings["ref_labels"] = case.settings["ref_labels"].to(torch.uint8)
    assert_same(case.by_rule(SmoothAPLoss()), case.of_scores(SmoothAPLoss()))
    x, tags = torch.randn(4, 3), torch.tensor([[0, 2], [0, 1], [1, 1], [2, 1]])
    of_bytes = SmoothAPLoss()(x, tags.byte(), relevance=SharedTags())
    assert torch.equal(of_bytes, SmoothAPLoss()(x, tags, relevance=SharedTags()))
