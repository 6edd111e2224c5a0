"""Pickles of plain values from elsewhere, read without running anything that they ask for.

A pickle is a program: it may call any function that it names. Here it may name bytes, set, frozenset and what NumPy's
arrays and numbers are made of; all else is refused by its name. What it names it may call, but not change.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_scalar: Any = np.float64(0).__reduce__()[0]  # numpy.core.multiarray.scalar, wherever this NumPy has it
_frombuffer: Any = np.zeros(1).__reduce_ex__(5)[0]


def load_plain_pickle(who: str, path: Path) -> Any:
    """The value in a pickle of lists, tuples, dicts, sets, text, bytes, numbers, bools, None and arrays of these.

    Args:
        who: begins every message.
        path: of the file.

    Raises:
        ValueError: if it asks for anything else, naming that, or cannot be unpickled.
    """
    with path.open("rb") as file:
        try:
            return _PlainUnpickler(file).load()
        except _Refused as refused:
            raise ValueError(
                f"{who}: {path} must hold plain values and NumPy arrays of numbers and text only, got {refused}, which "
                "could run code and is refused; take the file from its official source."
            ) from None
        except Exception as error:  # pickle promises no kind of its errors
            raise ValueError(f"{who}: {path} must be a pickle, which this one cannot be read as ({error}).") from None


class _Refused(Exception):  # noqa: N818
    """What was asked for."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        short = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        if (short, name) not in _KNOWN:
            raise _Refused(f"{module}.{name}")
        return _KNOWN[short, name]


class _Function:
    """What a pickle may call. Setting the state of a plain function would change it for the whole process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("the state of a function")


class _Kind:
    """What a pickle has in place of a dtype, whose state could ask for anything; `dtype` is the real one."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype: np.dtype[Any] = np.dtype(name)
        if self.dtype.kind not in "biufcSU":
            raise _Refused(f"an array of {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        version, order, *rest = state
        plain: Any = self.dtype.__reduce__()[2]
        if (version, rest) != (plain[0], list(plain[2:])) or order not in ("<", ">", "|"):
            raise _Refused(f"a type of numbers of the state {state}")
        self.dtype = self.dtype.newbyteorder(order)


class _Array(np.ndarray[Any, Any]):
    """An array whose state names a `_Kind`."""

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, in_columns, data = state
        super().__setstate__((version, shape, _dtype(kind), in_columns, data))


def _empty_array(*_: Any) -> NDArray[Any]:
    """What NumPy's `_reconstruct` gives before the array's state is set."""
    return np.empty(0, np.int8).view(_Array)


def _dtype(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, _Kind):
        raise _Refused(f"an array of {kind!r:.40}")
    return kind.dtype


def _bytes_of(made: Callable[..., Any]) -> _Function:
    """How bytes and bytearrays are pickled; not by a number, which would ask for that much memory."""

    def make(source: Any = b"", *_: Any) -> Any:
        return made(source.encode("latin1") if isinstance(source, str) else bytes(memoryview(source)))

    return _Function(make)


_KNOWN: dict[tuple[str, str], Any] = {
    ("builtins", "bytes"): _bytes_of(bytes),  # in old protocols, and the state of an empty array
    ("builtins", "bytearray"): _bytes_of(bytearray),
    ("builtins", "set"): _Function(set),
    ("builtins", "frozenset"): _Function(frozenset),
    ("_codecs", "encode"): _Function(lambda text, *_: text.encode("latin1")),  # bytes, as Python 2 can read them
    ("numpy", "ndarray"): np.ndarray.__name__,  # which is only handed to `_reconstruct`
    ("numpy", "dtype"): _Function(_Kind),
    ("numpy.core.multiarray", "_reconstruct"): _Function(_empty_array),
    ("numpy.core.multiarray", "scalar"): _Function(lambda kind, *data: _scalar(_dtype(kind), *data)),
    ("numpy.core.numeric", "_frombuffer"): _Function(lambda data, kind, *more: _frombuffer(data, _dtype(kind), *more)),
}
