"""Checks, normalises and samples embeddings, block by block, before they are added to an index.

Embeddings can be larger than memory (a tensor over a file, or the rows of a folder), so no function here copies more
than a block of rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Integer
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import (
    check_float,
    check_integer,
    check_strings,
    has_finite_sum,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.progress import Progress
from lightning_retrieval.ranking.rows import normalize
from lightning_retrieval.search.embedding_folder import EmbeddingFolder

BLOCK = 1 << 16  # rows that are passed to faiss at a time
SMALL_BLOCK = 1 << 12  # rows that are normalised or checked at a time, so that temporary copies are small
SHOWN = 5  # number of invalid rows that an error message names


class FolderRows:
    """Behaves like a tensor with all rows of a folder, but holds only one file in memory at a time.

    The constructor reads and verifies every file, so that a missing or damaged file raises before an index is built.
    It also finds out whether the sum of each file is finite, so that the numbers need no further look. The files
    must not change while the rows are used, and are not verified again.

    Args:
        folder: a folder in which no shard is missing.

    Raises:
        ValueError: if a file is missing, is damaged or belongs to another folder.

    Cost:
        Memory for the rows of one file and, for every row, its path and 8 bytes.
    """

    def __init__(self, folder: EmbeddingFolder) -> None:
        self.folder = folder
        ends, ids, paths = [0], [np.zeros(0, np.int64)], [PackedStrings([])]
        self.unreadable: list[tuple[str, str]] = []
        self.has_finite_sums = True
        with Progress("Reading embeddings", total=len(folder), units="files") as progress:
            for shard in range(len(folder)):
                rows = folder.read(shard)
                ends.append(ends[-1] + len(rows.ids))
                ids.append(rows.ids)
                paths.append(PackedStrings(rows.paths))
                self.unreadable += rows.unreadable
                self.has_finite_sums &= bool(has_finite_sum(torch.from_numpy(rows.embeddings)))
                progress.update(1)
        self.ids: Int[Tensor, " rows"] = torch.from_numpy(np.concatenate(ids))
        self.paths = PackedStrings.join(paths)
        self.shape = (ends[-1], folder.manifest.dim)
        self._ends: NDArray[np.int64] = np.array(ends[1:])
        self.free_file()

    def free_file(self) -> None:
        """Free the memory of the file that was read last."""
        self._read = -1  # number of the shard in memory
        self._rows: Float32[Tensor, "shard dim"] = torch.empty(0, self.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, positions: slice | Int[Tensor, " selected"]) -> Float[Tensor, "selected dim"]:
        """The rows of a slice, or the rows at these positions, which must be in ascending order."""
        if isinstance(positions, slice):
            positions = torch.arange(*positions.indices(len(self)))
        in_folder = positions.numpy()
        selected = [torch.empty(0, self.shape[1])]
        first = 0
        while first < len(in_folder):
            shard = int(np.searchsorted(self._ends, in_folder[first], side="right"))
            end = int(self._ends[shard])
            rows = self._shard(shard)
            last = int(np.searchsorted(in_folder, end))
            selected.append(rows[in_folder[first:last] - (end - len(rows))])
            first = last
        return torch.cat(selected)

    def _shard(self, shard: int) -> Float[Tensor, "shard dim"]:
        if shard != self._read:
            self._rows = torch.from_numpy(self.folder.read_again(shard)).float()
            self._read = shard
        return self._rows


class ArrayRows:
    """Behaves like a tensor with the rows of an array, which may be read-only, mapped, or of another byte order.

    Only the rows that are asked for are copied.

    Args:
        name: name of the argument that holds the array.
        array: an array (rows, dim) of floating-point numbers.

    Raises:
        TypeError: if the numbers are not of float16, float32 or float64.
    """

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self._dtype = _float_dtype(name, array)
        self._array = array
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, positions: slice | Int[Tensor, " selected"]) -> Float[Tensor, "selected dim"]:
        """The rows of a slice, or the rows at these positions."""
        chosen: Any = positions
        if isinstance(positions, Tensor):
            chosen = positions.numpy()
        return torch.from_numpy(self._array[chosen].astype(self._dtype, order="C"))


def _float_dtype(name: str, array: NDArray[Any]) -> np.dtype[Any]:
    """The dtype of a floating-point array in the byte order of the machine; raise if it is another dtype."""
    dtype = array.dtype.newbyteorder("=")
    if dtype not in (np.float16, np.float32, np.float64):
        raise InvalidType("must have the dtype float16, float32 or float64", argument=name, got=array.dtype)
    return dtype


Ids = Int[Tensor, " rows"] | Integer[np.ndarray, " rows"]
Rows = Float[Tensor, "rows dim"] | ArrayRows | FolderRows
Embeddings = Rows | Float[np.ndarray, "rows dim"]  # as users give them
Queries = (
    Float[Tensor, "query dim"] | Float[Tensor, " dim"] | Float[np.ndarray, "query dim"] | Float[np.ndarray, " dim"]
)


def normalized_blocks(
    embeddings: Rows, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The L2-normalised rows from `begin` to `end` in blocks, each with the position of its first row.

    All blocks use the same memory, so a block is valid until the next one is asked for.
    """
    end = len(embeddings) if end is None else end
    memory = np.empty((min(BLOCK, end - begin), embeddings.shape[1]), np.float32)
    for first_of_block in range(begin, end, BLOCK):
        block = memory[: end - first_of_block]
        for first in range(0, len(block), SMALL_BLOCK):
            last = min(first + SMALL_BLOCK, len(block))
            block[first:last] = normalized_rows(embeddings[first_of_block + first : first_of_block + last])
        yield first_of_block, block


