"""Every loss equals its formula in loops, has the right gradient, depends neither on order nor on blocks, and is finite
for settings so small or so large that float32 cannot represent the formula."""

import itertools
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_retrieval import QueryExpansion, RetrievalMetrics, blackbox_rank, losses
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    CalibrationLoss,
    NestedLoss,
    SmoothAPLoss,
    WeightedSum,
    blockwise,
)
from tests.awkward_values.calls import annotations
from tests.awkward_values.losses import CALLS
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


def assert_lists_equal_loops(name, scores, relevant, candidate):
    each = make(name, reduction="none").from_scores(scores, relevant, candidate)
    expected = values_by_loops(name, scores.tolist(), relevant.int().tolist(), candidate.tolist())
    torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-7 if "full" in name else 1e-10, equal_nan=True)
    known = expected[~expected.isnan()]
    value = make(name).from_scores(scores, relevant, candidate)
    assert value.item() == pytest.approx(known.mean().item(), abs=1e-7)


def test_the_table_has_every_loss():
    made = {type(make(name)).__name__ for name in TABLE}
    other = {
        "After",
        "Before",
        "BlackboxMAPLoss",
        "NestedLoss",
        "PairLoss",
        "Ramp",
        "RetrievalLoss",
        "ROADMAPLoss",
        "WeightedSum",
        "blackbox_rank",
    }
    missing = set(losses.__all__) - made - other
    assert not missing, f"add to TABLE of oracles.py: {missing}"
    assert made | other <= set(losses.__all__)


@ALL
def test_scores_against_loops(name):
    for _ in range(4):
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
        # The same from the score matrix.
        relevant = level if is_graded(name) else level > 0
        from_scores = make(name, reduction="none").from_scores(scores, relevant, known)
        torch.testing.assert_close(from_scores, each, rtol=1e-9, atol=1e-9, equal_nan=True)
        valid = ~expected.isnan()
        for reduction, wanted in (("mean", expected[valid].mean()), ("sum", expected[valid].sum())):
            value = make(name, reduction=reduction)(x, y, *others, **keywords)
            assert value.item() == pytest.approx(wanted.item(), abs=1e-6)
        # Class-balanced: the mean over classes of the mean over the queries of each.
        classes = [expected[valid & (labels == label)] for label in labels.unique()]
        balanced = torch.stack([values.mean() for values in classes if len(values)]).mean()
        value = make(name, class_balanced=True)(x, y, *others, **keywords)
        assert value.item() == pytest.approx(balanced.item(), abs=1e-6)


@DIFFERENTIABLE
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(name, reduction):
    x, labels = batch([1, 2, 4], dim=3)
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
    x, labels = batch([2, 3], dim=3)
    r, ref_labels = batch([3, 4, 1], dim=3)
    arguments = (labels_for(name, labels), labels_for(name, ref_labels))
    ids, ref_ids = torch.arange(5), torch.tensor([9, 1, 8, 0, 7, 3, 6, 5])
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
@settings(deadline=None, max_examples=6)
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
@settings(deadline=None, max_examples=6)
@given(labels=LABELS, elements=st.integers(1, 300), reduction=st.sampled_from(["mean", "sum", "none"]))
@pytest.mark.parametrize("references", [False, True])
def test_blocks_do_not_matter(name, references, labels, elements, reduction):
    x, y = torch.randn(len(labels), 4, dtype=torch.float64), labels_for(name, torch.tensor(labels))
    others = (torch.randn(9, 4, dtype=torch.float64), labels_for(name, torch.arange(9) % 5)) if references else ()
    loss = make(name, reduction=reduction, class_balanced=True)
    value, gradient = value_and_gradient(loss, x, y, *others)
    with patch.object(blockwise, "BLOCK_ELEMENTS", elements):
        cut, cut_gradient = value_and_gradient(loss, x, y, *others)
    torch.testing.assert_close(cut, value, equal_nan=True)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, case in TABLE.items() if case.in_unit_interval])
@settings(deadline=None, max_examples=10)
@given(labels=LABELS, seed=st.integers(0, 10**6))
def test_value_lies_between_0_and_1(name, labels, seed):
    x = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    each = make(name, reduction="none")(x, labels_for(name, torch.tensor(labels)))
    each = each[~each.isnan()]
    assert ((each >= -1e-12) & (each <= 1 + 1e-12)).all()


