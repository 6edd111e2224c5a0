"""Millions of strings, such as the paths of images, as two arrays."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16  # strings gathered at a time


class Paths(Sequence[str]):
    """Strings as one array of bytes, so that they pickle, fork and save as arrays do.

    Args:
        strings: the paths.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode(errors="surrogateescape") for string in strings]  # file names may be any bytes
        self.ends: NDArray[np.int64] = np.cumsum([len(string) for string in encoded], dtype=np.int64)
        self.bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    @classmethod
    def of_arrays(cls, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> "Paths":
        """The paths whose arrays these are."""
        paths = cls.__new__(cls)
        paths.bytes, paths.ends = data, ends
        return paths

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, (int, np.integer)):
            return self._gathered(np.arange(len(self))[index])
        place = range(len(self))[index]
        begin = int(self.ends[place - 1]) if place else 0
        return self.bytes[begin : int(self.ends[place])].tobytes().decode(errors="surrogateescape")

    def _gathered(self, rows: NDArray[np.int64]) -> "Paths":
        lengths = np.diff(self.ends, prepend=0)
        begins, lengths = (self.ends - lengths)[rows], lengths[rows]
        ends = np.cumsum(lengths, dtype=np.int64)
        data = np.empty(int(lengths.sum()), dtype=np.uint8)
        for block in range(0, len(rows), BLOCK):  # the places of all bytes at once would take 16 times their memory
            part = slice(block, block + BLOCK)
            first, last = int(ends[block] - lengths[block]), int(ends[part][-1])
            into = np.arange(first, last)
            data[first:last] = self.bytes[into + np.repeat(begins[part] - ends[part] + lengths[part], lengths[part])]
        return Paths.of_arrays(data, ends)

    def joined(self, other: "Paths") -> "Paths":
        """These strings and then the others."""
        shifted = len(self.bytes) + other.ends
        return Paths.of_arrays(np.concatenate([self.bytes, other.bytes]), np.concatenate([self.ends, shifted]))

    def __iter__(self) -> Iterator[str]:
        data, begin = self.bytes.tobytes(), 0
        for end in self.ends.tolist():
            yield data[begin:end].decode(errors="surrogateescape")
            begin = end
