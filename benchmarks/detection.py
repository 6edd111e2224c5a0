"""The AP loss of detectors, compared with one sort of the same scores, and a training step with it and without.

    python benchmarks/detection.py

A batch has 16,384 RoIs, a quarter of which show an object, and 21 classes besides the background, which differ in
frequency as those of photographs do. The yardstick is one sort of all scores of a batch in one list. The loss is timed
without a memory, and with a full memory of 7 batches. A step is forward pass, backward pass and AdamW of the small
detector on 8 scenes, with torchvision's own heads, and with `RankedRoIHeads` and a full memory. What is compared is
timed alternately in one process, by the time of its CPU, so that other processes on the machine do not count. The
benchmark takes a minute on one core.
"""

from typing import Any

import torch
from timing import arguments, cpu_clock, environment, interleaved, report
from torch import Tensor

from lightning_retrieval.datamodules import GlyphScenes
from lightning_retrieval.detection import DetectionAPLoss, RankedRoIHeads, TinyFasterRCNN
from lightning_retrieval.detection.ap_loss import foreground_lists

CLASSES = 21
MEMORY = 7
RUNS = 15
STEPS = 40


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


def training_step(data: GlyphScenes, loss: DetectionAPLoss | None, device: str) -> Any:
    """A function that trains the small detector with one batch after the other."""
    torch.manual_seed(0)
    detector = TinyFasterRCNN(data.num_classes)
    if loss is not None:
        detector.roi_heads = RankedRoIHeads(detector.roi_heads, loss)
    detector.to(device)
    optimizer = torch.optim.AdamW(detector.parameters(), lr=0.002)
    waiting = []
    for images, targets in data.train_dataloader():
        boxes = [{key: value.to(device) for key, value in target.items()} for target in targets]
        waiting.append(([image.to(device) for image in images], boxes))

    def run() -> None:
        batch = waiting.pop(0)
        waiting.append(batch)
        optimizer.zero_grad()
        sum(detector(*batch).values()).backward()
        optimizer.step()

    for _ in range(MEMORY + 1):
        run()
    return run


def measure_steps(images: int, runs: int, device: str) -> list[dict[str, Any]]:
    """Rows of training steps with torchvision's heads and with `RankedRoIHeads`."""
    data = GlyphScenes(train_size=10 * images, batch_size=images)
    functions = {
        "step, cross entropy": training_step(data, None, device),
        "step, RankedRoIHeads": training_step(data, DetectionAPLoss(), device),
    }
    return rows_of(functions, runs, device, rois=32 * images, classes=data.num_classes)


def measure(rois: int, runs: int, device: str) -> list[dict[str, Any]]:
    """Rows of the loss, without a memory and with a full one."""
    batches = [make_batch(rois, seed, device) for seed in range(MEMORY + 3)]
    scores = foreground_lists(*batches[0])[0].flatten()
    functions = {
        "one sort": scores.sort,
        "no memory": step(DetectionAPLoss(batch_memory=0), batches),
        f"memory of {MEMORY}": step(DetectionAPLoss(batch_memory=MEMORY), batches),
    }
    return rows_of(functions, runs, device, rois=rois, classes=CLASSES)


def rows_of(functions: dict[str, Any], runs: int, device: str, *, rois: int, classes: int) -> list[dict[str, Any]]:
    """Time the functions, and divide by the time of the first one."""
    timings = interleaved(functions, runs, device, clock=cpu_clock(device))
    first = next(iter(timings.values()))
    rows = []
    for name, timing in timings.items():
        rows.append(
            {"what": name, "RoIs": rois, "classes": classes, "time": timing, "ratio": timing.median / first.median}
        )
    return rows


def main() -> None:
    options = arguments("The AP loss of detectors, compared with one sort, and a training step with it and without.")
    torch.set_num_threads(1)
    rois, images, runs, steps = 16_384, 8, RUNS, STEPS
    if options.quick:
        rois, images, runs, steps = 512, 2, 1, 1
    rows = measure(rois, runs, options.device) + measure_steps(images, steps, options.device)
    title = "AP loss of detectors, forward and backward, and training steps; median (lowest to highest)"
    report(title, environment(options.device), rows, options.json)


if __name__ == "__main__":
    main()
