"""Millions of strings, such as the paths of images, packed into two arrays."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16  # number of strings copied at a time


class PackedStrings(Sequence[str]):
    """A sequence of strings, stored as an array of bytes and an array with the end position of each string.

    Arrays can be pickled, forked and saved quickly, without a Python object for each string. An integer index returns a
    string; a slice, a mask or an array of integers returns `PackedStrings`.

    Args:
        strings: the strings. File names that are not valid UTF-8 are preserved.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode(errors="surrogateescape") for string in strings]
        lengths = [len(string) for string in encoded]
        self.ends: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64)
        self.data: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    @classmethod
    def from_arrays(cls, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> "PackedStrings":
        """Strings from the `data` and `ends` of other packed strings, without a copy."""
        strings = cls.__new__(cls)
        strings.data = data
        strings.ends = ends
        return strings

    @classmethod
    def join(cls, parts: Sequence["PackedStrings"]) -> "PackedStrings":
        """Concatenate packed strings; there must be at least one part."""
        sizes = [len(part.data) for part in parts]
        begins = np.cumsum([0, *sizes[:-1]])
        ends = [part.ends + begin for part, begin in zip(parts, begins)]
        return cls.from_arrays(np.concatenate([part.data for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, (int, np.integer)):
            return self._select(np.arange(len(self))[index])
        position = range(len(self))[index]
        begin = 0
        if position > 0:
            begin = int(self.ends[position - 1])
        return _decode(self.data[begin : int(self.ends[position])].tobytes())

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for block in range(0, len(self), BLOCK):  # Python objects for all strings at once would take much memory
            ends = self.ends[block : block + BLOCK].tolist()
            first = begin
            data = self.data[first : ends[-1]].tobytes()
            for end in ends:
                yield _decode(data[begin - first : end - first])
                begin = end

    def _select(self, rows: NDArray[np.int64]) -> "PackedStrings":
        """The strings at these positions, copied block by block.

        An index for all bytes at once would take 16 times the memory of the bytes themselves.
        """
        all_lengths = np.diff(self.ends, prepend=0)
        lengths = all_lengths[rows]
        begins = (self.ends - all_lengths)[rows]
        ends = np.cumsum(lengths, dtype=np.int64)
        data = np.empty(int(lengths.sum()), dtype=np.uint8)
        for block in range(0, len(rows), BLOCK):
            part = slice(block, block + BLOCK)
            first = int(ends[block] - lengths[block])
            last = int(ends[part][-1])
            shifts = begins[part] - (
                ends[part] - lengths[part]
            )  # added to a byte's new position, gives its old position
            data[first:last] = self.data[np.arange(first, last) + np.repeat(shifts, lengths[part])]
        return PackedStrings.from_arrays(data, ends)


def _decode(encoded: bytes) -> str:
    return encoded.decode(errors="surrogateescape")
