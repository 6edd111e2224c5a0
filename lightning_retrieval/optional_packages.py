"""Packages that only some features need: they are imported where they are used, and may be missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def optional_import(message: str) -> Iterator[None]:
    """Raise one sentence if a package that is imported in this block is missing.

    If the package is installed, but its import fails, such as for a shared library, the reason is added in parentheses.

    Args:
        message: what needs the package, and how to install it; a sentence with its full stop.

    Raises:
        ModuleNotFoundError: if an import of the block fails.

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
