"""Builds an IVF index that is larger than memory: its inverted lists are written in parts and merged into one file.

A part is a file with the rows that were in memory at the same time. For each list it holds the number of rows, the
codes and the ids. The merged file is the same as faiss writes for an index in memory: a header, and for each list the
codes of all parts followed by the ids of all parts. Files are only read and written sequentially, so merging needs one
buffer per part.

faiss' own `OnDiskInvertedLists` are not used: they write through a memory map, and a full disk would kill the process.
"""

import resource
import struct
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_integer
from lightning_retrieval.files import READ_BYTES, DigestStream, write_verified
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.faiss_index import add_block, load_faiss, read_shard, shard_name, without_transform
from lightning_retrieval.search.rows import BLOCK, OWNER, Rows, check_rows, normalized_blocks
from lightning_retrieval.search.storage import NewVersion

BUFFER = 1 << 17  # bytes read from a part at a time
ID_BYTES, SIZE_BYTES = 8, 8
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
            f"on disk, got {factory!r}; choose one of these, or build the index in memory."
        )


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
        self._parts: list[Path] = []
        self._sizes: NDArray[np.int64] = np.zeros(self._lists, np.int64)  # number of rows of each list in all parts

    def move_to_disk(self) -> None:
        """Move the rows in memory to a new part.

        Raises:
            OSError: if the part cannot be written completely.
        """
        faiss = load_faiss()
        ivf = faiss.extract_index_ivf(self._index)
        part = self._path.with_name(f"{self._path.name}-{len(self._parts)}")
        sizes = np.array([ivf.invlists.list_size(number) for number in range(self._lists)], dtype=np.int64)
        write_verified(OWNER, part, partial(self._write_part, ivf.invlists, sizes))
        self._parts.append(part)
        self._sizes += sizes
        # New lists: emptied lists would keep their memory, which adds up if each part fills different lists.
        empty = faiss.ArrayInvertedLists(self._lists, self._code_bytes)
        ivf.replace_invlists(empty, True)
        empty.this.disown()

    def merge(self, stream: DigestStream) -> None:
        """Write the index, with the lists of all parts, in the format of faiss.

        Raises:
            OSError: if a part cannot be read.
        """
        stream.write(self._header())
        with ExitStack() as stack:
            rows_in_parts = int(self._sizes.sum())
            progress = stack.enter_context(Progress("Merging", total=rows_in_parts, units="rows"))
            files = [stack.enter_context(part.open("rb", buffering=BUFFER)) for part in self._parts]
            for size in self._sizes.tolist():
                in_parts = [int.from_bytes(file.read(SIZE_BYTES), "little") for file in files]
                if sum(in_parts) != size:
                    raise OSError("its parts were changed meanwhile")
                for row_bytes in (self._code_bytes, ID_BYTES):
                    for file, rows in zip(files, in_parts):
                        _copy(file, stream, rows * row_bytes)
                progress.update(size)

    def delete(self) -> None:
        """Delete the parts."""
        for part in self._parts:
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
        return trained.removesuffix(no_rows) + lists + self._sizes.astype("<u8").tobytes()


def add_on_disk(
    shards: list[Any],
    embeddings: Rows,
    ids: NDArray[np.int64],
    rows_in_memory: int,
    version: NewVersion,
) -> list[Any]:
    """Add rows to trained, empty shards, moving them to the disk in parts, and write each shard to a file.

    Each shard gets the rows that `add_to_shards` would add to it. Adding the rows and merging the parts of each shard
    show the progress.

    Args:
        shards: the shards; `check_disk_build` must have accepted one of them.
        embeddings: the rows.
        ids: ids of the rows.
        rows_in_memory: maximum number of rows that all shards together hold in memory.
        version: the new version of the index's folder, to which the files are written. The parts are written there,
            too, and then deleted.

    Returns:
        The shards, memory-mapped.

    Raises:
        OSError: if a file cannot be written completely.
    """
    lists = [DiskLists(shard, version.inner / f"part-{number}") for number, shard in enumerate(shards)]
    in_memory = 0
    with Progress("Indexing", total=len(ids), units="rows") as progress:
        for begin, block in normalized_blocks(embeddings):
            if in_memory + len(block) > rows_in_memory:
                _move_to_disk(lists)
                in_memory = 0
            add_block(shards, block, ids[begin : begin + len(block)])
            in_memory += len(block)
            progress.update(len(block))
    _move_to_disk(lists)
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