def normalized_sample(embeddings: Rows, most: int) -> NDArray[np.float32]:
    """All rows, L2-normalised; if there are more than `most`, a sample of `most` rows with a fixed seed."""
    positions = sample_rows(len(embeddings), most)
    sample = np.empty((len(positions), embeddings.shape[1]), np.float32)
    for first in range(0, len(positions), SMALL_BLOCK):
        block = positions[first : first + SMALL_BLOCK]
        sample[first : first + len(block)] = normalized_rows(embeddings[block])
    if isinstance(embeddings, FolderRows):
        embeddings.free_file()
    return sample


def normalized_rows(embeddings: Float[Tensor, "rows dim"]) -> NDArray[np.float32]:
    """The L2-normalised rows as an array for faiss."""
    rows: NDArray[np.float32] = normalize(embeddings.detach().cpu()).float().contiguous().numpy()
    return rows


def sample_rows(rows: int, most: int) -> Int[Tensor, " sampled"]:
    """The positions of all rows; if there are more than `most`, a sorted sample of `most` with a fixed seed."""
    if rows <= most:
        return torch.arange(rows)
    sampled = np.random.default_rng(0).choice(rows, most, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(sampled))


def checked_rows(name: str, embeddings: Any, dim: int | None = None) -> Rows:
    """Embeddings as `Rows`; raise unless they are floating-point numbers of shape (rows, dim), any dim for None."""
    if isinstance(embeddings, np.ndarray):
        embeddings = ArrayRows(name, embeddings)
    elif not isinstance(embeddings, ArrayRows | FolderRows):
        check_float(name, embeddings)
    if len(embeddings.shape) != 2 or dim not in (None, embeddings.shape[1]):
        rule = f"must have shape (rows, {dim or 'dim'}), as the index has"
        raise InvalidValue(rule, argument=name, got=tuple(embeddings.shape))
    rows: Rows = embeddings
    return rows


def query_rows(queries: Queries, dim: int) -> Float[Tensor, "query dim"]:
    """Queries as a tensor of rows; one vector becomes one row. Raise unless they are finite and have this dimension."""
    if isinstance(queries, np.ndarray):
        queries = torch.from_numpy(queries.astype(_float_dtype("queries", queries), order="C"))
    check_float("queries", queries)
    if queries.shape == (dim,):
        queries = queries[None]
    if queries.ndim != 2 or queries.shape[1] != dim:
        rule = f"must have shape (rows, {dim}), or ({dim},) for one vector, as the index has"
        raise InvalidValue(rule, argument="queries", got=tuple(queries.shape))
    check_finite_rows("queries", queries, np.arange(len(queries)))
    return queries


def check_not_mapped(mapped: bool, operation: str) -> None:
    """Raise if the files of an index are memory-mapped."""
    if mapped:
        rule = f"cannot {operation} an index whose files are mapped into memory"
        raise InvalidValue(rule, cure="load it with mapped=False")


def check_finite_rows(name: str, embeddings: Rows, ids: NDArray[np.int64], paths: Sequence[str] | None = None) -> None:
    """Raise if a row holds NaN or infinity; the message gives ids and paths of the first such rows."""
    if isinstance(embeddings, FolderRows) and embeddings.has_finite_sums:
        return
    invalid: list[int] = []
    for begin in range(0, len(embeddings), SMALL_BLOCK):
        finite = torch.isfinite(embeddings[begin : begin + SMALL_BLOCK]).all(1)
        positions = (~finite).nonzero()[:, 0] + begin
        invalid += positions.tolist()
    if not invalid:
        return
    shown = []
    for row in invalid[:SHOWN]:
        text = f"id {ids[row]}"
        if paths is not None:
            text += f" {paths[row]!r}"
        shown.append(text)
    if len(invalid) > SHOWN:
        shown.append("...")
    got = f"NaN or inf in {len(invalid)} of {len(embeddings)} rows: {', '.join(shown)}"
    raise InvalidValue("must be finite", argument=name, got=got)


def plain_values(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Validate the values that are saved with an index: raise unless they can be stored as JSON."""
    if about is None:
        return {}
    try:
        json.dumps(dict(about))
    except (TypeError, ValueError) as error:
        rule = f"must hold plain values only, since it is saved as JSON ({error})"
        raise InvalidType(rule, argument="about") from None
    return dict(about)


def check_paths(paths: Sequence[str], rows: int) -> None:
    """Raise unless there is one string for each row."""
    if not isinstance(paths, PackedStrings):
        check_strings("paths", paths)
    if len(paths) != rows:
        raise InvalidValue(f"must have one entry for each of {rows} rows", argument="paths", got=len(paths))


def check_results(k: Any, rows: int) -> int:
    """Return `k`, the number of results; raise unless it is from 1 to the number of rows in the index."""
    results = check_integer("k", k, least=1)
    if results > rows:
        rule = f"must be at most the number of rows in the index, {rows}"
        raise InvalidValue(rule, argument="k", got=k, cure="ask for fewer")
    return results


def join_parameters(first: str, second: str) -> str:
    """Concatenate two strings of search parameters, either of which may be empty."""
    return ",".join(filter(None, (first, second)))
