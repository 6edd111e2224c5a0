"""Declared arguments: which rule an annotation stands for, where it is looked up, and what jsonargparse makes of it."""

from typing import Annotated, Literal

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from lightning_retrieval import SmoothAPLoss
from lightning_retrieval.arguments import Fraction, Positive, PositiveInt, PositiveInts, checked, integers
from lightning_retrieval.invalid import InvalidType, InvalidValue

pytestmark = pytest.mark.refusal


class Settings:
    """Stores one argument of each kind."""

    def __init__(
        self,
        number: Positive = 1.0,
        fraction: Fraction = 0.5,
        integer: PositiveInt | None = None,
        size: Annotated[int, integers(2, 4)] = 2,
        sizes: PositiveInts = (1,),
        flag: bool = False,
        optional_flag: bool | None = None,
        text: str | None = None,
        choice: Literal["a", 1] = "a",
    ) -> None:
        self.number = checked(self, number=number)
        self.fraction = checked(self, fraction=fraction)
        self.integer = checked(self, integer=integer)
        self.size = checked(self, size=size)
        self.sizes = checked(self, sizes=sizes)
        self.flag = checked(self, flag=flag)
        self.optional_flag = checked(self, optional_flag=optional_flag)
        self.text = checked(self, text=text)
        self.choice = checked(self, choice=choice)


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("number", (1e-9, 3, np.float32(2.0)), {0.0: InvalidValue, "1": InvalidType, True: InvalidType}),
        ("fraction", (0, 1.0), {1.5: InvalidValue, -0.1: InvalidValue, None: InvalidType}),
        ("integer", (None, 1, np.int64(3)), {0: InvalidValue, 1.0: InvalidType, "": InvalidType}),
        ("size", (2, 4), {1: InvalidValue, 5: InvalidValue}),
        ("sizes", ((1, 10),), {(): InvalidValue, (0,): InvalidValue, "1": InvalidValue}),
        ("flag", (True,), {0: InvalidType, None: InvalidType}),
        ("optional_flag", (None, False), {0: InvalidType}),
        ("text", (None, ""), {3: InvalidType}),
        ("choice", ("a", 1), {"b": InvalidValue, True: InvalidValue}),
    ],
)
def test_an_annotation_declares_the_valid_values(name, valid, invalid):
    for value in valid:
        stored = getattr(Settings(**{name: value}), name)
        assert stored == value
        assert type(stored).__module__ == "builtins"  # NumPy's numbers become Python's
    for value, kind in invalid.items():
        with pytest.raises(kind, match=f"^Settings: `{name}` must .*got ") as raised:
            Settings(**{name: value})
        assert (raised.value.owner, raised.value.argument) == ("Settings", name)


class OwnLoss(SmoothAPLoss):
    """A user's loss, in which an argument has another type than in the base class."""

    def __init__(self, tau: str = "cold", size: PositiveInt = 1) -> None:
        super().__init__(tau={"cold": 0.01, "hot": 0.0}[tau])
        self.size = checked(self, size=size)


def test_a_users_subclass_has_its_own_arguments_and_the_rules_of_its_base_class():
    assert OwnLoss().tau == 0.01
    with pytest.raises(ValueError, match=r"^OwnLoss: `tau` must be a finite number > 0, got 0\.0\.$"):
        OwnLoss("hot")
    with pytest.raises(ValueError, match=r"^OwnLoss: `size` must be an integer >= 1, got 0\.$"):
        OwnLoss(size=0)


def test_an_argument_without_a_rule_raises():
    def scaled(factor: float) -> float:
        return checked(scaled, factor=factor)

    with pytest.raises(LookupError, match="scaled: the annotation of `factor` must declare a rule"):
        scaled(1.0)


def test_annotations_may_be_strings():
    """As in a module with `from __future__ import annotations`."""

    def scaled(factor: "Positive") -> "float":
        return checked(scaled, factor=factor)

    assert scaled(2) == 2.0
    with pytest.raises(ValueError, match="scaled: `factor` must be a finite number > 0, got -1"):
        scaled(-1)


def test_options_of_the_command_line_have_the_annotated_types():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Settings, "x")
    options = ["--x.number=2", "--x.integer=3", "--x.sizes=[1, 5]", "--x.flag=true", "--x.text=null", "--x.choice=1"]
    created = parser.instantiate_classes(parser.parse_args(options)).x
    assert vars(created) == {**vars(Settings()), "number": 2, "integer": 3, "sizes": (1, 5), "flag": True, "choice": 1}
    for invalid in ("--x.number=many", "--x.integer=2.5", "--x.choice=b"):
        with pytest.raises(Exception, match=r"x\.(number|integer|choice)"):
            parser.parse_args([invalid])
