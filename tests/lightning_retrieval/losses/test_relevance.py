"""Losses by a rule of relevance are those of the score matrix with the rule's masks, which are made pair by pair."""

import functools

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from lightning_retrieval import GalleryOnly, OtherCamera, SharedTags
from lightning_retrieval.losses import (
    BlackboxRecallLoss,
    CalibrationLoss,
    HAPLoss,
    NestedLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    WeightedSum,
    blockwise,
    lists,
)
from lightning_retrieval.losses.batch_loss import ranked_batch
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


@BY_RULE
@pytest.mark.parametrize("name", MAKE)
def test_every_loss_is_that_of_the_whole_matrices(name, rule):
    for with_memory in (False, True):
        case, loss = Case(rule, with_memory), MAKE[name]()
        assert_same(case.by_rule(loss), case.of_scores(loss))


@BY_RULE
def test_settings_of_a_loss_keep_their_meaning(rule, monkeypatch):
    """In blocks of a few queries, too; the lists of "gallery only" are empty for some queries."""
    for settings in ({"reduction": "sum"}, {"reduction": "none"}, {"include_self": True}):
        for limits in ({}, {"BLOCK_ELEMENTS": 60, "GROUP_ELEMENTS": 120}):
            for name, elements in limits.items():
                monkeypatch.setattr(blockwise, name, elements)
            monkeypatch.setattr(lists, "COUNTED_ELEMENTS", 60 if limits else 1 << 22)
            case, loss = Case(rule, True, include_self="include_self" in settings), SmoothAPLoss(0.1, **settings)
            assert_same(case.by_rule(loss), case.of_scores(loss))


@BY_RULE
def test_prefixes_of_embeddings(rule):
    case, inner = Case(rule, True), SmoothAPLoss(0.1)
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


@pytest.mark.refusal
def test_losses_that_cannot_follow_a_rule():
    x, tags = torch.randn(4, 3), torch.tensor([[0], [0], [1], [1]])
    for error, words, loss in (
        (TypeError, r"HAPLoss: `relevance` must be None, .* got SharedTags\(at_least=1\); use", HAPLoss()),
        (
            ValueError,
            r"SmoothAPLoss: `class_balanced` .* and SharedTags\(at_least=1\) has no classes; set class_bal",
            NestedLoss(SmoothAPLoss(class_balanced=True), (3,)),
        ),
        (
            TypeError,
            r"ContrastiveLoss: a third-party loss gets labels only, .* got SharedTags\(at_least=1\); use",
            WeightedSum({"pairs": (1.0, ContrastiveLoss())}),
        ),
    ):
        with pytest.raises(error, match=f"^{words}"):
            loss(x, tags, relevance=SharedTags())
    with pytest.raises(TypeError, match=r"^SmoothAPLoss: `relevance` must be an instance of Relevance, got 'tags'"):
        SmoothAPLoss()(x, tags, relevance="tags")


@pytest.mark.refusal
def test_columns_of_a_wrong_form():
    x, pairs = torch.randn(3, 2), torch.tensor([[0, 1], [0, 2], [1, 1]])
    for words, rule, columns in (
        (r"`labels` must be tags >= 0, or -1 in rows with fewer tags, got -2", SharedTags(), pairs - 2),
        (r"`labels` must be the columns that SharedTags reads, .* for tags, got \(3,\);", SharedTags(), pairs[:, 0]),
        (r"`labels` .* shape \(rows, 2\) for labels, cameras, got \(3, 1\);", OtherCamera(), pairs[:, :1]),
        (r"`roles` must be from 0 to 3 .* got 1 to 4", GalleryOnly(), torch.tensor([[0, 1], [0, 4], [1, 2]])),
    ):
        with pytest.raises(ValueError, match=f"^SmoothAPLoss: {words}"):
            SmoothAPLoss()(x, columns, relevance=rule)
    with pytest.raises(
        ValueError, match=r"`ref_labels` must have as many columns as `labels`, got \(3, 1\) against \(3, 2\)"
    ):
        SmoothAPLoss().of_batch(ranked_batch(x, pairs, x, pairs[:, :1], relevance=SharedTags()))