# The full tie-aware form is not 0 for a perfect ranking, since it replaces a harmonic sum by a logarithm.
@pytest.mark.parametrize("name", [name for name in TABLE if name != "quantized_ap full"])
@settings(deadline=None, max_examples=8)
@given(order=st.permutations(range(8)), positives=st.integers(1, 7))
def test_perfect_ranking_has_the_least_value(name, order, positives):
    """The scores lie on bin centres and differ by more than temperature and margin; no other order is better."""
    bins = {"fast_ap": 8, "quantized_ap": 13, "quantized_ap narrow": 5}.get(name, 20)
    low, high = (0.0, 0.5) if "narrow" in name else (-1.0, 1.0)
    centres = torch.linspace(high, low, bins, dtype=torch.float64)
    s = centres[torch.linspace(0, bins - 1, 8).round().long()]
    level = torch.arange(8) < positives
    relevant = level.int()[None] if is_graded(name) else level[None]
    loss = BlackboxAPLoss(margin=0.0) if name == "blackbox_ap margin" else make(name)
    if name == "calibration":  # perfect are positives above alpha and negatives below beta
        s = torch.where(level, 0.95, 0.1).double()
    perfect = loss.from_scores(s[None], relevant).item()
    assert perfect <= loss.from_scores(s[torch.tensor(order)][None], relevant).item() + 1e-9
    # It is 0 unless the temperature is close to the scores' distance of 0.3, a bin holds several scores, or a rank
    # equals k, for which the recall loss counts sigma(0), or positives are pulled up.
    not_zero = (
        "smooth_ap",
        "sup_ap official",
        "hap alpha 2",
        "quantized_ap narrow",
        "fast_ap",
        "recall_at_k",
        "log_rank",
    )
    if name not in not_zero:
        assert perfect == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in TABLE if not is_graded(name)])
def test_losses_without_levels_use_the_finest_level(name):
    x, labels = batch([3, 4, 2, 1])
    r, ref_labels = batch([2, 2, 2])
    for keywords in ({}, {"class_balanced": True}):
        loss = make(name, **keywords)
        levels, ref_levels = (torch.stack([y, y * 0, y * 0], 1) for y in (labels, ref_labels))
        assert torch.equal(loss(x, levels), loss(x, labels))
        assert torch.equal(loss(x, levels, r, ref_levels), loss(x, labels, r, ref_labels))


SIZES = (1e-300, 1e-45, 1e-38, 1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e30, 1e38, 1e300)
EXTREMES = sorted({0.0, *SIZES, *(-size for size in SIZES)})
ACCEPTED_BY_ALL = (1e-12, 1e12)  # where the range of a setting is not narrower


def settings_of(call):
    """{setting: the extreme values to try} of the constructor of a loss: numbers, and sequences of numbers."""
    found = {}
    hints = annotations(call.signed)
    for name in call.valid():
        if name in {"losses", "weights"} or "float" not in str(hints[name]):
            continue
        found[name] = list(EXTREMES)
        if name == "hrank_slopes":
            found[name] = list(itertools.product((-1e12, 0.5, 1e12, 1e30), repeat=3))
    return found


def constructors():
    """{loss: the valid call of its constructor} of the losses with such settings."""
    found = {}
    for name, (call, *_) in CALLS.items():
        is_loss = isinstance(call.function, type) and issubclass(call.function, nn.Module)
        if is_loss and settings_of(call):
            found[name] = call
    return found


CONSTRUCTORS = constructors()


def tied_batch():
    """Unit rows, some of which are equal, so that scores tie, and some opposite."""
    rows = torch.randn(12, 4)
    rows[6:9] = rows[:3]
    rows[9] = -rows[0]
    return rows.requires_grad_(), torch.arange(12) % 3


def value_and_gradient_of_ties(loss):
    """The value of the loss, and its gradient with respect to embeddings or scores."""
    rows, labels = tied_batch()
    targets = labels
    if type(loss).__name__ == "BlackboxMAPLoss":
        targets = rows > 0
    if type(loss).__name__ == "HAPLoss":
        targets = torch.stack([torch.arange(12), labels, labels % 2], 1)  # no query has an item of the finest level
    value = loss(rows, targets)
    value.backward()
    return value.item(), rows.grad


