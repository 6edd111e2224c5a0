"""Training steps on 1 and 2 processes of one machine: time, what of it is communication, and the bytes sent.

    python benchmarks/ddp.py

Each process gets an equal part of the cores. `RetrievalModule` trains GlyphNet with `SmoothAPLoss` under a real Trainer
(`strategy="ddp"`, gloo) on noise; the loader's time is left out. Inside a collective a process also waits for the
others. So in every second step a barrier stands before each collective: "waiting" is the time in the barriers, their
own messages included, "moving" that in the collectives after them, and "%" their shares of these steps. "step" is of
the other steps, without barriers. All times are the first process'.

"sent" counts what the collectives were really given, as if each sends nothing twice. DDP's own broadcast of the batch
norms' buffers (6 kB here) is not among them. "model" is `lightning_retrieval.training.traffic.step_traffic`,

    (W - 1) / W x (B (4 D + 16) + 4 B D + 8 x parameters) bytes, for B rows, D dimensions and W processes:

rows gathered with label and id, their gradients handed back, gradients of parameters summed. "predicted" is that over
the bandwidth of an all-reduce of 64 MiB, measured in the same processes: a floor, as
each of the five collectives also costs some time whatever its bytes. Two minutes on two cores.
"""

import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from timing import Timing, arguments, report, setting
from torch import Tensor
from torch.utils.data import Dataset

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import PKSampler
from lightning_retrieval.datamodules.loader import RetrievalDataLoader
from lightning_retrieval.training.traffic import step_traffic

PER_CLASS, MB = 4, 1e6
WARM_UP = 2  # steps


class Noise(Dataset[dict[str, Tensor]]):
    """Noise in classes of four, as many items as `steps` batches have; the images repeat from batch to batch."""

    def __init__(self, batch: int, steps: int) -> None:
        self.images = torch.rand(batch, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(batch * steps) // PER_CLASS

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "images": self.images[index % len(self.images)],
            "labels": self.labels[index],
            "ids": torch.tensor(int(index)),
        }


class Clock(pl.Callback):
    """Seconds of steps, plain and with barriers in turn; seconds and bytes of the collectives of the latter."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.with_barriers: list[dict[str, float]] = []
        self.real: dict[str, Callable[..., Any]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.seen = {"waiting": 0.0, "moving": 0.0, "sent": 0.0}
        if index % 2:
            self.real = {name: getattr(dist, name) for name in SENT}
            for name in SENT:
                setattr(dist, name, partial(self.measured, name))
        if dist.is_initialized():
            dist.barrier()
        self.begin = time.perf_counter()

    def measured(self, name: str, *args: Any, **keywords: Any) -> None:
        start = time.perf_counter()
        dist.barrier()
        together = time.perf_counter()
        self.real[name](*args, **keywords)
        self.seen["moving"] += time.perf_counter() - together
        self.seen["waiting"] += together - start
        self.seen["sent"] += SENT[name](*args)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        seconds = time.perf_counter() - self.begin
        for name, function in self.real.items():
            setattr(dist, name, function)
        self.real = {}
        if index >= WARM_UP and index % 2:
            self.with_barriers.append({**self.seen, "step": seconds})
        elif index >= WARM_UP:
            self.steps.append(seconds)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sent_to_others(out: Tensor, tensor: Tensor, out_rows: list[int], rows: list[int]) -> float:
    return _size(tensor) * (1 - rows[dist.get_rank()] / sum(rows))


# Bytes that a process sends in a collective which sends nothing twice, from the collective's arguments.
SENT: dict[str, Callable[..., float]] = {
    "all_gather": lambda parts, tensor: _size(tensor) * (dist.get_world_size() - 1),
    "all_to_all_single": _sent_to_others,
    "all_reduce": lambda tensor: 2 * _size(tensor) * (dist.get_world_size() - 1) / dist.get_world_size(),
}


def train(world: int, batch: int, dim: int, runs: int) -> tuple[Clock, int]:
    """Steps of both kinds, `runs` of each; and the number of parameters."""
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", dim, freeze_batch_norm=True), SmoothAPLoss())
    data = Noise(batch, WARM_UP + 2 * runs)
    sampler = PKSampler(data.labels, classes_per_batch=batch // PER_CLASS, samples_per_class=PER_CLASS)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, RetrievalDataLoader(data, sampler))
    return clock, sum(p.numel() for p in module.parameters() if p.requires_grad)


def bandwidth(size: int) -> float:
    """Bytes a second that each process sends in a large all-reduce."""
    tensor, seconds = torch.zeros(size // 4), []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    return SENT["all_reduce"](tensor) / statistics.median(seconds[1:])


def one_process(rank: int, world: int, threads: int, cases: list[tuple[int, int]], quick: bool, folder: str) -> None:
    """Goes through all cases; the first process writes down what it saw."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    if world > 1:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher does
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for batch, dim in cases:
        clock, parameters = train(world, batch, dim, 1 if quick else 5)
        row: dict[str, Any] = {"processes": world, "batch": batch, "dim": dim, "step": _timing(clock.steps)}
        if world > 1:
            columns = {name: [step[name] for step in clock.with_barriers] for name in clock.with_barriers[0]}
            of_step = {name: 100 * sum(columns[name]) / sum(columns["step"]) for name in ("waiting", "moving")}
            model = sum(step_traffic(batch, dim, parameters, world).values())
            rate = bandwidth(1 << (16 if quick else 26))
            row |= {
                "waiting %": of_step["waiting"],
                "moving %": of_step["moving"],
                "moving": _timing(columns["moving"]),
            }
            row |= {"predicted ms": 1000 * model / rate, "sent MB": columns["sent"][0] / MB, "model MB": model / MB}
            row |= {"bandwidth MB/s": rate / MB}
        rows.append(row)
    if rank == 0:
        torch.save(rows, Path(folder) / f"rows{world}.pt")
    if world > 1:
        dist.destroy_process_group()


def _timing(seconds: list[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def main() -> None:
    options = arguments("Training steps on 1 and 2 processes: time, communication, bytes sent.")
    if options.device != "cpu":
        sys.exit("--device cuda: the processes of this benchmark share the cores of one CPU.")
    cases = [(16, 8)] if options.quick else [(batch, dim) for batch in (256, 1024) for dim in (128, 512)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            threads = max(1, torch.get_num_threads() // world)
            torch.multiprocessing.spawn(one_process, (world, threads, cases, options.quick, folder), nprocs=world)
            rows += torch.load(Path(folder) / f"rows{world}.pt", weights_only=False)
    title = f"Steps of GlyphNet with SmoothAPLoss, K = {PER_CLASS}, float32; median (lowest to highest)"
    report(title, setting("cpu", "pytorch-lightning"), rows, options.json)


if __name__ == "__main__":
    main()
