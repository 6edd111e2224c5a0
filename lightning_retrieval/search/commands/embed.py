"""`lightning-retrieval embed`: embed images or texts into a folder of shards, and continue a killed run."""

import itertools
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lightning_retrieval.backend import Fabric, FabricDDPStrategy, MisconfigurationException, module_names
from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.datamodules.image_table import is_empty
from lightning_retrieval.datamodules.table_file import read_table
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned_by
from lightning_retrieval.models.sides import Side
from lightning_retrieval.paths import check_path
from lightning_retrieval.search.commands.embedding import (
    EmbeddedBatch,
    ImageEmbedder,
    ListedImages,
    UnreadableImage,
    default_device,
    list_images,
    unusable_device,
)
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.embedding_folder import (
    SHARD_SIZE,
    EmbeddingFolder,
    EmbeddingManifest,
    ShardRows,
    check_unicode,
    digest_of_files,
    digest_of_list,
)
from lightning_retrieval.search.embedding_writer import wait_for_other_processes
from lightning_retrieval.search.export.onnx_file import errors_only
from lightning_retrieval.search.image_files import name_folder
from lightning_retrieval.search.shared_folder import RangeBatches, ShardCollector, share_folder

OWNER = "embed_images"
FIRST_PROCESS = "LIGHTNING_RETRIEVAL_FIRST_PROCESS"  # environment variable: id of the process that starts the others
SECONDS_TO_NOTICE = 1.0  # between two looks at whether that process is still there
LONGEST_WAIT = timedelta(days=30)  # how long a finished process waits for the other processes


@dataclass(frozen=True)
class EmbeddedFolder:
    """The result of `embed_images`. Except for `rank`, it is the same on all processes.

    Args:
        folder: the embeddings; no shard is missing.
        written: number of shards that this call wrote; all other shards already existed.
        unreadable: the images of all shards that could not be read.
        rank: rank of this process.
        renewed: number of existing shards that were written again, because their images have changed.
    """

    folder: EmbeddingFolder
    written: int
    unreadable: list[UnreadableImage]
    rank: int = 0
    renewed: int = 0


@dataclass(frozen=True)
class ListedTexts:
    """The texts of a table, with their labels as text if known; the counterpart of `ListedImages`.

    Args:
        table: the table.
        paths: the texts.
        labels: label of each text; None if the label is unknown.
    """

    table: Path
    paths: Sequence[str]
    labels: Sequence[str | None]

    @property
    def root(self) -> Path:
        """The folder of the table."""
        return self.table.parent

    def files(self, positions: range) -> Iterator[Path]:
        """The table, from which each text is read."""
        yield self.table

    def fields(self) -> Iterator[list[Any]]:
        """Text and label of each row, which identify the list."""
        yield from map(list, zip(self.paths, self.labels))


def _list_queries(
    embedder: ImageEmbedder, images: Path, root: Path | None, table_format: TableFormat
) -> ListedImages | ListedTexts:
    """List images, or the texts of a table if the network of queries embeds texts.

    Raises:
        FileNotFoundError: if there are no images, or the table does not exist.
        ValueError: if the images or the table cannot be read, the table has no column `text`, or a text is empty.
    """
    if not embedder.takes_texts:
        return list_images(images, root, table_format)
    if root is not None:
        raise InvalidValue("must be given for images only", argument="root", got=f"{root} for queries that are texts")
    if not images.is_file():
        rule = "must be a table with the column text for queries that are texts"
        raise MissingFile(rule, argument="images", got=f"{images}, which is not a file")
    table = read_table(images, required=("text",), table_format=table_format)
    table.check("text", is_empty, "not be empty in any row")
    labels: list[str | None] = [None] * len(table)
    if "label" in table:
        labels = [label or None for label in table["label"]]
    return ListedTexts(images, table["text"], labels)


def _digest(listed: ListedImages | ListedTexts, side: Side) -> str:
    """The digest of a list. It depends on the side, so that a folder of candidates is not continued with queries."""
    fields = listed.fields()
    if side == "queries":
        fields = itertools.chain([[side]], fields)
    return digest_of_list(fields)


