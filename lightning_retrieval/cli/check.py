"""`lightning-retrieval check`: look at the directory structure of a data set before training."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lightning_retrieval.command_line import (
    CommandParser,
    given_path,
    imports_of_command,
    null_for_none,
    one_line,
    printable,
)
from lightning_retrieval.invalid import Invalid

PROGRAM = "lightning-retrieval check"
PREFIX = "--data."  # of settings of the data module in `fit`
EXAMPLE = "--data ImageFolder --root FOLDER"
HELP = frozenset({"-h", "--help"})
# The help lists these names instead of importing the data modules, which takes seconds. A test compares the names with
# the package.
DATA_MODULES = (
    "CUB200",
    "CocoDetection",
    "GlyphScenes",
    "Glyphs",
    "HuggingFaceImages",
    "IJBC",
    "INaturalist",
    "ImageFolder",
    "ImageTable",
    "InShop",
    "LandmarksClean",
    "Pairs",
    "PascalVOC",
    "RevisitedOxford",
    "RevisitedParis",
    "StanfordOnlineProducts",
    "TextTable",
    "VGGFace2",
    "VehicleID",
)


def check(args: Sequence[str]) -> int:
    """Compare the images of a data set with the published counts, and print the comparison.

    Args:
        args: `--data NAME --root DIR` and other settings of the data module; `Glyphs` has no root.

    Returns:
        The exit code: 0 if no problem was found and all counts are published counts, 1 if not, 2 if the data set cannot
            be read.
    """
    data_module, settings = _parse(args)
    try:
        report = data_module(**settings).check()
    except (ImportError, OSError, ValueError) as error:
        if isinstance(error, Invalid):
            error = error.of("check", **{name: f"--{name}" for name in settings})
        print(error, file=sys.stderr)
        return 2
    for line in str(report).splitlines():
        print(printable(line))
    if report.ok:
        return 0
    return 1


def data_modules() -> dict[str, Any]:
    """The data modules that can be checked, by name."""
    from lightning_retrieval import datamodules

    found = {}
    for name in datamodules.__all__:
        value = getattr(datamodules, name)
        if inspect.isclass(value) and hasattr(value, "check") and not inspect.isabstract(value):
            found[name] = value
    return found


def _parse(args: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The class of a data module, and its settings."""
    first = argparse.ArgumentParser(PROGRAM, add_help=False)
    first.add_argument("--data")
    named, rest = first.parse_known_args(args)

    parser = _Parser(
        PROGRAM,
        description="Check the directory structure of a data set before training. "
        f"--data is one of {', '.join(DATA_MODULES)}.",
        epilog="example: lightning-retrieval check --data ImageFolder --root photos; "
        "lightning-retrieval check --data ImageFolder --help shows all settings of ImageFolder, which may begin with "
        f"{PREFIX} as for fit",
    )
    if named.data is None:
        parser.add_argument("--data", required=True, metavar="NAME", help="the data module")
        if HELP.isdisjoint(args):
            parser.error(f"--data is required, the name of the data module, such as {EXAMPLE}")
        parser.parse_args(args)  # this call ends the program with the help
    _check_root(named.data, rest)
    _print_start(named.data, rest)
    with imports_of_command():
        known = data_modules()
    if named.data not in known:
        parser.error(f"there is no data module {named.data!r}; --data is one of {', '.join(sorted(known))}")
    parser.add_argument("--data", choices=sorted(known), metavar="NAME", help="the data module")
    data_module = known[named.data]
    parser.add_class_arguments(data_module, fail_untyped=False, sub_configs=True)
    parsed = parser.parse_args(["--data", named.data, *map(_without_prefix, rest)])
    settings: dict[str, Any] = parser.instantiate_classes(parsed).as_dict()
    del settings["data"]
    return data_module, settings


def _check_root(data: str, args: Sequence[str]) -> None:
    """Exit if the folder of a data set does not exist, before libraries are imported, which takes seconds."""
    first = CommandParser(PROGRAM, add_help=False, allow_abbrev=False)
    first.add_argument("--root", f"{PREFIX}root", type=partial(given_path, exists=True))
    if data in DATA_MODULES:
        first.parse_known_args(args)


def _without_prefix(argument: str) -> str:
    """A command-line argument, without the prefix that `fit` gives to the settings of the data module."""
    if argument.startswith(PREFIX):
        return f"--{argument.removeprefix(PREFIX)}"
    return argument


def _print_start(data: str, rest: Sequence[str]) -> None:
    """Say what the command does if libraries are imported first, which takes seconds."""
    is_imported = "torch" in sys.modules
    if is_imported or data not in DATA_MODULES or not HELP.isdisjoint(rest):
        return
    print(f"check: loading {data}, then its images are read ...", file=sys.stderr, flush=True)


class _Parser(ArgumentParser):
    """A parser that prints an error as one line."""

    def parse_args(self, args: Sequence[str], *further: Any, **settings: Any) -> Any:  # type: ignore[override]
        """Parse arguments, in which None and null are the same."""
        return super().parse_args(null_for_none(args), *further, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit."""
        if not self.exit_on_error:  # the parser of a class, whose name only the other parser knows
            super().error(message, ex)
        self.exit(2, one_line(PROGRAM, " ".join(message.split())))
