"""Declared arguments: the annotation of a parameter says which values are valid, and `checked` follows it.

`def __init__(self, tau: Positive = 0.01)` declares the rule, and `self.tau = checked(self, tau=tau)` applies it where
the attribute is assigned. Type checkers and jsonargparse see a float. `Literal` needs no further mark, and a union with
None allows None.
"""

import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from lightning_retrieval.checks import (
    LARGEST,
    SMALLEST,
    check_choice,
    check_counts,
    check_finite_number,
    check_integer,
)

T = TypeVar("T")
# The mark of an annotation: a check, which is called with the name, the value and the owner of an argument.
Rule = functools.partial[Any]


def numbers(least: float = -LARGEST, most: float = LARGEST) -> Rule:
    """The rule for numbers from `least` to `most`."""
    return functools.partial(check_finite_number, least=least, most=most)


def integers(least: int, most: float = math.inf) -> Rule:
    """The rule for integers from `least` to `most`."""
    return functools.partial(check_integer, least=least, most=most)


Number = Annotated[float, numbers()]
Positive = Annotated[float, numbers(SMALLEST)]
NotNegative = Annotated[float, numbers(0)]
Fraction = Annotated[float, numbers(0, 1)]
PositiveInt = Annotated[int, integers(1)]
NotNegativeInt = Annotated[int, integers(0)]
Several = Annotated[int, integers(2)]
Seed = NotNegativeInt
PositiveInts = Annotated[Sequence[int], functools.partial(check_counts)]


def checked(owner: object, **argument: T) -> T:
    """The value of an argument, with a number of NumPy as a number of Python; raises unless its rule holds.

    Args:
        owner: the object whose constructor has the parameter, or the function.
        **argument: the argument by its name; exactly one.

    Raises:
        InvalidValue: if the value breaks the rule that the parameter's annotation declares.
        InvalidType: if it is not a number, or not an integer.

    Example:
        >>> from lightning_retrieval.arguments import PositiveInt, checked
        >>> def repeat(text: str, times: PositiveInt = 2) -> str:
        ...     return text * checked(repeat, times=times)
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
    rule, may_be_none = _rule_of_argument(shown, name)
    if value is None and may_be_none:
        return value
    plain: T = rule(name, value, owner=shown.__name__)
    return plain


@functools.cache
def _rule_of_argument(owner: Any, name: str) -> tuple[Rule, bool]:
    """The rule that a parameter declares, and whether None is valid, too.

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
        annotation = annotation_of(function, name)
        rule = _rule_of(annotation)
        if rule is not None:
            return rule, NoneType in get_args(annotation)
    raise LookupError(f"{owner.__name__}: the annotation of `{name}` declares no rule")


def annotation_of(function: Any, name: str) -> Any:
    """The annotation of a parameter, also if it is a string; None if there is none."""
    annotation = getattr(function, "__annotations__", {}).get(name)
    if isinstance(annotation, str):
        with suppress(NameError):  # a name that only type checkers import
            annotation = get_type_hints(function, include_extras=True)[name]
    return annotation


def _rule_of(annotation: Any) -> Rule | None:
    """The rule that an annotation declares; None if it declares none."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return functools.partial(check_choice, choices=get_args(annotation))
    marks = getattr(annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, functools.partial)), None)


def constructor_parameters(cls: Any) -> list[inspect.Parameter]:
    """The parameters of the constructor of a class, without `self`.

    In the place of `**settings: Unpack[Settings]` are the settings that the `TypedDict` declares.

    Raises:
        ValueError: if the constructor has no signature, like some types written in C.
    """
    found: list[inspect.Parameter] = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        annotation = annotation_of(cls.__init__, parameter.name)
        if get_origin(annotation) is not Unpack:
            found.append(parameter)
            continue
        (settings,) = get_args(annotation)
        for name, kind in get_type_hints(settings).items():
            found.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, annotation=kind))
    return found


def settings_repr(module: object) -> str:
    """The arguments of a module's constructor with their values. Submodules are left to PyTorch's own `repr`.

    If a constructor takes any further settings, the arguments of the next base class follow.
    """
    names: dict[str, None] = {}
    for cls in type(module).__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = constructor_parameters(cls)
        names |= dict.fromkeys(parameter.name for parameter in parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    values = {name: getattr(module, name) for name in names if name in vars(module)}
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
