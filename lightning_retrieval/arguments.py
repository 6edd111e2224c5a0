"""Declared arguments: the annotation of a parameter says which values are valid, and `checked` follows it.

`def __init__(self, tau: Positive = 0.01)` declares the rule, and `self.tau = checked(self, tau=tau)` applies it where
the attribute is assigned. Type checkers and jsonargparse see a float. `bool`, `str`, `Literal` and a union with None
need no further mark.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_retrieval.checks import (
    LARGEST,
    LARGEST_INTEGER,
    check_bool,
    check_choice,
    check_counts,
    check_finite_number,
    check_flag,
    check_integer,
    check_not_negative,
    check_positive,
    check_string,
)

T = TypeVar("T")


class Rule:
    """Marks an annotation with the check that a value must pass.

    Args:
        check: a function of `checks.py`, called with the name, the value and the owner of an argument.
        **settings: further arguments of the check.
    """

    def __init__(self, check: Callable[..., Any], **settings: Any) -> None:
        self.check = check
        self.settings = settings

    def __call__(self, name: str, value: Any, *, owner: str = "") -> Any:
        """Return the value as it is stored; raise if it breaks the rule."""
        return self.check(name, value, **self.settings, owner=owner)

    def __repr__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self.settings.items()]
        return f"Rule({', '.join([self.check.__name__, *settings])})"


def numbers(least: float = -LARGEST, most: float = LARGEST) -> Rule:
    """The rule for numbers from `least` to `most`."""
    return Rule(check_finite_number, least=least, most=most)


def integers(least: int, most: int | None = LARGEST_INTEGER) -> Rule:
    """The rule for integers from `least` to `most`; without a limit if `most` is None."""
    return Rule(check_integer, least=least, most=most)


Number = Annotated[float, numbers()]
Positive = Annotated[float, Rule(check_positive)]
NotNegative = Annotated[float, Rule(check_not_negative)]
Fraction = Annotated[float, numbers(0, 1)]
PositiveInt = Annotated[int, integers(1)]
NotNegativeInt = Annotated[int, integers(0)]
Several = Annotated[int, integers(2)]
Seed = Annotated[int, integers(0, None)]
PositiveInts = Annotated[Sequence[int], Rule(check_counts)]


def checked(owner: object, **argument: T) -> T:
    """The value of an argument, with a number of NumPy as a number of Python; raises unless its rule holds.

    Args:
        owner: the object whose constructor has the parameter, or the function.
        **argument: the argument by its name; exactly one.

    Raises:
        InvalidValue: if the value breaks the rule that the parameter's annotation declares.
        InvalidType: if its type does.

    Example:
        >>> from lightning_retrieval.arguments import PositiveInt, checked
        >>> def repeat(text: str, times: PositiveInt = 2) -> str:
        ...     return checked(repeat, text=text) * checked(repeat, times=times)
        >>> repeat("ab")
        'abab'
        >>> repeat("ab", 0)
        Traceback (most recent call last):
        lightning_retrieval.invalid.InvalidValue: repeat: `times` must be an integer >= 1, got 0.
    """
    ((name, value),) = argument.items()
    shown: Any = owner
    if not isinstance(owner, FunctionType):
        shown = type(owner)
    plain: T = rule_of_argument(shown, name)(name, value, owner=shown.__name__)
    return plain


@functools.cache
def rule_of_argument(owner: Any, name: str) -> Rule:
    """The rule that a parameter declares.

    Args:
        owner: a function, or a class whose constructor, or that of a base class, has the parameter. Classes of this
            library come first, since in a class of a user an argument of the same name may have another meaning.
        name: name of the parameter.
    """
    functions = [owner]
    if isinstance(owner, type):
        bases = sorted(owner.__mro__, key=lambda base: not base.__module__.startswith("lightning_retrieval."))
        functions = [base.__init__ for base in bases]  # type: ignore[misc]
    for function in functions:
        annotation = getattr(function, "__annotations__", {}).get(name)
        if isinstance(annotation, str):  # of a module with `from __future__ import annotations`
            with suppress(NameError):  # a name that only type checkers import
                annotation = get_type_hints(function, include_extras=True)[name]
        rule = rule_of(annotation)
        if rule is not None:
            return rule
    raise LookupError(
        f"{owner.__name__}: the annotation of `{name}` must declare a rule, such as `{name}: Positive` of "
        "lightning_retrieval.arguments, got none."
    )


def rule_of(annotation: Any) -> Rule | None:
    """The rule that an annotation declares; None if it declares none."""
    if annotation is bool:
        return Rule(check_bool)
    if annotation is str:
        return Rule(check_string)
    if get_origin(annotation) is Literal:
        return Rule(check_choice, choices=get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return _rule_of_union(*get_args(annotation))
    marks = getattr(annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Rule)), None)


def _rule_of_union(first: Any, *others: Any) -> Rule | None:
    rule = rule_of(first)
    if others != (NoneType,) or rule is None:
        return None
    if first is bool:
        return Rule(check_flag)
    return Rule(_check_unless_none, otherwise=rule)


def _check_unless_none(name: str, value: Any, *, otherwise: Rule, owner: str = "") -> Any:
    if value is None:
        return None
    return otherwise(name, value, owner=owner)


def settings_repr(module: object) -> str:
    """The arguments of a module's constructor with their values. Submodules are left to PyTorch's own `repr`.

    If a constructor takes `**settings`, the arguments of the next base class follow.
    """
    names: dict[str, None] = {}
    for cls in type(module).__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        names |= dict.fromkeys(parameter.name for parameter in parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    values = {name: getattr(module, name) for name in names if name in vars(module)}
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
