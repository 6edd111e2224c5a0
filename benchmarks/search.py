"""`RetrievalIndex` by factory string: time to build and to search, and recall, compared with the matrix product alone.

    python benchmarks/search.py

The product is the least that exact search has to compute: all queries against all rows, block by block into one buffer
that is allocated in advance. The embeddings are class centres with noise, distributed roughly like those of a trained
network; queries are of the same classes. The bytes of a row are those of the saved vectors, without paths. The memory
is what building adds to the rows themselves. Takes some minutes on two cores.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import arguments, environment, interleaved, peak_added_memory, report
from torch import Tensor

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.ranking.rows import normalize

DIM, QUERIES, K, BLOCK, NOISE, MIB = 128, 256, 10, 4096, 1.3, 1 << 20
SETTINGS = [
    ("Flat", "", 1),
    ("Flat", "", 2),
    ("SQ8", "", 1),
    ("IVF256,Flat", "nprobe=16", 1),
    ("IVF256,PQ32", "nprobe=16", 1),
    ("IVF256,PQ32", "nprobe=16", 4),
    ("IVF256,PQ32,RFlat", "nprobe=16,k_factor_rf=4", 1),
    ("HNSW32", "efSearch=64", 1),
]
QUICK = [("Flat", "", 2), ("IVF4,PQ8x4", "nprobe=2", 1)]


def embeddings(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of an index, and queries."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(max(1, rows // 20), DIM, generator=generator)
    classes = torch.randint(len(centres), (rows + QUERIES,), generator=generator)
    noise = NOISE * torch.randn(rows + QUERIES, DIM, generator=generator)
    rows_and_queries = normalize(centres[classes] + noise)
    return rows_and_queries[:rows], rows_and_queries[rows:]


def build(rows: Tensor, factory: str, parameters: str, shards: int) -> RetrievalIndex:
    index = RetrievalIndex(DIM, factory, parameters=parameters, shards=shards)
    index.add(rows)
    return index


def product(rows: Tensor, queries: Tensor) -> Callable[[], None]:
    """A function that computes all similarities, block by block."""
    buffer = rows.new_empty(len(queries), BLOCK)

    def run() -> None:
        for part in rows.split(BLOCK):
            torch.mm(queries, part.T, out=buffer[:, : len(part)])

    return run


def bytes_per_row(index: RetrievalIndex) -> float:
    """Size of the saved vectors."""
    with tempfile.TemporaryDirectory() as folder:
        index.save(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*/*.faiss"))
    return size / len(index)


def prepared_build(count: int, *settings: Any) -> Callable[[], Any]:
    """A function that builds an index, whose memory is measured: the rows exist and faiss is loaded before."""
    rows, _ = embeddings(count)
    build(rows[:10], "Flat", "", 1)
    return lambda: build(rows, *settings)


def measure(settings: tuple[str, str, int], rows: Tensor, queries: Tensor, repeats: int) -> dict[str, Any]:
    """A line of the table, without the memory."""
    factory, parameters, shards = settings
    made: list[RetrievalIndex] = []
    building = interleaved({"build": lambda: made.append(build(rows, *settings))}, 1, "cpu", 0)
    index = made[0]
    times = interleaved({"search": lambda: index.search(queries, K), "product": product(rows, queries)}, repeats, "cpu")
    recall = 1.0  # of an exact index
    if index.recall is not None:
        recall = index.recall
    return {
        "factory": factory,
        "parameters": parameters or None,
        "shards": shards,
        "build": building["build"],
        "search": times["search"],
        "product alone": times["product"],
        "ratio": times["search"].median / times["product"].median,
        "recall@10": recall,
        "bytes a row": bytes_per_row(index),
    }


def main() -> None:
    options = arguments("RetrievalIndex by factory string, against the matrix product alone.")
    count, repeats, all_settings = 100_000, 5, SETTINGS
    if options.quick:
        count, repeats, all_settings = 20_000, 1, QUICK
    rows, queries = embeddings(count)
    table: list[dict[str, Any]] = []
    for settings in all_settings:
        line = measure(settings, rows, queries, repeats)
        line["added MiB"] = None
        if not (options.quick and table):  # the memory takes a process of its own
            line["added MiB"] = peak_added_memory(prepared_build, "cpu", count, *settings) / MIB
        table.append(line)
    title = f"{count} rows, {QUERIES} queries, D = {DIM}, k = {K}; median (lowest to highest)"
    report(title, environment("cpu", "faiss-cpu"), table, options.json)


if __name__ == "__main__":
    main()
