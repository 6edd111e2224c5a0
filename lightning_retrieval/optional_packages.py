"""Imports of optional packages, which only some features need."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def optional_import(message: str) -> Iterator[None]:
    """Context that replaces the error of a failed import by one sentence.

    If the package is installed but its import fails, for example because a shared library is missing, the reason is
    added in parentheses.

    Args:
        message: a sentence, with full stop, on what needs the package and how to install it.

    Raises:
        ModuleNotFoundError: if an import in the context fails.

    Example:
        >>> from lightning_retrieval.optional_packages import optional_import
        >>> with optional_import("demo: no_such_package must be installed: pip install no_such_package."):
        ...     import no_such_package
        Traceback (most recent call last):
        ModuleNotFoundError: demo: no_such_package must be installed: pip install no_such_package.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise ModuleNotFoundError(message) from None
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise ModuleNotFoundError(f"{message.removesuffix('.')} ({reason}).") from None
