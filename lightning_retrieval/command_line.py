"""What all commands share: their parser, imports and output. No torch is imported, so help appears at once."""

import argparse
import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from lightning_retrieval.invalid import Invalid
from lightning_retrieval.paths import check_path

INTERRUPTED = 130  # exit code after Ctrl-C
# Settings of glibc's `mallopt`: M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD.
KEEP_MEMORY = {-4: 0, -1: 2**31 - 1, -2: 1 << 26}
JOINERS = "\u200c\u200d"  # they join or part letters, as in Persian and Hindi, and join the parts of an emoji


@contextmanager
def imports_of_command() -> Iterator[None]:
    """Import libraries without garbage collections, which would search all objects that torch makes, several times.

    Afterwards these objects are left out of collections. Memory and images are handled as a program of its own may:
    memory of a batch is kept for the next one, and photographs of any size are opened. Nothing changes if torch is
    already imported: then the caller is no new process, and may have garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    _keep_memory()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _keep_memory() -> None:
    """Let glibc keep freed memory, where it would hand back the activations of each batch and take them again.

    The system clears what it hands out, which is up to half of the time of a network on a CPU.
    """
    with suppress(OSError, AttributeError):  # another system or C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in KEEP_MEMORY.items():
            mallopt(parameter, value)


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


def null_for_none(args: Sequence[str]) -> list[str]:
    """Command-line arguments in which each value None is written null, as YAML writes it.

    jsonargparse itself passes a null on to the options of a class as the text None.

    Example:
        >>> null_for_none(["fit", "--data.cache_dir=None", "--trainer.logger", "None"])
        ['fit', '--data.cache_dir=null', '--trainer.logger', 'null']
    """
    return [re.sub(r"^(--.*=)?None$", r"\1null", argument) for argument in args]


class CommandParser(argparse.ArgumentParser):
    """A parser that prints an error as one line without the usage, and reads paths by `check_path`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; end the program for `--help` or an invalid option."""
        for action in self._actions:
            if action.type is Path:
                action.type = given_path
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(2, one_line(self.prog, message))


def given_path(text: str, *, exists: bool = False) -> Path:
    """The path in an option, with the home folder for `~`; see `check_path`."""
    try:
        return check_path("", text, exists=exists)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def one_line(program: str, message: str) -> str:
    """The line that reports an error and says how to get help."""
    end = "."
    if message.endswith((".", "?")):
        end = ""
    return f"{program}: error: {printable(message)}{end} See {program} --help.\n"
