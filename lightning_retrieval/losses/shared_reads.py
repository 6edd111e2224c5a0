"""Reads from the device whose results several calls of losses share.

The number of positives of a query follows from labels and ids, not from the embeddings. A loss that is computed at
several lengths of the same embeddings would read the same numbers at each length, and wait for the device each time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
_Reads = dict[tuple[Any, ...], tuple[tuple[Tensor | None, ...], Any]]
_reads: ContextVar[_Reads | None] = ContextVar("shared_reads", default=None)


@contextmanager
def shared_reads() -> Iterator[None]:
    """Within this context, `read_once` returns the result of an earlier call with the same tensors and settings."""
    token = _reads.set({})
    try:
        yield
    finally:
        _reads.reset(token)


def read_once(tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...], read: Callable[[], T]) -> T:
    """The result of `read`, or of an earlier call with the same tensors and settings within `shared_reads`.

    Args:
        tensors: the objects that the result depends on, compared by identity; they must not change in between.
        settings: whatever else it depends on, hashable.
        read: computes the result.
    """
    reads = _reads.get()
    if reads is None:
        return read()
    key = (*map(id, tensors), *settings)
    if key not in reads:
        reads[key] = (tensors, read())  # keeps the tensors, so that no other object gets the identity of one
    result: T = reads[key][1]
    return result
