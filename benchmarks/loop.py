"""The training loop of RetrievalModule over a plain PyTorch loop with the same network, loss, optimizer and loader.

    python benchmarks/loop.py

The loops run in turn in one process with one thread, for 40 batches of 64 images, after a turn that is not counted. The
time is CPU time, so that other work on the machine hardly counts; the ratio is the median of the ratios of each turn.
The loop of `RetrievalModule` is that of a Trainer without logger, checkpoints and progress bar. A third loop is that of
such a Trainer with the shortest module in manual optimization. Takes about three minutes.
"""

import logging
import time
import warnings
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from timing import Timing, arguments, environment, range_of, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalModule, SmoothAPLoss

BATCH, PER_CLASS = 64, 4


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


def compare(width: int, batches: int, runs: int) -> dict[str, Any]:
    """One row of the table."""
    labels = torch.arange(batches * BATCH) // PER_CLASS
    loader = DataLoader(TensorDataset(torch.randn(len(labels), 3, 32, 32), labels), BATCH)
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


def main() -> None:
    options = arguments("The loop of RetrievalModule over a plain PyTorch loop.")
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    widths, batches, runs = (8, 56), 40, 11
    if options.quick:
        widths, batches, runs = (4,), 2, 1
    rows = [compare(width, batches, runs) for width in widths]
    title = "training loop of RetrievalModule, batch 64, Smooth-AP; CPU time"
    report(title, environment("cpu", "pytorch-lightning"), rows, options.json)


if __name__ == "__main__":
    main()
