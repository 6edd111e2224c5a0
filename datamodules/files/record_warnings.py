"""Record the warnings of a function without suppressing them."""

import warnings
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def record_warnings(read: Callable[[], Result]) -> tuple[Result, list[str]]:
    """Call `read()`; return its result and the messages of its warnings, which are issued as usual."""
    recorded: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            result = read()
    finally:  # also if reading failed
        for warning in recorded:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return result, [str(warning.message) for warning in recorded]