def problem(name, **changed):
    """What is wrong with a loss with these settings; None if the settings are refused or the loss is finite."""
    call = CONSTRUCTORS[name]
    try:
        loss = call.function(**{**call.valid(), **changed})
    except ValueError as error:
        message = str(error)
        assert name in message, message
        assert any(setting in message for setting in changed), message
        return None
    value, gradient = value_and_gradient_of_ties(loss)
    if math.isfinite(value) and bool(gradient.isfinite().all()):
        return None
    return f"{name}({changed}): value {value}, gradient finite: {bool(gradient.isfinite().all())}"


@pytest.mark.refusal
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_extreme_settings_are_refused_or_give_a_finite_loss_and_gradient(name):
    found = []
    for setting, values in settings_of(CONSTRUCTORS[name]).items():
        found += [problem(name, **{setting: value}) for value in values]
    assert not list(filter(None, found))


@pytest.mark.refusal
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_two_settings_at_the_ends_of_their_ranges_give_a_finite_loss_and_gradient(name):
    names = [setting for setting in settings_of(CONSTRUCTORS[name]) if setting != "hrank_slopes"]
    found = []
    for one, other in itertools.combinations(names, 2):
        for values in itertools.product(ACCEPTED_BY_ALL, repeat=2):
            found.append(problem(name, **dict(zip((one, other), values))))
    assert not list(filter(None, found))


def sum_of_terms(weight):
    return WeightedSum({"ap": (weight, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())})


def sum_of_dims(weight):
    return NestedLoss(SmoothAPLoss(), (2, 4), weights=(weight, 0.5))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("make_sum", "owner"), [(sum_of_terms, r"WeightedSum: `losses\['ap'\]`"), (sum_of_dims, "NestedLoss: `weights`")]
)
def test_extreme_weights_are_refused_or_give_a_finite_loss_and_gradient(make_sum, owner):
    for weight in (-1e12, -1e-45, 0.0, 1e12):
        value, gradient = value_and_gradient_of_ties(make_sum(weight))
        assert math.isfinite(value)
        assert bool(gradient.isfinite().all())
    for weight in (-1e300, 1e30):
        with pytest.raises(ValueError, match=rf"^{owner} must be from -1e\+12 to 1e\+12, got"):
            make_sum(weight)


@pytest.mark.refusal
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch itself calls it for a Hessian
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev, torch.func.hessian])
@ALL
def test_a_loss_inside_of_a_function_transform_is_one_sentence(name, transform):
    loss, labels, embeddings = make(name), torch.tensor([0, 0, 1, 1]), torch.randn(4, 3)
    if transform is torch.func.vmap:
        embeddings = embeddings[None]
    with pytest.raises(TypeError, match=r"^\w+: `embeddings` must not be inside of torch\.func"):
        transform(lambda rows: loss(rows, labels))(embeddings)
    with pytest.raises(TypeError, match=r"^\w+: `scores` must not be inside of torch\.func"):
        transform(lambda rows: loss.from_scores(rows @ rows.T, labels == labels[:, None]))(embeddings)


ROWS, LABEL = torch.ones(4, 3), torch.zeros(1, dtype=torch.int64)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("owner", "transform", "call"),
    [
        ("blackbox_rank", torch.func.grad, lambda rows: blackbox_rank(rows).sum()),
        ("blackbox_rank", torch.func.jacrev, blackbox_rank),
        ("blackbox_rank", torch.func.vmap, blackbox_rank),
        ("RetrievalMetrics", torch.func.vmap, lambda row: RetrievalMetrics(ks=(1,)).update(row[None], LABEL)),
        ("QueryExpansion", torch.func.vmap, lambda row: QueryExpansion(2)(row[None], ROWS)),
    ],
)
def test_what_reads_numbers_inside_of_a_function_transform_is_one_sentence(owner, transform, call):
    with pytest.raises(
        TypeError, match=rf"^{owner}: `\w+` must not be inside of torch\.func .*; call the function for"
    ):
        transform(call)(torch.randn(4, 3))
