"""Training steps in 1 and 2 processes on one machine: time, the part of it that is communication, and the bytes sent.

    python benchmarks/ddp.py
    python benchmarks/ddp.py --weights     # how equal the weights are after six steps, half a minute

Each process has an equal fraction of the cores. `RetrievalModule` trains GlyphNet with `SmoothAPLoss` under a real
Trainer (`strategy="ddp"`, gloo) on noise; the time of the data loader does not count. Inside a collective operation a
process also waits for the others. Therefore, in every second step there is a barrier before each collective: "waiting"
is the time in the barriers, including their own messages; "transfer" is the time in the collectives after them; and "%"
are the percentages of these steps. "step" is the time of the other steps, without barriers. All times are those of the
first process.

"sent" counts the bytes that were passed to the collectives, as if none of them sent anything twice. It does not include
DDP's broadcast of the buffers of batch norms (6 kB here). The benchmark takes two minutes on two cores.

With `--weights`, GlyphNet takes six steps of AdamW on Glyphs, with torch's learning rate of 0.001, in each precision.
The weights are compared with those of one process that embeds the whole batch of 64 at once: the largest difference of
a weight, and the norm of all differences divided by that of the change of the weights in these steps. "float32 output"
is a network whose last layer computes in float32 although the precision is mixed: its embeddings are never rounded.
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
from timing import Timing, arguments, environment, report, run_processes
from torch import Tensor
from torch.utils.data import Dataset

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import Glyphs, PKSampler
from lightning_retrieval.datamodules.loader import RetrievalDataLoader

PER_CLASS, MB = 4, 1e6
WARM_UP = 2  # steps
BATCH, STEPS, CHUNK_SIZES = 64, 6, (None, 32, 5)  # of the comparison of weights


class Noise(Dataset[dict[str, Tensor]]):
    """Noise in classes of four, with as many items as `steps` batches need; all batches have the same images."""

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
    """Measures the seconds of steps, alternately without and with barriers, and the collectives of the latter."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.with_barriers: list[dict[str, float]] = []
        self.real: dict[str, Callable[..., Any]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.seen = {"waiting": 0.0, "transfer": 0.0, "sent": 0.0}
        if index % 2:
            self.real = {name: getattr(dist, name) for name in SENT}
            for name in SENT:
                setattr(dist, name, partial(self.measured, name))
        if dist.is_initialized():
            dist.barrier()
        self.begin = time.perf_counter()

    def measured(self, name: str, *args: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        dist.barrier()
        together = time.perf_counter()
        work = self.real[name](*args, **keywords)
        if work is not None:  # of an operation that runs beside the backward pass
            work.wait()
        self.seen["transfer"] += time.perf_counter() - together
        self.seen["waiting"] += together - start
        self.seen["sent"] += SENT[name](*args)
        return work

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


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# Bytes that a process sends in a collective that sends nothing twice, given the arguments of the collective.
SENT: dict[str, Callable[..., float]] = {
    "all_gather": lambda parts, tensor: _size(tensor) * (dist.get_world_size() - 1),
    GATHER: lambda result, tensor: _size(tensor) * (dist.get_world_size() - 1),
    "all_to_all_single": _sent_to_others,
    "all_reduce": lambda tensor: 2 * _size(tensor) * (dist.get_world_size() - 1) / dist.get_world_size(),
}


def train(world: int, batch: int, dim: int, runs: int) -> Clock:
    """Run `runs` steps of each kind; returns the clock."""
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", dim, freeze_batch_norm=True), SmoothAPLoss())
    data = Noise(batch, WARM_UP + 2 * runs)
    sampler = PKSampler(data.labels, classes_per_batch=batch // PER_CLASS, samples_per_class=PER_CLASS)
    clock = Clock()
    trainer_of(world, callbacks=[clock]).fit(module, RetrievalDataLoader(data, sampler))
    return clock


def trainer_of(world: int, **settings: Any) -> pl.Trainer:
    """A Trainer of one epoch on the CPU, without output."""
    return pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


class Float32Output(Embedder):
    """An `Embedder` whose last layer computes in float32 although the precision is mixed."""

    def forward(self, images: Tensor) -> Tensor:
        features = self.pooled_features(images)
        with torch.autocast(features.device.type, enabled=False):
            embeddings: Tensor = self.head(features.float())
        return embeddings


def trained_weights(world: int, chunk_size: int | None, name: str, steps: int) -> Tensor:
    """The weights before and after the steps of AdamW; no layer of the network mixes the images of a batch."""
    precision, network = PRECISIONS[name]
    torch.manual_seed(0)
    module = RetrievalModule(network("glyph_net", 64, freeze_batch_norm=True), SmoothAPLoss(), chunk_size=chunk_size)
    before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    data = Glyphs(classes_per_batch=BATCH // PER_CLASS, samples_per_class=PER_CLASS)
    trainer_of(world, precision=precision, max_steps=steps, limit_val_batches=0).fit(module, data)
    return torch.stack([before, torch.cat([p.detach().flatten() for p in module.parameters()])])


# The precision of the Trainer, and the network.
PRECISIONS: dict[str, tuple[Any, type[Embedder]]] = {
    "float32": ("32-true", Embedder),
    "bf16-mixed": ("bf16-mixed", Embedder),
    "bf16-mixed, float32 output": ("bf16-mixed", Float32Output),
}


def weights_of_process(rank: int, world: int, steps: int, folder: str) -> None:
    """Train in each precision; the first process saves the weights."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher sets them
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {}
    for name in PRECISIONS:
        for chunk_size in CHUNK_SIZES if world == 1 else (None,):
            found[name, chunk_size] = trained_weights(world, chunk_size, name, steps)
    if rank == 0:
        torch.save(found, Path(folder) / f"weights{world}.pt")
    if world > 1:
        dist.destroy_process_group()


def compare_weights(steps: int, folder: str) -> list[dict[str, Any]]:
    """How far the weights are from those of one process that embeds the whole batch at once."""
    for world in (1, 2):
        run_processes(weights_of_process, (world, steps, folder), world)
    alone, shared = (torch.load(Path(folder) / f"weights{world}.pt") for world in (1, 2))
    rows: list[dict[str, Any]] = []
    for name in PRECISIONS:
        before, after = alone[name, None]
        others = {f"chunks of {size}": alone[name, size][1] for size in CHUNK_SIZES if size is not None}
        for what, weights in {**others, "2 processes": shared[name, None][1]}.items():
            difference = weights - after
            relative = float(difference.norm() / (after - before).norm())
            rows.append(
                {"precision": name, "weights": what, "largest": float(difference.abs().max()), "norm": relative}
            )
    return rows


def one_process(rank: int, world: int, threads: int, cases: list[tuple[int, int]], quick: bool, folder: str) -> None:
    """Measure all cases; the first process saves its rows of the table."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    if world > 1:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher sets them
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for batch, dim in cases:
        clock = train(world, batch, dim, 1 if quick else 5)
        row: dict[str, Any] = {"processes": world, "batch": batch, "dim": dim, "step": _timing(clock.steps)}
        if world > 1:
            row |= communication(clock)
        rows.append(row)
    if rank == 0:
        torch.save(rows, Path(folder) / f"rows{world}.pt")
    if world > 1:
        dist.destroy_process_group()


def communication(clock: Clock) -> dict[str, Any]:
    """The columns of a row of several processes."""
    names = clock.with_barriers[0]
    columns = {name: [step[name] for step in clock.with_barriers] for name in names}
    step_seconds = sum(columns["step"])
    return {
        "waiting %": 100 * sum(columns["waiting"]) / step_seconds,
        "transfer %": 100 * sum(columns["transfer"]) / step_seconds,
        "transfer": _timing(columns["transfer"]),
        "sent MB": columns["sent"][0] / MB,
    }


def _timing(seconds: list[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def main() -> None:
    options = arguments(
        "Training steps in 1 and 2 processes: time, communication, bytes sent.",
        weights="compare the weights after some steps instead",
    )
    if options.device != "cpu":
        sys.exit("--device cuda: this benchmark runs on the CPU only, whose cores its processes share.")
    if options.weights:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare_weights(2 if options.quick else STEPS, folder)
        report(
            "Weights of GlyphNet after 6 steps, compared with one process without chunks",
            environment("cpu"),
            rows,
            options.json,
        )
        return
    cases = [(256, 128), (256, 512), (1024, 128), (1024, 512)]  # batch and dimension
    if options.quick:
        cases = [(16, 8)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            threads = max(1, torch.get_num_threads() // world)
            run_processes(one_process, (world, threads, cases, options.quick, folder), world)
            rows += torch.load(Path(folder) / f"rows{world}.pt", weights_only=False)
    title = f"Steps of GlyphNet with SmoothAPLoss, K = {PER_CLASS}, float32; median (lowest to highest)"
    report(title, environment("cpu", "pytorch-lightning"), rows, options.json)


if __name__ == "__main__":
    main()
