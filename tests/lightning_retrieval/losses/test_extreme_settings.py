"""Settings so small or so large that float32 cannot represent the formula: raised, or computed right."""

import itertools
import math

import pytest
import torch

from lightning_retrieval.losses import CalibrationLoss, NestedLoss, SmoothAPLoss, WeightedSum
from tests.awkward_values.calls import annotations
from tests.awkward_values.losses import CALLS, COMMON

SIZES = (1e-300, 1e-45, 1e-38, 1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e30, 1e38, 1e300)
EXTREMES = sorted({0.0, *SIZES, *(-size for size in SIZES)})
ACCEPTED_BY_ALL = (1e-12, 1e12)  # where the range of a setting is not narrower


def settings_of(call):
    """{setting: the extreme values to try} of the constructor of a loss: numbers, and sequences of numbers."""
    found = {}
    hints = annotations(call.signed)
    for name in call.arguments():
        if name in {"losses", "weights", *COMMON} or "float" not in str(hints[name]):
            continue
        found[name] = list(EXTREMES)
        if name == "hrank_slopes":
            found[name] = list(itertools.product((-1e12, 0.5, 1e12, 1e30), repeat=3))
    return found


def constructors():
    """{loss: the valid call of its constructor} of the losses with such settings."""
    found = {}
    for name, (call, *_) in CALLS.items():
        if isinstance(call.function, type) and settings_of(call):
            found[name] = call
    return found


CONSTRUCTORS = constructors()


def batch():
    """Unit rows, some of which are equal, so that scores tie, and some opposite."""
    rows = torch.randn(12, 4)
    rows[6:9] = rows[:3]
    rows[9] = -rows[0]
    return rows.requires_grad_(), torch.arange(12) % 3


def value_and_gradient(loss):
    """The value of the loss, and its gradient with respect to embeddings or scores."""
    rows, labels = batch()
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
        loss = call.function(**{**call.arguments(), **changed})
    except ValueError as error:
        message = str(error)
        assert name in message, message
        assert any(setting in message for setting in changed), message
        return None
    value, gradient = value_and_gradient(loss)
    if math.isfinite(value) and bool(gradient.isfinite().all()):
        return None
    return f"{name}({changed}): value {value}, gradient finite: {bool(gradient.isfinite().all())}"


def test_all_losses_with_numbers_are_tried():
    assert CONSTRUCTORS.keys() == {
        "BlackboxAPLoss",
        "BlackboxMAPLoss",
        "BlackboxRecallLoss",
        "CalibrationLoss",
        "HAPLoss",
        "QuantizedAPLoss",
        "ROADMAPLoss",
        "RecallAtKLoss",
        "SmoothAPLoss",
        "SupAPLoss",
    }


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


@pytest.mark.refusal
@pytest.mark.parametrize("weight", [-1e300, -1e12, -1e-45, 0.0, 1e12, 1e30])
def test_extreme_weights_of_a_sum_are_refused_or_give_a_finite_loss_and_gradient(weight):
    terms = {"ap": (weight, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())}
    if abs(weight) > 1e12:
        with pytest.raises(ValueError, match=r"^WeightedSum: `losses\['ap'\]` must be from -1e\+12 to 1e\+12, got"):
            WeightedSum(terms)
        return
    value, gradient = value_and_gradient(WeightedSum(terms))
    assert math.isfinite(value)
    assert bool(gradient.isfinite().all())


@pytest.mark.refusal
@pytest.mark.parametrize("weight", [-1e300, -1e12, -1e-45, 0.0, 1e12, 1e30])
def test_extreme_weights_of_dims_are_refused_or_give_a_finite_loss_and_gradient(weight):
    if abs(weight) > 1e12:
        with pytest.raises(ValueError, match=r"^NestedLoss: `weights` must be from -1e\+12 to 1e\+12, got"):
            NestedLoss(SmoothAPLoss(), (2, 4), weights=(weight, 0.5))
        return
    value, gradient = value_and_gradient(NestedLoss(SmoothAPLoss(), (2, 4), weights=(weight, 0.5)))
    assert math.isfinite(value)
    assert bool(gradient.isfinite().all())
