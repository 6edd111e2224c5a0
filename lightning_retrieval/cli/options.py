"""Text that the commands print: paths with unusual characters, and error messages in terms of the command line."""

import errno
import re
from collections.abc import Iterable, Iterator

# The names of the preparations that the help of the commands shows, in a module that needs no torch.


TRANSFORMS = ("plain", "smooth_ap", "roadmap", "ap_gem", "glyphs")


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
    for cause in _causes(error):
        if not isinstance(cause, ModuleNotFoundError) or cause.name is not None:
            continue
        if "`tensorboardX`" in str(cause):  # Lightning's message
            return TENSORBOARD
        return str(cause)
    return None


def invalid_argument_message(error: Exception) -> str | None:
    """The sentence in which a class of this library says which argument of a config is invalid, or None.

    The traceback of another error, such as one of a class of the user's, says more than its message.

    Args:
        error: what the parser raised when it created the objects of a config.

    Example:
        >>> from lightning_retrieval import SmoothAPLoss
        >>> try:
        ...     SmoothAPLoss(tau=-1.0)
        ... except ValueError as error:
        ...     print(invalid_argument_message(error))
        SmoothAPLoss: `tau` must be a finite number > 0, got -1.0.
    """
    for cause in _causes(error):
        is_sentence = re.match(r"[\w.]+: ", str(cause)) is not None
        if isinstance(cause, (FileNotFoundError, TypeError, ValueError)) and is_sentence and _is_ours(cause):
            return str(cause)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_ours(error: BaseException) -> bool:
    """Whether code of this library raised an error."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_globals.get("__name__")).startswith("lightning_retrieval.")
