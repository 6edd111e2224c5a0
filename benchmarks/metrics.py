"""Evaluation against peers, and against the product of its score matrix alone.

    python benchmarks/metrics.py
    python benchmarks/metrics.py --memory

The product is what any evaluation has to do: all queries against all images, block by block into one buffer that is
there before. The evaluation is `RetrievalMetrics`, from the first update to the last number, with all its metrics. The
embeddings are those of an untrained network (of Glyphs) or random points, where nearly all images can stand before a
positive, or class centres with noise, which rank about as a trained network's do. The peers are given the same
embeddings and asked for the same numbers as far as they have them: torchmetrics' `RetrievalMAP`, with scores shifted
above 0, and pytorch-metric-learning's `AccuracyCalculator` with the faster of its two searches. The last line is what
raw pixels reach. About eight minutes on two cores.

With `--memory` one million images are evaluated, of which a few are queries, and the peak memory of `update` and
`compute` is compared with the embeddings. A query adds its values, about 100 bytes with the default metrics.
"""

import os

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # processes that measure memory return what is freed at once

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from timing import arguments, environment, interleaved, peak_added_memory, report
from torch import Tensor
from torchmetrics.retrieval import RetrievalMAP

from lightning_retrieval import Embedder, RetrievalMetrics
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.ranking.similarity import normalize

GLYPHS, PEERS, BLOCK, MIB = "Glyphs test set", "against peers", 256, 1 << 20
SETS = {  # images, images of each class, dimension, noise of what is as if trained
    PEERS: (5_000, 5, 128, 1.3),
    "as SOP's test set": (60_502, 5, 512, 1.6),
    "50 a class": (20_000, 50, 512, 1.6),
    "340 a class": (20_000, 340, 512, 1.6),
}
QUICK = 500  # images of each set
MEMORY = {"images": 1_000_000, "queries": 1_000}  # of the evaluation whose memory is measured


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
            metrics.update(points, ids % (images // 5), ids, is_query=ids < MEMORY["queries"])
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


def main() -> None:
    description = "RetrievalMetrics against peers and against the score matrix product alone."
    options = arguments(description, memory="only the memory of an evaluation of one million images")
    device, quick = options.device, options.quick
    if options.memory:
        report("Memory of RetrievalMetrics", environment(device), memory_rows(device, quick), options.json)
        return
    rows: list[dict[str, Any]] = []
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
