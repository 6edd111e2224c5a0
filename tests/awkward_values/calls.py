"""A valid call of something public, and what is wrong with its answer to an awkward value."""

import copy
import functools
import inspect
import math
import re
import signal
import typing
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from beartype import BeartypeConf
from beartype.door import is_bearable

from lightning_retrieval.arguments import rule_of_argument
from lightning_retrieval.datamodules.base import ShownArguments
from lightning_retrieval.invalid import Invalid
from tests.awkward_values.values import awkward_values
from tests.test_contracts import PUBLIC, settings_of

SECONDS = 10.0  # that a call may take, also on a busy machine
ERRORS = (ValueError, TypeError, FileNotFoundError)
INT_FOR_FLOAT = BeartypeConf(is_pep484_tower=True)
EMPTY = inspect.Parameter.empty
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """A valid call, in which each argument is replaced by each awkward value.

    Args:
        owner: what error messages must name, a class or a function; or one of several, separated by "or".
        function: is called with keyword arguments only.
        arguments: makes arguments anew for each call. The parameters of the signature that are not among them stand at
            their defaults; those without a default, or whose default is None, must be among them.
        signature: the function or class whose annotations say which values are valid; `function` itself if None.
        use: is called with the result and returns what must be right: neither None nor NaN nor infinite.
        accepts: {argument: names of awkward values} that are right in spite of the annotation.
        without: {argument: reason} of the arguments that stay as they are.
        maps: whether it maps tensors element by element or row by row, as a network does, so that numbers that are not
            finite, and tensors on the device meta, may give the like.
        raises: {argument: names of awkward values} with which a network or a function that is given fails by itself:
            its error is passed on.
    """

    owner: str
    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]] = dict
    signature: Callable[..., Any] | None = None
    use: Callable[[Any], Any] = lambda result: result
    accepts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    maps: bool = False
    raises: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def signed(self):
        return self.signature or self.function

    @functools.cached_property
    def parameters(self):
        """{name: default} of the parameters of the signature."""
        signed = self.signed
        if isinstance(signed, type) and issubclass(signed, ShownArguments):
            signed = signed.__init__  # without the arguments of its base class, which has a table of its own
        parameters = inspect.signature(signed).parameters.values()
        named = {parameter.name: parameter.default for parameter in parameters if parameter.kind not in VARIABLE}
        return {name: default for name, default in named.items() if name not in ("self", "cls")}

    def valid(self):
        """The arguments of the call."""
        defaults = {name: default for name, default in self.parameters.items() if default is not EMPTY}
        return {**copy.deepcopy(defaults), **self.arguments()}


def constructor(name, **exceptions):
    """The call of a class with the settings of its entry in the table of contracts."""
    return Call(name, PUBLIC[name], functools.partial(settings_of, name), **exceptions)


class TooLong(BaseException):
    """A call took too long. No `except Exception` catches it."""


def complaints(call):
    """One line for each awkward value whose answer is not accepted, and for what is wrong with the table itself."""
    found = missing_arguments(call)
    problem = problem_of_valid_call(call)
    if problem:
        return [*found, problem]
    hints = annotations(call.signed)
    for argument, valid in call.valid().items():
        if argument in call.without:
            continue
        for name, value in awkward_values(valid).items():
            if name in call.raises.get(argument, ()):
                continue
            fits = is_valid(call.signed, argument, value, hints) or name in call.accepts.get(argument, ())
            problem = problem_of(call, argument, value, fits)
            if problem:
                found.append(f"{call.owner}: {argument}={name} {problem}")
    return found


def numpy_integers_that_raise(call):
    """One line for each integer of the valid call in whose place one of NumPy's raises an error."""
    found = []
    for argument, valid in call.valid().items():
        if type(valid) is not int:
            continue
        try:
            with time_limit(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call.use(call.function(**{**call.valid(), argument: np.int64(valid)}))
        except Exception as error:
            found.append(f"{call.owner}: {argument}=np.int64({valid}) raised {type(error).__name__}: {error}")
    return found


def missing_arguments(call):
    """A line if parameters that need a value are not in the table."""
    needed = {name for name, default in call.parameters.items() if default is EMPTY or default is None}
    missing = sorted(needed - call.arguments().keys())
    if missing:
        return [f"{call.owner}: the table gives no value for {missing}"]
    return []


def problem_of_valid_call(call):
    """What is wrong with the result of the valid call, None if nothing."""
    with time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = call.use(call.function(**call.valid()))
    if not is_right(result):
        return f"{call.owner}: the valid call returns {result!r}"
    return None


def problem_of(call, argument, value, fits):
    """What is wrong with the answer to an awkward value, None if nothing.

    Args:
        call: the valid call.
        argument: the argument that is replaced.
        value: the awkward value.
        fits: whether the value is valid as far as its annotation goes. Others must not be accepted.
    """
    arguments = {**call.valid(), argument: value}
    accepted = False
    try:
        with time_limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call.function(**arguments)
            accepted = True
            used = call.use(result)
    except TooLong:
        return f"took more than {SECONDS} seconds"
    except Exception as error:
        if accepted and not fits:
            return "was accepted, though its annotation forbids it, and failed later"
        return problem_of_error(error, call.owner, argument)
    if not fits:
        return "was accepted, though its annotation forbids it"
    if not is_right(used) and not (call.maps and is_passed_on(value)):
        return f"gave {str(used)[:100]}"
    return None


def problem_of_error(error, owner, argument):
    """What is wrong with an error, None if it is of an accepted type and names owner and argument."""
    message = " ".join(str(error).split())
    owned = any(name in message for name in owner.split(" or "))
    named = owned and re.search(rf"\b{argument}\b", message)
    if (type(error) in ERRORS or isinstance(error, Invalid)) and named:
        return None
    return f"raised {type(error).__name__}: {message[:150]}"


def annotations(function):
    """{parameter: annotation}; those of a class include the parameters that its bases take as `**settings`."""
    if not isinstance(function, type):
        return typing.get_type_hints(function)
    found = {}
    for base in reversed(function.__mro__):
        if "__init__" in vars(base) and base.__module__.startswith("lightning_retrieval"):
            found |= typing.get_type_hints(base.__init__)
    return found


def is_valid(function, argument, value, hints):
    """Whether a value follows the rule that its parameter declares, or has the annotated type if there is no rule."""
    try:
        rule_of_argument(function, argument)(argument, value)
    except Invalid:
        return False
    except LookupError:
        return is_of_type(value, hints[argument])
    return True


def is_of_type(value, annotation):
    """Whether a value has the annotated type. True is no number, unless the annotation names bool."""
    if isinstance(value, bool):
        return annotation in (bool, Any, object) or bool in typing.get_args(annotation)
    return is_bearable(value, annotation, conf=INT_FOR_FLOAT)


def is_right(result):
    """Whether a result is there and all its numbers are finite."""
    if result is None:
        return False
    if isinstance(result, torch.Tensor):
        return not result.is_meta and bool(torch.isfinite(result).all())
    if isinstance(result, Mapping):
        return all(map(is_right, result.values()))
    if isinstance(result, (list, tuple)):
        return all(map(is_right, result))
    if isinstance(result, float):
        return math.isfinite(result)
    return True


def is_passed_on(value):
    """Whether a tensor is one that a network may answer with meta or NaN."""
    return isinstance(value, torch.Tensor) and (value.is_meta or bool(value.isnan().any()))


@contextmanager
def time_limit():
    """Raise TooLong inside the `with` block after `SECONDS`, where the system has such a signal."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise TooLong

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
