"""A training step end to end, from images on disk to updated weights: the percentage of each of its parts.

    python benchmarks/step.py

`RetrievalModule` trains GlyphNet, with JPEGs of 64 x 64, and ResNet-50 at 224 pixels, with JPEGs of 500 x 400, under a
real Trainer with `SmoothAPLoss` and AdamW, in float32: in one process, and in two (gloo) that share its batch, with one
thread each. The images are in the system's cache, and are read in the training process, one part after the other:

- reading: decoding the files;
- preparing: random crop and flip to tensors of uint8, and normalising the batch;
- embedding: the forward and the backward pass of the network;
- loss: the forward and the backward pass of the loss, on the embeddings of all processes;
- communication: the collective operations. Each is waited for where it begins, so none overlaps with another part, and
  the time includes waiting for the other process;
- rest: the optimizer, the batches and the loop of the Trainer.

With `num_workers`, reading and preparing run beside the other parts. All times are those of the first process. Takes
about four minutes on two cores; a GPU trains in one process only.
"""

import logging
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from images import write_images
from timing import Timing, arguments, environment, report, run_processes

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import ImageDataModule, ImageIndex, ImageSet
from lightning_retrieval.training import module as module_of_library
from lightning_retrieval.training.batch import GlobalBatch

PARTS = ("reading", "preparing", "embedding", "loss", "communication", "rest")
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = ("all_gather", GATHER, "all_to_all_single", "all_reduce")
PER_CLASS, WARM_UP = 4, 2
CASES = {  # batch, steps, width and height of the images
    "glyph_net": (256, 9, (64, 64)),
    "resnet50": (16, 5, (500, 400)),
}


class PartClock(pl.Callback):
    """Measures the seconds of the parts of each step, of which only the innermost runs at a time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._seconds: Counter[str] = Counter()
        self._running = ["rest"]
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time within the context as that of a part, and not of the part around it."""
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts as that of a part."""

        @wraps(function)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            with self.part(name):
                return function(*args, **keywords)

        return wrapped

    def _count(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds[self._running[-1]] += now - self._since
        self._since = now

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """End the step. The next one begins with the reading of its images."""
        self._count()
        self.steps.append({name: self._seconds[name] for name in PARTS})
        self._seconds.clear()


class TimedImages(ImageSet):
    """Images whose reading and preparing is timed."""

    clock: PartClock

    def input_of_transform(self, position: int) -> Any:
        with self.clock.part("reading"):
            return super().input_of_transform(position)

    def transformed(self, image: Any) -> Any:
        with self.clock.part("preparing"):
            return super().transformed(image)


class TimedData(ImageDataModule):
    """The images of a folder, all for training."""

    def __init__(self, root: Path, clock: PartClock, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.clock = clock

    def read(self) -> Mapping[str, ImageIndex]:
        paths = sorted(str(file.relative_to(self.root)) for file in self.root.rglob("*.jpg"))
        return {"train": ImageIndex(paths, torch.arange(len(paths)).numpy() // PER_CLASS)}

    def image_set(self, index: ImageIndex, transform: Any) -> ImageSet:
        images = TimedImages(index, self.root, transform, **self.reading)
        images.clock = self.clock
        return images

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        with self.clock.part("preparing"):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)


def waits(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective operation that is complete when it returns."""

    @wraps(collective)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        work = collective(*args, **keywords)
        if work is not None:
            work.wait()
        return work

    return wrapped


@contextmanager
def timed_library(clock: PartClock) -> Iterator[None]:
    """Let the clock measure the passes of the network and of the loss, and the collective operations."""
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (module_of_library, "sides_backward", clock.timed("embedding", module_of_library.sides_backward)),
        (GlobalBatch, "loss", clock.timed("loss", GlobalBatch.loss)),
        (RetrievalModule, "manual_backward", clock.timed("loss", RetrievalModule.manual_backward)),
    ]
    for name in COLLECTIVES:
        places.append((dist, name, clock.timed("communication", waits(getattr(dist, name)))))
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, function in places:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, before):
            setattr(owner, name, function)


def train(network: str, folder: Path, batch: int, steps: int, world: int, device: str) -> list[dict[str, float]]:
    """The seconds of the parts of each step that counts."""
    torch.manual_seed(0)
    clock = PartClock(device)
    module = RetrievalModule(Embedder(network, 128), SmoothAPLoss())
    data = TimedData(folder, clock, classes_per_batch=batch // PER_CLASS, samples_per_class=PER_CLASS, seed=0)
    trainer = pl.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_steps=WARM_UP + steps,
        max_epochs=-1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with timed_library(clock):
        trainer.fit(module, data)
    return clock.steps[WARM_UP:]


def row_of(network: str, world: int, batch: int, steps: list[dict[str, float]]) -> dict[str, Any]:
    """The row of the table: the time of a step, and the percentages of its parts."""
    seconds = [sum(step.values()) for step in steps]
    timing = Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
    row: dict[str, Any] = {"network": network, "processes": world, "batch": batch, "step": timing}
    for name in PARTS:
        row[f"{name} %"] = 100 * sum(step[name] for step in steps) / sum(seconds)
    return row


def one_process(rank: int, world: int, device: str, quick: bool, folder: str) -> None:
    """Train each network in this process; the first process saves its rows of the table."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher sets them
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows = []
    for network, (batch, steps, _) in cases(quick).items():
        measured = train(network, Path(folder) / network, batch, steps, world, device)
        rows.append(row_of(network, world, batch, measured))
    if rank == 0:
        torch.save(rows, Path(folder) / f"rows{world}.pt")
    if world > 1:
        dist.destroy_process_group()


def cases(quick: bool) -> dict[str, tuple[int, int, tuple[int, int]]]:
    """Batch, number of steps and size of the images of each network."""
    if quick:
        return {"glyph_net": (16, 1, (40, 40))}
    return CASES


def main() -> None:
    options = arguments("A training step from images on disk to updated weights.")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for network, (batch, steps, size) in cases(options.quick).items():
            (Path(folder) / network).mkdir()
            write_images(Path(folder) / network, *size, batch * (WARM_UP + steps))
        for world in (1, 2) if options.device == "cpu" else (1,):
            run_processes(one_process, (world, options.device, options.quick, folder), world)
            rows += torch.load(Path(folder) / f"rows{world}.pt", weights_only=False)
    title = f"A training step end to end, SmoothAPLoss, K = {PER_CLASS}, float32; median (lowest to highest)"
    report(title, environment(options.device, "torchvision", "pytorch-lightning"), rows, options.json)


if __name__ == "__main__":
    main()
