"""The ids of the rows of an index, and a path for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_integers, check_tensor
from lightning_retrieval.search.packed_strings import PackedStrings
from lightning_retrieval.search.rows import OWNER

LARGEST_ID = int(np.iinfo(np.int64).max)


def integer_ids(ids: Any) -> NDArray[np.int64]:
    """The ids of rows as an array.

    Raises:
        ValueError: if they are not one-dimensional.
        TypeError: if they are not a tensor of integers.
    """
    check_tensor(OWNER, "ids", ids)
    if ids.ndim != 1:
        raise ValueError(f"{OWNER}: `ids` must have shape (rows,), got {tuple(ids.shape)}.")
    check_integers(OWNER, "ids", ids, len(ids), "ids")
    array: NDArray[np.int64] = ids.cpu().numpy().astype(np.int64)
    return array


class IdTable:
    """Sorted ids with their paths.

    Args:
        ids: sorted, all different.
        paths: one for each id, "" if a row has none.
    """

    def __init__(self, ids: NDArray[np.int64], paths: PackedStrings) -> None:
        self.ids = ids
        self.paths = paths

    @classmethod
    def empty(cls) -> "IdTable":
        """A table without rows."""
        return cls(np.zeros(0, np.int64), PackedStrings([]))

    def __len__(self) -> int:
        return len(self.ids)

    def new_ids(self, ids: Tensor | None, rows: int) -> NDArray[np.int64]:
        """The ids of rows that are to be added: those given, or the integers after the largest id if None.

        Raises:
            ValueError: if there is not one id for each row, or an id is negative, given twice or in the table.
            TypeError: if they are not integers.
        """
        if ids is None:
            return self._next_ids(rows)
        check_integers(OWNER, "ids", ids, rows, "embeddings")
        new = ids.cpu().numpy().astype(np.int64)
        if rows > 0 and new.min() < 0:
            raise ValueError(f"{OWNER}: `ids` must be >= 0, got {new.min()}.")
        distinct, counts = np.unique(new, return_counts=True)
        repeated = distinct[counts > 1]
        if len(repeated) > 0:
            raise ValueError(f"{OWNER}: `ids` must differ, got {repeated[0]} for several rows.")
        known = distinct[np.isin(distinct, self.ids)]
        if len(known) > 0:
            raise ValueError(
                f"{OWNER}: `ids` must be new, got {len(known)} that are in the index, such as {known[0]}; remove "
                "those first."
            )
        return new

    def add(self, ids: NDArray[np.int64], paths: Sequence[str] | None) -> None:
        """Add ids that `new_ids` returned, and their paths; None if the rows have none."""
        if paths is None:
            paths = [""] * len(ids)
        all_ids = np.concatenate([self.ids, ids])
        order = np.argsort(all_ids, kind="stable")
        self.ids = all_ids[order]
        if not isinstance(paths, PackedStrings):
            paths = PackedStrings(paths)
        self.paths = self.paths.concatenate(paths)[order]

    def remove(self, positions: NDArray[np.intp]) -> None:
        """Remove the ids at these positions, and their paths."""
        kept = np.delete(np.arange(len(self)), positions)
        self.ids = self.ids[kept]
        self.paths = self.paths[kept]

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """The positions of these ids in the table.

        Raises:
            ValueError: if an id is not in the table.
        """
        positions = np.searchsorted(self.ids, ids)
        known = positions < len(self)
        known[known] = self.ids[positions[known]] == ids[known]
        if not known.all():
            raise ValueError(f"{OWNER}: `ids` must be in the index, got {ids[~known][0]}, which is not.")
        return positions

    def _next_ids(self, rows: int) -> NDArray[np.int64]:
        largest = -1
        if len(self) > 0:
            largest = int(self.ids[-1])
        if rows > LARGEST_ID - largest:
            raise ValueError(
                f"{OWNER}: `ids` must be given, because there are no {rows} integers of 64 bits after the largest id, "
                f"{largest}."
            )
        return largest + np.arange(1, rows + 1)
