"""The ids, paths and metadata of the rows of an index: one Arrow table, in the order of the ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.files import DigestStream
from lightning_retrieval.packed_strings import PackedStrings, as_arrow
from lightning_retrieval.search.store import conditions
from lightning_retrieval.search.store.row_ids import check_all_known, check_new_ids, check_none_known, ids_after
from lightning_retrieval.search.store.rows import Ids, Rows, check_finite_rows, check_paths

FILE = "rows.arrow"
ID, PATH, COLUMN = "id", "path", "column_"  # names in the table; the prefix keeps a column named "id" apart


class RowTable:
    """Rows in the order of their ids, which all differ.

    Args:
        batch: an Arrow record batch with an id and a path ("" for a row without one) for each row, and any columns.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.ids: NDArray[np.int64] = np.asarray(np.from_dlpack(batch.column(ID)), np.int64)
        self._paths = PackedStrings.from_arrow(batch.column(PATH))
        self.columns: dict[str, conditions.Column] = {}
        for name in batch.schema.names:
            if name.startswith(COLUMN):
                self.columns[name.removeprefix(COLUMN)] = batch.column(name)

    @classmethod
    def of(
        cls,
        ids: NDArray[np.int64],
        paths: Sequence[str] | None = None,
        columns: Mapping[str, conditions.Column] | None = None,
    ) -> "RowTable":
        """A table of ids in any order, their paths (None for rows without paths), and their columns."""
        if paths is None:
            paths = PackedStrings.from_arrays(np.zeros(0, np.uint8), np.zeros(len(ids), np.int64))
        elif not isinstance(paths, PackedStrings):
            paths = PackedStrings(paths)
        arrays = {ID: as_arrow(ids.copy()), PATH: paths.arrow()}  # `ids` may be the memory of a tensor of the caller
        for name, column in (columns or {}).items():
            arrays[COLUMN + name] = column
        return cls(_in_order(arrays))

    @classmethod
    def read(cls, file: Path, mapped: bool) -> "RowTable":
        """Read a file that `write` wrote, or map it into memory.

        Raises:
            ValueError: if the file is damaged; also an error of another type.
        """
        import pyarrow

        content: Any = np.memmap(file, mode="r") if mapped else file.read_bytes()
        table = cls(pyarrow.ipc.open_file(pyarrow.py_buffer(content)).get_batch(0))
        for name, column in table.columns.items():
            conditions.check_column_name(name)
            column.validate(full=True)  # Arrow reads other memory if a column refers to texts that are not there
        return table

    def write(self, stream: DigestStream) -> None:
        """Write the table as a file of Arrow."""
        import pyarrow

        with pyarrow.ipc.new_file(pyarrow.PythonFile(stream, mode="w"), self._batch.schema) as file:
            file.write_batch(self._batch)

    def __len__(self) -> int:
        return len(self.ids)

    def joined(self, new: "RowTable") -> "RowTable":
        """A table with further rows, which have the columns of this one."""
        if len(self) == 0 or len(new) == 0:
            return max(self, new, key=len)
        arrays = {}
        for name in self._batch.schema.names:
            arrays[name] = conditions.joined(self._batch.column(name), new._batch.column(name))
        return RowTable(_in_order(arrays))

    def without(self, positions: NDArray[np.intp]) -> "RowTable":
        """A table without the rows at these positions."""
        kept = np.delete(np.arange(len(self)), positions)
        return RowTable(self._batch.take(as_arrow(kept)))

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """The positions of these ids.

        Raises:
            ValueError: if an id is not in the table.
        """
        positions = np.searchsorted(self.ids, ids)
        known = positions < len(self)
        known[known] = self.ids[positions[known]] == ids[known]
        check_all_known(ids[~known])
        return positions

    def paths(self, ids: NDArray[np.int64]) -> list[str]:
        """The paths of the rows with these ids.

        Raises:
            ValueError: if an id is not in the table.
        """
        return [self._paths[position] for position in self.positions(ids).tolist()]

    def values(self, name: str, ids: NDArray[np.int64]) -> list[Any]:
        """The values of the rows with these ids in a column.

        Raises:
            ValueError: if an id is not in the table.
        """
        return conditions.values_at(self.columns[name], self.positions(ids))

    def found(self, ids: NDArray[np.int64], names: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
        """For each row found by a search, its path and, by name, its values in these columns.

        The id -1 means no row: its path is "", and it has no values.
        """
        paths = [""] * len(ids)
        metadata: list[dict[str, Any]] = [{} for _ in paths]
        rows = np.flatnonzero(ids >= 0).tolist()
        for row, path in zip(rows, self.paths(ids[rows])):
            paths[row] = path
        for name in names:
            for row, value in zip(rows, self.values(name, ids[rows])):
                metadata[row][name] = value
        return paths, metadata


def _in_order(arrays: Mapping[str, Any]) -> Any:
    """A record batch of these arrays by name, in the order of the ids."""
    import pyarrow

    batch = pyarrow.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    ids = np.from_dlpack(batch.column(ID))
    if (ids[1:] > ids[:-1]).all():
        return batch
    return batch.take(as_arrow(np.argsort(ids, kind="stable")))


def check_new_rows(
    table: RowTable,
    embeddings: Rows,
    *,
    ids: Ids | None,
    paths: Sequence[str] | None,
    columns: Mapping[str, conditions.Values] | None,
) -> tuple[NDArray[np.int64], RowTable]:
    """Validate new rows of an index with this table; return their ids in the given order, and their own table.

    Raises:
        ValueError: if the number of ids, paths or values differs from the number of rows, an id is negative, occurs
            twice or is in the table, the columns are not those of the table, or an embedding is not finite.
        TypeError: if ids are not integers, `paths` is a single string, or a column has values of other types.
    """
    if ids is None:
        largest = int(table.ids[-1]) if len(table) > 0 else -1
        new_ids = ids_after(largest, len(embeddings))
    else:
        new_ids = check_new_ids(ids, len(embeddings))
        check_none_known(new_ids[np.isin(new_ids, table.ids)])
    if paths is not None:
        check_paths(paths, len(embeddings))
    added = conditions.new_columns(columns, len(embeddings))
    if len(table) > 0 and len(new_ids) > 0:
        conditions.check_same_columns(conditions.kinds_of(table.columns), conditions.kinds_of(added))
    check_finite_rows("embeddings", embeddings, new_ids, paths)
    return new_ids, RowTable.of(new_ids, paths, added)
