"""Millions of strings, such as the paths of images, packed into two arrays."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16  # number of strings that are Python objects at a time


class PackedStrings(Sequence[str]):
    """A sequence of strings, stored as an array of bytes and an array with the end position of each string.

    Arrays can be pickled, forked, mapped into memory and saved quickly, without a Python object for each string. Arrow
    works on the same bytes. An integer index returns a string; a slice, a mask or an array of integers returns
    `PackedStrings`.

    Args:
        strings: the strings. File names that are not valid UTF-8 are preserved.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode(errors="surrogateescape") for string in strings]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        self.ends: NDArray[np.int64] = np.cumsum(lengths)
        self.data: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    @classmethod
    def from_arrays(cls, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> "PackedStrings":
        """Strings from the `data` and `ends` of other packed strings, without a copy."""
        strings = cls.__new__(cls)
        strings.data = data
        strings.ends = ends
        return strings

    @classmethod
    def from_arrow(cls, strings: Any) -> "PackedStrings":
        """Strings from an Arrow array of the type large_binary that is not a slice of another one, without a copy."""
        _, offsets, data = strings.buffers()
        ends = np.frombuffer(offsets, np.int64)[1 : len(strings) + 1]
        return cls.from_arrays(np.frombuffer(data, np.uint8), ends)

    def arrow(self) -> Any:
        """The strings as an Arrow array of the type large_binary, without a copy of their bytes.

        Raises:
            ValueError: if the end positions are not in ascending order, or not inside the data.
        """
        import pyarrow

        offsets = np.concatenate([np.zeros(1, np.int64), self.ends], dtype=np.int64)
        buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(self.data)]
        strings = pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(self), buffers)
        strings.validate(full=True)  # Arrow reads other memory if the end positions of a damaged file are wrong
        return strings

    @classmethod
    def join(cls, parts: Sequence["PackedStrings"]) -> "PackedStrings":
        """Concatenate packed strings; there must be at least one part."""
        import pyarrow

        return cls.from_arrow(pyarrow.concat_arrays([part.arrow() for part in parts]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, (int, np.integer)):
            return PackedStrings.from_arrow(self.arrow().take(as_arrow(np.arange(len(self))[index])))
        position = range(len(self))[index]
        begin = 0
        if position > 0:
            begin = int(self.ends[position - 1])
        return _decode(self.data[begin : int(self.ends[position])].tobytes())

    def __iter__(self) -> Iterator[str]:
        strings = self.arrow()
        for begin in range(0, len(self), BLOCK):  # Python objects for all strings at once would take much memory
            yield from map(_decode, strings.slice(begin, BLOCK).to_pylist())


def as_arrow(values: NDArray[Any]) -> Any:
    """Numbers as an Arrow array, without a copy of contiguous ones.

    Unlike `pyarrow.array`, `Array.take` of NumPy's arrays and `Array.to_numpy`, this does not import pandas.
    """
    import pyarrow

    values = np.ascontiguousarray(values)
    buffers = [None, pyarrow.py_buffer(values)]
    return pyarrow.Array.from_buffers(pyarrow.from_numpy_dtype(values.dtype), len(values), buffers)


def _decode(encoded: bytes) -> str:
    return encoded.decode(errors="surrogateescape")
