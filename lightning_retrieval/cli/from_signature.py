"""The parser of a command is made from a typed function: its signature says which options there are, its docstring what
they mean. No torch is imported, so help appears at once.

A positional-only parameter and `*names` are arguments without an option, and the fields of a dataclass are options in
place of the parameter. A path begins with the home folder instead of `~`, see `check_path`, and an `ExistingPath` must
be there.
"""

import argparse
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from lightning_retrieval.command_line import CommandParser, given_path, printable
from lightning_retrieval.invalid import Invalid
from lightning_retrieval.paths import ExistingPath

HELP_WIDTH = 78  # columns of a description
TYPES_OF_PATHS = {Path: given_path, ExistingPath: partial(given_path, exists=True)}
METAVARS = {int: "N", float: "X", str: "TEXT"}


class Described(NamedTuple):
    """What the docstring of a command says: what it does, the meaning of its arguments by name, and an example."""

    description: str
    arguments: dict[str, str]
    example: str


def command_parser(command: str, function: Callable[..., int]) -> CommandParser:
    """The parser of a command.

    Args:
        command: name of the command.
        function: the typed function, whose docstring has the sections `Args` and `Example`.
    """
    described = _described(function)
    parser = CommandParser(
        f"lightning-retrieval {command}",
        description=textwrap.fill(described.description, HELP_WIDTH),
        epilog=f"example:\n{described.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, function)
    return parser


def add_options(parser: argparse.ArgumentParser, function: Callable[..., object]) -> None:
    """Add the options of a function, or of a dataclass, to a parser.

    Args:
        parser: the parser.
        function: a typed function whose docstring has the section `Args`.
    """
    meanings = _described(function).arguments
    for parameter, hint in _parameters(function):
        if dataclasses.is_dataclass(hint):
            add_options(parser, hint)  # type: ignore[arg-type]
            continue
        settings = {**_of_type(hint), "help": meanings.get(parameter.name, "")}  # python -OO has no docstrings
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            _add_option(parser, parameter, settings)
            continue
        if "choices" not in settings:
            settings["metavar"] = parameter.name.upper()
        if parameter.kind is parameter.VAR_POSITIONAL:
            settings["nargs"] = "*"
        parser.add_argument(parameter.name, **settings)


def call(function: Callable[..., Any], options: argparse.Namespace) -> Any:
    """Call a function, or a dataclass, with the options that `add_options` has added."""
    positional, named = [], {}
    for parameter, hint in _parameters(function):
        if dataclasses.is_dataclass(hint):
            named[parameter.name] = call(hint, options)  # type: ignore[arg-type]
            continue
        value = getattr(options, parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += value
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[parameter.name] = value
    return function(*positional, **named)


def error_message(command: str, error: Exception, parser: argparse.ArgumentParser, functions: Iterable[str]) -> str:
    """The message of an error, which names an option as it was typed.

    Args:
        command: the subcommand, such as `index`.
        error: the error of a function of the library, such as `index_images`.
        parser: the parser of the command.
        functions: the owners of errors that the command reports as its own, since the user did not call them.
    """
    if isinstance(error, OSError) and error.errno is not None:  # of the system, which does not know the command
        return f"{command}: {printable(str(error))}."
    if isinstance(error, Invalid) and error.owner in functions:
        return str(error.of(command, **{action.dest: _shown(action) for action in parser._actions}))
    return str(error)


def _shown(action: argparse.Action) -> str:
    """An option as it is typed, such as `-k`, or the name in the help of an argument without an option."""
    if action.option_strings:
        return action.option_strings[-1]
    return str(action.metavar or action.dest)


def _described(function: Callable[..., object]) -> Described:
    """The parts of a docstring."""
    docstring = inspect.getdoc(function) or ""
    description, *sections = re.split(r"^(Args|Example):\n", docstring, flags=re.MULTILINE)
    texts = dict(zip(sections[::2], sections[1::2]))
    arguments = {}
    for entry in re.split(r"^ {4}(?=\S)", texts.get("Args", ""), flags=re.MULTILINE)[1:]:
        name, _, meaning = entry.partition(": ")
        arguments[name.lstrip("*")] = " ".join(meaning.split()).rstrip(".").replace("%", "%%")
    return Described(" ".join(description.split()), arguments, texts.get("Example", "").strip())


def _parameters(function: Callable[..., object]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Each parameter of a function with its type."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        yield parameter, hints[name]


def _add_option(parser: argparse.ArgumentParser, parameter: inspect.Parameter, settings: dict[str, Any]) -> None:
    """Add an option, whose help ends with its default if there is one."""
    name = f"--{parameter.name}"
    if len(parameter.name) == 1:
        name = f"-{parameter.name}"
    if parameter.default is parameter.empty:
        parser.add_argument(name, required=True, **settings)
        return
    default = parameter.default
    if default == ():
        default = []  # to which argparse appends
    elif default not in (None, "") and default is not False:
        settings["help"] += f" [{default}]"
    parser.add_argument(name, default=default, **settings)


def _of_type(hint: Any) -> dict[str, Any]:
    """What argparse needs for a type; for a union with None, that of the other type."""
    others = [kind for kind in get_args(hint) if kind is not NoneType]
    if NoneType in get_args(hint):
        (hint,) = others
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is Sequence:
        return {"action": "append", **_of_type(get_args(hint)[0])}
    if get_origin(hint) is dict:
        return {"type": _settings, "metavar": "JSON"}
    if hint is bool:
        return {"action": "store_true"}
    if hint in TYPES_OF_PATHS:
        return {"type": TYPES_OF_PATHS[hint], "metavar": "PATH"}
    return {"type": hint, "metavar": METAVARS[hint]}


def _settings(text: str) -> dict[str, Any]:
    """The settings in a JSON object."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f'must be JSON such as {{"resize": 224}}, got {text} ({error})') from None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f'must be names and values such as {{"resize": 224}}, got {text}')
    return settings
