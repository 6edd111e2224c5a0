"""Smooth-AP, forward and backward: ours against pytorch-metric-learning's, and ours on large batches.

    python benchmarks/losses.py

The two are timed in turn in one process, on the same embeddings (classes of 4 side by side, as the other one needs
them). They do not have the same value: the other counts the query in its own list, and cuts its groups in another way.
Memory is what a step adds at its peak, in a process of its own. Under two minutes on two cores.
"""

from collections.abc import Callable
from typing import Any

import torch
from timing import arguments, interleaved, peak_added_memory, report, setting
from torch import nn

from lightning_retrieval import SmoothAPLoss

DIM, PER_CLASS, MIB = 512, 4, 1 << 20


def theirs() -> nn.Module:
    from pytorch_metric_learning.losses import SmoothAPLoss as TheirSmoothAPLoss

    loss: nn.Module = TheirSmoothAPLoss(temperature=0.01)
    return loss


def step(loss: nn.Module, batch: int, device: str) -> Callable[[], Any]:
    """A function that takes the loss of a batch and its gradient."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(batch, DIM, generator=generator).to(device).requires_grad_()
    labels = torch.arange(batch, device=device) // PER_CLASS

    def run() -> None:
        embeddings.grad = None
        loss(embeddings, labels).backward()

    return run


def measured(ours: bool, batch: int, device: str) -> Callable[[], Any]:
    """For the memory: a small step first, which loads what the first use loads."""
    loss = SmoothAPLoss(tau=0.01) if ours else theirs()
    step(loss, 2 * PER_CLASS, device)()
    return step(loss, batch, device)


def main() -> None:
    options = arguments("Smooth-AP forward and backward, against pytorch-metric-learning.")
    device, quick = options.device, options.quick
    batch, large, runs = (32, (64,), 1) if quick else (384, (2048, 4096), 7)
    functions = {"ours": step(SmoothAPLoss(tau=0.01), batch, device), "theirs": step(theirs(), batch, device)}
    times = interleaved(functions, runs, device)
    ratio = times["theirs"].median / times["ours"].median
    rows: list[dict[str, Any]] = [
        {"loss": "pytorch-metric-learning SmoothAPLoss", "batch": batch, "time": times["theirs"], "times faster": 1.0},
        {"loss": "SmoothAPLoss", "batch": batch, "time": times["ours"], "times faster": ratio},
    ]
    for size in large:
        alone = interleaved({"ours": step(SmoothAPLoss(tau=0.01), size, device)}, max(1, runs // 2), device)
        rows.append({"loss": "SmoothAPLoss", "batch": size, "time": alone["ours"]})
    for row in rows[-1:] if quick else rows:
        ours = row["loss"] == "SmoothAPLoss"
        row["added MiB"] = peak_added_memory(measured, device, ours, row["batch"], device) / MIB
    title = f"Smooth-AP forward and backward, K = {PER_CLASS}, D = {DIM}; median (lowest to highest)"
    report(title, setting(device, "pytorch-metric-learning"), rows, options.json)


if __name__ == "__main__":
    main()
