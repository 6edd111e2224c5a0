"""A training step on a large batch that is embedded in chunks: does it need only the memory of a small one, and what
does that cost in time?

    python benchmarks/large_batch.py

The model is ResNet-18 without its last layer, in train mode, on images of 128 x 128; the loss is Smooth-AP of the whole
batch. The step in chunks of 32 and the plain step, which embeds the batch at once, are timed alternately: on the same
batch if it is small, else the plain step has a batch of 64 and the times per image are compared. Memory is the peak
that a step adds to the network and the images, gradients included, measured in a separate process. The benchmark takes
about ten minutes on two cores.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import arguments, environment, interleaved, peak_added_memory, report
from torch import Tensor, nn
from torchvision.models import resnet18

from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.training.chunked import chunked_backward

CHUNK, SMALL, PER_CLASS, MIB = 32, 64, 4, 1 << 20
# The targets: memory relative to the batch of 64, and time relative to the plain step.
MOST_MEMORY, MOST_TIME = 1.15, 1.40


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = resnet18(weights=None)
    model.fc = nn.Identity()
    return model.to(device)


def step(model: nn.Module, batch: int, side: int, chunk_size: int | None, device: str) -> Callable[[], Any]:
    """A function that computes the loss of a batch and its gradient, on images that are created before it is called."""
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.arange(batch, device=device) // PER_CLASS
    loss = SmoothAPLoss()

    def of_batch(embeddings: Tensor) -> Tensor:
        value: Tensor = loss(embeddings, labels)
        return value

    def run() -> None:
        model.zero_grad()
        chunked_backward(model, images, of_batch, chunk_size)

    return run


def measured(batch: int, side: int, chunk_size: int | None, device: str) -> Callable[[], Any]:
    """To measure memory: runs a small step first, which loads what the first use loads, and drops its gradients."""
    model = network(device)
    step(model, 2 * PER_CLASS, side, PER_CLASS, device)()
    model.zero_grad()
    return step(model, batch, side, chunk_size, device)


def verdict(what: str, value: float, most: float) -> str:
    return f"| {what} | {value:.3f} | at most {most} | {'met' if value <= most else 'missed'} |"


def number_of_runs(batch: int, quick: bool) -> int:
    if quick:
        return 1
    return 3 if batch > 256 else 5


def main() -> None:
    options = arguments("A training step on a large batch that is embedded in chunks, compared with the plain step.")
    device, quick = options.device, options.quick
    side, chunk, small, batches = 128, CHUNK, SMALL, (64, 128, 256, 512, 1024)
    if quick:
        side, chunk, small, batches = 32, 4, 8, (8, 16)
    # The processes that measure memory read this when they start: a freed tensor then goes back to the system at once.
    # Otherwise holes in the heap of the C library count as well: a tenth of the peak or more, different in every run.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MIB))
    model = network(device)
    added = partial(peak_added_memory, measured, device)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        plain_batch = batch if batch <= 2 * small else small
        functions = {
            "chunks": step(model, batch, side, chunk, device),
            "plain": step(model, plain_batch, side, None, device),
        }
        times = interleaved(functions, number_of_runs(batch, quick), device)
        time_in_chunks, plain_time = times["chunks"].median / batch, times["plain"].median / plain_batch
        row: dict[str, Any] = {"batch": batch, "in chunks": times["chunks"]}
        row |= {
            "plain batch": plain_batch,
            "plain": times["plain"],
            "time ratio per image": time_in_chunks / plain_time,
        }
        row["added MiB"] = added(batch, side, chunk, device) / MIB
        rows.append(row)
        row["ratio to the first"] = row["added MiB"] / rows[0]["added MiB"]
        row["plain added MiB"] = added(batch, side, None, device) / MIB if plain_batch == batch else None
    title = f"ResNet-18 at {side} x {side}, Smooth-AP, chunks of {chunk}; median (lowest to highest)"
    report(title, environment(device, "torchvision"), rows, options.json)
    print("\n| | measured | target | |\n| --- | --- | --- | --- |")
    print(verdict(f"memory at {batches[-1]}, relative to {batches[0]}", rows[-1]["ratio to the first"], MOST_MEMORY))
    for row in rows:
        what = f"time per image at {row['batch']}, relative to the plain step at {row['plain batch']}"
        print(verdict(what, row["time ratio per image"], MOST_TIME))


if __name__ == "__main__":
    main()
