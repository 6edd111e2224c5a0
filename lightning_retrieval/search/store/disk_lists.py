"""Builds an IVF index that is larger than memory: its inverted lists are written in parts and merged into one file.

A part is a file with the rows that were in memory at the same time. For each list it holds the number of rows, the
codes and the ids. The merged file is the same as faiss writes for an index in memory: a header, and for each list the
codes of all parts followed by the ids of all parts. Files are only read and written sequentially, so merging needs one
buffer per part.

Several processes of one machine can write the parts: each adds consecutive blocks of rows to a copy of the trained
index. The merge takes the parts in the order of the rows, so the file does not depend on the number of processes.

faiss' own `OnDiskInvertedLists` are not used: they write through a memory map, and a full disk would kill the process.
"""

import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.distributed import scatter_objects, together, world_size
from lightning_retrieval.files import READ_BYTES, DigestStream, write_verified
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.store.faiss_index import (
    add_block,
    load_faiss,
    read_shard,
    shard_name,
    without_transform,
    write_shard,
)
from lightning_retrieval.search.store.rows import BLOCK, OWNER, Rows, check_rows, normalized_blocks, part_of
from lightning_retrieval.search.store.storage import NewVersion

BUFFER = 1 << 17  # bytes read from a part at a time
ID_BYTES, SIZE_BYTES = 8, 8
TRAINED = "trained"  # name of the file with the trained, empty index, from which all processes begin
ROWS_IN_MEMORY = 1_000_000
MOST_PARTS = 500  # maximum number of parts; all parts are open at the same time


