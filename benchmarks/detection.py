"""The AP loss of detectors: forward and backward pass, compared with one sort of the same scores.

    python benchmarks/detection.py

A batch has 16,384 RoIs, a quarter of which show an object, and 21 classes besides the background, which differ in
frequency as those of photographs do. The yardstick is one sort of all scores of a batch in one list. The loss is timed
without a memory, and with a full memory of 7 batches. All are timed alternately in one process, by the time of its CPU,
so that other processes on the machine do not count. The benchmark takes a minute on one core.
"""

import time
from typing import Any

import torch
from timing import arguments, environment, interleaved, report
from torch import Tensor

from lightning_retrieval.detection import DetectionAPLoss
from lightning_retrieval.detection.ap_loss import foreground_lists

CLASSES = 21
MEMORY = 7
RUNS = 15


def make_batch(rois: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Logits and labels of RoIs; class k has a frequency of 1 / k."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1 / torch.arange(1, CLASSES + 1)
    labels = torch.multinomial(frequencies, rois, replacement=True, generator=generator) + 1
    labels[torch.rand(rois, generator=generator) > 0.25] = 0
    logits = torch.randn(rois, CLASSES + 1, generator=generator)
    logits[torch.arange(rois), labels] += 2
    return logits.to(device), labels.to(device)


def step(loss: DetectionAPLoss, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """A function that computes loss and gradient of one batch after the other, beginning with a full memory."""
    waiting = list(batches)

    def run() -> None:
        logits, labels = waiting.pop(0)
        waiting.append((logits, labels))
        loss(logits.clone().requires_grad_(), labels).backward()

    for _ in range(loss.batch_memory):
        run()
    return run


def measure(rois: int, runs: int, device: str) -> list[dict[str, Any]]:
    batches = [make_batch(rois, seed, device) for seed in range(MEMORY + 3)]
    scores = foreground_lists(*batches[0])[0].flatten()
    functions = {
        "one sort": scores.sort,
        "no memory": step(DetectionAPLoss(batch_memory=0), batches),
        f"memory of {MEMORY}": step(DetectionAPLoss(batch_memory=MEMORY), batches),
    }
    clock = time.process_time if device == "cpu" else time.perf_counter
    timings = interleaved(functions, runs, device, clock=clock)
    rows = []
    for name, timing in timings.items():
        ratio = timing.median / timings["one sort"].median
        rows.append({"what": name, "RoIs": rois, "classes": CLASSES, "time": timing, "ratio": ratio})
    return rows


def main() -> None:
    options = arguments("Forward and backward pass of the AP loss of detectors, compared with one sort.")
    torch.set_num_threads(1)
    rois, runs = (512, 1) if options.quick else (16_384, RUNS)
    rows = measure(rois, runs, options.device)
    title = "AP loss of detectors, forward and backward; median (lowest to highest)"
    report(title, environment(options.device), rows, options.json)


if __name__ == "__main__":
    main()
