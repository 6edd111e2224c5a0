"""Imports of optional packages, which only some features need."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_retrieval.invalid import MissingPackage


@contextmanager
def optional_import(message: str, owner: str = "") -> Iterator[None]:
    """Context that replaces the error of a failed import by one sentence.

    If the package is installed but its import fails, for example because a shared library is missing, the reason is
    added in parentheses.

    Args:
        message: a sentence, with full stop, on what needs the package and how to install it.
        owner: prefix of the message.

    Raises:
        ModuleNotFoundError: if an import in the context fails.

    Example:
        >>> from lightning_retrieval.optional_packages import optional_import
        >>> with optional_import("mappyng must be installed: pip install mappyng.", "demo"):
        ...     import mappyng
        Traceback (most recent call last):
        lightning_retrieval.invalid.MissingPackage: demo: mappyng must be installed: pip install mappyng.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise MissingPackage(message, owner) from None
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingPackage(f"{message.removesuffix('.')} ({reason}).", owner) from None