def check_disk_build(index: Any, factory: str, embeddings: Rows, rows_before: int, rows_in_memory: int) -> None:
    """Raise unless an index of these rows can be built on disk.

    Args:
        index: a faiss index.
        factory: factory string of the index.
        embeddings: the rows to add.
        rows_before: number of rows in the index.
        rows_in_memory: as for `add_on_disk`.

    Raises:
        ValueError: if a number is out of range, or faiss stores data of a row outside of the inverted lists.
        TypeError: if `rows_in_memory` is not an integer.
    """
    check_rows(OWNER, "embeddings", embeddings, index.d)
    check_rows_in_memory(rows_in_memory)
    if rows_before > 0:
        raise ValueError(
            f"{OWNER}: an index must be empty to be built on disk, got one of {rows_before} rows; make a new one."
        )
    check_lists(index, factory)
    rows = len(embeddings)
    blocks = -(-rows // BLOCK)
    parts = most_parts()
    least = -(-blocks // parts) * BLOCK
    if rows_in_memory < least:
        cure = ""
        if parts < MOST_PARTS:
            cure = "; give that many, or allow more open files with `ulimit -n`"
        raise ValueError(
            f"{OWNER}: `rows_in_memory` must be at least {least} for {rows} rows, because at most {parts} parts "
            f"are merged, got {rows_in_memory}{cure}."
        )


def most_parts() -> int:
    """The maximum number of parts: at most half of the files this process may open, because a merge opens all parts."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_PARTS
    return max(1, min(MOST_PARTS, allowed // 2))


def check_rows_in_memory(rows_in_memory: int) -> None:
    """Raise unless `rows_in_memory` is an integer and at least the number of rows in a block."""
    check_integer(OWNER, "rows_in_memory", rows_in_memory, least=BLOCK)


def check_lists(index: Any, factory: str) -> None:
    """Raise unless faiss stores all data of a row in an inverted list.

    Raises:
        ValueError: if faiss stores data elsewhere, or if this release of faiss writes the lists in another format.
    """
    faiss = load_faiss()
    inner = without_transform(index)
    is_known = type(inner) in (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)
    if not is_known or not faiss.serialize_index(index).tobytes().endswith(_no_rows(inner)):
        raise ValueError(
            f"{OWNER}: `factory` must be IVF with Flat, SQ or PQ, such as 'IVF1024,PQ16', for an index that is built "
            f"on disk or by several processes, got {factory!r}; choose one of these, or build the index in memory by "
            "one process."
        )


class Parts(NamedTuple):
    """The files with the parts of one index, and the number of rows of each list in all of them."""

    files: list[Path]
    sizes: NDArray[np.int64]


class DiskLists:
    """The inverted lists of one faiss index. Rows are added in memory, then moved to the disk in parts.

    Args:
        index: a trained, empty faiss index. Later, its number of rows includes the rows on the disk.
        path: path of the parts; the number of each part is appended to the path.
    """

    def __init__(self, index: Any, path: Path) -> None:
        ivf = load_faiss().extract_index_ivf(index)
        self._index = index
        self._path = path
        self._lists: int = ivf.nlist
        self._code_bytes: int = ivf.code_size
        self.parts = Parts([], np.zeros(self._lists, np.int64))

    def move_to_disk(self) -> None:
        """Move the rows in memory to a new part.

        Raises:
            OSError: if the part cannot be written completely.
        """
        faiss = load_faiss()
        ivf = faiss.extract_index_ivf(self._index)
        part = self._path.with_name(f"{self._path.name}-{len(self.parts.files)}")
        sizes = np.array([ivf.invlists.list_size(number) for number in range(self._lists)], dtype=np.int64)
        write_verified(OWNER, part, partial(self._write_part, ivf.invlists, sizes))
        self.parts = Parts([*self.parts.files, part], self.parts.sizes + sizes)
        # New lists: emptied lists would keep their memory, which adds up if each part fills different lists.
        empty = faiss.ArrayInvertedLists(self._lists, self._code_bytes)
        ivf.replace_invlists(empty, True)
        empty.this.disown()

    def append(self, parts: Parts) -> None:
        """Append the parts that another process has written."""
        self.parts = Parts([*self.parts.files, *parts.files], self.parts.sizes + parts.sizes)
        set_rows(self._index, int(self.parts.sizes.sum()))

    def merge(self, stream: DigestStream) -> None:
        """Write the index, with the lists of all parts, in the format of faiss.

        Raises:
            OSError: if a part cannot be read.
        """
        stream.write(self._header())
        with ExitStack() as stack:
            rows_in_parts = int(self.parts.sizes.sum())
            progress = stack.enter_context(Progress("Merging", total=rows_in_parts, units="rows"))
            files = [stack.enter_context(part.open("rb", buffering=BUFFER)) for part in self.parts.files]
            for size in self.parts.sizes.tolist():
                in_parts = [int.from_bytes(file.read(SIZE_BYTES), "little") for file in files]
                if sum(in_parts) != size:
                    raise OSError("its parts were changed meanwhile")
                for row_bytes in (self._code_bytes, ID_BYTES):
                    for file, rows in zip(files, in_parts):
                        _copy(file, stream, rows * row_bytes)
                progress.update(size)

    def delete(self) -> None:
        """Delete the parts."""
        for part in self.parts.files:
            part.unlink()

    def _write_part(self, lists: Any, sizes: NDArray[np.int64], stream: DigestStream) -> None:
        faiss = load_faiss()
        for number, rows in enumerate(sizes.tolist()):
            stream.write(rows.to_bytes(SIZE_BYTES, "little"))
            if rows > 0:
                stream.write(faiss.rev_swig_ptr(lists.get_codes(number), rows * self._code_bytes))
                stream.write(faiss.rev_swig_ptr(lists.get_ids(number), rows))

    def _header(self) -> bytes:
        """The bytes that faiss writes before the rows: the trained index, and the number of rows in each list."""
        faiss = load_faiss()
        trained: bytes = faiss.serialize_index(self._index).tobytes()
        no_rows = _no_rows(faiss.extract_index_ivf(self._index))
        lists = struct.pack("<4sQQ4sQ", b"ilar", self._lists, self._code_bytes, b"full", self._lists)
        return trained.removesuffix(no_rows) + lists + self.parts.sizes.astype("<u8").tobytes()


@dataclass(frozen=True)
class AssignedRows:
    """The rows that one process adds to the shards of an index and moves to the disk in parts.

    Args:
        folder: folder of the parts.
        process: rank of the process.
        embeddings: the rows.
        ids: ids of the rows.
        rows_before: number of rows that the processes of lower rank add to each shard.
        rows_in_memory: maximum number of rows that all shards together hold in memory.
    """

    folder: Path
    process: int
    embeddings: Rows
    ids: NDArray[np.int64]
    rows_before: Sequence[int]
    rows_in_memory: int

    def divide(self, processes: int) -> list["AssignedRows"]:
        """Divide the rows, in the order of the ranks. Each process gets consecutive blocks, or no rows."""
        rows, shards = len(self.ids), len(self.rows_before)
        blocks = -(-rows // BLOCK)
        divided = []
        for process in range(processes):
            begin = min(rows, blocks * process // processes * BLOCK)
            end = min(rows, blocks * (process + 1) // processes * BLOCK)
            embeddings = part_of(self.embeddings, begin, end)
            before = rows_of_shards(begin, shards)
            ids = self.ids[begin:end]
            divided.append(AssignedRows(self.folder, process, embeddings, ids, before, self.rows_in_memory))
        return divided

    def add_to(self, shards: list[Any]) -> list[DiskLists]:
        """Add the rows to trained, empty shards, and show the progress.

        Raises:
            OSError: if a part cannot be written completely.
        """
        lists = []
        for number, shard in enumerate(shards):
            set_rows(shard, self.rows_before[number])
            lists.append(DiskLists(shard, self.folder / f"part-{number}-{self.process}"))
        in_memory = 0
        with Progress("Indexing", total=len(self.ids), units="rows", hidden=self.process > 0) as progress:
            for begin, block in normalized_blocks(self.embeddings):
                if in_memory + len(block) > self.rows_in_memory:
                    _move_to_disk(lists)
                    in_memory = 0
                add_block(shards, block, self.ids[begin : begin + len(block)])
                in_memory += len(block)
                progress.update(len(block))
        _move_to_disk(lists)
        return lists


def rows_of_shards(rows: int, shards: int) -> list[int]:
    """The number of rows that each shard has after `add_block` has added the first `rows` rows, block by block."""
    counts = [0] * shards
    for begin in range(0, rows, BLOCK):
        size = min(BLOCK, rows - begin)
        for position, number in enumerate(sorted(range(shards), key=counts.__getitem__)):
            counts[number] += -(-(size - position) // shards)
    return counts


def set_rows(index: Any, rows: int) -> None:
    """Set the number of rows of an IVF index whose rows are elsewhere."""
    index.ntotal = rows
    without_transform(index).ntotal = rows


def add_on_disk(
    shards: list[Any],
    embeddings: Rows,
    ids: NDArray[np.int64],
    rows_in_memory: int,
    version: NewVersion,
    launch: Callable[[], object] | None = None,
) -> list[DiskLists]:
    """Add rows to trained, empty shards, moving them to the disk in parts, and show the progress.

    Each shard gets the rows that `add_to_shards` would add to it.

    Args:
        shards: the shards; `check_disk_build` must have accepted one of them.
        embeddings: the rows.
        ids: ids of the rows.
        rows_in_memory: maximum number of rows that all shards together hold in memory, in each process.
        version: the new version of the index's folder, to which the parts are written.
        launch: as for `RetrievalIndex.build_on_disk`.

    Returns:
        The parts of each shard.

    Raises:
        OSError: if a file cannot be written completely.
        ConnectionError: if another process has ended early.
    """
    assigned = AssignedRows(version.inner, 0, embeddings, ids, [0] * len(shards), rows_in_memory)
    if launch is None:
        return assigned.add_to(shards)
    trained = assigned.folder / TRAINED
    write_verified(OWNER, trained, partial(write_shard, shards[0]))
    launch()
    lists: list[DiskLists] = []
    with _other_processes():
        mine = scatter_objects(assigned.divide(world_size()))
        parts = together(partial(_add_rows, mine, shards, lists))
    for of_process in parts[1:]:
        for of_shard, more in zip(lists, of_process):
            of_shard.append(more)
    trained.unlink()
    return lists


def help_build_on_disk() -> None:
    """Add the rows that the first process of a group, which runs `RetrievalIndex.build_on_disk`, gives this process.

    Returns when the first process has published the index.

    Raises:
        OSError: if a file cannot be written completely.
        ConnectionError: if another process has ended early.
    """
    with _other_processes():
        assigned = scatter_objects([])
        together(partial(_add_rows_to_copies, assigned))
        together(lambda: None)  # while the first process merges the parts


def _add_rows(rows: AssignedRows, shards: list[Any], lists: list[DiskLists]) -> list[Parts]:
    """Add rows to the shards, append the lists of each shard to `lists`, and return their parts."""
    lists += rows.add_to(shards)
    return [of_shard.parts for of_shard in lists]


def _add_rows_to_copies(rows: AssignedRows) -> list[Parts]:
    """Add rows to copies of the trained shards, and return the parts of each shard."""
    shards = [read_shard(rows.folder / TRAINED, mapped=False) for _ in rows.rows_before]
    return _add_rows(rows, shards, [])


@contextmanager
def others_informed(launch: Callable[[], object] | None) -> Iterator[None]:
    """Context in which the first process finishes an index. The other processes wait, and raise if it raises."""
    if launch is None:
        yield
        return
    error = None
    try:
        yield
    except Exception as found:  # of any type, because the other processes wait for this one
        error = found
    with _other_processes():
        together(partial(_raise, error))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


@contextmanager
def _other_processes() -> Iterator[None]:
    """Context in which this process waits for others; raises if one of them has ended.

    Raises:
        ConnectionError: if another process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]  # without the advice of gloo
        raise ConnectionError(
            f"{OWNER}: all processes must run until the index is complete, but another one has ended early "
            f"({reason}); run the same command again."
        ) from None


def merge_on_disk(lists: list[DiskLists], version: NewVersion) -> list[Any]:
    """Write each shard to a file, delete its parts, and return the shards, memory-mapped. Shows the progress.

    Raises:
        OSError: if a file cannot be written completely.
    """
    mapped = []
    for number, of_shard in enumerate(lists):
        file = version.write(shard_name(number), of_shard.merge)
        of_shard.delete()
        mapped.append(read_shard(file, mapped=True))
    return mapped


def _no_rows(ivf: Any) -> bytes:
    """The bytes that faiss writes at the end of an index for empty inverted lists."""
    return struct.pack("<4sQQ4sQ", b"ilar", ivf.nlist, ivf.code_size, b"sprs", 0)


def _move_to_disk(lists: list[DiskLists]) -> None:
    for of_shard in lists:
        of_shard.move_to_disk()


def _copy(source: IO[bytes], target: DigestStream, length: int) -> None:
    """Copy `length` bytes."""
    while length > 0:
        data = source.read(min(length, READ_BYTES))
        if not data:
            raise OSError(f"{source.name} has become shorter")
        target.write(data)
        length -= len(data)
