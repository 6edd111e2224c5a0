"""Every loss equals its formula in loops, has the right gradient, depends neither on order nor on blocks, and is finite
for extreme settings."""

import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_retrieval import losses
from lightning_retrieval.losses import BlackboxMAPLoss, HAPLoss
from tests.lightning_retrieval.blocks import small_blocks, way_of_an_accelerator
from tests.lightning_retrieval.losses.oracles import (
    LABELS,
    TABLE,
    batch,
    is_graded,
    labels_for,
    make,
    random_lists,
    value_and_gradient,
    values_by_loops,
)

ALL = pytest.mark.parametrize("name", TABLE)
DIFFERENTIABLE = pytest.mark.parametrize("name", [name for name, case in TABLE.items() if case.differentiable])
WITHOUT_LISTS = {"LossSettings", "NestedLoss", "Schedule", "WeightedSum", "blackbox_rank"}
# They have no formula of their own, or tests of their own.
ELSEWHERE = {"BlackboxMAPLoss", "PairLoss", "RetrievalLoss", "ROADMAPLoss"}


def assert_lists_equal_loops(name, scores, relevant, candidate):
    each = make(name, reduction="none").from_scores(scores, relevant, candidate)
    expected = values_by_loops(name, scores.tolist(), relevant.int().tolist(), candidate.tolist())
    torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-7 if "full" in name else 1e-10, equal_nan=True)
    known = expected[~expected.isnan()]
    value = make(name).from_scores(scores, relevant, candidate)
    assert value.item() == pytest.approx(known.mean().item(), abs=1e-7)
    # The masks say which references are in a list, also if a query in a batch would be in its own list.
    with_self = make(name, reduction="none", include_self=True).from_scores(scores, relevant, candidate)
    torch.testing.assert_close(with_self, each, equal_nan=True)


def test_the_table_has_every_loss():
    made = {type(make(name)).__name__ for name in TABLE}
    assert made | ELSEWHERE | WITHOUT_LISTS == set(losses.__all__)


@ALL
def test_scores_against_loops(name):
    for _ in range(2):
        assert_lists_equal_loops(name, *random_lists(7, 11, name))


@ALL
def test_awkward_lists_against_loops(name):
    """Negative scores only, one positive, positives only, no positive, and exact ties (of binary fractions)."""
    scores, relevant, candidate = random_lists(6, 9, name)
    scores[1] = -scores[1].abs() - 0.01
    relevant[2] = 0
    relevant[2, 3] = 1
    candidate[2, 3] = True
    relevant[3] = 1
    relevant[4] = 0
    # Between a positive and a negative, SupAP counts a tie one half.
    scores[5] = torch.tensor([0.25, 0.25, 0.25, -0.5, -0.5, 0.0, 0.0, 0.75, 0.75])
    assert_lists_equal_loops(name, scores, relevant, candidate)


@ALL
def test_embeddings_against_loops(name):
    """Classes of unequal size and a singleton, in the batch and against references that contain copies of queries."""
    x, labels = batch([1, 2, 4, 3])
    r, ref_labels = batch([2, 0, 3, 5])
    ids, ref_ids = torch.arange(10), torch.tensor([3, 20, 1, 0, 21, 22, 9, 9, 23, 24])
    y, z = labels_for(name, labels), labels_for(name, ref_labels)
    for others, ref, ref_y, keywords, known in (
        ((), x, labels, {}, ~torch.eye(10, dtype=torch.bool)),
        ((r, z), r, ref_labels, {"ids": ids, "ref_ids": ref_ids}, ids[:, None] != ref_ids),
    ):
        fine = labels[:, None] == ref_y
        level = fine.int()
        if is_graded(name):
            level = level + (labels[:, None] // 2 == ref_y // 2)
        level = level * known
        scores = nn.functional.normalize(x) @ nn.functional.normalize(ref).T
        expected = values_by_loops(name, scores.tolist(), level.tolist(), known.tolist())
        each = make(name, reduction="none")(x, y, *others, **keywords)
        torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-7 if "full" in name else 1e-9, equal_nan=True)
        valid = ~expected.isnan()
        for reduction, wanted in (("mean", expected[valid].mean()), ("sum", expected[valid].sum())):
            value = make(name, reduction=reduction)(x, y, *others, **keywords)
            assert value.item() == pytest.approx(wanted.item(), abs=1e-6)
        # Class-balanced: the mean over classes of the mean over the queries of each.
        classes = [expected[valid & (labels == label)] for label in labels.unique()]
        balanced = torch.stack([values.mean() for values in classes if len(values)]).mean()
        value = make(name, class_balanced=True)(x, y, *others, **keywords)
        assert value.item() == pytest.approx(balanced.item(), abs=1e-6)


