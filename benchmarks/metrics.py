"""Evaluation against peers, and against the product of its score matrix alone.

    python benchmarks/metrics.py
    python benchmarks/metrics.py --memory
    python benchmarks/metrics.py --processes
    python benchmarks/metrics.py --rules
    python benchmarks/metrics.py --classes

The product is what any evaluation has to do: all queries against all images, block by block into one buffer that is
there before. The evaluation is `RetrievalMetrics`, from the first update to the last number, with all its metrics. The
embeddings are those of an untrained network (of Glyphs) or random points, where nearly all images can stand before a
positive, or class centres with noise, which rank about as a trained network's do. The peers are given the same
embeddings and asked for the same numbers as far as they have them: torchmetrics' `RetrievalMAP`, with scores shifted
above 0, and pytorch-metric-learning's `AccuracyCalculator` with the faster of its two searches. The last line is what
raw pixels reach. About eight minutes on two cores.

With `--memory` one million images are evaluated, of which a few are queries, and the peak memory of `update` and
`compute` is compared with the embeddings. A query adds its values, about 100 bytes with the default metrics.

With `--processes` sets are evaluated by 1 and 2 processes (gloo) of one thread each, which are given the same batches
in turn. "added MiB" is the peak of `update` and `compute` beyond the memory before, of the process with the most; the
embeddings are part of it, since they are there only in the metric. "time" is that of the slowest process, from the
first update to the last number, without the making of the embeddings; "CPU time" that of the process with the most,
which other work on the machine hardly changes. "mAP" is printed in full, because it is the same for both.

With `--rules` one set is evaluated by labels and by shared tags. A label has 500 images. An image has three tags of 500
images each, the first of which is its label. The times are CPU times of one thread, in turn.

With `--classes` sets with large classes are evaluated: one of which half of the images are one class, and sets of 2,000
classes, 20, two and one. The times are CPU times of one thread.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from timing import Timing, arguments, environment, interleaved, memory_status, peak_added_memory, report, run_processes
from torch import Tensor
from torchmetrics.retrieval import RetrievalMAP

from lightning_retrieval import DatabaseAugmentation, Embedder, QueryExpansion, RetrievalMetrics, SharedTags
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.ranking.rows import normalize

GLYPHS, PEERS, BLOCK, MIB = "Glyphs test set", "against peers", 256, 1 << 20
SETS = {  # images, images of each class, dimension, noise of what is as if trained
    PEERS: (5_000, 5, 128, 1.3),
    "as SOP's test set": (60_502, 5, 512, 1.6),
    "50 a class": (20_000, 50, 512, 1.6),
    "340 a class": (20_000, 340, 512, 1.6),
}
QUICK = 500  # images of each set
MEMORY = {"images": 1_000_000, "queries": 1_000}  # of the evaluation whose memory is measured
OF_CLASS, BATCH = 5, 512
TAGGED = {"images": 12_000, "dim": 128, "tags": 3, "of a tag": 500, "runs": 5}


@dataclass(frozen=True)
class ProcessCase:
    """A set that several processes evaluate: random class centres with noise, as if trained.

    Args:
        images: number of images, of `OF_CLASS` a class.
        dim: of the embeddings.
        queries: number of queries; all images are candidates.
        half_in_one_class: whether the first half of the images is one class.
        expanded: whether the gallery is augmented and queries are expanded.
    """

    images: int
    dim: int
    queries: int
    half_in_one_class: bool = False
    expanded: bool = False


PROCESS_CASES = {
    "all images are queries": ProcessCase(20_000, 128, 20_000),
    "2 % are queries": ProcessCase(200_000, 256, 4_000),
    "0.5 % are queries": ProcessCase(100_000, 256, 500),
    "0.5 % of more": ProcessCase(400_000, 256, 2_000),
    "half in one class": ProcessCase(12_000, 128, 12_000, half_in_one_class=True),
    "expanded": ProcessCase(20_000, 128, 20_000, expanded=True),
}


def glyphs(quick: bool) -> tuple[Tensor, Tensor]:
    data = Glyphs()
    data.prepare_data()
    size = QUICK if quick else len(data.test_set)
    return data.test_set.images[:size, None].float() / 255, data.test_set.labels[:size]


def embeddings_of(name: str, trained: bool, quick: bool, device: str) -> tuple[Tensor, Tensor]:
    """Unit rows and labels."""
    generator = torch.Generator().manual_seed(0)
    if name == GLYPHS:
        images, labels = glyphs(quick)
        dim, noise = 128, 1.3
        if not trained:
            torch.manual_seed(0)
            embedder = Embedder("glyph_net", embedding_dim=dim).eval()
            with torch.no_grad():
                return normalize(torch.cat([embedder(part) for part in images.split(512)])).to(device), labels.to(
                    device
                )
    else:
        images, of_class, dim, noise = SETS[name]
        images = QUICK if quick else images
        labels = torch.arange(images) % -(-images // of_class)
    classes, index = torch.unique(labels, return_inverse=True)
    points = torch.randn(len(labels), dim, generator=generator)
    if trained:
        points = torch.randn(len(classes), dim, generator=generator)[index] + noise * points
    return normalize(points).to(device), labels.to(device)


def evaluation(embeddings: Tensor, labels: Tensor) -> Callable[[], dict[str, Tensor]]:
    ids = torch.arange(len(labels), device=embeddings.device)

    def run() -> dict[str, Tensor]:
        metrics = RetrievalMetrics().to(embeddings.device)
        for part in ids.split(512):
            metrics.update(embeddings[part], labels[part], part)
        return metrics.compute()

    return run


def product(embeddings: Tensor) -> Callable[[], None]:
    buffer = embeddings.new_empty(BLOCK, len(embeddings))

    def run() -> None:
        for part in embeddings.split(BLOCK):
            torch.mm(part, embeddings.T, out=buffer[: len(part)])

    return run


def torchmetrics_map(embeddings: Tensor, labels: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        metric, every = RetrievalMAP().to(embeddings.device), torch.arange(len(labels), device=embeddings.device)
        for part in every.split(BLOCK):
            scores = embeddings[part] @ embeddings.T + 2  # it takes positives that score <= 0 for negatives
            others = part[:, None] != every
            relevant, query = labels[part, None] == labels, part[:, None].expand_as(others)
            metric.update(scores[others], relevant[others], query[others])
        return metric.compute()

    return run


def accuracy_calculator(embeddings: Tensor, labels: Tensor) -> Callable[[], Any]:
    include = ("mean_average_precision", "mean_average_precision_at_r", "r_precision", "precision_at_1")
    calculator = AccuracyCalculator(
        include=(*include, "mean_reciprocal_rank"),
        k=len(labels) - 1,
        knn_func=CustomKNN(CosineSimilarity(), batch_size=BLOCK),
        device=embeddings.device,
    )
    return lambda: calculator.get_accuracy(embeddings, labels)


def measured(name: str, quick: bool, device: str) -> Callable[[], Any]:
    """For the memory: a small evaluation first, which loads what the first use loads."""
    embeddings, labels = embeddings_of(name, True, quick, device)
    evaluation(embeddings[:100], torch.arange(100, device=device) % 10)()
    return evaluation(embeddings, labels)


def kept(images: int, dim: int, device: str) -> Callable[[], Any]:
    """For the memory: an evaluation of random points that are there only in the metric."""

    def run(images: int) -> None:
        metrics = RetrievalMetrics().to(device)
        for ids in torch.arange(images, device=device).split(512):
            points = torch.randn(len(ids), dim, device=device)
            metrics.update(points, ids % (images // 5), ids, roles=torch.where(ids < MEMORY["queries"], 3, 2))
        metrics.compute()

    run(1000)  # loads what the first use loads
    return lambda: run(images)


def memory_rows(device: str, quick: bool) -> list[dict[str, Any]]:
    images = 10 * QUICK if quick else MEMORY["images"]
    rows = []
    for dim in (128, 512):
        added = peak_added_memory(kept, device, images, dim, device)
        size = images * dim * 4
        row = {"images": images, "queries": MEMORY["queries"], "D": dim, "embeddings MiB": size / MIB}
        rows.append({**row, "added MiB": added / MIB, "added / embeddings": added / size})
    return rows


def batches_of(case: ProcessCase, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The batches of a process: embeddings, labels, ids and roles; those of all processes are the set."""
    centres = torch.randn(case.images // OF_CLASS + 1, case.dim, generator=torch.Generator().manual_seed(0))
    for number, ids in enumerate(torch.arange(case.images).split(BATCH)):
        if number % world != rank:
            continue
        labels = ids // OF_CLASS
        if case.half_in_one_class:
            labels = torch.where(ids < case.images // 2, 0, labels)
        noise = torch.randn(len(ids), case.dim, generator=torch.Generator().manual_seed(number + 1))
        is_query = ids * case.queries % case.images < case.queries
        yield centres[labels] + 1.6 * noise, labels, ids, 2 + is_query


def evaluate(case: ProcessCase, rank: int, world: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Seconds and CPU seconds of an evaluation, and its results."""
    settings: dict[str, Any] = {}
    if case.expanded:
        settings = {"query_expansion": QueryExpansion(), "database_augmentation": DatabaseAugmentation()}
    metrics, spent = RetrievalMetrics(**settings), {"time": 0.0, "CPU time": 0.0}
    clocks = {"time": time.perf_counter, "CPU time": time.process_time}
    for batch in batches_of(case, rank, world):
        before = {name: clock() for name, clock in clocks.items()}
        metrics.update(*batch)
        spent = {name: spent[name] + clock() - before[name] for name, clock in clocks.items()}
    if world > 1:
        dist.barrier()
    before = {name: clock() for name, clock in clocks.items()}
    results = metrics.compute()
    return {name: spent[name] + clock() - before[name] for name, clock in clocks.items()}, results


def one_process(rank: int, world: int, cases: dict[str, ProcessCase], runs: int, folder: str) -> None:
    """Evaluate each set several times, the first time for the memory too; saves what this process has measured."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    measured = {}
    for name, case in cases.items():
        evaluate(ProcessCase(1_000, 8, 1_000, expanded=case.expanded), rank, world)  # loads what the first use loads
        gc.collect()  # metrics refer to themselves, so those of the previous set may still be in memory
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak to the memory in use
        before = memory_status("VmRSS")
        seconds, results = evaluate(case, rank, world)
        added = memory_status("VmHWM") - before
        spent = [seconds, *(evaluate(case, rank, world)[0] for _ in range(runs - 1))]
        measured[name] = {"added": added, "spent": spent, "mAP": results["mAP"].item()}
    torch.save(measured, f"{folder}/{world}-{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


def measured_by_processes(world: int, cases: dict[str, ProcessCase], runs: int) -> list[dict[str, Any]]:
    """What each process has measured, by set."""
    with tempfile.TemporaryDirectory() as folder:
        run_processes(one_process, (world, cases, runs, folder), world)
        return [torch.load(f"{folder}/{world}-{rank}.pt") for rank in range(world)]


def process_rows(cases: dict[str, ProcessCase], runs: int) -> list[dict[str, Any]]:
    """The rows of the table. Memory and time are measured by different processes.

    Those that measure the memory return freed tensors at once, so that the result does not depend on what the
    allocator keeps. This takes time.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for world in (1, 2):
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        of_memory = measured_by_processes(world, cases, 1)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        of_time = measured_by_processes(world, cases, runs)
        for name, case in cases.items():
            row = {"set": name, "images": case.images, "D": case.dim, "queries": case.queries, "processes": world}
            for clock in ("time", "CPU time"):
                in_turn = zip(*(measured[name]["spent"] for measured in of_time))
                seconds = [max(spent[clock] for spent in of_processes) for of_processes in in_turn]
                row[clock] = Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
            row["added MiB"] = max(measured[name]["added"] for measured in of_memory) / MIB
            rows[name].append({**row, "mAP": str(of_time[0][name]["mAP"])})
    return [row for of_case in rows.values() for row in of_case]


def tagged(images: int) -> tuple[Tensor, Tensor]:
    """Embeddings around the centres of their tags, as if trained, and tags: columns of different tags."""
    generator = torch.Generator().manual_seed(0)
    number = -(-images // TAGGED["of a tag"])  # of tags in a column
    columns = []
    for column in range(TAGGED["tags"]):
        order = torch.randperm(images, generator=generator)
        columns.append(order % number + column * number)
    tags = torch.stack(columns, 1)
    centres = torch.randn(TAGGED["tags"] * number, TAGGED["dim"], generator=generator)
    return centres[tags].sum(1) + 1.6 * torch.randn(images, TAGGED["dim"], generator=generator), tags


def rule_rows(quick: bool) -> list[dict[str, Any]]:
    """Evaluations by labels and by rules, in turn."""
    torch.set_num_threads(1)
    embeddings, tags = tagged(2 * QUICK if quick else TAGGED["images"])
    cases = {"labels": (None, tags[:, 0]), "SharedTags": (SharedTags(), tags)}
    spent: dict[str, list[float]] = {name: [] for name in cases}
    found = {}
    for _ in range(1 if quick else TAGGED["runs"]):
        for name, (relevance, labels) in cases.items():
            metrics = RetrievalMetrics(relevance=relevance)
            before = time.process_time()
            for ids in torch.arange(len(tags)).split(BATCH):
                metrics.update(embeddings[ids], labels[ids], ids)
            found[name] = metrics.compute()["mAP"].item()
            spent[name].append(time.process_time() - before)
    rows = []
    for name, seconds in spent.items():
        timing = Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
        ratio = timing.median / statistics.median(spent["labels"])
        rows.append({"relevance": name, "images": len(tags), "CPU time": timing, "ratio": ratio, "mAP": found[name]})
    return rows


def large_class_rows(quick: bool) -> list[dict[str, Any]]:
    """Evaluations of sets with large classes, the product alone, and a sort of all scores, which large classes need."""
    torch.set_num_threads(1)
    case = PROCESS_CASES["half in one class"]
    if quick:
        case = replace(case, images=2 * QUICK, queries=2 * QUICK)
    half, labels, _, _ = (torch.cat(parts) for parts in zip(*batches_of(case, 0, 1)))
    sets = {"half in one class": (normalize(half), labels)}
    images = QUICK if quick else 8_000
    for classes in (2_000, 20, 2, 1):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(images) % classes
        points = torch.randn(classes, 128, generator=generator)[labels]
        points += 1.3 * torch.randn(images, 128, generator=generator)
        sets[f"classes of {max(1, images // classes)}"] = (normalize(points), labels)
    rows = []
    for name, (embeddings, labels) in sets.items():
        scores = embeddings[:BLOCK] @ embeddings.T
        functions = {
            "evaluation": evaluation(embeddings, labels),
            "product alone": product(embeddings),
            "sort alone": partial(sort_blocks, scores, len(embeddings) // BLOCK),
        }
        times = interleaved(functions, 1 if quick else 5, "cpu", clock=time.process_time)
        ratio = times["evaluation"].median / times["product alone"].median
        rows.append({"set": name, "images": len(labels), "D": embeddings.shape[1], **times, "ratio": ratio})
    return rows


def sort_blocks(scores: Tensor, blocks: int) -> None:
    """Sort a block of scores as often as an evaluation has blocks of queries."""
    for _ in range(blocks):
        scores.clone().numpy().sort(axis=1)


def main() -> None:
    description = "RetrievalMetrics against peers and against the score matrix product alone."
    options = arguments(
        description,
        memory="only the memory of an evaluation of one million images",
        processes="only the evaluations by 1 and 2 processes",
        rules="only the evaluations by labels and by rules of relevance",
        classes="only the evaluations of sets with large classes",
    )
    device, quick = options.device, options.quick
    if options.memory:
        report("Memory of RetrievalMetrics", environment(device), memory_rows(device, quick), options.json)
        return
    if options.processes:
        if device != "cpu":
            sys.exit("--processes: this comparison runs on the CPU only, whose cores its processes share.")
        torch.set_num_threads(1)
        cases, runs = PROCESS_CASES, 3
        if quick:
            cases, runs = {name: replace(case, images=1_500, dim=8, queries=1_500) for name, case in cases.items()}, 1
        rows = process_rows(cases, runs)
        report("RetrievalMetrics in processes of one thread each", environment(device), rows, options.json)
        return
    if options.rules:
        report("RetrievalMetrics by rules of relevance", environment("cpu"), rule_rows(quick), options.json)
        return
    if options.classes:
        report("RetrievalMetrics of large classes", environment("cpu"), large_class_rows(quick), options.json)
        return
    rows = []
    for name in (*SETS, GLYPHS):
        for trained in (True, False):
            embeddings, labels = embeddings_of(name, trained, quick, device)
            run, found = evaluation(embeddings, labels), {}
            long = len(labels) > 30_000
            times = interleaved(
                {"evaluation": lambda run=run, found=found: found.update(run()), "product": product(embeddings)},
                1 if quick or long else 3,
                device,
                warm_up=0 if long else 1,
            )
            seen = trained and not (quick and rows)
            memory = peak_added_memory(measured, device, name, quick, device) / MIB if seen else None
            row = {
                "set": name,
                "images": len(labels),
                "D": embeddings.shape[1],
                "embeddings": "as if trained" if trained else "untrained",
                "evaluation": times["evaluation"],
                "product alone": times["product"],
                "ratio": times["evaluation"].median / times["product"].median,
                "added MiB": memory,
                "mAP": found["mAP"].item(),
            }
            rows.append(row)
            if name == PEERS and trained:
                peers = {"RetrievalMAP": torchmetrics_map, "AccuracyCalculator": accuracy_calculator}
                made = {peer: make(embeddings, labels) for peer, make in peers.items()}
                for peer, time in interleaved(made, 1, device, warm_up=0).items():
                    ratio = time.median / times["evaluation"].median
                    rows.append({"set": name, "peer": peer, "peer's time": time, "times faster": ratio})
    images, labels = glyphs(quick)
    pixels = evaluation(normalize(images.flatten(1)).to(device), labels.to(device))()
    rows.append({"set": GLYPHS, "images": len(labels), "embeddings": "raw pixels", "mAP": pixels["mAP"].item()})
    packages = ("torchmetrics", "pytorch-metric-learning")
    report("RetrievalMetrics; median (lowest to highest)", environment(device, *packages), rows, options.json)


if __name__ == "__main__":
    main()
