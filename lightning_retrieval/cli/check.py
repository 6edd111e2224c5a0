"""`lightning-retrieval check`: look at the directory structure of a data set before training."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser

from lightning_retrieval import datamodules
from lightning_retrieval.cli.messages import printable

PROGRAM = "lightning-retrieval check"


def check(args: Sequence[str]) -> int:
    """Compare the images of a data set with the published counts, and print the comparison.

    Args:
        args: `--data NAME --root DIR` and other settings of the data module; `Glyphs` has no root.

    Returns:
        The exit code: 0 if all is as published, 1 if not, 2 if the data set cannot be read.
    """
    known = data_modules()
    settings = _parse(args, known)
    data_module = known[settings.pop("data")]
    try:
        report = data_module(**settings).check()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in str(report).splitlines():
        print(printable(line))
    if report.ok:
        return 0
    return 1


def data_modules() -> dict[str, Any]:
    """The data modules that can be checked, by name."""
    found = {}
    for name, value in vars(datamodules).items():
        if inspect.isclass(value) and hasattr(value, "check") and not inspect.isabstract(value):
            found[name] = value
    return found


def _parse(args: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
    """The settings of a data module, and its name under `data`."""
    names = sorted(known)
    first = argparse.ArgumentParser(PROGRAM, add_help=False)
    first.add_argument("--data", choices=names)
    named, rest = first.parse_known_args(args)

    parser = ArgumentParser(
        PROGRAM,
        description="Check the directory structure of a data set before training. "
        f"--data is one of {', '.join(names)}.",
    )
    parser.add_argument("--data", required=True, choices=names, help="the data module")
    if named.data is not None:
        parser.add_class_arguments(known[named.data], fail_untyped=False, sub_configs=True)
        rest = ["--data", named.data, *rest]
    settings: dict[str, Any] = parser.instantiate_classes(parser.parse_args(rest)).as_dict()
    return settings
