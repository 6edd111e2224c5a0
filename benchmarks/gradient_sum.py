"""Memory and time of a training step in 2 processes whose gradients are summed in buckets, or in one flat tensor.

    python benchmarks/gradient_sum.py

`RetrievalModule` trains a network of eight square layers, 33.6 million parameters in float32, with `SmoothAPLoss` in
chunks under a real Trainer (`strategy="ddp"`, gloo) on noise; the 65 images of a batch are divided into 33 and 32.
"flat" is a bucket of unlimited size: one tensor holds a copy of all gradients, and is summed after the last backward
pass. "buckets" are those of `lightning_retrieval.training.gradient_sum`, which are summed while it runs.

"added MiB" is the peak of the resident memory of the first process in a step, beyond what it had before the step,
without gradients: the largest of all steps. It needs the /proc of Linux. "step" is the time of a step; the processes
share the cores, which an all-reduce takes from the backward pass, so no gain in time can be expected.
"""

import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from timing import Timing, arguments, environment, memory_status, report, run_processes
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.training import gradient_sum

WORLD, LAYERS, CHUNKS, WARM_UP = 2, 8, 4, 2
BUCKETS = {"flat": 2**62, "buckets": gradient_sum.BUCKET_BYTES}  # bytes


class Watch(pl.Callback):
    """Measures the seconds of the steps, and the memory that they add."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.added: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        pl_module.zero_grad()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak to the memory in use
        self.before, self.begin = memory_status("VmRSS"), time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        seconds = time.perf_counter() - self.begin
        if index >= WARM_UP:
            self.seconds.append(seconds)
            self.added.append(memory_status("VmHWM") - self.before)


def train(rank: int, width: int, batch: int, steps: int) -> Watch:
    """Train for some steps, after some that are not measured."""
    torch.manual_seed(0)
    embedder = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    images = torch.randn(batch, width).tensor_split(WORLD)[rank]
    labels = (torch.arange(batch) // 4).tensor_split(WORLD)[rank]
    watch = Watch()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        max_epochs=1,
        callbacks=[watch],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    chunk_size = len(images) // CHUNKS
    batches = DataLoader([(images, labels)] * (WARM_UP + steps), batch_size=None)
    trainer.fit(RetrievalModule(embedder, SmoothAPLoss(), chunk_size=chunk_size), batches)
    return watch


def one_process(rank: int, threads: int, quick: bool, folder: str) -> None:
    """Measure both ways in this process; the first process saves the rows of the table."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher sets them
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    width, batch, steps = 2048, 65, 5
    if quick:
        width, batch, steps = 1024, 9, 1
    rows = []
    for name, bucket_bytes in BUCKETS.items():
        gradient_sum.BUCKET_BYTES = bucket_bytes
        watch = train(rank, width, batch, steps)
        seconds = watch.seconds
        timing = Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
        rows.append(
            {
                "sum": name,
                "parameters": LAYERS * width * width,
                "step": timing,
                "added MiB": round(max(watch.added) / 2**20),
                "ratio": max(watch.added),
            }
        )
    for row in reversed(rows):
        row["ratio"] /= rows[0]["ratio"]
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.destroy_process_group()


def main() -> None:
    options = arguments("Memory and time of the sum of gradients in 2 processes.")
    if options.device != "cpu":
        sys.exit("--device cuda: this benchmark runs on the CPU only, whose cores its processes share.")
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // WORLD)
        run_processes(one_process, (threads, options.quick, folder), WORLD)
        rows = torch.load(Path(folder) / "rows.pt", weights_only=False)
    title = f"Steps of {LAYERS} layers with SmoothAPLoss in {CHUNKS} chunks, 2 processes, float32, AdamW"
    report(title, environment("cpu", "pytorch-lightning"), rows, options.json)


if __name__ == "__main__":
    main()
