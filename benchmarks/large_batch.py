"""A training step on a large batch that is embedded in chunks: does it need only the memory of a small one, and what
does that cost in time?

    python benchmarks/large_batch.py             # about ten minutes on two cores
    python benchmarks/large_batch.py --kept      # what keep_graphs saves, about three minutes
    python benchmarks/large_batch.py --networks  # which chunks fit into a GPU of 8 GB, by an estimate, seconds

The model is ResNet-18 without its last layer, in train mode, on images of 128 x 128; the loss is Smooth-AP of the whole
batch. The step in chunks of 32 and the plain step, which embeds the batch at once, are timed alternately: on the same
batch if it is small, else the plain step has a batch of 64 and the times per image are compared. Memory is the peak
that a step adds to the network and the images, gradients included, measured in a separate process.

With `--kept`, a step in 16 chunks of 16 images of 64 x 64 is timed for several numbers of kept graphs, and compared to
the step that keeps all graphs and as many forward passes without a graph as the step has further ones. All run in turn
with one thread; the time is CPU time on a CPU.

With `--networks`, the memory of a chunk is estimated for several networks: the tensors that autograd stores for the
backward pass of one image, in float32 and in bfloat16, are added up, and the chunk is the largest power of two for
which 16 bytes for each parameter (weights, gradients and AdamW) and 1.5 times the stored tensors fit into 7 GiB, which
a GPU of 8 GB has left beside CUDA itself. Nothing runs on a GPU for it.
"""

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from timing import (
    arguments,
    cpu_clock,
    environment,
    interleaved,
    peak_added_memory,
    range_of,
    report,
    timed_in_turn,
)
from torch import Tensor, nn
from torchvision.models import resnet18

from lightning_retrieval import Embedder
from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.training.chunked import chunked_backward

CHUNK, SMALL, PER_CLASS, MIB = 32, 64, 4, 1 << 20
NETWORKS = {
    "resnet18": 224,
    "resnet50": 224,
    "timm/vit_small_patch14_dinov2.lvd142m": 224,
    "timm/vit_base_patch14_dinov2.lvd142m": 224,
}
FREE, PER_PARAMETER, HEADROOM = 7 << 30, 16, 1.5  # bytes that a GPU of 8 GB has left, and the estimate's terms
# The targets: memory relative to the batch of 64, and time relative to the plain step.
MOST_MEMORY, MOST_TIME = 1.15, 1.40


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = resnet18(weights=None)
    model.fc = nn.Identity()
    return model.to(device)


def step(
    model: nn.Module, batch: int, side: int, chunk_size: int | None, device: str, keep_graphs: int = 1
) -> Callable[[], Any]:
    """A function that computes the loss of a batch and its gradient, on images that are created before it is called."""
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.arange(batch, device=device) // PER_CLASS
    loss = SmoothAPLoss()

    def of_batch(embeddings: Tensor) -> Tensor:
        value: Tensor = loss(embeddings, labels)
        return value

    def run() -> None:
        model.zero_grad()
        chunked_backward(model, images, of_batch, chunk_size, keep_graphs=keep_graphs)

    return run


def measured(batch: int, side: int, chunk_size: int | None, device: str) -> Callable[[], Any]:
    """To measure memory: runs a small step first, which loads what the first use loads, and drops its gradients."""
    model = network(device)
    step(model, 2 * PER_CLASS, side, PER_CLASS, device)()
    model.zero_grad()
    return step(model, batch, side, chunk_size, device)


def forward_passes(model: nn.Module, chunks: int, chunk_size: int, side: int, device: str) -> Callable[[], Any]:
    """A function that embeds so many chunks without a graph."""
    images = torch.rand(chunk_size, 3, side, side, device=device)

    def run() -> None:
        with torch.no_grad():
            for _ in range(chunks):
                model(images)

    return run


def compare_kept_graphs(device: str, quick: bool) -> list[dict[str, Any]]:
    """A step in chunks for several numbers of kept graphs."""
    batch, side, chunk, runs = (16, 32, 4, 1) if quick else (256, 64, 16, 5)
    chunks = batch // chunk
    kept = [number for number in (1, 4, 8, 12) if number < chunks]
    if device == "cpu":
        torch.set_num_threads(1)
    model = network(device)
    functions = {f"keeps {number}": step(model, batch, side, chunk, device, number) for number in (*kept, chunks)}
    functions["all again"] = forward_passes(model, chunks, chunk, side, device)
    turns = timed_in_turn(functions, runs, device, clock=cpu_clock(device))
    rows: list[dict[str, Any]] = []
    for number in kept:
        over_all, over_prediction = [], []
        for turn in turns:
            all_kept = turn[f"keeps {chunks}"]
            predicted = all_kept + turn["all again"] * (chunks - number) / chunks
            over_all.append(turn[f"keeps {number}"] / all_kept)
            over_prediction.append(turn[f"keeps {number}"] / predicted)
        row: dict[str, Any] = {"chunks": chunks, "keep_graphs": number, "over keeping all": median(over_all)}
        rows.append(row | range_of("over the prediction", over_prediction) | {"runs": runs})
    return rows


def stored_bytes(model: nn.Module, images: Tensor, half: bool) -> int:
    """Bytes of the tensors that autograd stores for the backward pass, without parameters, each storage once."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            embeddings = model(images)
        sizes = [tensor.untyped_storage().nbytes() for tensor in storages.values()]
        del embeddings
    return sum(sizes)


def largest_chunk(parameters: int, bytes_of_an_image: float) -> int:
    """The largest power of two whose chunk is estimated to fit."""
    images = (FREE - PER_PARAMETER * parameters) / (HEADROOM * bytes_of_an_image)
    return 1 << (int(images).bit_length() - 1)


def estimate_chunks(quick: bool) -> list[dict[str, Any]]:
    """What one image stores in each network, and the chunk that fits."""
    rows: list[dict[str, Any]] = []
    for name, side in {"resnet18": 64}.items() if quick else NETWORKS.items():
        model = Embedder(name, 512, image_size=side).train()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        row: dict[str, Any] = {"network": name, "pixels": side, "parameters, million": parameters / 1e6}
        for precision, half in (("float32", False), ("bf16-mixed", True)):
            # The difference, because casts of the weights to bfloat16 are stored once, not for each image.
            one, two = (stored_bytes(model, torch.rand(number, 3, side, side), half) for number in (2, 4))
            an_image = (two - one) / 2
            row[f"{precision}: MiB an image"] = an_image / MIB
            row[f"{precision}: chunk"] = largest_chunk(parameters, an_image)
        rows.append(row)
    return rows


def verdict(what: str, value: float, most: float) -> str:
    return f"| {what} | {value:.3f} | at most {most} | {'met' if value <= most else 'missed'} |"


def number_of_runs(batch: int, quick: bool) -> int:
    if quick:
        return 1
    return 3 if batch > 256 else 5


def main() -> None:
    options = arguments(
        "A training step on a large batch that is embedded in chunks, compared with the plain step.",
        kept="measure what keep_graphs saves instead",
        networks="estimate instead which chunks of several networks fit into a GPU of 8 GB",
    )
    device, quick = options.device, options.quick
    if options.kept:
        title = "ResNet-18, Smooth-AP, a step in chunks that keep their graphs; CPU time on a CPU"
        kept_rows = compare_kept_graphs(device, quick)
        report(title, environment(device, "torchvision"), kept_rows, options.json)
        return
    if options.networks:
        title = "Estimated memory of an image's graph, and the chunk that fits into a GPU of 8 GB"
        report(title, environment("cpu", "torchvision", "timm"), estimate_chunks(quick), options.json)
        return
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
