"""Lightning's prediction loop over the processes of `lightning-retrieval embed`."""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_retrieval.callbacks.embedding_writer import EmbeddingWriter
from lightning_retrieval.checks import first_line
from lightning_retrieval.cli.embedding import EmbeddedBatch, ImageEmbedder, LoadedImage, default_device, unusable_device
from lightning_retrieval.cli.image_list import ListedImages
from lightning_retrieval.export.onnx_file import errors_only
from lightning_retrieval.search.embedding_folder import digest_of_files
from lightning_retrieval.search.embedding_shards import ShardRows
from lightning_retrieval.search.shard_collector import ShardCollector

ACCELERATORS = ("cpu", "cuda", "mps")
LONGEST_WAIT = timedelta(days=30)  # of the first process that has finished, for the last one


class EmbeddingTask(pl.LightningModule):
    """Embeds batches of an `ImageEmbedder`'s loader on the device that Lightning gives to this process.

    Args:
        embedder: the model, on the CPU.
        names: how messages refer to the images.
    """

    def __init__(self, embedder: ImageEmbedder, names: Sequence[str]) -> None:
        super().__init__()
        self.module = embedder.module  # which Lightning moves
        self._embedder = embedder
        self._names = names

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch as it is: the embedder moves it when it has stacked the images that could be read."""
        return batch

    def predict_step(self, batch: list[LoadedImage], batch_idx: int) -> EmbeddedBatch:
        """Embed a batch."""
        embedder = replace(self._embedder, device=str(self.device))
        return embedder.embed_items(batch, self._names)


class ListedSet:
    """The listed images, whose rows have their paths and labels.

    Args:
        listed: the images.
        embedder: the model.
    """

    def __init__(self, listed: ListedImages, embedder: ImageEmbedder) -> None:
        self.listed = listed
        self.about = {**embedder.about, "images": str(listed.root.absolute())}
        self.dim = embedder.dim()

    def fields(self, images: int) -> Iterator[Sequence[Any]]:
        """Path, label and box of each image."""
        return self.listed.fields()

    def image_files(self, positions: range) -> str:
        """The digest of the files of the images at these positions."""
        return digest_of_files(self.listed.root / self.listed.index.paths[position] for position in positions)

    def begin(self, ranges: Sequence[range]) -> None:
        """Nothing to do: a batch says which images it has."""

    def dim_of(self, outputs: EmbeddedBatch) -> int:
        """The length of an embedding."""
        return self.dim

    def collect(self, outputs: EmbeddedBatch, collector: ShardCollector) -> None:
        """Pass the rows of a batch on, and the images that could not be read."""
        for image in outputs.unreadable:
            collector.add_unreadable(image.position, image.path, image.reason)
        if outputs.embeddings is None:
            return
        positions = outputs.positions
        paths = [self.listed.index.paths[position] for position in positions]
        labels = [self.listed.labels[position] for position in positions]
        ids = np.array(positions, dtype=np.int64)
        collector.add(positions, ShardRows(ids, outputs.embeddings.numpy(), paths, labels))

    def finish(self, collector: ShardCollector) -> None:
        """Nothing is left after the last batch."""


class ImageWriter(EmbeddingWriter):
    """Writes what `EmbeddingTask` returns.

    Args:
        output: folder of the embeddings.
        images: what is known of the images.
        settings: as for `EmbeddingWriter`.
    """

    owner = "embed_images"

    def __init__(self, output: Path, images: ListedSet, **settings: Any) -> None:
        super().__init__(output, **settings)
        self.images = images

    def describe_set(self, trainer: pl.Trainer, pl_module: pl.LightningModule, dataset: Any) -> ListedSet:
        """What is known of the images."""
        return self.images


def embedding_trainer(
    owner: str, writer: EmbeddingWriter, device: str | None, *, devices: int, num_nodes: int, precision: str
) -> pl.Trainer:
    """A Trainer for the prediction, with a process for each device.

    The processes exchange nothing but the list of missing files, so they use gloo on GPUs, too: a process notices at
    once if another one was killed.

    Raises:
        ValueError: if there are not so many devices, or a device does not support the precision.
    """
    accelerator, numbers = _accelerator(owner, device, devices)
    settings: dict[str, Any] = {}
    if devices * num_nodes > 1:
        settings["strategy"] = DDPStrategy(process_group_backend="gloo", timeout=LONGEST_WAIT)
    try:
        return pl.Trainer(
            accelerator=accelerator,
            devices=numbers,
            num_nodes=num_nodes,
            precision=precision,  # type: ignore[arg-type]
            callbacks=writer,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
            **settings,
        )
    except (MisconfigurationException, ValueError) as error:
        raise ValueError(
            f"{owner}: `devices`, `num_nodes` and `precision` must be such as this machine supports, got {devices}, "
            f"{num_nodes} and {precision!r} ({first_line(error)})."
        ) from None


def run_embedding(trainer: pl.Trainer, task: EmbeddingTask, loader: DataLoader[Any]) -> None:
    """Embed the images.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
    """
    try:
        trainer.predict(task, loader, return_predictions=False)
    except SystemExit:
        if trainer.interrupted:  # Lightning exits with 1
            raise KeyboardInterrupt from None
        raise


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without what Lightning says about the Trainer, which is not the user's."""
    loggers = errors_only(logging.getLogger("pytorch_lightning")), errors_only(logging.getLogger("lightning_fabric"))
    with loggers[0], loggers[1], warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
        yield


def _accelerator(owner: str, device: str | None, devices: int) -> tuple[str, int | list[int]]:
    """Lightning's names of the devices."""
    name = device or default_device()
    try:
        torch.empty(0, device=name)
        chosen = torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{owner}: {unusable_device(name, error)}") from None
    if chosen.type not in ACCELERATORS:
        raise ValueError(f"{owner}: `device` must be of one of the types {', '.join(ACCELERATORS)}, got {name!r}.")
    if ":" not in name:
        return chosen.type, devices
    if devices > 1:
        raise ValueError(
            f"{owner}: `device` must be without a number for several devices, got {name!r} and devices={devices}; "
            f"use {chosen.type!r}."
        )
    if chosen.type != "cuda":
        return chosen.type, devices
    return chosen.type, [chosen.index]