@pytest.mark.parametrize("name", ["smooth_ap", "hap", "recall_at_k"])  # which count the query itself differently
@pytest.mark.parametrize("include_self", [False, True])
def test_repeated_labels_and_ids_against_the_masks_of_all_pairs(name, include_self):
    """References have some that no query has."""
    labels, ref_labels = torch.randint(6, (12,)), torch.randint(8, (17,))
    ids, ref_ids = torch.randint(9, (12,)), torch.randint(12, (17,))
    x, r = torch.randn(12, 3, dtype=torch.float64), torch.randn(17, 3, dtype=torch.float64)
    loss = make(name, include_self=include_self, reduction="none")
    for other, other_labels, other_ids, references in (
        (x, labels, ids, {}),
        (r, ref_labels, ref_ids, {"ref_emb": r, "ref_labels": labels_for(name, ref_labels), "ref_ids": ref_ids}),
    ):
        is_self = ids[:, None] == other_ids
        candidate = include_self | ~is_self
        level = (labels[:, None] == other_labels).int()
        if is_graded(name):
            level += labels[:, None] // 2 == other_labels // 2
        positive = candidate & ~is_self if name == "recall_at_k" else candidate
        relevant = level * positive if is_graded(name) else (level * positive) > 0
        scores = nn.functional.normalize(x) @ nn.functional.normalize(other).T
        found = loss(x, labels_for(name, labels), ids=ids, **references)
        torch.testing.assert_close(found, loss.from_scores(scores, relevant, candidate), equal_nan=True)


@DIFFERENTIABLE
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(name, reduction):
    x, labels = batch([1, 2, 3], dim=3)
    loss, y = make(name, reduction=reduction, class_balanced=reduction != "none"), labels_for(name, labels)
    classes = labels
    if is_graded(name):
        classes = labels // 2
    has_positive = torch.tensor([(classes == label).sum() > 1 for label in classes])

    def function(x):
        value = loss(x, y)
        return value[has_positive] if reduction == "none" else value

    # H^- of SupAP has jumps, and slopes of 1 / tau: with a small eps, few differences of scores cross a jump.
    assert torch.autograd.gradcheck(function, x.requires_grad_(), eps=1e-7, atol=1e-5, rtol=1e-4)


@DIFFERENTIABLE
def test_gradcheck_with_references(name):
    x, labels = batch([2, 2], dim=2)
    r, ref_labels = batch([3, 2, 1], dim=2)
    arguments = (labels_for(name, labels), labels_for(name, ref_labels))
    ids, ref_ids = torch.arange(4), torch.tensor([9, 1, 8, 0, 7, 6])
    loss = make(name)
    inputs = (x.requires_grad_(), r.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x, r: loss(x, arguments[0], r, arguments[1], ids=ids, ref_ids=ref_ids),
        inputs,
        eps=1e-7,
        atol=1e-5,
        rtol=1e-4,
    )


