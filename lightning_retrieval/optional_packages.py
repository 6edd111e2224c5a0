"""Imports of optional packages, which only some features need."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_retrieval.invalid import MissingPackage


@contextmanager
def optional_import(message: str, owner: str = "") -> Iterator[None]:
    """Context that replaces the error of a failed import by one sentence, with the reason in parentheses.

    The reason names the module that is missing, which may be another one that an installed package needs.

    Args:
        message: a sentence, with full stop, on what needs the package and how to install it.
        owner: prefix of the message.

    Raises:
        ModuleNotFoundError: if an import in the context fails.

    Example:
        >>> from lightning_retrieval.optional_packages import optional_import
        >>> with optional_import("pip install mappyng.", "demo"):
        ...     import mappyng
        Traceback (most recent call last):
        lightning_retrieval.invalid.MissingPackage: demo: pip install mappyng (No module named 'mappyng').
    """
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingPackage(f"{message.removesuffix('.')} ({reason}).", owner) from None
