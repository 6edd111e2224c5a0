"""Builds an IVF index that is larger than memory: its inverted lists are written in parts and merged into one file.

A part is a file with the rows that were in memory at the same time: the number of rows in each list, then for each list
the codes and the ids. The merged file is the same as faiss writes for an index in memory: a header, and for each list
the codes of all parts followed by the ids of all parts. Each file is read and written from its beginning to its end.
Parts are mapped into memory, so merging any number of them needs neither memory nor open files.

Several processes of one machine can write the parts: each adds consecutive blocks of rows to a copy of the trained
index. The merge takes the parts in the order of the rows, so the file does not depend on the number of processes.

faiss' own `OnDiskInvertedLists` are not used: they write through a memory map, so a disk that fills during the merge
would kill the process. Their file has another format, and its path is in the file of the index.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.distributed import scatter_objects, together, world_size
from lightning_retrieval.files import DigestStream, remove, write_verified
from lightning_retrieval.invalid import InvalidValue, Unreachable, owned_by
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.store.faiss_index import (
    add_block,
    load_faiss,
    read_shard,
    shard_name,
    without_transform,
    write_shard,
)
from lightning_retrieval.search.store.rows import BLOCK, Rows, normalized_blocks, part_of
from lightning_retrieval.search.store.storage import NewVersion

ID_BYTES, SIZE_BYTES = 8, 8
TRAINED = "trained"  # name of the file with the trained, empty index, from which all processes begin
ROWS_IN_MEMORY = 1_000_000


def check_disk_build(index: Any, factory: str, rows_before: int, rows_in_memory: int) -> None:
    """Raise unless an index of these rows can be built on disk.

    Args:
        index: a faiss index.
        factory: factory string of the index.
        rows_before: number of rows in the index.
        rows_in_memory: as for `add_on_disk`.

    Raises:
        ValueError: if a number is out of range, or faiss stores data of a row outside of the inverted lists.
        TypeError: if `rows_in_memory` is not an integer.
    """
    check_rows_in_memory(rows_in_memory)
    if rows_before > 0:
        rule = "an index must be empty to be built on disk"
        raise InvalidValue(rule, got=f"one of {rows_before} rows", cure="make a new one")
    check_lists(index, factory)


def check_rows_in_memory(rows_in_memory: int) -> None:
    """Raise unless `rows_in_memory` is an integer and at least the number of rows in a block."""
    check_integer("rows_in_memory", rows_in_memory, least=BLOCK)


def check_lists(index: Any, factory: str) -> None:
    """Raise unless faiss stores all data of a row in an inverted list.

    Raises:
        ValueError: if faiss stores data elsewhere, or if this release of faiss writes the lists in another format.
    """
    faiss = load_faiss()
    inner = without_transform(index)
    is_known = type(inner) in (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)
    if not is_known or not faiss.serialize_index(index).tobytes().endswith(_no_rows(inner)):
        raise InvalidValue(
            "must be IVF with Flat, SQ or PQ, such as 'IVF1024,PQ16', for an index that is built on disk or by "
            "several processes",
            argument="factory",
            got=repr(factory),
            cure="choose one of these, or build the index in memory by one process",
        )


class Part(NamedTuple):
    """A file with rows of one index, and its number of bytes."""

    path: Path
    size: int

    def mapped(self) -> NDArray[np.uint8]:
        """The content, mapped into memory by torch, which does not keep the file open.

        Raises:
            RuntimeError: if the file has become shorter.
        """
        content: NDArray[np.uint8] = torch.from_file(str(self.path), size=self.size, dtype=torch.uint8).numpy()
        return content


def move_to_disk(index: Any, path: Path) -> Part:
    """Move the rows that an IVF index holds in memory to a part. The number of rows of the index stays the same.

    Raises:
        OSError: if the part cannot be written completely.
    """
    faiss = load_faiss()
    ivf = faiss.extract_index_ivf(index)
    write_verified(path, partial(_write_lists, ivf))
    # New lists: emptied lists would keep their memory, which adds up if each part fills different lists.
    empty = faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size)
    ivf.replace_invlists(empty, True)
    empty.this.disown()
    return Part(path, path.stat().st_size)


def _write_lists(ivf: Any, stream: DigestStream) -> None:
    faiss, lists = load_faiss(), ivf.invlists
    sizes = np.array([lists.list_size(number) for number in range(ivf.nlist)], dtype="<i8")
    stream.write(sizes)
    for number, rows in enumerate(sizes.tolist()):
        if rows > 0:
            stream.write(faiss.rev_swig_ptr(lists.get_codes(number), rows * ivf.code_size))
            stream.write(faiss.rev_swig_ptr(lists.get_ids(number), rows))


def merge(index: Any, parts: Sequence[Part], stream: DigestStream) -> None:
    """Write an IVF index with the rows of all parts, in the format of faiss, and show the progress.

    Raises:
        RuntimeError: if a part has become shorter.
    """
    ivf = load_faiss().extract_index_ivf(index)
    contents = list(map(Part.mapped, parts))
    end_of_sizes = ivf.nlist * SIZE_BYTES
    sizes_of_parts = [content[:end_of_sizes].view("<i8") for content in contents]
    sizes = np.sum(sizes_of_parts, axis=0, dtype="<i8")
    rows = int(sizes.sum())
    set_rows(index, rows)
    stream.write(_header(index, sizes))
    positions = [end_of_sizes] * len(parts)
    with Progress("Merging", total=rows, units="rows") as progress:
        for number, size in enumerate(sizes.tolist()):
            for row_bytes in (ivf.code_size, ID_BYTES):
                for part, content in enumerate(contents):
                    begin = positions[part]
                    positions[part] = begin + int(sizes_of_parts[part][number]) * row_bytes
                    stream.write(content[begin : positions[part]])
            progress.update(size)


def _header(index: Any, sizes: NDArray[np.int64]) -> bytes:
    """The bytes that faiss writes before the rows: the trained index, and the number of rows in each list."""
    faiss = load_faiss()
    ivf = faiss.extract_index_ivf(index)
    trained: bytes = faiss.serialize_index(index).tobytes()
    lists = struct.pack("<4sQQ4sQ", b"ilar", ivf.nlist, ivf.code_size, b"full", ivf.nlist)
    return trained.removesuffix(_no_rows(ivf)) + lists + sizes.tobytes()


def _no_rows(ivf: Any) -> bytes:
    """The bytes that faiss writes at the end of an index for empty inverted lists."""
    return struct.pack("<4sQQ4sQ", b"ilar", ivf.nlist, ivf.code_size, b"sprs", 0)


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

    def add_to(self, shards: list[Any]) -> list[list[Part]]:
        """Add the rows to trained, empty shards, and show the progress.

        Returns:
            The parts of each shard.

        Raises:
            OSError: if a part cannot be written completely.
        """
        for shard, rows in zip(shards, self.rows_before):
            set_rows(shard, rows)
        parts: list[list[Part]] = [[] for _ in shards]
        in_memory = 0
        with Progress("Indexing", total=len(self.ids), units="rows", hidden=self.process > 0) as progress:
            for begin, block in normalized_blocks(self.embeddings):
                if in_memory + len(block) > self.rows_in_memory:
                    self._move_to_disk(shards, parts)
                    in_memory = 0
                add_block(shards, block, self.ids[begin : begin + len(block)])
                in_memory += len(block)
                progress.update(len(block))
        self._move_to_disk(shards, parts)
        return parts

    def _move_to_disk(self, shards: list[Any], parts: list[list[Part]]) -> None:
        for number, (shard, of_shard) in enumerate(zip(shards, parts)):
            path = self.folder / f"part-{number}-{self.process}-{len(of_shard)}"
            of_shard.append(move_to_disk(shard, path))


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
) -> list[list[Part]]:
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
    write_verified(trained, partial(write_shard, shards[0]))
    launch()
    with _other_processes():
        mine = scatter_objects(assigned.divide(world_size()))
        parts_of_processes = together(partial(mine.add_to, shards))
    remove(trained)
    return [list(chain.from_iterable(of_shard)) for of_shard in zip(*parts_of_processes)]


@owned_by("RetrievalIndex")
def help_build_on_disk() -> None:
    """Add the rows that the first process of a group, which runs `RetrievalIndex.build_on_disk`, gives this process.

    Returns when the first process has published the index.

    Raises:
        OSError: if a file cannot be written completely.
        ConnectionError: if another process has ended early.
    """
    with _other_processes():
        assigned = scatter_objects([])
        together(partial(_add_to_copies, assigned))
        together(lambda: None)  # while the first process merges the parts


def _add_to_copies(rows: AssignedRows) -> list[list[Part]]:
    """Add rows to copies of the trained shards, and return the parts of each shard."""
    return rows.add_to([read_shard(rows.folder / TRAINED, mapped=False) for _ in rows.rows_before])


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
        rule = f"all processes must run until the index is complete, but another one has ended early ({reason})"
        raise Unreachable(rule, cure="run the same command again") from None


def merge_on_disk(shards: Sequence[Any], parts: Sequence[Sequence[Part]], version: NewVersion) -> list[Any]:
    """Write each shard to a file, delete its parts, and return the shards, memory-mapped. Shows the progress.

    Args:
        shards: the trained shards, without rows in memory.
        parts: the parts of each shard.
        version: the new version of the index's folder.

    Raises:
        OSError: if a file cannot be written completely.
    """
    mapped = []
    for number, (shard, of_shard) in enumerate(zip(shards, parts)):
        file = version.write(shard_name(number), partial(merge, shard, of_shard))
        for part in of_shard:
            remove(part.path)
        mapped.append(read_shard(file, mapped=True))
    return mapped
