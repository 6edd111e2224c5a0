"""A step on a large batch, embedded in chunks: does memory stay that of a small batch, and what does it cost in time?

    python benchmarks/large_batch.py

ResNet-18 without its last layer, in train mode, on images of 128 x 128, and Smooth-AP of the whole batch. The step in
chunks of 32 is timed in turn with the plain step, which embeds the batch at once: on the same batch as long as that is
small, else on one of 64, and then image by image. Memory is what a step adds at its peak to the images and the network
that are there before it, gradients among it, in a process of its own. About ten minutes on two cores.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import arguments, interleaved, peak_added_memory, report, setting
from torch import Tensor, nn
from torchvision.models import resnet18

from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.training.chunked import chunked_backward

CHUNK, SMALL, PER_CLASS, MIB = 32, 64, 4, 1 << 20
MOST_MEMORY, MOST_TIME = 1.15, 1.40  # times the batch of 64, and times the plain step


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = resnet18(weights=None)
    model.fc = nn.Identity()
    return model.to(device)


def step(model: nn.Module, batch: int, side: int, chunk_size: int | None, device: str) -> Callable[[], Any]:
    """A function that takes the loss of a batch and its gradient, on images that are there already."""
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
    """For the memory: a small step first, which loads what the first use loads; its gradients are dropped again."""
    model = network(device)
    step(model, 2 * PER_CLASS, side, PER_CLASS, device)()
    model.zero_grad()
    return step(model, batch, side, chunk_size, device)


def verdict(what: str, value: float, most: float) -> str:
    return f"| {what} | {value:.3f} | at most {most} | {'met' if value <= most else 'missed'} |"


def main() -> None:
    options = arguments("A step on a large batch, embedded in chunks, against the plain step.")
    device, quick = options.device, options.quick
    side, chunk, small = (32, 4, 8) if quick else (128, CHUNK, SMALL)
    batches = (8, 16) if quick else (64, 128, 256, 512, 1024)
    # Read by the processes that measure memory as they start: a freed tensor then goes back to the system. Else holes
    # of the C library's heap are counted, too, a tenth of the peak and more, and never the same in two runs.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MIB))
    model = network(device)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        peer = batch if batch <= 2 * small else small
        functions = {"chunks": step(model, batch, side, chunk, device), "plain": step(model, peer, side, None, device)}
        times = interleaved(functions, 1 if quick else 3 if batch > 256 else 5, device)
        added = partial(peak_added_memory, measured, device)
        chunks_added = added(batch, side, chunk, device) / MIB
        rows.append(
            {
                "batch": batch,
                "in chunks": times["chunks"],
                "plain batch": peer,
                "plain": times["plain"],
                "time an image": (times["chunks"].median / batch) / (times["plain"].median / peer),
                "added MiB": chunks_added,
                "times the first": chunks_added / (rows[0]["added MiB"] if rows else chunks_added),
                "plain added MiB": added(batch, side, None, device) / MIB if peer == batch else None,
            }
        )
    title = f"ResNet-18 at {side} x {side}, Smooth-AP, chunks of {chunk}; median (lowest to highest)"
    report(title, setting(device, "torchvision"), rows, options.json)
    print("\n| | measured | target | |\n| --- | --- | --- | --- |")
    print(verdict(f"memory at {batches[-1]}, times that at {batches[0]}", rows[-1]["times the first"], MOST_MEMORY))
    for row in rows:
        what = f"time an image at {row['batch']}, times the plain step's at {row['plain batch']}"
        print(verdict(what, row["time an image"], MOST_TIME))


if __name__ == "__main__":
    main()