@ALL
def test_float32_is_close_to_float64(name):
    x, labels = batch([3, 4, 2, 5, 1, 4], dim=8)
    x = x.float()
    y = labels_for(name, labels)
    value, gradient = value_and_gradient(make(name), x.double(), y)
    single, single_gradient = value_and_gradient(make(name), x, y)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(value.item(), abs=1e-5)
    torch.testing.assert_close(single_gradient.double(), gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@ALL
@settings(deadline=None, max_examples=3)
@given(labels=LABELS, data=st.data())
def test_order_of_rows_and_values_of_labels_do_not_matter(name, labels, data):
    order = torch.tensor(data.draw(st.permutations(range(len(labels)))))
    new_labels = torch.tensor(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=5, max_size=5, unique=True)))
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    y = labels_for(name, labels)
    renamed = new_labels[y]
    for loss in (make(name), make(name, class_balanced=True)):
        value, gradient = value_and_gradient(loss, x, y)
        moved, moved_gradient = value_and_gradient(loss, x[order], renamed[order])
        torch.testing.assert_close(moved, value, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-6, atol=1e-8)
        # Neither does the length of an embedding.
        scaled, _ = value_and_gradient(loss, x * (1 + torch.arange(len(x), dtype=x.dtype))[:, None], y)
        torch.testing.assert_close(scaled, value, rtol=1e-7, atol=1e-9)


@ALL
@settings(deadline=None, max_examples=4)
@given(labels=LABELS, elements=st.integers(1, 300), reduction=st.sampled_from(["mean", "sum", "none"]))
@pytest.mark.parametrize("references", [False, True])
def test_blocks_and_devices_do_not_matter(name, references, labels, elements, reduction):
    x, y = torch.randn(len(labels), 4, dtype=torch.float64), labels_for(name, torch.tensor(labels))
    others = (torch.randn(9, 4, dtype=torch.float64), labels_for(name, torch.arange(9) % 5)) if references else ()
    loss = make(name, reduction=reduction, class_balanced=True)
    value, gradient = value_and_gradient(loss, x, y, *others)
    for otherwise in (small_blocks(elements), way_of_an_accelerator()):
        with otherwise:
            found, found_gradient = value_and_gradient(loss, x, y, *others)
        torch.testing.assert_close(found, value, equal_nan=True)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in TABLE if not is_graded(name)])
def test_losses_without_levels_use_the_finest_level(name):
    x, labels = batch([3, 4, 2, 1])
    r, ref_labels = batch([2, 2, 2])
    for keywords in ({}, {"class_balanced": True}):
        loss = make(name, **keywords)
        levels, ref_levels = (torch.stack([y, y * 0, y * 0], 1) for y in (labels, ref_labels))
        assert torch.equal(loss(x, levels), loss(x, labels))
        assert torch.equal(loss(x, levels, r, ref_levels), loss(x, labels, r, ref_labels))


def numbers_of(cls):
    """The names of the settings of a loss whose default is a float."""
    return [name for name, each in inspect.signature(cls).parameters.items() if isinstance(each.default, float)]


LISTED = [cls for cls in map(losses.__dict__.get, sorted(set(losses.__all__) - WITHOUT_LISTS)) if numbers_of(cls)]
EXTREMES = [sign * size for sign in (1, -1) for size in (0.0, 1e-300, 1e-38, 1e-12, 1e12, 1e38)]


def is_finite_or_refused(cls, **changed):
    """Value and gradient are finite for a batch in which scores tie, or the settings are refused."""
    try:
        loss = cls(**changed)
    except ValueError:
        return True
    rows = torch.randn(12, 4)
    rows[6:9] = rows[:3]
    rows[9] = -rows[0]
    labels = torch.arange(12) % 3
    targets = {
        BlackboxMAPLoss: rows > 0,
        HAPLoss: torch.stack([torch.arange(12), labels, labels % 2], 1),  # no query has an item of the finest level
    }.get(cls, labels)
    value, gradient = value_and_gradient(loss, rows, targets)
    return bool(value.isfinite()) and bool(gradient.isfinite().all())


@pytest.mark.refusal
@pytest.mark.parametrize("cls", LISTED)
def test_extreme_settings_are_refused_or_give_a_finite_loss_and_gradient(cls):
    """One setting at a time; and two at the ends of the ranges of all of them."""
    found = [{name: value} for name in numbers_of(cls) for value in EXTREMES]
    for pair in itertools.combinations(numbers_of(cls), 2):
        found += [dict(zip(pair, values)) for values in itertools.product((1e-12, 1e12), repeat=2)]
    if cls is HAPLoss:
        found += [{"hrank_slopes": slopes} for slopes in itertools.product((-1e12, 0.5, 1e12), repeat=3)]
    assert [changed for changed in found if not is_finite_or_refused(cls, **changed)] == []