def _embedded(
    embedder: ImageEmbedder, listed: ListedImages | ListedTexts, ranges: Sequence[range]
) -> Iterator[EmbeddedBatch]:
    """Embed some rows of a list, batch by batch."""
    if isinstance(listed, ListedImages):
        yield from embedder.embed(listed, ranges)
        return
    for positions in RangeBatches(ranges, embedder.batch_size):
        texts = [listed.paths[position] for position in positions]
        yield EmbeddedBatch(positions, embedder.embed_texts(texts), [])


def summary(done: EmbeddedFolder) -> str:
    """What was written, in one line."""
    manifest = done.folder.manifest
    rows = manifest.images - len(done.unreadable)
    shards = len(done.folder)
    found = ""
    if done.written < shards:
        found = f", {shards - done.written} of which were there"
    renewed = ""
    if done.renewed > 0:
        renewed = f"; made again, because images in them have changed: {done.renewed}"
    files = f"{shards} Parquet files"
    if shards == 1:
        files = "1 Parquet file"
    return f"{rows} embeddings of {manifest.dim} dimensions in {files}{found}{renewed}"


@owned_by(OWNER)
def embed_images(
    checkpoint: Path | PretrainedBackbone,
    images: Path,
    output: Path,
    *,
    root: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    transform: str | None = None,
    shard_size: int = SHARD_SIZE,
    dtype: Literal["float32", "float16"] = "float32",
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
    side: Side = "candidates",
) -> EmbeddedFolder:
    """Embed images or texts into a folder of Parquet files. Existing files are kept.

    With several devices or nodes, Lightning Fabric starts a process for each device, and each process calls this
    function again. Each process embeds the images of whole files. The files therefore do not depend on the number of
    processes, and a later call with another number of processes can continue. A file is written again if the size or
    the modification time of one of its images has changed.

    The arguments are the options of the command, see `functions.embed`, but for one:

    Args:
        checkpoint: as for `index_images`.

    Raises:
        FileNotFoundError: if the checkpoint or the images do not exist.
        ValueError: if the folder holds a damaged file, or embeddings of another model or of another list of images; if
            processes have different images; if an argument is invalid.
        ConnectionError: if another process has ended early.

    Cost:
        Memory in each process for the embeddings of one shard and for the list of images.
    """
    for name, number in (("shard_size", shard_size), ("devices", devices), ("num_nodes", num_nodes)):
        check_integer(name, number, least=1)
    images, output = check_path("images", images, exists=True), check_path("output", output)
    table_format = TableFormat.checked(columns, delimiter)
    listed: ListedImages | ListedTexts | None = None
    if side == "candidates":
        listed = list_images(images, root, table_format)
    embedder = ImageEmbedder.load(
        checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device="cpu", side=side
    )
    about = embedder.description()
    if listed is None:
        listed = _list_queries(embedder, images, root, table_format)
        about = {**about, "side": side}
    check_unicode("paths", listed.paths)
    fabric = new_fabric(device, devices=devices, num_nodes=num_nodes, precision=precision)
    launch(fabric)
    embedder = embedder.on(str(fabric.device))
    manifest = EmbeddingManifest(
        images=len(listed.paths),
        images_sha256=_digest(listed, side),
        model_sha256=embedder.about["checkpoint_sha256"],
        preparation=about["preparation"],
        dim=embedder.dim(),
        shard_size=shard_size,
        dtype=dtype,
        precision=str(fabric.strategy.precision.precision),
        about={**about, "images": name_folder(listed.root)},
    )
    missing, changed = _embed_missing(fabric, embedder, listed, output, manifest)
    folder = EmbeddingFolder.load(output)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return EmbeddedFolder(folder, len(missing), unreadable, fabric.global_rank, len(changed))


def _embed_missing(
    fabric: Fabric,
    embedder: ImageEmbedder,
    listed: ListedImages | ListedTexts,
    output: Path,
    manifest: EmbeddingManifest,
) -> tuple[list[int], list[int]]:
    """Embed the shards of this process, wait for all processes, and return the written and the changed shards."""

    def image_files(positions: range) -> str:
        return digest_of_files(listed.files(positions))

    with closing(share_folder(output, lambda: manifest, image_files)) as shared:
        collector = ShardCollector(shared.begin(manifest.dim), shared.image_files)
        with fabric.autocast():
            for batch in _embedded(embedder, listed, list(shared.ranges)):
                _collect(batch, listed, collector)
        collector.finish()
        wait_for_other_processes()
        return shared.missing, shared.changed


