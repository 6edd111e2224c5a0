"""`RetrievalIndex` and `MilvusStore` on the same rows: time to add, to open and to search, and recall.

    python benchmarks/stores.py

Needs `pip install 'lightning-retrieval[milvus]'`. Milvus Lite runs in this process, on a file; if the environment
variable `MILVUS_URI` is the address of a server or a cluster, the rows go there instead. The recall is relative to the
10 nearest rows by the product of all pairs in float64, and the error is that of the similarities. The embeddings are
those of `search.py`. An index of faiss is opened without mapping its files. Takes some minutes on two cores.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from search import DIM, QUERIES, K, embeddings
from timing import Timing, arguments, environment, interleaved, report
from torch import Tensor

from lightning_retrieval import MilvusStore, RetrievalIndex

NAME = "benchmark"
MIB = 1 << 20
SETTINGS = [
    ("faiss", "Flat", ""),
    ("Milvus", "Flat", ""),
    ("faiss", "HNSW32", "efSearch=64"),
    ("Milvus", "HNSW,M=32,efConstruction=40", "ef=64"),  # as many links and candidates as faiss' HNSW32
]
Index = RetrievalIndex | MilvusStore


def write_faiss(folder: Path, rows: Tensor, factory: str, parameters: str) -> None:
    index = RetrievalIndex(DIM, factory, parameters=parameters)
    index.add(rows)
    index.save(folder / "faiss")


def write_milvus(folder: Path, rows: Tensor, factory: str, parameters: str) -> None:
    with closing(MilvusStore.create(uri(folder), NAME, DIM, factory, parameters=parameters)) as store:
        store.add(rows)
        store.publish()


def open_faiss(folder: Path) -> RetrievalIndex:
    return RetrievalIndex.load(folder / "faiss")


def open_milvus(folder: Path) -> MilvusStore:
    return MilvusStore(uri(folder), NAME)


def uri(folder: Path) -> str:
    return os.environ.get("MILVUS_URI", str(folder / "milvus.db"))


STORES: dict[str, tuple[Callable[..., None], Callable[[Path], Index]]] = {
    "faiss": (write_faiss, open_faiss),
    "Milvus": (write_milvus, open_milvus),
}


def once(function: Callable[[], Any]) -> Timing:
    return interleaved({"once": function}, 1, "cpu", 0)["once"]


def exact(rows: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Similarities and positions of the nearest rows, in float64."""
    best = [(part @ rows.double().T).topk(K) for part in queries.double().split(32)]
    return torch.cat([found.values for found in best]), torch.cat([found.indices for found in best])


def measure(settings: tuple[str, str, str], folder: Path, rows: Tensor, queries: Tensor, runs: int) -> dict[str, Any]:
    """A line of the table."""
    name, factory, parameters = settings
    write, open_index = STORES[name]
    written = once(lambda: write(folder, rows, factory, parameters))
    opened: list[Index] = []
    opening = once(lambda: opened.append(open_index(folder)))
    index = opened[0]
    manager = closing(index) if isinstance(index, MilvusStore) else nullcontext()
    with manager:
        one = queries[:1]
        times = interleaved({"all": lambda: index.search(queries, K), "one": lambda: index.search(one, K)}, runs, "cpu")
        similarities, ids = index.search(queries, K)
    true, true_ids = exact(rows, queries)
    hits = sum(len(set(found) & set(nearest)) for found, nearest in zip(ids.tolist(), true_ids.tolist()))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "store": name,
        "factory": factory,
        "rows": len(rows),
        "written": written,
        "opened": opening,
        f"{QUERIES} queries": times["all"],
        "one query": times["one"],
        "recall@10": hits / true_ids.numel(),
        "error": float((similarities - true).abs().max()) if "HNSW" not in factory else None,
        "MiB on disk": size / MIB,
    }


def main() -> None:
    options = arguments("RetrievalIndex and MilvusStore on the same rows.")
    counts, runs = (10_000, 100_000), 5
    if options.quick:
        counts, runs = (2000,), 1
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:  # loads the packages
        for write, _ in STORES.values():
            write(Path(folder), embeddings(100)[0], "Flat", "")
    for count in counts:
        rows, queries = embeddings(count)
        for settings in SETTINGS:
            with tempfile.TemporaryDirectory() as folder:
                table.append(measure(settings, Path(folder), rows, queries, runs))
                print(table[-1], file=sys.stderr)
    title = f"{QUERIES} queries, D = {DIM}, k = {K}; median (lowest to highest)"
    report(title, environment("cpu", "faiss-cpu", "pymilvus", "milvus-lite"), table, options.json)


if __name__ == "__main__":
    main()
