"""Rows on their way into Milvus: what it cannot hold is refused, and the rest is divided into requests."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.search.milvus_collection import EMBEDDING, ID, LONGEST_PATH, PATH
from lightning_retrieval.search.milvus_connection import OWNER, MilvusConnection
from lightning_retrieval.search.rows import Rows, normalized_blocks

BATCH_ROWS, BATCH_BYTES = 10_000, 1 << 24  # of one insertion
BATCH_IDS = 4_096  # of one request


def insertions(embeddings: Rows, ids: NDArray[np.int64], paths: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each request, with normalised embeddings."""
    size = max(1, min(BATCH_ROWS, BATCH_BYTES // (4 * embeddings.shape[1])))
    for begin, block in normalized_blocks(embeddings):
        for first in range(0, len(block), size):
            batch = block[first : first + size]
            part = slice(begin + first, begin + first + len(batch))
            rows = []
            for embedding, row_id, path in zip(batch, ids[part].tolist(), paths[part]):
                rows.append({ID: row_id, EMBEDDING: embedding, PATH: path})
            yield rows


def id_batches(ids: NDArray[np.int64]) -> Iterator[list[int]]:
    for first in range(0, len(ids), BATCH_IDS):
        yield ids[first : first + BATCH_IDS].tolist()


def all_ids(connection: MilvusConnection, collection: str) -> NDArray[np.int64]:
    """The ids of all rows of a collection, in any order.

    Raises:
        OSError: if Milvus reports an error.
    """
    found = [np.zeros(0, np.int64)]
    with closing(connection.call("query_iterator", collection, batch_size=BATCH_ROWS, output_fields=[ID])) as rows:
        while batch := connection.checked("query_iterator", rows.next):
            found.append(np.array([row[ID] for row in batch], np.int64))
    return np.concatenate(found)


def check_path_bytes(paths: Sequence[str]) -> None:
    """Raise unless Milvus can hold the paths."""
    for path in paths:
        try:
            size = len(path.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"{OWNER}: `paths` must be valid Unicode, got {path!r}; rename the file, or keep the index in a folder."
            ) from None
        if size > LONGEST_PATH:
            raise ValueError(f"{OWNER}: `paths` must have at most {LONGEST_PATH} bytes each, got one of {size}.")


def check_directions(name: str, embeddings: Rows) -> None:
    """Raise if a row is zero: it has no cosine similarity, and servers differ in what they make of it."""
    for begin, block in normalized_blocks(embeddings):
        zero = ~block.any(axis=1)
        if zero.any():
            raise ValueError(f"{OWNER}: `{name}` must not be zero, got zeros in row {begin + int(zero.argmax())}.")
