"""`RetrievalIndex` by factory string: building, searching and what is found, against the matrix product alone.

    python benchmarks/search.py

The product is what exact search has to do: all queries against all rows, block by block into one buffer that is there
before. The embeddings are class centres with noise, which lie about as a trained network's do; queries are of the same
classes. The bytes of a row are those of the saved vectors, without paths; the memory is that of building, beyond the
rows themselves. Some minutes on two cores.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import arguments, environment, interleaved, peak_added_memory, report
from torch import Tensor

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.ranking.similarity import normalize

DIM, QUERIES, K, BLOCK, NOISE, MIB = 128, 256, 10, 4096, 1.3, 1 << 20
SETTINGS = [
    ("Flat", "", 1),
    ("Flat", "", 2),
    ("SQ8", "", 1),
    ("IVF256,Flat", "nprobe=16", 1),
    ("IVF256,PQ32", "nprobe=16", 1),
    ("IVF256,PQ32,RFlat", "nprobe=16,k_factor_rf=4", 1),
    ("HNSW32", "efSearch=64", 1),
]
QUICK = [("Flat", "", 2), ("IVF4,PQ8x4", "nprobe=2", 1)]


def embeddings(rows: int) -> tuple[Tensor, Tensor]:
    """Rows to search in, and queries."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(max(1, rows // 20), DIM, generator=generator)
    classes = torch.randint(len(centres), (rows + QUERIES,), generator=generator)
    every = normalize(centres[classes] + NOISE * torch.randn(rows + QUERIES, DIM, generator=generator))
    return every[:rows], every[rows:]


def built(rows: Tensor, factory: str, parameters: str, shards: int) -> RetrievalIndex:
    index = RetrievalIndex(DIM, factory, parameters=parameters, shards=shards)
    index.add(rows)
    return index


def product(rows: Tensor, queries: Tensor) -> Callable[[], None]:
    buffer = rows.new_empty(len(queries), BLOCK)

    def run() -> None:
        for part in rows.split(BLOCK):
            torch.mm(queries, part.T, out=buffer[:, : len(part)])

    return run


def bytes_a_row(index: RetrievalIndex) -> float:
    with tempfile.TemporaryDirectory() as folder:
        index.save(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*/*.faiss")) / len(index)


def building(count: int, *settings: Any) -> Callable[[], Any]:
    """For the memory: the rows are there, and faiss is loaded."""
    rows, _ = embeddings(count)
    built(rows[:10], "Flat", "", 1)
    return lambda: built(rows, *settings)


def main() -> None:
    options = arguments("RetrievalIndex by factory string, against the matrix product alone.")
    quick = options.quick
    count = 20_000 if quick else 100_000
    rows, queries = embeddings(count)
    table: list[dict[str, Any]] = []
    for settings in QUICK if quick else SETTINGS:
        factory, parameters, shards = settings
        made: list[RetrievalIndex] = []
        build = interleaved({"build": lambda s=settings, m=made: m.append(built(rows, *s))}, 1, "cpu", 0)
        index = made[0]
        functions = {"search": lambda i=index: i.search(queries, K), "product": product(rows, queries)}
        times = interleaved(functions, 1 if quick else 5, "cpu")
        added = None if quick and table else peak_added_memory(building, "cpu", count, *settings) / MIB
        table.append(
            {
                "factory": factory,
                "parameters": parameters or None,
                "shards": shards,
                "build": build["build"],
                "search": times["search"],
                "product alone": times["product"],
                "ratio": times["search"].median / times["product"].median,
                "recall@10": 1.0 if index.recall is None else index.recall,
                "bytes a row": bytes_a_row(index),
                "added MiB": added,
            }
        )
    title = f"{count} rows, {QUERIES} queries, D = {DIM}, k = {K}; median (lowest to highest)"
    report(title, environment("cpu", "faiss-cpu"), table, options.json)


if __name__ == "__main__":
    main()
