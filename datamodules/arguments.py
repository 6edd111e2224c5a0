"""The arguments of data modules: signatures that show all of them, and an error that names the nearest.

The constructor of a data module takes the arguments of its base class as `**settings`, so that each argument is written
once. For type checkers and editors, a `TypedDict` lists their names and types. At run time the signature of a class
lists them with the defaults of the base class, which is what `help`, notebooks and `inspect.signature` show.

A constructor that passes no further arguments on takes what is left as `**unknown`, for `refuse_unknown_arguments`:
Python's own error would name the base class.
"""

import difflib
import inspect
from collections.abc import Mapping
from functools import partial
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar

UNKNOWN = "unknown"  # name of the arguments that a constructor does not pass on
ALIKE = 0.6  # least similarity of a name that a message suggests

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:

    class Unpack:
        """At run time `**settings: Unpack[ImageSettings]` means `**settings: Any`.

        jsonargparse, which makes the options of the command line, would take the names of the `TypedDict` without the
        defaults and descriptions that it finds in the base class.
        """

        def __class_getitem__(cls, settings: Any) -> Any:
            return Any


class ShownArguments:
    """Base class of classes whose `inspect.signature` lists what their `**settings` pass on to their base classes."""

    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.__signature__ = Signature(list(all_arguments(cls).values()))


def all_arguments(cls: type) -> dict[str, Parameter]:
    """The arguments of a constructor by name, with the keyword-only ones that its `**settings` pass on."""
    found: dict[str, Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *own = inspect.signature(vars(base)["__init__"]).parameters.values()
        passed_on = [parameter for parameter in own if parameter.kind is Parameter.KEYWORD_ONLY]
        if not found:
            passed_on = [parameter for parameter in own if parameter.kind is not Parameter.VAR_KEYWORD]
        for parameter in passed_on:
            found.setdefault(parameter.name, parameter)
        if not own or own[-1].kind is not Parameter.VAR_KEYWORD or own[-1].name == UNKNOWN:
            break
    return found


def refuse_unknown_arguments(cls: type, unknown: Mapping[str, Any]) -> None:
    """Raise if there are arguments that no constructor of the class has, and name the nearest that one has.

    Args:
        cls: the class that the user calls.
        unknown: the arguments that are left for the last of its base classes.

    Raises:
        TypeError: if there are any.
    """
    if not unknown:
        return
    name, names = next(iter(unknown)), list(all_arguments(cls))
    cure = f"it has {', '.join(names)}."
    nearest = max(names, key=partial(_similarity, name), default=None)
    if nearest is not None and _similarity(name, nearest) >= ALIKE:
        cure = f"did you mean `{nearest}`?"
    raise TypeError(f"{cls.__name__}: has no argument `{name}`; {cure}")


def _similarity(name: str, other: str) -> float:
    """How similar two names are: the number of their common words, and the ratio of their common letters."""
    words = set(name.split("_")) & set(other.split("_"))
    return len(words) + difflib.SequenceMatcher(None, name, other).ratio()
