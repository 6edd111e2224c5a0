"""The command `example`: writes the config of the main example, for users without a clone of the repository."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from lightning_retrieval.command_line import command_line_message, command_parser
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.invalid import InvalidValue

EXAMPLES = ("glyphs",)  # each is a file of this package; `examples/` in the repository has the same file
DESCRIPTION = (
    "Write the config of an example, which `fit` runs. glyphs trains on characters that are drawn from fonts, so that "
    "nothing is downloaded."
)


def example(args: Sequence[str]) -> int:
    """Write a config, print the command that runs it, and return the exit code: 0, or 2 if nothing was written."""
    parser = command_parser(
        "example",
        DESCRIPTION,
        "examples:\nlightning-retrieval example glyphs\nlightning-retrieval example --output first.yaml glyphs",
    )
    add_options(parser)
    options = parser.parse_args(args)
    path = options.output or Path(f"{options.name}.yaml")
    try:
        write_example(options.name, path)
    except (OSError, ValueError) as error:
        print(command_line_message("example", error, vars(options)), file=sys.stderr)
        return 2
    shown = str(path)
    if shown.startswith("-"):  # which would be read as an option
        shown = f"./{shown}"
    print(f"Run it with: lightning-retrieval fit --config {shlex.quote(shown)}")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument("name", choices=EXAMPLES, help="name of the example")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write, which must not exist [NAME.yaml]")


def write_example(name: str, path: Path) -> None:
    """Write the config of an example.

    Args:
        name: one of `EXAMPLES`.
        path: the file to write.

    Raises:
        ValueError: if the file exists.
        OSError: if it cannot be written.
    """
    if os.path.lexists(path):
        got = f"{path}, which exists"
        raise InvalidValue("must be a new file", argument="output", got=got, cure="give another name")
    content = files("lightning_retrieval.cli").joinpath(f"{name}.yaml").read_bytes()
    with writing(path), new_file(path) as file:
        file.write(content)
