"""Memory of the list of images and of the classes of the sampler, in each process and each worker of a run.

    python benchmarks/lists.py

Two processes of a Trainer (DDP) train on a list of ten million images of a million classes, with two workers each,
which are forked or spawned. Each process keeps the list and the classes; forked workers use those of their process,
spawned ones get a copy. The images themselves are not read: an image is one grey pixel.

The memory is what Linux counts as private (`Private_Clean` and `Private_Dirty` of `smaps_rollup`) after all paths and
labels were read, minus that of the same run on a thousand images: of both processes before the first batch, of the
second one with the draw of the first epoch, and of the largest worker after its first image. "ready" is the time of a
process until its first batch. This takes about five minutes on two cores.
"""

import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from timing import Timing, arguments, environment, launcher_variables, process_context, report

from lightning_retrieval.datamodules import ImageDataModule, ImageIndex, ImageSet
from lightning_retrieval.packed_strings import PackedStrings

MIB = 1 << 20
PROCESSES, WORKERS, PER_CLASS, FEW = 2, 2, 10, 1000
BLOCK = 1_000_000
GREY = torch.zeros(3, 1, 1)


def grey(_: Any) -> torch.Tensor:
    return GREY


class UnreadImages(ImageSet):
    """Images whose files are not read; the first item notes the memory of its process.

    Args:
        index: the images.
        notes: folder of the notes.
    """

    def __init__(self, index: ImageIndex, notes: Path) -> None:
        super().__init__(index, notes, grey)
        self.notes = notes
        self.has_noted = False

    def input_of_transform(self, position: int) -> torch.Tensor:
        if not self.has_noted:
            self.has_noted = True
            self.read_all()
            note(self.notes, "worker")
        return GREY

    def read_all(self) -> None:
        """Read from each page of the list, as an epoch does."""
        for row in range(0, len(self), 50):
            _ = self.index.paths[row], self.index.labels[row]


class ListedImages(ImageDataModule):
    """A list of images that do not exist.

    Args:
        notes: folder of the notes.
        count: number of images.
        settings: arguments of `ImageDataModule`.
    """

    def __init__(self, notes: Path, count: int, **settings: Any) -> None:
        super().__init__(notes, classes_per_batch=32, samples_per_class=4, **settings)
        self.count = count

    def read(self) -> dict[str, ImageIndex]:
        parts = []
        for begin in range(0, self.count, BLOCK):
            rows = range(begin, min(begin + BLOCK, self.count))
            parts.append(PackedStrings(f"train/{row // PER_CLASS:08}/{row:010}.jpg" for row in rows))
        paths = PackedStrings.join(parts)
        labels = np.arange(self.count) // PER_CLASS
        return {"train": ImageIndex.from_arrays({"paths": paths.data, "ends": paths.ends, "labels": labels})}

    def image_set(self, index: ImageIndex, transform: Any) -> UnreadImages:
        return UnreadImages(index, self.root)


class NotingModule(pl.LightningModule):
    """Notes the memory of its process before the first batch and in the first step.

    Args:
        notes: folder of the notes.
        data: the data module.
    """

    def __init__(self, notes: Path, data: ListedImages) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.notes, self.data, self.start = notes, data, time.perf_counter()

    def note(self, what: str) -> None:
        """Note the memory as soon as all processes have used the list: a page counts as private if only one has."""
        torch.distributed.barrier()
        note(self.notes, f"{what} {self.global_rank}")
        torch.distributed.barrier()

    def on_train_start(self) -> None:
        self.data.train_set.read_all()
        self.note("process")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self.note("drawn")
            (self.notes / f"ready-{os.getpid()}").write_text(str(time.perf_counter() - self.start))
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def note(folder: Path, what: str) -> None:
    """Write the private memory of this process, in bytes, to a file."""
    total = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_"):
            total += 1024 * int(line.split()[1])
    (folder / f"{what}-{os.getpid()}").write_text(str(total))


def train(local_rank: int, variables: dict[str, str], notes: Path, count: int, start_method: str) -> None:
    """What each process does: four steps, enough for the first items of both workers."""
    os.environ.update(variables, LOCAL_RANK=str(local_rank))
    torch.set_num_threads(1)
    multiprocessing.set_start_method(start_method, force=True)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = ListedImages(notes, count, num_workers=WORKERS)
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        strategy="ddp",
        devices=PROCESSES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = NotingModule(notes, data)
    trainer.fit(module, datamodule=data)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(count: int, start_method: str) -> dict[str, list[float]]:
    """The notes of all processes and workers of one run."""
    with tempfile.TemporaryDirectory() as name:
        context = process_context()
        arguments_of_run = (launcher_variables(PROCESSES), Path(name), count, start_method)
        processes = [context.Process(target=train, args=(rank, *arguments_of_run)) for rank in range(PROCESSES)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit("A process of the benchmark has failed.")
        found: dict[str, list[float]] = {}
        for file in Path(name).glob("*-*"):
            if file.is_file():
                found.setdefault(file.name.split("-")[0], []).append(json.loads(file.read_text()))
    return found


def main() -> None:
    options = arguments("Memory of the list of images in each process and worker.")
    images = 20_000 if options.quick else 10_000_000
    rows: list[dict[str, Any]] = []
    for start_method in ("fork",) if options.quick else ("fork", "spawn"):
        few = measure(FEW, start_method)
        many = measure(images, start_method)
        seconds = many["ready"]
        added = {}
        for name, values in many.items():
            added[name] = (max(values) - max(few[name])) / MIB
        rows.append(
            {
                "workers": start_method,
                "images": images,
                "first process, MiB": added["process 0"],
                "second process, MiB": added["process 1"],
                "with a draw, MiB": added["drawn 1"],
                "worker, MiB": added["worker"],
                "ready": Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds)),
            }
        )
    title = f"Private memory that a list of images adds; {PROCESSES} processes with {WORKERS} workers each"
    report(title, environment("cpu", "pytorch-lightning", "numpy"), rows, options.json)


if __name__ == "__main__":
    main()
