"""What filters, groups, thresholds and heads on stored embeddings cost, each beside the same work without it.

    python benchmarks/filters.py

`where` and `group_by` are options of a search for the 10 nearest rows of one query; the rows are those of `search.py`.
The conditions are met by 50 %, 1 % and 0.01 % of the rows, and a group has 10 rows. `nearest_scores` is compared with
`RetrievalMetrics.compute` on the same embeddings. A step of `adapt` is one step of a linear head of 128 dimensions on
stored embeddings of 384 dimensions. The times are CPU times of one thread. Milvus Lite needs
`pip install 'lightning-retrieval[milvus]'`.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from search import DIM, K, embeddings
from timing import Timing, arguments, cpu_clock, environment, interleaved, report

from lightning_retrieval import FastAPLoss, MilvusStore, RetrievalIndex, SmoothAPLoss
from lightning_retrieval.losses import RetrievalLoss
from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores
from lightning_retrieval.models import AdaptedEmbedder

SHARES = (0.5, 0.01, 0.0001)
GROUP = 10  # number of rows of a group
FROM_DIM, HEAD_DIM = 384, 128
Index = RetrievalIndex | MilvusStore
Line = dict[str, Any]


def timed(functions: dict[str, Any], runs: int) -> dict[str, Timing]:
    """The CPU time of each function, so that other processes do not count."""
    return interleaved(functions, runs, "cpu", clock=cpu_clock("cpu"))


def line(what: str, store: str, rows: int, times: dict[str, Timing]) -> Line:
    """A line of the table; the ratio is None if there is no plain work to compare with."""
    ratio = None
    if "plain" in times:
        ratio = times[what].median / times["plain"].median
    return {"what": what, "store": store, "rows": rows, "CPU time": times[what], "times the plain one": ratio}


def searches(store: str, index: Index, rows: int, runs: int) -> list[Line]:
    """The lines of the searches in an index, which are timed in turn."""
    query = embeddings(rows)[1][:1]
    search = functools.partial(index.search, query, K)
    functions = {"plain": search}
    for share in SHARES:
        where = f"place < {max(1, round(share * rows))}"
        functions[f"where, {share:.2%} of the rows"] = functools.partial(search, where=where)
    functions["group_by"] = functools.partial(search, group_by="product")
    times = timed(functions, runs)
    return [line(what, store, rows, times) for what in functions]


def filled(store: str, folder: Path, rows: int) -> Index:
    """An index of random rows, each with a place and a product."""
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    columns = {"place": places, "product": [f"product {number // GROUP}" for number in range(rows)]}
    if store != "Milvus":
        parameters = {"Flat": ""}.get(store, "nprobe=8")
        index = RetrievalIndex(DIM, store, parameters=parameters)
        index.add(embeddings(rows)[0], columns=columns)
        return index
    made = MilvusStore.create(str(folder / "a.db"), "tools", DIM, columns={"place": "number", "product": "text"})
    made.add(embeddings(rows)[0], columns=columns)
    made.publish()  # without it, Milvus Lite searches the rows one by one
    return made


def thresholds(images: int, runs: int) -> list[Line]:
    """The line of `nearest_scores`."""
    metrics = RetrievalMetrics()
    metrics.update(embeddings(images)[0], torch.arange(images) // GROUP, torch.arange(images))

    def compute() -> None:
        metrics._computed = None  # otherwise, torchmetrics returns the earlier result
        metrics.compute()

    functions: dict[str, Any] = {"plain": compute, "nearest_scores": functools.partial(nearest_scores, metrics)}
    return [line("nearest_scores", "", images, timed(functions, runs))]


def head(size: int, loss: RetrievalLoss, runs: int) -> Line:
    """The line of a step of `adapt` with a list of this length."""
    embedder = AdaptedEmbedder(torch.nn.Identity(), FROM_DIM, HEAD_DIM)
    optimizer = torch.optim.AdamW(embedder.head.parameters())
    rows, labels = torch.randn(size, FROM_DIM), torch.arange(size) // GROUP

    def step() -> None:
        optimizer.zero_grad()
        loss(embedder(rows), labels).backward()
        optimizer.step()

    what = f"a step of adapt, {type(loss).__name__}"
    return line(what, "", size, timed({what: step}, runs))


def main() -> None:
    options = arguments("Filters, groups, thresholds and heads on stored embeddings.")
    torch.set_num_threads(1)
    rows, images, runs, stores = 100_000, 10_000, 5, ("Flat", "IVF256,Flat", "Milvus")
    lists: dict[int, RetrievalLoss] = {2048: SmoothAPLoss(), 16_384: FastAPLoss()}
    if options.quick:
        rows, images, runs, stores = 2000, 500, 1, ("Flat", "IVF4,Flat", "Milvus")
        lists = {64: SmoothAPLoss()}
    table: list[Line] = []
    for store in stores:
        with tempfile.TemporaryDirectory() as folder:
            index = filled(store, Path(folder), rows)
            table += searches(store, index, rows, runs)
            if isinstance(index, MilvusStore):
                index.close()
    table += thresholds(images, runs)
    for size, loss in lists.items():
        table.append(head(size, loss, min(runs, 3)))
    title = f"D = {DIM}, k = {K}; median (lowest to highest)"
    report(title, environment("cpu", "faiss-cpu", "pymilvus", "milvus-lite"), table, options.json)


if __name__ == "__main__":
    main()
