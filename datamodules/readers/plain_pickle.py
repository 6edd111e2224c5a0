"""Load pickles from other sources without running any code in them.

A pickle is a program that can call any function it names. Here it may name only `bytes`, `bytearray`, `set`,
`frozenset` and the functions with which NumPy pickles arrays and numbers; any other name raises an error. The pickle
gets stand-ins for these functions, which it can call but not modify.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.invalid import InvalidValue

PLAIN_KINDS = "biufcSU"  # kinds of dtypes: bool, integers, floats, complex numbers, bytes and text

# NumPy's functions, found without their module path, which depends on the version.
_numpy_scalar: Any = np.float64(0).__reduce__()[0]  # this is numpy.core.multiarray.scalar
_numpy_frombuffer: Any = np.zeros(1).__reduce_ex__(5)[0]  # this is numpy.core.numeric._frombuffer


def load_plain_pickle(path: Path) -> Any:
    """Load a pickle of lists, tuples, dicts, sets, text, bytes, numbers, bools, None and arrays of these.

    Args:
        path: the file.

    Raises:
        ValueError: if the pickle needs another function or type (the message has the name), or cannot be unpickled.
    """
    with path.open("rb") as file:
        try:
            value = _PlainUnpickler(file).load()
        except _ForbiddenError as forbidden:
            rule = f"{path} must contain only plain values and NumPy arrays of numbers and text"
            got = f"{forbidden}, which could run code and is not loaded"
            raise InvalidValue(rule, got=got, cure="download the file from its official source") from None
        except Exception as error:  # pickle does not document which errors it raises
            rule = f"{path} must be a pickle"
            raise InvalidValue(rule, got=f"a file that cannot be read as one ({error})") from None
    return value


class _ForbiddenError(Exception):
    """A pickle names something that could run code; the message is its name."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the pickle, instead of importing it."""
        # Newer versions of NumPy and Python 2 use other names for the same modules.
        module_name = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        if (module_name, name) not in _STAND_INS:
            raise _ForbiddenError(f"{module}.{name}")
        return _STAND_INS[module_name, name]


class _Function:
    """A function that a pickle may call, but not modify: attributes set on the original would affect all its users."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise _ForbiddenError("the state of a function")


class _PlainDtype:
    """A stand-in for a dtype, because a pickle could give a dtype any state; `dtype` is the real dtype."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype: np.dtype[Any] = np.dtype(name)
        if self.dtype.kind not in PLAIN_KINDS:
            raise _ForbiddenError(f"an array of {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        """Accept only the normal state of this dtype; the byte order may differ."""
        version, byte_order, *others = state
        expected: Any = self.dtype.__reduce__()[2]
        expected_version, _, *expected_others = expected
        is_expected = version == expected_version and others == expected_others
        if not is_expected or byte_order not in ("<", ">", "|"):
            raise _ForbiddenError(f"a dtype with the state {state}")
        self.dtype = self.dtype.newbyteorder(byte_order)


class _PlainArray(np.ndarray[Any, Any]):
    """An array whose pickled state has a `_PlainDtype`."""

    def __setstate__(self, state: Any) -> None:
        version, shape, plain_dtype, is_fortran, data = state
        super().__setstate__((version, shape, _real_dtype(plain_dtype), is_fortran, data))


def _real_dtype(plain_dtype: Any) -> np.dtype[Any]:
    if not isinstance(plain_dtype, _PlainDtype):
        raise _ForbiddenError(f"an array of {plain_dtype!r:.40}")
    return plain_dtype.dtype


def _make_bytes(source: Any = b"", *_: Any) -> bytes:
    """Like `bytes`, but without `bytes(number)`, which would allocate `number` bytes."""
    if isinstance(source, str):
        return source.encode("latin1")
    return bytes(memoryview(source))


def _make_bytearray(source: Any = b"", *_: Any) -> bytearray:
    return bytearray(_make_bytes(source))


def _encode(text: str, *_: Any) -> bytes:
    """Like `codecs.encode`, which pickles of protocol 2 and lower call to create bytes."""
    return text.encode("latin1")


def _reconstruct(*_: Any) -> NDArray[Any]:
    """Like NumPy's `_reconstruct`: an empty array, whose state is set next."""
    return np.empty(0, np.int8).view(_PlainArray)


def _scalar(plain_dtype: Any, *data: Any) -> Any:
    return _numpy_scalar(_real_dtype(plain_dtype), *data)


def _frombuffer(data: Any, plain_dtype: Any, *more: Any) -> Any:
    return _numpy_frombuffer(data, _real_dtype(plain_dtype), *more)


_STAND_INS: dict[tuple[str, str], Any] = {
    ("builtins", "bytes"): _Function(_make_bytes),  # old protocols and empty arrays need it
    ("builtins", "bytearray"): _Function(_make_bytearray),
    ("builtins", "set"): _Function(set),
    ("builtins", "frozenset"): _Function(frozenset),
    ("_codecs", "encode"): _Function(_encode),
    ("numpy", "ndarray"): "ndarray",  # the pickle passes this to `_reconstruct`, which ignores it
    ("numpy", "dtype"): _Function(_PlainDtype),
    ("numpy.core.multiarray", "_reconstruct"): _Function(_reconstruct),
    ("numpy.core.multiarray", "scalar"): _Function(_scalar),
    ("numpy.core.numeric", "_frombuffer"): _Function(_frombuffer),
}
