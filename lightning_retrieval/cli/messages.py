"""Text that the commands print: paths with unusual characters, and error messages in terms of the command line."""

from collections.abc import Iterable

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
