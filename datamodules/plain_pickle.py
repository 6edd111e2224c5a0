"""Pickles of plain values from elsewhere, read without running anything that they ask for.

A pickle is a program: it may call any function that it names. Here it may name bytes, set, frozenset and what NumPy's
arrays and numbers are made of; all else is refused by its name.
"""

import pickle
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


def _empty_array(*_: Any) -> NDArray[Any]:
    """What NumPy's `_reconstruct` gives before the array's state is set."""
    return np.empty(0, np.int8)


def _dtype(kind: Any, *_: Any) -> np.dtype[Any]:
    # A copy, since its state is set next, and NumPy shares one dtype among all arrays.
    found: np.dtype[Any] = np.dtype(kind, copy=True)
    if found.kind not in "biufcSU":
        raise _Refused(f"an array of {found}")
    return found


def _encode(text: str, *_: Any) -> bytes:
    """Bytes as Python 3 pickles them for Python 2: `_codecs.encode(text, "latin1")`."""
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("builtins", "bytes"): bytes,  # in old protocols, and the state of an empty array
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): np.ndarray.__name__,  # which is only handed to `_reconstruct`
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
}
