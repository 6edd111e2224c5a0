"""Objects as plain data and back, and their settings for a log."""

import functools
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_retrieval.losses import RetrievalLoss, SmoothAPLoss
from lightning_retrieval.plain_data import describe, logged_settings, rebuild, rebuild_factory

PATH = "lightning_retrieval.SmoothAPLoss"


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


@pytest.mark.parametrize("value", [None, True, 3, -0.5, math.inf, "text", [1, "a"], {"k": [1, {"l": None}]}])
def test_plain_values_stand_for_themselves(value):
    assert describe(value) == value


def test_tuples_become_lists_and_keys_strings():
    assert describe({1: (2, 3)}) == {"1": [2, 3]}


def test_an_object_and_back():
    loss = SmoothAPLoss(tau=0.07, reduction="sum", class_balanced=True)
    description = describe(loss)
    assert description == {
        "class_path": PATH,
        "init_args": {"tau": 0.07, "reduction": "sum", "class_balanced": True, "include_self": False},
    }
    again = rebuild("Test", "loss", description, RetrievalLoss)
    assert type(again) is SmoothAPLoss
    assert repr(again) == repr(loss)
    assert describe(again) == description


def test_an_object_that_tells_its_arguments():
    description = describe(WithInitArgs(6))
    assert description["init_args"] == {"width": 6}
    assert description["class_path"].endswith("test_describe.WithInitArgs")


@pytest.mark.parametrize("given", [functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5), torch.optim.AdamW])
def test_a_factory_and_back(given):
    factory = rebuild_factory("Test", "optimizer", describe(given), (torch.optim.Optimizer,))
    parameters = [nn.Parameter(torch.zeros(1))]
    made, expected = factory(parameters), given(parameters)
    assert type(made) is type(expected)
    assert made.defaults == expected.defaults


def test_a_factory_of_several_kinds():
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    given = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    factory = rebuild_factory("Test", "lr_scheduler", describe(given), kinds)
    assert factory.func is torch.optim.lr_scheduler.StepLR
    assert factory.keywords == {"step_size": 3}


def test_a_callable_stands_for_itself():
    make = lambda parameters: None  # noqa: E731
    assert rebuild_factory("Test", "optimizer", make, (torch.optim.Optimizer,)) is make


@pytest.mark.parametrize(
    "value",
    [
        WithoutAttributes(3),
        nn.Sequential(nn.Linear(2, 2)),  # *args
        functools.partial(torch.optim.SGD, [nn.Parameter(torch.zeros(1))]),
        functools.partial(nn.Linear, weight=torch.zeros(2)),
        functools.partial(min, 1),
        lambda parameters: None,
        torch.zeros(2),
        frozenset([1]),
        b"bytes",
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_described_says_so_when_it_is_loaded(value):
    description = describe(value)
    assert description["init_args"] is None
    match = r"Test: `thing` was a .* pass it again: load_from_checkpoint\(path, thing=\.\.\.\)\."
    with pytest.raises(ValueError, match=match):
        rebuild("Test", "thing", description, nn.Module)
    with pytest.raises(ValueError, match=match):
        rebuild_factory("Test", "thing", description, (nn.Module,))


def test_a_class_inside_a_function_cannot_be_found_again():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()

    with pytest.raises(ValueError, match=r"`net` was a .*<locals>\.Local"):
        rebuild("Test", "net", describe(Local()), nn.Module)


@pytest.mark.refusal
@pytest.mark.parametrize(("load", "kind"), [(rebuild, RetrievalLoss), (rebuild_factory, (RetrievalLoss,))])
def test_only_the_expected_kind_is_made(load, kind, monkeypatch):
    def called(*args, **kwargs):
        raise AssertionError("it was called")

    monkeypatch.setattr(nn.Linear, "__init__", called)
    with pytest.raises(
        TypeError, match=r"Test: `loss` names torch.nn.Linear, which is not a class of the kind needed here"
    ):
        load("Test", "loss", {"class_path": "torch.nn.Linear", "init_args": {"args": ["true"]}}, kind)


@pytest.mark.refusal
@pytest.mark.parametrize("description", [{"class_path": 3}, {"class_path": PATH, "init_args": [0.1]}])
def test_a_description_that_is_none(description):
    with pytest.raises(
        TypeError, match=r"Test: `loss` must have a string as class_path and a dict .* got \{'class_path'"
    ):
        rebuild("Test", "loss", description, RetrievalLoss)


@pytest.mark.refusal
@pytest.mark.parametrize(("value", "came"), [(3, "int"), (nn.Linear(1, 1), "Linear"), ({"tau": 1}, "dict")])
def test_a_value_of_another_kind(value, came):
    with pytest.raises(
        TypeError, match=rf"Test: `loss` must be a {RetrievalLoss.__module__}.RetrievalLoss, got {came}\."
    ):
        rebuild("Test", "loss", value, RetrievalLoss)


@pytest.mark.refusal
def test_a_factory_that_cannot_be_called():
    with pytest.raises(TypeError, match=r"Test: `optimizer` must be callable, .* got 0\.1\."):
        rebuild_factory("Test", "optimizer", 0.1, (torch.optim.Optimizer,))


def test_every_loss_of_the_package_can_be_described():
    from lightning_retrieval import losses

    for name in losses.__all__:
        cls = getattr(losses, name)
        if isinstance(cls, type) and not inspect.isabstract(cls):
            settings = {"WeightedSum": {"losses": {"ap": (0.5, SmoothAPLoss(tau=0.2))}}}
            settings["NestedLoss"] = {"loss": SmoothAPLoss(tau=0.2), "dims": (2, 8), "weights": (1.0, 0.5)}
            loss = cls(**settings.get(name, {}))
            assert repr(rebuild("Test", "loss", describe(loss), nn.Module)) == repr(loss)


def test_numbers_of_numpy_become_plain():
    described = describe({"lr": np.float64(0.5), "flags": [np.float64(2.0)]})
    assert described == {"lr": 0.5, "flags": [2.0]}
    assert type(described["lr"]) is float
    assert type(described["flags"][0]) is float


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
    nested = {"a": {"b": {"c": [1]}}, "many": [0] * 5000}
    nested["itself"] = nested
    made = Derived(list(range(1000)), nested=nested, loss=SmoothAPLoss(tau=0.2), root="a/b", size=7)
    found = logged_settings(made)
    assert found.pop("class_path").endswith("Derived")
    inner = {"a": "builtins.dict", "many": "builtins.list", "itself": "builtins.dict"}
    assert found == {
        "labels": "list of 1000",
        "short": [1, 2],
        "nested": {"a": {"b": {"c": "builtins.list"}}, "many": "list of 5000", "itself": {
            "a": {"b": "builtins.dict"}, "many": "list of 5000", "itself": inner,
        }},
        "loss": "lightning_retrieval.SmoothAPLoss",
        "root": "a/b",
        "size": 7,
    }  # fmt: skip
