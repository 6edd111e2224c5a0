"""Errors about invalid input that keep their parts: whose argument, which one, the rule, the value and the cure.

An error of another function can so be reported under the name that the user knows, without its message being read.
Functions that no user calls raise errors without an owner, and what the user calls adds its name with `owned_by`.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

AnyInvalid = TypeVar("AnyInvalid", bound="Invalid")
Method = TypeVar("Method", bound=Callable[..., Any])


class Invalid(Exception):
    """Base of the errors about an argument. The message is one sentence of all the parts that are given.

    Args:
        rule: what the argument must be, such as "must be a number > 0"; the whole sentence if no other part is given,
            such as the text of an error that another process sends. Names of arguments are in backticks.
        owner: the class or function whose argument it is, the prefix of the message; `owned_by` adds it if it is "".
        argument: name of the argument.
        got: the value, which `str` shows.
        cure: what the user can do. Names of arguments are in backticks.

    Example:
        >>> from lightning_retrieval.invalid import InvalidValue
        >>> error = InvalidValue("must be a number > 0", "SmoothAPLoss", "tau", got="-1.0")
        >>> str(error)
        'SmoothAPLoss: `tau` must be a number > 0, got -1.0.'
        >>> str(error.of("adapt", tau="--tau"))
        'adapt: `--tau` must be a number > 0, got -1.0.'
    """

    def __init__(self, rule: str, owner: str = "", argument: str = "", *, got: object = "", cure: str = "") -> None:
        super().__init__(rule)  # pickle calls the class with this text, and restores the other attributes afterwards
        self.rule = rule
        self.owner = owner
        self.argument = argument
        self.got = str(got)
        self.cure = cure

    def __str__(self) -> str:
        text = self.rule
        if self.argument:
            text = f"`{self.argument}` {text}"
        if self.owner:
            text = f"{self.owner}: {text}"
        if self.got:
            text += f", got {self.got}"
        if self.cure:
            text += f"; {self.cure}"
        is_whole_sentence = not self.got and not self.cure and text.rstrip().endswith((".", "?"))
        if is_whole_sentence:
            return text
        return f"{text}."

    def of(self: AnyInvalid, owner: str, **renamed: str) -> AnyInvalid:
        """The same error of another owner, whose arguments may have other names.

        Args:
            owner: the other owner.
            **renamed: the other name of each argument that has one.
        """
        argument = renamed.get(self.argument, self.argument)
        rule, cure = _with_names(self.rule, renamed), _with_names(self.cure, renamed)
        return type(self)(rule, owner, argument, got=self.got, cure=cure)


class InvalidValue(Invalid, ValueError):
    """An invalid value or shape."""


class InvalidType(Invalid, TypeError):
    """An invalid type or dtype."""


class MissingFile(Invalid, FileNotFoundError):
    """A file or folder that does not exist."""


class MissingPackage(Invalid, ModuleNotFoundError):
    """A package that must be installed."""


class Unreachable(Invalid, ConnectionError):
    """A server or a file that cannot be reached, because it does not answer or another process uses it."""


class NotWritten(Invalid, OSError):
    """A file or folder that cannot be written."""


class Failed(Invalid, OSError):
    """What a server or the system has reported as failed."""


@contextmanager
def owned_by(owner: str) -> Iterator[None]:
    """Context or decorator that gives an owner to the errors about arguments that have none.

    A private function raises an error without an owner, and the public function around it names itself. If one public
    function calls another one, the error keeps the owner that it got first. `reported_as` changes it.
    """
    try:
        yield
    except Invalid as error:
        error.owner = error.owner or owner
        raise


def owned(method: Method) -> Method:
    """Decorator of a method: `owned_by` the class of its object. Constructors keep their frame, and use `owned_by`."""

    @functools.wraps(method)
    def named(self: object, *arguments: Any, **settings: Any) -> Any:
        with owned_by(type(self).__name__):
            return method(self, *arguments, **settings)

    return named  # type: ignore[return-value]


@contextmanager
def reported_as(owner: str = "", **renamed: str) -> Iterator[None]:
    """Context in which errors about arguments become those of another owner, whatever their owner is, see `of`.

    Without a name, they have no owner then, and get that of the public function around the context.
    """
    try:
        yield
    except Invalid as error:
        raise error.of(owner, **renamed) from error.__cause__


def _with_names(text: str, renamed: dict[str, str]) -> str:
    """The text, with other names for some of the arguments in backticks."""
    return re.sub("`(.+?)`", lambda quoted: f"`{renamed.get(quoted[1], quoted[1])}`", text)
