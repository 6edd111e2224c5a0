"""Embed images into a folder of shards with any number of processes, and continue where a killed run stopped."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_retrieval.callbacks.embedding_writer import EmbeddingWriter
from lightning_retrieval.checks import check_choice, check_integer, first_line
from lightning_retrieval.cli.embedding import (
    EmbeddedBatch,
    ImageEmbedder,
    LoadedImage,
    UnreadableImage,
    default_device,
    unusable_device,
)
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_table import parse_boxes, parse_images
from lightning_retrieval.datamodules.table_file import read_table
from lightning_retrieval.export.onnx_file import errors_only
from lightning_retrieval.preparation.decoding import image_suffixes
from lightning_retrieval.search.embedding_folder import (
    DTYPES,
    FILE_FORMATS,
    SHARD_SIZE,
    EmbeddingFolder,
    ShardRows,
    check_output,
    digest_of_files,
    load_pyarrow,
)
from lightning_retrieval.search.shared_folder import ShardCollector

# The images that a command works on: all in a folder, or those that a table lists.


@dataclass(frozen=True)
class ListedImages:
    """Images with their labels as text, where these are known.

    Args:
        root: folder that the paths are relative to.
        index: paths and boxes of the images; its labels and instances have no meaning.
        labels: one for each image, None where it is not known.
    """

    root: Path
    index: ImageIndex
    labels: list[str | None]

    def fields(self) -> Iterator[list[Any]]:
        """Path, label and box of each image: what two lists of the same images have in common."""
        boxes = self.index.boxes
        for position, (path, label) in enumerate(zip(self.index.paths, self.labels)):
            box = None
            if boxes is not None:
                box = boxes[position].tolist()
            yield [path, label, box]


def list_images(owner: str, images: Path, root: Path | None = None) -> ListedImages:
    """The images in a folder, or those of a table.

    Args:
        owner: prefix of error messages.
        images: a folder, or a table as `ImageTable` reads it, of which only the column `image` is required.
        root: folder that the paths of a table are relative to; if None, the one that the table is in.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if there is no image, the table cannot be read, or `root` is given for a folder.
    """
    if not images.is_file():
        if root is not None:
            raise ValueError(f"{owner}: `root` must be given for a table only, got {root} for the folder {images}.")
        return images_in_folder(owner, images)
    table = read_table(images, required=("image",))
    paths = parse_images(table)
    labels: list[str | None] = []
    for label in table.columns.get("label", [""] * len(paths)):
        labels.append(label or None)
    index = ImageIndex(paths, [0] * len(paths), boxes=parse_boxes(table))
    return ListedImages(root or images.parent, index, labels)


def images_in_folder(owner: str, folder: Path) -> ListedImages:
    """The images in a folder at any depth, without labels.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if there is no image in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{owner}: `images` must be a folder of images, got {folder}, which is not a folder.")
    paths = _image_paths(folder)
    if not paths:
        raise ValueError(f"{owner}: `images` must be a folder of images, got {folder}, which holds no image.")
    return ListedImages(folder, ImageIndex(paths, [0] * len(paths)), [None] * len(paths))


def _image_paths(folder: Path) -> list[str]:
    """Sorted paths, relative to the folder, of the files at any depth with a suffix that Pillow opens, in any case."""
    suffixes = image_suffixes()
    found = []
    for parent, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)


# Lightning's prediction loop over the processes of `lightning-retrieval embed`.


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


OWNER = "embed_images"


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class EmbeddedFolder:
    """What `embed_images` has done.

    Args:
        folder: the embeddings, all shards of which are complete.
        written: number of shards that were written; the others were there before.
        unreadable: the images that could not be read, of all shards.
        rank: of this process. All processes return the same.
        renewed: number of the shards that were written although they were there, because images have changed since.
    """

    folder: EmbeddingFolder
    written: int
    unreadable: list[UnreadableImage]
    rank: int = 0
    renewed: int = 0


def embed_images(
    checkpoint: Path,
    images: Path,
    output: Path,
    *,
    root: Path | None = None,
    transform: str | None = None,
    file_format: Literal["parquet", "npy"] = "parquet",
    shard_size: int = SHARD_SIZE,
    dtype: Literal["float32", "float16"] = "float32",
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    precision: str = PRECISIONS[0],
) -> EmbeddedFolder:
    """Embed images into a folder of Parquet or .npy files, of which those that are there are not made again.

    With several devices or nodes, Lightning starts a process for each, which calls this function again. Each process
    embeds whole files, so the files are the same for any number of processes, and so may a run that continues. A file
    that is there is made again if the size or the modification time of one of its images is not that of then.

    Args:
        checkpoint: of a `RetrievalModule`.
        images: a folder, or a table as `ImageTable` reads it, of which only the column `image` is required.
        output: folder of the embeddings: new, or one that the same call began. All nodes must see it.
        root: folder that the paths of a table are relative to; if None, the one that the table is in.
        transform: as for `index_images`.
        file_format: `"parquet"` or `"npy"`.
        shard_size: number of images of a file, >= 1; as many are embedded again by each process after a kill, at most.
        dtype: type of the numbers in the files, `"float32"` or `"float16"`.
        batch_size: number of images embedded at a time.
        num_workers: number of processes that read images, for each device.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.
        devices: number of devices of each node, each of which gets a process.
        num_nodes: number of machines.
        precision: as Lightning names it: `"32-true"`, `"bf16-mixed"` or `"16-mixed"`.

    Raises:
        FileNotFoundError: if the checkpoint or the images do not exist.
        ModuleNotFoundError: if pyarrow is missing.
        ValueError: if the folder holds embeddings of another model or list, or a damaged file, processes have different
            images, or an argument is invalid.
        ConnectionError: if another process has ended early.

    Cost:
        In each process memory for the embeddings of one shard, and for the list of images.
    """
    check_choice(OWNER, "file_format", file_format, FILE_FORMATS)
    check_choice(OWNER, "dtype", dtype, DTYPES)
    check_choice(OWNER, "precision", precision, PRECISIONS)
    for name, number in (("shard_size", shard_size), ("devices", devices), ("num_nodes", num_nodes)):
        check_integer(OWNER, name, number, least=1)
    check_output(OWNER, output)
    if file_format == "parquet":
        load_pyarrow(OWNER)  # raises before any image is embedded
    listed = list_images(OWNER, images, root)
    embedder = ImageEmbedder.load(
        OWNER, checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device="cpu"
    )  # Lightning moves it to the device of this process
    writer = ImageWriter(
        output, ListedSet(listed, embedder), file_format=file_format, shard_size=shard_size, dtype=dtype
    )
    task = EmbeddingTask(embedder, listed.index.paths)
    with quiet_lightning():
        trainer = embedding_trainer(OWNER, writer, device, devices=devices, num_nodes=num_nodes, precision=precision)
        run_embedding(trainer, task, embedder.loader(listed.root, listed.index))
    folder = EmbeddingFolder.load(OWNER, output)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return EmbeddedFolder(folder, writer.written, unreadable, trainer.global_rank, writer.renewed)
