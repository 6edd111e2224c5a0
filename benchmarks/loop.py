"""The training loop of RetrievalModule over a plain PyTorch loop with the same network, loss, optimizer and loader.

    python benchmarks/loop.py
    python benchmarks/loop.py --compile

The loops run in turn in one process with one thread, for 40 batches of 64 images, after a turn that is not counted. The
time is CPU time, so that other work on the machine hardly counts; the ratio is the median of the ratios of each turn.
The loop of `RetrievalModule` is that of a Trainer without logger, checkpoints and progress bar. A third loop is that of
such a Trainer with the shortest module in manual optimization. Takes about three minutes.

With `--compile`, the step of a plain network is compared with that of the same network after `embedder.compile()`, for
GlyphNet at 32 pixels and ResNet-18 at 64. The seconds of compiling are the wall-clock time by which the first epoch
takes longer than the others. Takes about ten minutes, and needs a compiler of C++.
"""

import logging
import os
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from timing import Timing, arguments, environment, range_of, report
from torch import nn
from torch._inductor import config
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss

BATCH, PER_CLASS = 64, 4
COMPILED = {"glyph_net": (1, 32), "resnet18": (3, 64)}  # channels and pixels a side of the images of `--compile`


class EpochTime(pl.Callback):
    """CPU seconds of the batches of an epoch."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.start = time.process_time()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds = time.process_time() - self.start


class ShortestModule(pl.LightningModule):
    """The plain loop as a LightningModule, in manual optimization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network, self.loss = network(width), SmoothAPLoss()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        images, labels = batch
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.network(images), labels))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def network(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, wider in ((3, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 64))


def plain_loop(width: int, loader: DataLoader[Any]) -> float:
    """CPU seconds of a plain loop over the loader."""
    net, loss = network(width), SmoothAPLoss()
    optimizer = torch.optim.AdamW(net.parameters())
    start = time.process_time()
    for images, labels in loader:
        optimizer.zero_grad()
        loss(net(images), labels).backward()
        optimizer.step()
    return time.process_time() - start


def trainer_loop(module: pl.LightningModule, loader: DataLoader[Any]) -> float:
    """CPU seconds of the loop of a Trainer over the loader."""
    epoch = EpochTime()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[epoch],
    )
    trainer.fit(module, loader)
    return epoch.seconds


def images(batches: int, channels: int, pixels: int) -> DataLoader[Any]:
    """A loader of batches of random images."""
    labels = torch.arange(batches * BATCH) // PER_CLASS
    return DataLoader(TensorDataset(torch.randn(len(labels), channels, pixels, pixels), labels), BATCH)


def compare(width: int, batches: int, runs: int) -> dict[str, Any]:
    """One row of the table."""
    loader = images(batches, 3, 32)
    plain, shortest, ours = [], [], []
    for run in range(-1, runs):
        times = [plain_loop(width, loader), trainer_loop(ShortestModule(width), loader)]
        times.append(trainer_loop(RetrievalModule(network(width), SmoothAPLoss()), loader))
        if run >= 0:
            for found, spent in zip((plain, shortest, ours), times):
                found.append(spent / batches)
    ratios = [ours_of_run / plain_of_run for ours_of_run, plain_of_run in zip(ours, plain)]
    above = [ours_of_run - shortest_of_run for ours_of_run, shortest_of_run in zip(ours, shortest)]
    return {
        "plain step": Timing(median(plain), min(plain), max(plain), runs),
        "shortest module's step": Timing(median(shortest), min(shortest), max(shortest), runs),
        "RetrievalModule's step": Timing(median(ours), min(ours), max(ours), runs),
        "above the shortest": Timing(median(above), min(above), max(above), runs),
        **range_of("ratio", ratios),
    }


def compare_compiled(name: str, batches: int, runs: int) -> dict[str, Any]:
    """One row of the table of `--compile`."""
    loader = images(batches, *COMPILED[name])
    plain_module, compiled_module = (RetrievalModule(Embedder(name, 128), SmoothAPLoss()) for _ in range(2))
    compiled_module.embedder.compile()
    plain, compiled, passed = [], [], []
    for _ in range(-1, runs):
        plain.append(trainer_loop(plain_module, loader) / batches)
        start = time.perf_counter()
        compiled.append(trainer_loop(compiled_module, loader) / batches)
        passed.append(time.perf_counter() - start)
    del plain[0], compiled[0]
    ratios = [compiled_of_run / plain_of_run for compiled_of_run, plain_of_run in zip(compiled, plain)]
    return {
        "network": name,
        "plain step": Timing(median(plain), min(plain), max(plain), runs),
        "compiled step": Timing(median(compiled), min(compiled), max(compiled), runs),
        **range_of("compiled over plain", ratios),
        "compiling s": passed[0] - median(passed[1:]),
    }


def compiled_rows(quick: bool) -> list[dict[str, Any]]:
    """The table of `--compile`. Nothing that an earlier run has compiled is used."""
    networks, batches, runs = list(COMPILED), 10, 9
    if quick:
        networks, batches, runs = ["glyph_net"], 1, 1
    with tempfile.TemporaryDirectory() as folder, config.patch(compile_threads=1):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return [compare_compiled(name, batches, runs) for name in networks]


def main() -> None:
    flags = {"compile": "compare a compiled network with a plain one"}
    options = arguments("The loop of RetrievalModule over a plain PyTorch loop.", **flags)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    widths, batches, runs = (8, 56), 40, 11
    if options.quick:
        widths, batches, runs = (4,), 2, 1
    if options.compile:
        title = "training steps of a plain and of a compiled network, batch 64, Smooth-AP; CPU time"
        report(
            title, environment("cpu", "torchvision", "pytorch-lightning"), compiled_rows(options.quick), options.json
        )
        return
    rows = [compare(width, batches, runs) for width in widths]
    title = "training loop of RetrievalModule, batch 64, Smooth-AP; CPU time"
    report(title, environment("cpu", "pytorch-lightning"), rows, options.json)


if __name__ == "__main__":
    main()
