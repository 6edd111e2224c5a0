"""The ids, paths and columns of the rows of an index."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_retrieval.checks import as_int64, check_integers, check_tensor
from lightning_retrieval.files import DigestStream
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.packed_strings import PackedStrings, as_arrow
from lightning_retrieval.search.store import conditions
from lightning_retrieval.search.store.rows import Ids, Rows, check_finite_rows, check_paths

LARGEST_ID = int(np.iinfo(np.int64).max)


def integer_ids(ids: Any) -> NDArray[np.int64]:
    """Validate ids and convert them to an array.

    Raises:
        ValueError: if the ids are not one-dimensional.
        TypeError: if the ids are not a tensor or an array of integers.
    """
    ids = as_int64("ids", _as_tensor(ids))
    check_tensor("ids", ids)
    if ids.ndim != 1:
        raise InvalidValue("must have shape (rows,)", argument="ids", got=tuple(ids.shape))
    check_integers("ids", ids, len(ids), "ids")
    array: NDArray[np.int64] = ids.cpu().numpy().astype(np.int64)
    return array


def _as_tensor(ids: Any) -> Any:
    """A copy of an array of numbers, of any byte order, as a tensor; any other object as it is."""
    if not isinstance(ids, np.ndarray):
        return ids
    if ids.dtype.kind not in "iuf":
        raise InvalidType("must be integers", argument="ids", got=f"a NumPy array of {ids.dtype}")
    return torch.from_numpy(ids.astype(ids.dtype.newbyteorder("="), order="C"))


def check_new_ids(ids: Ids, rows: int) -> NDArray[np.int64]:
    """Validate the ids of new rows and convert them to an array, which may share the memory of a tensor.

    Raises:
        ValueError: if the number of ids differs from the number of rows, or an id is negative or occurs twice.
        TypeError: if the ids are not integers.
    """
    given = as_int64("ids", _as_tensor(ids))
    check_integers("ids", given, rows, "embeddings")
    new: NDArray[np.int64] = given.cpu().numpy().astype(np.int64, copy=False)
    if rows > 0 and new.min() < 0:
        raise InvalidValue("must be >= 0", argument="ids", got=new.min())
    if _ascend(new):
        return new
    distinct, counts = np.unique(new, return_counts=True)
    repeated = distinct[counts > 1]
    if len(repeated) > 0:
        raise InvalidValue("must differ", argument="ids", got=f"{repeated[0]} for several rows")
    return new


def ids_after(largest: int, rows: int) -> NDArray[np.int64]:
    """The next `rows` integers after the largest id of an index (-1 for an empty index).

    Raises:
        ValueError: if the integers do not fit into 64 bits.
    """
    if rows > LARGEST_ID - largest:
        rule = f"must be given, because there are no {rows} integers of 64 bits after the largest id, {largest}"
        raise InvalidValue(rule, argument="ids")
    return largest + np.arange(1, rows + 1)


def check_none_known(known: NDArray[np.int64]) -> None:
    """Raise if `known`, the new ids that are already in the index, is not empty."""
    if len(known) > 0:
        got = f"{len(known)} that are in the index, such as {known.min()}"
        raise InvalidValue("must be new", argument="ids", got=got, cure="remove those first")


def check_all_known(unknown: NDArray[np.int64]) -> None:
    """Raise if `unknown`, the requested ids that are not in the index, is not empty."""
    if len(unknown) > 0:
        raise InvalidValue("must be in the index", argument="ids", got=f"{unknown[0]}, which is not")


class IdTable:
    """Sorted ids with their paths and columns.

    Args:
        ids: ids in ascending order, all different.
        paths: path of each id; "" for an id without a path.
        columns: columns by name, in the order of the ids.
    """

    def __init__(self, ids: NDArray[np.int64], paths: PackedStrings, columns: Mapping[str, conditions.Column]) -> None:
        self.ids = ids
        self.paths = paths
        self.columns = dict(columns)

    @classmethod
    def empty(cls) -> "IdTable":
        """A table without rows."""
        return cls(np.zeros(0, np.int64), PackedStrings([]), {})

    @classmethod
    def read(cls, files: Mapping[str, Path], mapped: bool) -> "IdTable":
        """Read the files that `writers` wrote, or map them into memory."""
        mode: Literal["r"] | None = None
        if mapped:
            mode = "r"
        data, ends = np.load(files["paths.npy"], mode), np.load(files["path-ends.npy"], mode)
        columns = conditions.read_columns(files, len(ends), mode)
        return cls(np.load(files["ids.npy"], mode), PackedStrings.from_arrays(data, ends), columns)

    def writers(self) -> dict[str, Callable[[DigestStream], None]]:
        """For each file, by name, a function that writes its content to a stream."""
        return {
            "ids.npy": partial(np.save, arr=self.ids),
            "paths.npy": partial(np.save, arr=self.paths.data),
            "path-ends.npy": partial(np.save, arr=self.paths.ends),
            **conditions.column_writers(self.columns),
        }

    def __len__(self) -> int:
        return len(self.ids)

    def new_ids(self, ids: Ids | None, rows: int) -> NDArray[np.int64]:
        """The ids of new rows: the validated `ids`; if None, the integers after the largest id of the table.

        Raises:
            ValueError: if the number of ids differs from the number of rows, or an id is negative, occurs twice or is
                in the table.
            TypeError: if the ids are not integers.
        """
        if ids is None:
            largest = -1
            if len(self) > 0:
                largest = int(self.ids[-1])
            return ids_after(largest, rows)
        new = check_new_ids(ids, rows)
        check_none_known(new[np.isin(new, self.ids)])
        return new

    def add(
        self, ids: NDArray[np.int64], paths: Sequence[str] | None, columns: Mapping[str, conditions.Column]
    ) -> None:
        """Add ids that `new_ids` returned, their paths (None for rows without paths), and their columns.

        Paths are copied only if necessary, because they may need as much memory as the codes.
        """
        if len(ids) == 0:
            return
        packed = _packed(paths, len(ids))
        joined = dict(columns)
        ids = np.concatenate([self.ids, ids])  # a copy, because `ids` may be the memory of a tensor of the caller
        if len(self) > 0:
            packed = PackedStrings.join([self.paths, packed])
            joined = {name: conditions.joined(column, columns[name]) for name, column in self.columns.items()}
        if not _ascend(ids):
            order = np.argsort(ids, kind="stable")
            ids, packed = ids[order], packed[order]
            joined = {name: column.take(as_arrow(order)) for name, column in joined.items()}
        self.ids, self.paths, self.columns = ids, packed, joined

    def remove(self, positions: NDArray[np.intp]) -> None:
        """Remove the ids at these positions, and their paths and columns."""
        kept = np.delete(np.arange(len(self)), positions)
        self.ids = self.ids[kept]
        self.paths = self.paths[kept]
        self.columns = {name: column.take(as_arrow(kept)) for name, column in self.columns.items()}

    def paths_of(self, ids: NDArray[np.int64]) -> list[str]:
        """The paths of the rows with these ids.

        Raises:
            ValueError: if an id is not in the table.
        """
        return [self.paths[position] for position in self.positions(ids).tolist()]

    def found(self, ids: NDArray[np.int64], names: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
        """For each row found by a search, its path and, by name, its values in these columns.

        The id -1 means no row: its path is "", and it has no values.
        """
        paths = [""] * len(ids)
        metadata: list[dict[str, Any]] = [{} for _ in paths]
        found = np.flatnonzero(ids >= 0)
        positions = self.positions(ids[found])
        for row, position in zip(found.tolist(), positions.tolist()):
            paths[row] = self.paths[position]
        for name in names:
            values = conditions.values_at(self.columns[name], positions)
            for row, value in zip(found.tolist(), values):
                metadata[row][name] = value
        return paths, metadata

    def values(self, name: str, ids: NDArray[np.int64]) -> list[Any]:
        """The values of the rows with these ids in a column.

        Raises:
            ValueError: if an id is not in the table.
        """
        return conditions.values_at(self.columns[name], self.positions(ids))

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """The positions of these ids in the table.

        Raises:
            ValueError: if an id is not in the table.
        """
        positions = np.searchsorted(self.ids, ids)
        known = positions < len(self)
        known[known] = self.ids[positions[known]] == ids[known]
        check_all_known(ids[~known])
        return positions


def check_new_rows(
    table: IdTable,
    embeddings: Rows,
    *,
    ids: Ids | None,
    paths: Sequence[str] | None,
    columns: Mapping[str, conditions.Values] | None,
) -> tuple[NDArray[np.int64], dict[str, conditions.Column]]:
    """Validate new rows and return their ids and columns."""
    new_ids = table.new_ids(ids, len(embeddings))
    if paths is not None:
        check_paths(paths, len(embeddings))
    added = conditions.new_columns(columns, len(embeddings))
    if len(table) > 0 and len(new_ids) > 0:
        conditions.check_same_columns(conditions.kinds_of(table.columns), conditions.kinds_of(added))
    check_finite_rows("embeddings", embeddings, new_ids, paths)
    return new_ids, added


def _packed(paths: Sequence[str] | None, rows: int) -> PackedStrings:
    """The paths as `PackedStrings`; paths that are already `PackedStrings` are not copied. If None, "" for each row."""
    if paths is None:
        return PackedStrings.from_arrays(np.zeros(0, np.uint8), np.zeros(rows, np.int64))
    if isinstance(paths, PackedStrings):
        return paths
    return PackedStrings(paths)


def _ascend(ids: NDArray[np.int64]) -> bool:
    """Whether the ids are strictly ascending."""
    return bool((ids[1:] > ids[:-1]).all())
