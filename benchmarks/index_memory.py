"""Building an index from a folder of embeddings: the memory that it adds, with one shard and several, and of a search.

    python benchmarks/index_memory.py

The folder is one that `lightning-retrieval embed` writes, with random embeddings around 2,000 centres. Memory is what
no file backs: the highest of samples, taken each 2 ms in a process of its own, over what it was before. What is mapped
from files is left out, because the operating system drops it when it needs the space. The files are those of the whole
index, with ids and paths. The training rows are as many as faiss uses, and a block has 65,536 rows. A search looks for
256 queries in an index that is memory-mapped. Takes some minutes on two cores.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Timing, arguments, environment, memory_status, process_context, report

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search.commands.index import index_embeddings
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows

DIM, CENTRES, QUERIES, MIB = 128, 2000, 256, 1 << 20
BLOCK_MIB = 65_536 * DIM * 4 / MIB
SETTINGS = [
    ("Flat", 1),
    ("Flat", 8),
    ("IVF256,Flat", 1),
    ("IVF256,Flat", 8),
    ("IVF256,SQ8", 1),
    ("IVF256,SQ8", 8),
]


def write_embeddings(folder: Path, rows: int) -> None:
    """A folder of embeddings."""
    what = {"images_sha256": "", "model_sha256": "", "preparation": {}}
    embeddings = EmbeddingFolder.create(folder, EmbeddingManifest(images=rows, dim=DIM, **what))
    centres = np.random.default_rng(0).standard_normal((CENTRES, DIM), np.float32)
    for shard in range(len(embeddings)):
        generator = np.random.default_rng(1 + shard)
        ids = np.array(embeddings.positions(shard))
        values = centres[generator.integers(0, CENTRES, len(ids))]
        values += generator.standard_normal(values.shape, np.float32)
        embeddings.write(shard, ShardRows(ids, values, [f"photos/{id_:09d}.jpg" for id_ in ids], [None] * len(ids)))


def run_sampled(function: Callable[[], Any], interval: float = 0.002) -> tuple[int, float]:
    """The memory that no file backs which a function adds at its peak, by samples each `interval`, and its seconds."""
    before = memory_status("RssAnon")
    samples = [before]
    is_done = threading.Event()

    def sample() -> None:
        while not is_done.wait(interval):
            samples.append(memory_status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    try:
        function()
        seconds = time.perf_counter() - begin
    finally:
        is_done.set()  # the process of a function that has failed would wait for the thread forever
        sampler.join()
    return max(samples) - before, seconds


def build(folder: Path, output: Path, factory: str, shards: int) -> tuple[int, float]:
    """Memory and seconds of a build, without what faiss and torch allocate in a first build of few rows."""
    RetrievalIndex(DIM, "IVF4,Flat").add(torch.randn(5000, DIM))
    return run_sampled(lambda: index_embeddings(folder, output, factory=factory, shards=shards))


def search(output: Path) -> tuple[int, float]:
    """Memory and seconds of a search in an index that is opened for it."""
    small = RetrievalIndex(DIM)
    small.add(torch.randn(5000, DIM))
    queries = torch.randn(QUERIES, DIM)
    small.search(queries, 10)
    return run_sampled(lambda: RetrievalIndex.load(output, mapped=True, verify=False).search(queries, 10))


def in_new_process(function: Callable[..., tuple[int, float]], *args: Any) -> tuple[int, float]:
    with ProcessPoolExecutor(1, mp_context=process_context()) as pool:
        return pool.submit(function, *args).result()


def measure(folder: Path, rows: int, factory: str, shards: int) -> dict[str, Any]:
    """A line of the table."""
    output = folder.with_name(f"index-{factory}-{shards}")
    added, seconds = in_new_process(build, folder, output, factory, shards)
    search_added, _ = in_new_process(search, output)
    size = sum(file.stat().st_size for file in output.glob("files-*/*"))
    training = 0.0
    if factory.startswith("IVF"):
        training = min(rows * DIM * 4 / MIB, BLOCK_MIB)  # 256 lists, 256 rows for each
    return {
        "factory": factory,
        "shards": shards,
        "build": Timing(seconds, seconds, seconds, 1),
        "files in MiB": size / MIB,
        "training rows in MiB": training,
        "block in MiB": BLOCK_MIB,
        "build adds in MiB": added / MIB,
        "search adds in MiB": search_added / MIB,
    }


def main() -> None:
    options = arguments("Memory of building an index, with one shard and several.")
    rows, settings = 500_000, SETTINGS
    if options.quick:
        rows, settings = 70_000, SETTINGS[2:4]
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "embeddings")
        write_embeddings(folder, rows)
        for factory, shards in settings:
            table.append(measure(folder, rows, factory, shards))
    report(f"{rows} rows, D = {DIM}", environment("cpu", "faiss-cpu"), table, options.json)


if __name__ == "__main__":
    main()
