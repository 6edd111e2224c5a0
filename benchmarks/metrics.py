"""Evaluation of the Glyphs test set against the product of its score matrix alone.

    python benchmarks/metrics.py

The product is what any evaluation has to do: all queries against all images, block by block into one buffer that is
there before. The evaluation is `RetrievalMetrics`, from the first update to the last number. Two kinds of embeddings:
those of an untrained network, and class centres with noise, which rank about as a trained network's do. The last line
is what raw pixels reach. About a minute on two cores.
"""

from collections.abc import Callable
from typing import Any

import torch
from timing import arguments, interleaved, peak_added_memory, report, setting
from torch import Tensor

from lightning_retrieval import Embedder, RetrievalMetrics
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.similarity import normalize

DIM, BLOCK, NOISE, MIB = 128, 256, 1.3, 1 << 20


def images_and_labels(quick: bool) -> tuple[Tensor, Tensor]:
    data = Glyphs()
    data.prepare_data()
    size = 500 if quick else len(data.test_set)
    return data.test_set.images[:size, None].float() / 255, data.test_set.labels[:size]


def untrained(images: Tensor, device: str) -> Tensor:
    torch.manual_seed(0)
    embedder = Embedder("glyph_net", embedding_dim=DIM).eval().to(device)
    with torch.no_grad():
        return torch.cat([embedder(part.to(device)) for part in images.split(512)])


def as_if_trained(labels: Tensor, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    classes, index = torch.unique(labels, return_inverse=True)
    centres = torch.randn(len(classes), DIM, generator=generator)
    return normalize(centres[index] + NOISE * torch.randn(len(labels), DIM, generator=generator)).to(device)


def evaluation(embeddings: Tensor, labels: Tensor) -> Callable[[], dict[str, Tensor]]:
    labels = labels.to(embeddings.device)
    ids = torch.arange(len(labels), device=embeddings.device)

    def run() -> dict[str, Tensor]:
        metrics = RetrievalMetrics().to(embeddings.device)
        for part in torch.arange(len(labels), device=embeddings.device).split(512):
            metrics.update(embeddings[part], labels[part], ids[part])
        return metrics.compute()

    return run


def product(embeddings: Tensor) -> Callable[[], None]:
    buffer = embeddings.new_empty(BLOCK, len(embeddings))

    def run() -> None:
        for part in embeddings.split(BLOCK):
            torch.mm(part, embeddings.T, out=buffer[: len(part)])

    return run


def measured(kind: str, quick: bool, device: str) -> Callable[[], Any]:
    """For the memory: a small evaluation first, which loads what the first use loads."""
    images, labels = images_and_labels(quick)
    embeddings = untrained(images, device) if kind == "untrained" else as_if_trained(labels, device)
    del images
    evaluation(embeddings[:100], labels[:100])()
    return evaluation(embeddings, labels)


def main() -> None:
    options = arguments("RetrievalMetrics on the Glyphs test set, against the score matrix product alone.")
    device, quick = options.device, options.quick
    images, labels = images_and_labels(quick)
    kinds = {"untrained": untrained(images, device), "as if trained": as_if_trained(labels, device)}
    rows: list[dict[str, Any]] = []
    for kind, embeddings in kinds.items():
        run = evaluation(embeddings, labels)
        times = interleaved({"evaluation": run, "product": product(embeddings)}, 1 if quick else 5, device)
        results = run()
        rows.append(
            {
                "embeddings": kind,
                "evaluation": times["evaluation"],
                "product alone": times["product"],
                "ratio": times["evaluation"].median / times["product"].median,
                "added MiB": None if quick and rows else peak_added_memory(measured, device, kind, quick, device) / MIB,
                "mAP": results["mAP"].item(),
                "R@1": results["R@1"].item(),
            }
        )
    pixels = evaluation(images.flatten(1).to(device), labels)()
    rows.append({"embeddings": "raw pixels", "mAP": pixels["mAP"].item(), "R@1": pixels["R@1"].item()})
    title = f"Glyphs test set, {len(labels)} images, D = {DIM}; median (lowest to highest)"
    report(title, setting(device), rows, options.json)


if __name__ == "__main__":
    main()
