"""The rows of an index, distributed over several faiss indexes that are searched in parallel."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.search.faiss_index import faiss_reason, load_faiss, train_faiss_index
from lightning_retrieval.search.files import DigestStream
from lightning_retrieval.search.rows import OWNER, normalized_blocks


def train_shards(shards: list[Any], factory: str, embeddings: Float[Tensor, "rows dim"]) -> None:
    """Train the first shard, and replace the others by copies of it.

    Raises:
        ValueError: if there are too few rows.
    """
    train_faiss_index(shards[0], factory, embeddings)
    faiss = load_faiss()
    for number in range(1, len(shards)):
        shards[number] = faiss.clone_index(shards[0])


def add_to_shards(shards: list[Any], embeddings: Float[Tensor, "rows dim"], ids: NDArray[np.int64]) -> None:
    """Distribute the rows of each block evenly, the first part to the shard with the fewest rows."""
    for begin, block in normalized_blocks(embeddings):
        positions = np.array_split(np.arange(len(block)), len(shards))
        for index, part in zip(sorted(shards, key=_row_count), positions):
            index.add_with_ids(block[part], ids[begin + part])


def search_shards(
    shards: list[Any], dim: int, queries: Float[Tensor, "query dim"], k: int
) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
    """Similarities and ids of the k nearest rows of all shards; -inf and -1 where fewer are found.

    Raises:
        ValueError: if faiss cannot search with the index's parameters.
    """
    index = shards[0]
    if len(shards) > 1:
        in_threads, successive_ids = True, False
        index = load_faiss().IndexShards(dim, in_threads, successive_ids)
        for shard in shards:
            index.add_shard(shard)
    similarities = [np.zeros((0, k), np.float32)]
    ids = [np.zeros((0, k), np.int64)]
    for _, block in normalized_blocks(queries):
        try:
            block_similarities, block_ids = index.search(block, k)
        except RuntimeError as error:
            raise ValueError(
                f"{OWNER}: faiss cannot search for the {k} nearest rows ({faiss_reason(error)}); ask for fewer, or "
                "change the search parameters with set_parameters."
            ) from None
        similarities.append(block_similarities)
        ids.append(block_ids)
    all_similarities = np.concatenate(similarities)
    all_ids = np.concatenate(ids)
    all_similarities[all_ids < 0] = -np.inf
    return torch.from_numpy(all_similarities), torch.from_numpy(all_ids)


def remove_from_shards(shards: list[Any], factory: str, ids: NDArray[np.int64]) -> None:
    """Remove rows, wherever they are.

    Raises:
        ValueError: if faiss cannot remove rows from this kind of index.
    """
    faiss = load_faiss()
    try:
        for shard in shards:
            shard.remove_ids(faiss.IDSelectorBatch(ids))
    except RuntimeError as error:
        why = f"because faiss reports: {faiss_reason(error)}"
        if "not implemented" in str(error):
            why = "because faiss does not support it"
        raise ValueError(
            f"{OWNER}: rows cannot be removed from an index of {factory!r}, {why}; build the index again without them, "
            "or use Flat or IVF."
        ) from None


def write_shard(shard: Any, stream: DigestStream) -> None:
    """Write a shard to a stream. faiss' own files are not used: they ignore errors of the last flush."""
    faiss = load_faiss()
    faiss.write_index(shard, faiss.PyCallbackIOWriter(stream.write))


def read_shard(path: Path, mapped: bool) -> Any:
    """Read a shard from a file, or map the file into memory.

    Raises:
        ValueError: if faiss cannot read the file.
    """
    faiss = load_faiss()
    flags = 0
    if mapped:
        flags = faiss.IO_FLAG_MMAP_IFC
    try:
        return faiss.read_index(os.fspath(path), flags)
    except RuntimeError as error:
        raise ValueError(f"{OWNER}: faiss cannot read {path} ({faiss_reason(error)}); build the index again.") from None


def _row_count(shard: Any) -> int:
    count: int = shard.ntotal
    return count
