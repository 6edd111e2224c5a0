"""Objects as plain data and back, and their settings for a log."""

import functools
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_retrieval import losses
from lightning_retrieval.losses import RetrievalLoss, Schedule, SmoothAPLoss
from lightning_retrieval.plain_data import describe, logged_settings, rebuild, rebuild_factory


class WithoutAttributes(nn.Module):
    """Does not keep what it was given."""

    def __init__(self, width):
        super().__init__()


class WithInitArgs(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.half = width // 2

    def init_args(self):
        return {"width": 2 * self.half}


def test_plain_values_stand_for_themselves():
    """Tuples become lists, keys strings, and numbers of NumPy those of Python."""
    plain = {"a": None, "b": True, "c": math.inf, "d": "text", "e": [1, {"f": None}]}
    assert describe(plain) == plain
    described = describe({1: (2, np.float64(0.5))})
    assert described == {"1": [2, 0.5]}
    assert type(described["1"][1]) is float


def test_an_object_and_back():
    loss = SmoothAPLoss(tau=0.07, reduction="sum", class_balanced=True)
    description = describe(loss)
    assert description == {
        "class_path": "lightning_retrieval.SmoothAPLoss",
        "init_args": {"tau": 0.07, "reduction": "sum", "class_balanced": True, "include_self": False},
    }
    again = rebuild("loss", description, RetrievalLoss)
    assert type(again) is SmoothAPLoss
    assert describe(again) == description
    assert describe(WithInitArgs(6))["init_args"] == {"width": 6}


def test_every_loss_and_back():
    terms = {
        "ap": 0.5,
        "pairs": Schedule([(0, 1), (0.2, 0)]),
        "later": Schedule([(0, 0), (0.2, 2.0)]),
        "more": Schedule([(0, 0.1), (1, 1.0)], "geometric"),
    }
    settings = {"WeightedSum": {"losses": {name: (w, SmoothAPLoss(tau=0.2)) for name, w in terms.items()}}}
    settings["NestedLoss"] = {"loss": SmoothAPLoss(tau=0.2), "dims": (2, 8), "weights": (1.0, 0.5)}
    for name in losses.__all__:
        cls = getattr(losses, name)
        if isinstance(cls, type) and issubclass(cls, nn.Module) and not inspect.isabstract(cls):
            loss = cls(**settings.get(name, {}))
            assert repr(rebuild("loss", describe(loss), nn.Module)) == repr(loss)


@pytest.mark.parametrize("given", [functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5), torch.optim.AdamW])
def test_a_factory_and_back(given):
    factory = rebuild_factory("optimizer", describe(given), (torch.optim.Optimizer,))
    parameters = [nn.Parameter(torch.zeros(1))]
    made, expected = factory(parameters), given(parameters)
    assert type(made) is type(expected)
    assert made.defaults == expected.defaults


def test_a_callable_stands_for_itself():
    make = lambda parameters: None  # noqa: E731
    assert rebuild_factory("optimizer", make, (torch.optim.Optimizer,)) is make


class OfFunction:
    """Has classes that no path leads to."""

    @staticmethod
    def make():
        class Local(nn.Module):
            pass

        return Local()


@pytest.mark.parametrize(
    "value",
    [
        WithoutAttributes(3),
        OfFunction.make(),
        nn.Sequential(nn.Linear(2, 2)),  # *args
        functools.partial(nn.Linear, weight=torch.zeros(2)),
        nn.Identity,  # a class, which is no optimizer and no scheduler
        lambda parameters: None,
        torch.zeros(2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_described_has_to_be_passed_again(value):
    """The cure is the rule, since it is all that a user can do."""
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, thing=\.\.\.\)"):
        rebuild("thing", describe(value), nn.Module)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("load", "kind", "path"),
    [
        (rebuild, RetrievalLoss, "torch.nn.Identity"),
        (rebuild, nn.Module, "torch.optim.SGD"),
        (rebuild_factory, (torch.optim.Optimizer,), "torch.nn.Identity"),
        (rebuild_factory, (torch.optim.Optimizer,), "torch.optim.lr_scheduler.StepLR"),
    ],
)
def test_only_the_expected_kind_is_accepted(load, kind, path):
    with pytest.raises(TypeError, match=r"^`thing` must "):
        load("thing", {"class_path": path}, kind)


@pytest.mark.refusal
def test_a_weight_in_a_file_is_a_number_or_a_schedule():
    weight = {"class_path": "torch.optim.SGD", "init_args": {}}
    terms = {"ap": [weight, {"class_path": "lightning_retrieval.SmoothAPLoss", "init_args": {}}]}
    description = {"class_path": "lightning_retrieval.WeightedSum", "init_args": {"losses": terms}}
    with pytest.raises(TypeError, match="partial"):
        rebuild("loss", description, nn.Module)


class Base:
    def __init__(self, root, size=3):
        self.root, self.size = Path(root), size


class Derived(Base):
    def __init__(self, labels, short=(1, 2), nested=None, loss=None, train_set=None, **others):
        super().__init__(**others)
        self.labels, self.short, self.nested, self.loss = labels, short, nested, loss

    @property
    def train_set(self):
        raise RuntimeError("call setup() first")


def test_settings_for_a_log_are_plain_and_short():
    """Those of bases too. Large or other values are logged by length or class, and no property is called."""
    nested = {"a": {"b": 1}, "many": [0] * 5000}
    made = Derived(list(range(1000)), nested=nested, loss=SmoothAPLoss(tau=0.2), root="a/b", size=7)
    found = logged_settings(made)
    assert found.pop("class_path").endswith("Derived")
    assert found == {
        "labels": "list of 1000",
        "short": [1, 2],
        "nested": {"a": {"b": 1}, "many": "list of 5000"},
        "loss": "lightning_retrieval.SmoothAPLoss",
        "root": "a/b",
        "size": 7,
    }
