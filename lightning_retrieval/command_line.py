"""What all commands share: parsers, and messages about errors; it does not import torch, so help appears at once."""

import argparse
import gc
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from lightning_retrieval.invalid import Invalid

HELP_WIDTH = 78  # columns of a description
INTERRUPTED = 130  # exit code after Ctrl-C
JOINERS = "\u200c\u200d"  # they join or part letters, as in Persian and Hindi, and join the parts of an emoji
# Owners of the errors that a command reports as its own; an error without an owner is one of the command itself.
OWNERS = (
    "",
    "adapt_head",
    "embed_images",
    "export_model",
    "index_embeddings",
    "index_images",
    "report_images",
    "search_images",
    "MilvusStore",
    "RetrievalIndex",
)


@contextmanager
def imports_of_command() -> Iterator[None]:
    """Import libraries without garbage collections, which would search all objects that torch makes, several times.

    Afterwards these objects are left out of collections. Nothing changes if torch is already imported: then the caller
    is no new process, and may have garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def read_by_another_program() -> Iterator[None]:
    """End without an error if the program that reads the output has read what it wanted, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it exits
        sys.exit(0)


def printable(text: str) -> str:
    """The text, with unprintable characters (such as a line break in a file name) replaced by escape sequences."""
    characters = []
    for character in text:
        if not character.isprintable() and character not in JOINERS:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def command_line_message(
    command: str, error: Exception, arguments: Iterable[str], *, positional: Mapping[str, str] | None = None
) -> str:
    """The message of an error, with arguments of Python functions replaced by command-line options.

    Args:
        command: the subcommand, such as `index`.
        error: the error of a Python function, such as `index_images`.
        arguments: names of the arguments that are options of the subcommand.
        positional: what the help calls the arguments that have no option, by name.

    Example:
        >>> from lightning_retrieval.invalid import InvalidValue
        >>> error = InvalidValue("must be a folder", "index_images", "images", got="x")
        >>> command_line_message("index", error, ["images"])
        'index: `--images` must be a folder, got x.'
    """
    if isinstance(error, OSError) and error.errno is not None:  # of the system, which does not know the command
        return f"{command}: {printable(str(error))}."
    if isinstance(error, Invalid) and error.owner in OWNERS:
        names = {name: _option(name) for name in arguments}
        names.update(positional or {})
        error = error.of(command, index_images="lightning-retrieval index", **names)
        return with_options(str(error), arguments)
    return str(error)


def _option(name: str) -> str:
    """The option of an argument, such as `--images` or `-k`."""
    if len(name) == 1:
        return f"-{name}"
    return f"--{name}"


def with_options(text: str, arguments: Iterable[str]) -> str:
    """A text with options in place of arguments of Python functions that it names with their values.

    Args:
        text: the text.
        arguments: names of the arguments that are options.

    Example:
        >>> with_options('set categories=True, or classes="deepest"', ["categories", "classes"])
        'set --categories True, or --classes deepest'
    """
    names = "|".join(map(re.escape, arguments))
    return re.sub(rf"(?<![\w.-])({names})=(\"?)([\w./-]+)\2", r"--\1 \3", text)


def null_for_none(args: Sequence[str]) -> list[str]:
    """Command-line arguments in which each value None is written null, as YAML writes it.

    jsonargparse itself passes a null on to the options of a class as the text None.

    Example:
        >>> null_for_none(["fit", "--data.cache_dir=None", "--trainer.logger", "None"])
        ['fit', '--data.cache_dir=null', '--trainer.logger', 'null']
    """
    return [re.sub(r"^(--.*=)?None$", r"\1null", argument) for argument in args]


class CommandParser(argparse.ArgumentParser):
    """A parser that prints an error as one line without the usage.

    An empty text is no path, although `Path("")` is the current folder: it comes from a variable of a script that is
    not set.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; end the program for `--help` or an invalid option."""
        for action in self._actions:
            if action.type is Path:
                action.type = _path
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(2, one_line(self.prog, message))


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be the path of a file or a folder, got an empty text")
    return Path(text)


def command_parser(command: str, description: str, epilog: str) -> CommandParser:
    """The parser of a command, whose help wraps the description and keeps the lines of the epilog.

    Args:
        command: name of the command.
        description: what it does.
        epilog: examples, which follow the options.
    """
    return CommandParser(
        f"lightning-retrieval {command}",
        description=textwrap.fill(description, HELP_WIDTH),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def one_line(program: str, message: str) -> str:
    """The line that reports an error and says how to get help."""
    end = "."
    if message.endswith((".", "?")):
        end = ""
    return f"{program}: error: {printable(message)}{end} See {program} --help.\n"
