"""`RetrievalIndex` by factory string: time to build and to search, and recall, compared with the matrix product alone.

    python benchmarks/search.py
    python benchmarks/search.py --disk

The product is the least that exact search has to compute: all queries against all rows, block by block into one buffer
that is allocated in advance. The embeddings are class centres with noise, distributed roughly like those of a trained
network; queries are of the same classes. The bytes of a row are those of the saved vectors, without paths. The memory
is what building adds to the rows themselves. Takes some minutes on two cores.

With --disk, an index is built on disk from a folder of embeddings, those of `index_memory.py`, by one process and by
two, and beside them by faiss alone, which fills copies of the trained index and merges them as its documentation does;
fewer rows also with the codes of PQ in the order for Hamming distances, faiss' default, and in Milvus Lite. The CPU
time is that of all processes, each of one thread, without their start; each build measures its recall. The memory is
what no file backs, of the process that adds most, while the allocator returns freed blocks at once; index and block
are the files of the index, with ids and paths, and 65,536 rows. Each line has processes of its own. Takes ten minutes,
and needs `pip install 'lightning-retrieval[milvus]'`.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from index_memory import BLOCK_MIB, run_sampled, write_embeddings
from numpy.typing import NDArray
from timing import arguments, environment, interleaved, launcher_variables, peak_added_memory, report, run_processes
from torch import Tensor

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.ranking.rows import normalize
from lightning_retrieval.search.commands.index import index_embeddings

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
DISK_FACTORY, MILVUS_FACTORY = "IVF256,PQ32", "IVF_SQ8,nlist=256"
ROWS_IN_MEMORY, FILES_OF_PART, TRAINING_ROWS = 1 << 16, 6, 1 << 16  # a part of faiss alone is as large as ours


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


def vectors_of(file: Path) -> NDArray[np.float32]:
    """The embeddings in a file of a folder."""
    column = pyarrow.parquet.read_table(file, columns=["embedding"])["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(-1, DIM)  # type: ignore[no-any-return]


def build_by_faiss(folder: Path, output: Path, factory: str) -> float:
    """Build an index on disk as faiss' documentation does; returns its recall."""
    import faiss
    from faiss.contrib.ondisk import merge_ondisk

    output.mkdir()
    files = sorted(folder.glob("*.parquet"))
    trained = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
    of_each_file = -(-TRAINING_ROWS // len(files))
    sample = [np.random.default_rng(0).choice(vectors_of(file), of_each_file, replace=False) for file in files]
    trained.train(unit_rows(np.concatenate(sample)))
    names, rows = [], 0
    for first in range(0, len(files), FILES_OF_PART):
        part = faiss.clone_index(trained)
        for file in files[first : first + FILES_OF_PART]:
            block = unit_rows(vectors_of(file))
            part.add_with_ids(block, np.arange(rows, rows + len(block)))
            rows += len(block)
        names.append(str(output / f"part-{first}"))
        faiss.write_index(part, names[-1])
    merge_ondisk(trained, names, str(output / "lists"))
    faiss.write_index(trained, str(output / "index"))
    trained.nprobe = 16
    return recall_by_faiss(trained, files)


def unit_rows(block: np.ndarray) -> np.ndarray:
    import faiss

    faiss.normalize_L2(block)
    return block


def recall_by_faiss(index: Any, files: list[Path]) -> float:
    """Recall@10 by an exact search of faiss, with the first rows as queries, which are not their own neighbours."""
    import faiss

    queries = unit_rows(np.load(files[0])[:QUERIES])
    best, nearest = np.zeros((QUERIES, 0), np.float32), np.zeros((QUERIES, 0), np.int64)
    rows = 0
    for file in files:
        block = unit_rows(vectors_of(file))
        scores, ids = faiss.knn(queries, block, K + 1, metric=faiss.METRIC_INNER_PRODUCT)
        best, nearest = np.concatenate([best, scores], 1), np.concatenate([nearest, ids + rows], 1)
        order = np.argsort(-best, 1)[:, : K + 1]
        best, nearest = np.take_along_axis(best, order, 1), np.take_along_axis(nearest, order, 1)
        rows += len(block)
    hits = 0
    for query, (found, expected) in enumerate(zip(index.search(queries, K + 1)[1].tolist(), nearest.tolist())):
        others = [row for row in found if row != query]
        hits += len({*others[:K]} & ({*expected} - {query}))
    return hits / (QUERIES * K)


def build_on_disk(rank: int, name: str, folder: Path, output: Path, variables: dict[str, str]) -> None:
    """Build an index in this process, or by several of them, and write CPU time, memory and recall to a file."""
    torch.set_num_threads(1)
    RetrievalIndex(DIM, "IVF4,Flat").add(torch.randn(5000, DIM))  # loads faiss
    processes = int(variables.get("WORLD_SIZE", "1"))
    if processes > 1:
        os.environ.update(variables, LOCAL_RANK=str(rank))
    in_folder: dict[str, Any] = {"rows_in_memory": ROWS_IN_MEMORY, "devices": processes}
    in_folder |= {"factory": DISK_FACTORY, "parameters": "nprobe=16"}
    milvus = {"store": f"milvus:{output}.db", "factory": MILVUS_FACTORY, "parameters": "nprobe=16"}
    functions: dict[str, Callable[[], float | None]] = {
        "RetrievalIndex": lambda: index_embeddings(folder, output, **in_folder)[0].recall,
        "faiss alone": lambda: build_by_faiss(folder, output, f"{DISK_FACTORY}np"),
        "faiss, codes ordered": lambda: build_by_faiss(folder, output, DISK_FACTORY),
        "Milvus Lite": lambda: index_embeddings(folder, Path("benchmark"), **milvus)[0].recall,
    }
    recall: list[float | None] = []
    begin = time.process_time()
    memory, seconds = run_sampled(lambda: recall.append(functions[name]()), interval=0.02)
    cpu = time.process_time() - begin
    measured = {"cpu": cpu, "memory": memory, "seconds": seconds, "recall": recall[0]}
    folder.with_name(f"{output.name}-{rank}.json").write_text(json.dumps(measured))


def measure_on_disk(name: str, folder: Path, rows: int, processes: int) -> dict[str, Any]:
    """A line of the table of --disk, without the ratios."""
    output = folder.with_name(f"{name}-{processes}-{rows}")
    run_processes(build_on_disk, (name, folder, output, launcher_variables(processes)), processes)
    of_each = [json.loads(folder.with_name(f"{output.name}-{rank}.json").read_text()) for rank in range(processes)]
    return {
        "built by": name,
        "rows": rows,
        "processes": processes,
        "time in s": of_each[0]["seconds"],
        "CPU time in s": sum(each["cpu"] for each in of_each),
        "over faiss alone": None,
        "adds in MiB": max(each["memory"] for each in of_each) / MIB,
        "index and block in MiB": None,
        "recall@10": of_each[0]["recall"],
    }


def table_on_disk(counts: list[tuple[int, list[tuple[str, int]]]]) -> list[dict[str, Any]]:
    """For each number of rows, a line for each of the indexes of them."""
    table = []
    with tempfile.TemporaryDirectory() as name:
        for rows, built in counts:
            folder = Path(name, f"embeddings-{rows}")
            write_embeddings(folder, rows)
            lines = [measure_on_disk(builder, folder, rows, processes) for builder, processes in built]
            index = folder.with_name(f"RetrievalIndex-1-{rows}")
            size = sum(file.stat().st_size for file in index.glob("files-*/*")) / MIB
            alone = next(line["CPU time in s"] for line in lines if line["built by"] == "faiss alone")
            for line in lines:
                line["over faiss alone"] = line["CPU time in s"] / alone
                line["index and block in MiB"] = size + BLOCK_MIB
            table += lines
    return table


def main_on_disk(options: Any) -> None:
    # The allocator of each process returns freed blocks of a MiB at once, so that the memory is that of live blocks.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    counts = [
        (1_000_000, [("RetrievalIndex", 1), ("RetrievalIndex", 2), ("faiss alone", 1)]),
        (100_000, [("RetrievalIndex", 1), ("faiss alone", 1), ("faiss, codes ordered", 1), ("Milvus Lite", 1)]),
    ]
    if options.quick:
        counts = [(70_000, counts[0][1])]
    title = f"{DISK_FACTORY} on disk with nprobe=16, D = {DIM}, {ROWS_IN_MEMORY} rows in memory"
    report(title, environment("cpu", "faiss-cpu", "milvus-lite"), table_on_disk(counts), options.json)


def main() -> None:
    options = arguments(
        "RetrievalIndex by factory string, against the matrix product alone.",
        disk="instead, build an index of a folder on disk, beside faiss alone and Milvus Lite",
    )
    if options.disk:
        main_on_disk(options)
        return
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