def _collect(batch: EmbeddedBatch, listed: ListedImages | ListedTexts, collector: ShardCollector) -> None:
    """Pass the rows of a batch, and its unreadable images, to the collector."""
    embeddings = np.zeros((0, collector.folder.manifest.dim), np.float32)
    if batch.embeddings is not None:
        embeddings = batch.embeddings.numpy()
    paths = [listed.paths[position] for position in batch.positions]
    labels = [listed.labels[position] for position in batch.positions]
    unreadable = [(image.path, image.reason) for image in batch.unreadable]
    first = [*batch.positions, *(image.position for image in batch.unreadable)][0]
    collector.add(first, ShardRows(np.array(batch.positions, np.int64), embeddings, paths, labels, unreadable))


def new_fabric(device: str | None, *, devices: int, num_nodes: int, precision: str) -> Fabric:
    """Fabric with a process for each device, which `launch` starts.

    The processes exchange only what each has to do, so they use gloo even on GPUs: with gloo, a process notices
    immediately if another process was killed.

    Raises:
        ValueError: if there are fewer devices than asked for, or a device does not support the precision.
    """
    accelerator, numbers = _accelerator(device, devices)
    settings: dict[str, Any] = {}
    if devices * num_nodes > 1:
        settings["strategy"] = FabricDDPStrategy(process_group_backend="gloo", timeout=LONGEST_WAIT)
    try:
        with _quiet_lightning():
            return Fabric(
                accelerator=accelerator,
                devices=numbers,
                num_nodes=num_nodes,
                precision=precision,  # type: ignore[arg-type]
                **settings,
            )
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        rule = "`device`, `devices`, `num_nodes` and `precision` must be supported by this machine"
        raise InvalidValue(rule, got=first_line(error)) from None


def launch(fabric: Fabric) -> None:
    """Start the processes of Fabric, each of which runs the command again and joins the process group here.

    A process that was started ends if the first one ends before both have joined; afterwards, gloo notices.
    """
    with _quiet_lightning(), _ending_with_first_process():
        fabric.launch()


@contextmanager
def _ending_with_first_process() -> Iterator[None]:
    """Context in which a process that this function's caller has started ends as soon as its parent does."""
    first, has_joined = os.environ.pop(FIRST_PROCESS, None), threading.Event()
    watch = threading.Thread(target=_end_with, args=(first, has_joined), daemon=True)
    if first is None:
        os.environ[FIRST_PROCESS] = str(os.getpid())  # the started processes inherit it
    watch.start()
    try:
        yield
    finally:
        os.environ.pop(FIRST_PROCESS, None)
        has_joined.set()
        watch.join()


def _end_with(first: str | None, has_joined: threading.Event) -> None:
    """End this process if its parent is no longer the first process, until it has joined the group."""
    while first is not None and not has_joined.wait(SECONDS_TO_NOTICE):
        if str(os.getppid()) != first:
            os._exit(1)


def _accelerator(device: str | None, devices: int) -> tuple[str, int | list[int]]:
    """Lightning's names of the accelerator and of the devices."""
    name = device or default_device()
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise unusable_device(name, error) from None
    if chosen.index is not None and devices > 1:
        rule = "must be without a number for several devices"
        raise InvalidValue(rule, argument="device", got=f"{name!r} and devices={devices}", cure=f"use {chosen.type!r}")
    if chosen.index is None or chosen.type != "cuda":
        return chosen.type, devices
    return chosen.type, [chosen.index]


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Context without Lightning's log messages about Fabric, because the user has not called Fabric."""
    with ExitStack() as stack:
        for name in module_names():  # Lightning uses one of several loggers, depending on what is imported
            stack.enter_context(errors_only(logging.getLogger(name)))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"lightning(_|\.)fabric")
        yield
