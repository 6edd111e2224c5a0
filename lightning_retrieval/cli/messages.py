"""Text that the commands print: paths with unusual characters, and error messages in terms of the command line."""

from collections.abc import Iterable


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
        command: the subcommand, such as `index`, whose Python function is `index_images`.
        error: what the Python function raised.
        arguments: names of the arguments that are options of the subcommand.

    Example:
        >>> error = ValueError("index_images: `images` must be a folder, got x.")
        >>> command_line_message("index", error, ["images"])
        'index: `--images` must be a folder, got x.'
    """
    message = str(error)
    for function in (f"{command}_images: ", f"{command}_embeddings: ", f"{command}_model: "):
        if message.startswith(function):
            message = f"{command}: {message.removeprefix(function)}"
    message = message.replace("`index_images`", "`lightning-retrieval index`")
    for name in arguments:
        message = message.replace(f"`{name}`", f"`{_option(name)}`")
    return message


def _option(name: str) -> str:
    if len(name) == 1:
        return f"-{name}"
    return f"--{name}"
