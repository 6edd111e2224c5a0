"""Text that the commands print: paths with unusual characters, and error messages in terms of the command line."""

import errno
from collections.abc import Iterable

TENSORBOARD = "TensorBoardLogger needs TensorBoard; install it with pip install 'lightning-retrieval[tensorboard]'."
SHOWN = 100  # characters of a path that is too long
FUNCTIONS = ("embed_images", "export_model", "index_embeddings", "index_images", "search_images")  # of the commands


def printable(text: str) -> str:
    """The text with characters that cannot be printed, such as a line break in a file name, as escape sequences."""
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def command_line_message(command: str, error: Exception, arguments: Iterable[str]) -> str:
    """The message of an error with options of the command line instead of arguments of Python functions.

    Args:
        command: the subcommand, such as `index`.
        error: what a Python function raised, such as `index_images`.
        arguments: names of the arguments that are options of the subcommand.

    Example:
        >>> error = ValueError("index_images: `images` must be a folder, got x.")
        >>> command_line_message("index", error, ["images"])
        'index: `--images` must be a folder, got x.'
    """
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        shown = printable(str(error.filename))[:SHOWN]
        return f"{command}: a path must have names of at most 255 bytes, got {shown}..., which is longer; shorten it."
    message = str(error)
    owner, separator, sentence = message.partition(": ")
    if owner in FUNCTIONS:
        message = f"{command}{separator}{sentence}"
    message = message.replace("`index_images`", "`lightning-retrieval index`")
    for name in arguments:
        message = message.replace(f"`{name}`", f"`{_option(name)}`")
    return message


def _option(name: str) -> str:
    if len(name) == 1:
        return f"-{name}"
    return f"--{name}"


def missing_package_message(error: Exception) -> str | None:
    """The sentence that names the package which a class of a config needs, or None if no package is missing.

    jsonargparse quotes the error of a class within errors of its own. A module whose import fails without a sentence on
    what needs it is none of these packages: its traceback says more.

    Args:
        error: what the parser raised when it created the objects of a config.

    Example:
        >>> error = ValueError("Problem with given class_path 'a.B'")
        >>> error.__cause__ = ModuleNotFoundError("B: timm must be installed: pip install timm.")
        >>> missing_package_message(error)
        'B: timm must be installed: pip install timm.'
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    if cause is None or cause.name is not None:
        return None
    message = str(cause)
    if "`tensorboardX`" in message:  # Lightning's message
        return TENSORBOARD
    return message
