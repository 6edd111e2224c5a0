"""Objects as plain data and back, and their settings for a log."""

import functools
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_retrieval.losses import After, Before, Ramp, RetrievalLoss, SmoothAPLoss
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
        "class_path": PATH,
        "init_args": {"tau": 0.07, "reduction": "sum", "class_balanced": True, "include_self": False},
    }
    again = rebuild("loss", description, RetrievalLoss)
    assert type(again) is SmoothAPLoss
    assert repr(again) == repr(loss)
    assert describe(again) == description


def test_an_object_that_tells_its_arguments():
    description = describe(WithInitArgs(6))
    assert description["init_args"] == {"width": 6}
    assert description["class_path"].endswith("test_describe.WithInitArgs")


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
    match = r"`thing` was a .* pass it again: load_from_checkpoint\(path, thing=\.\.\.\)\."
    with pytest.raises(ValueError, match=match):
        rebuild("thing", description, nn.Module)
    with pytest.raises(ValueError, match=match):
        rebuild_factory("thing", description, (nn.Module,))


def test_a_class_inside_a_function_cannot_be_found_again():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()

    with pytest.raises(ValueError, match=r"`net` was a .*<locals>\.Local"):
        rebuild("net", describe(Local()), nn.Module)


@pytest.mark.refusal
@pytest.mark.parametrize(("load", "kind"), [(rebuild, RetrievalLoss), (rebuild_factory, (RetrievalLoss,))])
def test_only_the_expected_kind_is_made(load, kind, monkeypatch):
    monkeypatch.setattr(nn.Linear, "__init__", lambda *args, **kwargs: pytest.fail("it was called"))
    with pytest.raises(TypeError, match=r"`loss` names torch.nn.Linear, which is not a class of the kind"):
        load("loss", {"class_path": "torch.nn.Linear", "init_args": {"args": ["true"]}}, kind)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"class_path": 3}, r"have a string as class_path and a dict .* got \{'class_path'"),
        ({"class_path": PATH, "init_args": [0.1]}, r"have a string as class_path and a dict .* got \{'class_path'"),
        (nn.Linear(1, 1), rf"be a {RetrievalLoss.__module__}.RetrievalLoss, got Linear\."),
        ({"tau": 1}, rf"be a {RetrievalLoss.__module__}.RetrievalLoss, got dict\."),
    ],
)
def test_what_is_no_description(given, sentence):
    with pytest.raises(TypeError, match=f"^`loss` must {sentence}"):
        rebuild("loss", given, RetrievalLoss)
    with pytest.raises(TypeError, match=r"^`optimizer` must be callable, .* got 0\.1\."):
        rebuild_factory("optimizer", 0.1, (torch.optim.Optimizer,))


def test_every_loss_of_the_package_can_be_described():
    from lightning_retrieval import losses

    for name in losses.__all__:
        cls = getattr(losses, name)
        is_loss = isinstance(cls, type) and issubclass(cls, nn.Module)
        if is_loss and not inspect.isabstract(cls):
            terms = {"ap": 0.5, "pairs": Before(0.2), "later": After(0.2, 2.0), "more": Ramp(0.1, 1.0, geometric=True)}
            settings = {"WeightedSum": {"losses": {name: (w, SmoothAPLoss(tau=0.2)) for name, w in terms.items()}}}
            settings["NestedLoss"] = {"loss": SmoothAPLoss(tau=0.2), "dims": (2, 8), "weights": (1.0, 0.5)}
            loss = cls(**settings.get(name, {}))
            assert repr(rebuild("loss", describe(loss), nn.Module)) == repr(loss)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("weight", "match"),
    [
        ({"class_path": "lightning_retrieval.losses.After", "init_args": {"start": "0.2"}}, "After: `start` must be a"),
        ({"class_path": "torch.optim.SGD", "init_args": {}}, "`ap` names torch.optim.SGD, which is not a"),
        ({"class_path": "torch.nn.Identity", "init_args": {}}, r"WeightedSum: `losses\['ap'\]` must be a number or a"),
    ],
)
def test_a_weight_in_a_file_is_a_number_or_a_schedule(weight, match):
    losses = {"ap": [weight, {"class_path": PATH, "init_args": {}}]}
    description = {"class_path": "lightning_retrieval.WeightedSum", "init_args": {"losses": losses}}
    with pytest.raises(TypeError, match=f"^{match}"):
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
