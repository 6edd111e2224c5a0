"""Writes the embeddings of `Trainer.predict` to a folder, in the format of `lightning-retrieval embed`.

Each process embeds the images of some of the missing files, and loads only these images.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import CombinedLoader, pl
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.csv_logger import run_folder
from lightning_retrieval.checkpoints import checkpoint_digest, is_checkpoint
from lightning_retrieval.checks import first_line
from lightning_retrieval.distributed import gather_objects, kept_integers, kept_rows
from lightning_retrieval.invalid import InvalidType, InvalidValue, Unreachable, owned_by
from lightning_retrieval.paths import check_path
from lightning_retrieval.search.embedding_folder import (
    SHARD_SIZE,
    EmbeddingManifest,
    ShardRows,
    check_unicode,
    digest_of_files,
    digest_of_list,
)
from lightning_retrieval.search.image_files import name_folder
from lightning_retrieval.search.shared_folder import RangeBatches, ShardCollector, SharedFolder, share_folder

DISTRACTOR = -1  # the label of images without a class
OWNER = "EmbeddingWriter"


class LoadedSet:
    """A prediction set, whose batches `predict_step` embeds, with the folder of its embeddings.

    Args:
        dataset: any data set. An `ImageSet` has paths, and may skip unreadable images.
        about: plain values that an index of the embeddings stores, among them `checkpoint_sha256` and `preparation`.
    """

    def __init__(self, dataset: Any, about: dict[str, Any]) -> None:
        self.dataset = dataset
        self.about = about
        self.index = _index_of(dataset)
        self._batches: Iterator[list[int]] = iter([])
        self._collector: ShardCollector | None = None

    def fields(self, images: int) -> Iterator[Sequence[Any]]:
        """Yield the path and the box of each image, or its position if the data set has no paths, and its label."""
        labels = getattr(self.dataset, "labels", None)
        for position in range(images):
            fields: list[Any] = [position]
            if self.index is not None:
                fields = list(map(str, self.index.key(position)))
            if isinstance(labels, Tensor):
                fields.append(labels[position].tolist())
            yield fields

    def image_files(self, positions: range) -> str:
        """Return the digest of the image files at some positions; "" for a data set without image files."""
        root = getattr(self.dataset, "root", None)
        if self.index is None or root is None:
            return ""
        return digest_of_files(Path(root, self.index.paths[position]) for position in positions)

    def begin(self, shared: SharedFolder, batches: Iterable[list[int]]) -> None:
        """Set the folder, whose lock is held, and the positions of the images of each batch that will follow."""
        self.shared = shared
        self._batches = iter(batches)

    def add(self, outputs: Any) -> None:
        """Collect the rows of a batch."""
        dim = self._dim_of(outputs)
        if self._collector is None:
            self._collector = ShardCollector(self.shared.begin(dim), self.shared.image_files)
        self._collect(outputs, self._collector)

    def finish(self) -> None:
        """Write the last file."""
        if self._collector is not None:
            self._collector.finish()

    def _dim_of(self, outputs: Any) -> int:
        """The dimension of the embeddings; raises if the outputs of `predict_step` are invalid."""
        if not isinstance(outputs, dict) or not isinstance(outputs.get("embeddings"), Tensor):
            rule = "must return a dict with the tensor `embeddings`, as that of RetrievalModule does"
            raise InvalidType(rule, argument="predict_step", got=type(outputs).__name__)
        embeddings = outputs["embeddings"]
        if embeddings.ndim != 2:
            raise InvalidValue("must have shape (images, dim)", argument="embeddings", got=tuple(embeddings.shape))
        for name in ("ids", "labels"):
            values = outputs.get(name)
            if values is not None and len(values) != len(embeddings):
                rule = f"must have one entry for each row of `embeddings` {tuple(embeddings.shape)}"
                raise InvalidValue(rule, argument=name, got=tuple(values.shape))
        dim: int = embeddings.shape[1]
        return dim

    def _collect(self, outputs: Any, collector: ShardCollector) -> None:
        """Pass the rows of a batch to the collector, with the paths and labels from the data set."""
        positions = next(self._batches)
        embeddings = kept_rows(outputs["embeddings"].float()).cpu().numpy()
        labels = _label_texts(outputs.get("labels"), self.index, len(embeddings))
        ids = np.array(positions, np.int64)
        if outputs.get("ids") is not None:
            ids = kept_integers(outputs["ids"]).cpu().numpy()
        paths = [""] * len(ids)
        unreadable: list[tuple[str, str]] = []
        if self.index is not None:
            skipped = set(self.dataset.skipped)
            # A batch without a readable image holds a black image, which has no row.
            kept = [row for row, position in enumerate(ids.tolist()) if self.index.paths[position] not in skipped]
            ids, embeddings, labels = ids[kept], embeddings[kept], [labels[row] for row in kept]
            paths = [self.index.paths[position] for position in ids.tolist()]
            of_batch = [self.index.paths[position] for position in positions]
            unreadable = [(path, "skipped by the data module") for path in of_batch if path in skipped]
        if len(ids) != len(embeddings) or len(ids) + len(unreadable) != len(positions):
            rule = f"must have one row for each of the {len(positions)} images of a batch"
            raise InvalidValue(rule, argument="embeddings", got=len(embeddings))
        collector.add(positions[0], ShardRows(ids, embeddings, paths, labels, unreadable))


def describe_prediction(trainer: pl.Trainer, module: nn.Module, dataset: Any) -> dict[str, Any]:
    """Return plain values that an index of the embeddings stores: model, preparation and folder of the images."""
    checkpoint = trainer.ckpt_path
    about: dict[str, Any] = {"preparation": _preparation(trainer), "preparation_from": "checkpoint"}
    if checkpoint is not None and is_checkpoint(Path(checkpoint)):
        about["checkpoint"] = Path(checkpoint).absolute().as_posix()
        about["checkpoint_sha256"] = checkpoint_digest(Path(checkpoint))
    else:
        about["checkpoint_sha256"] = _digest_of_weights(module)
    root = getattr(dataset, "root", None)
    if root is not None:
        about["images"] = name_folder(Path(root))
    return about


def _index_of(dataset: Any) -> Any:
    """The `ImageIndex` of an `ImageSet`; None for other data sets."""
    index = getattr(dataset, "index", None)
    if not hasattr(index, "paths") or not hasattr(dataset, "skipped"):
        return None
    return index


def _label_texts(labels: Tensor | None, index: Any, rows: int) -> list[str | None]:
    """Return the class of each row as text: the name of the class if there are names, else its number."""
    if labels is None:
        return [None] * rows
    names = getattr(index, "names", None)
    texts: list[str | None] = []
    for label in labels.reshape(rows, -1)[:, 0].tolist():
        if label == DISTRACTOR:
            texts.append(None)
        elif names is None:
            texts.append(str(label))
        else:
            texts.append(names[label])
    return texts


def _preparation(trainer: pl.Trainer) -> dict[str, Any]:
    """The preparation of the data module, as plain data; empty if there is none."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is None:
        return {}
    described = getattr(datamodule, "serialised_preparation", None)
    return dict(described or datamodule.state_dict())


def _digest_of_weights(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, for a model that was not loaded from a file."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)  # settings of the original `DataLoader` that `ShardLoader` uses too


def is_in_order(loader: Any) -> bool:
    """Whether a loader yields all images of a data set once and in order.

    In a prediction, Lightning ignores `drop_last` of a plain `DataLoader`.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:  # a subclass that does more than loading
        return False
    batches = loader.batch_sampler
    return type(batches) is BatchSampler and type(loader.sampler) is SequentialSampler


class ShardLoader:
    """Loads only some images, with the settings of another loader.

    This class is not a `DataLoader`, because Lightning would replace the batch sampler of a `DataLoader`.

    Args:
        loader: a loader of all images, for which `is_in_order` is True.
        batches: positions of the images of each batch.
        has_length: whether `len` works; must be False if any process has no batch.
    """

    def __init__(self, loader: DataLoader[Any], batches: RangeBatches, *, has_length: bool) -> None:
        self.dataset = loader.dataset
        self._has_length = has_length
        settings = {name: getattr(loader, name) for name in KEPT}
        self._loader = DataLoader(self.dataset, batch_sampler=batches, **settings)

    def __len__(self) -> int:
        if not self._has_length:
            raise TypeError("the number of batches is not known to all processes")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. This is a generator, so `iter`, which Lightning calls as a check, starts no workers."""
        yield from self._loader


def wait_for_other_processes() -> None:
    """Wait until all processes have written their files.

    Raises:
        ConnectionError: if a process ended before it had written all its files, or is late.
    """
    try:
        gather_objects(None)
    except RuntimeError as error:
        raise Unreachable(
            "all files of this process are written, but another process has ended early or is late "
            f"({first_line(error)})",
            cure="run the same command again, which continues",
        ) from None


class EmbeddingWriter(Callback):
    """Writes the outputs of `predict_step` to a folder of Parquet files, instead of keeping them in memory.

    Each file has the embeddings of `shard_size` images with their ids, paths and labels, and appears when it is
    complete. If there are several prediction sets, each set gets a subfolder with the name or the number of the set.

    The missing files are distributed over the processes, and each process embeds all images of its files. So no image
    is embedded twice, and the files do not depend on the number of processes. If a run was killed, the same command
    continues it, even with another number of processes.

    Args:
        output: folder of the embeddings; if None, the folder `embeddings` in the folder of the run. The folder must be
            new, or begun with the same model and images. Existing files are written again only if the size or the
            modification time of one of their images has changed.
        shard_size: number of images per file, >= 1.
        dtype: type of the numbers in the files, `"float32"` or `"float16"`; `"float16"` takes half the space.

    Raises:
        ValueError: if an argument is out of its range. The error is also raised on all processes when the prediction
            begins: if the folder holds embeddings of another model or of other images, a damaged file or unrelated
            files; if processes have different images; or if the loader does not yield all images in order. It is raised
            for a batch if the number of ids or of labels is not the number of embeddings.
        TypeError: if `predict_step` does not return a dict with `embeddings`.
        ConnectionError: at the end, if another process has ended early or is late.

    Example:
        >>> import pytorch_lightning as pl, torch
        >>> from lightning_retrieval import RetrievalModule, SmoothAPLoss, read_embeddings
        >>> from lightning_retrieval.callbacks import EmbeddingWriter
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss())
        >>> loader = torch.utils.data.DataLoader(torch.randn(10, 8), batch_size=4)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
        >>> trainer = pl.Trainer(callbacks=EmbeddingWriter("embeddings"), **quiet)
        >>> trainer.predict(module, loader, return_predictions=False)
        >>> read_embeddings("embeddings").embeddings.shape
        (10, 4)

    Cost:
        Each process keeps the embeddings of one file in memory. At the end, processes wait for each other, but not
        longer than the timeout of the process group (by default 30 minutes).

    Relations:
        `lightning-retrieval predict` uses this callback. `lightning-retrieval embed` writes the same files without a
        data module. `read_embeddings` returns them as arrays, and `lightning-retrieval index --embeddings` builds an
        index of them. To embed a part of the images, predict with a `Subset`: with a sampler, the images of a file
        would not be known before they are embedded. `limit_predict_batches` is right for the images of one file.
    """

    def __init__(
        self,
        output: str | Path | None = None,
        *,
        shard_size: PositiveInt = SHARD_SIZE,
        dtype: Literal["float32", "float16"] = "float32",
    ) -> None:
        self.output: Path | None = None
        if output is not None:
            self.output = check_path("output", output, owner=OWNER)
        self.shard_size = checked(self, shard_size=shard_size)
        self.dtype = checked(self, dtype=dtype)
        self.written = 0
        """Number of files that the last prediction wrote, in all processes."""
        self.renewed = 0
        """Number of these files that already existed, and were written again because images had changed."""
        self._begun: list[LoadedSet] = []
        self._current: LoadedSet | None = None
        self._source: Any = None  # Lightning's source of the prediction loaders, until the prediction has ended

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make Lightning load only the images that this process embeds.

        The loaders are replaced when the prediction loop requests them, after the weights have been restored.
        """
        if stage != "predict":
            return
        loop: Any = trainer.predict_loop
        self._source = loop._data_source
        loop._data_source = _SharedLoaders(self._source, partial(self._distribute, trainer, pl_module))

    @owned_by(OWNER)
    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the embeddings of a batch, and write each file as soon as it is complete."""
        current = self._begun[dataloader_idx]
        if current is not self._current:
            self._finish()
            self._current = current
        current.add(outputs)

    @owned_by(OWNER)
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the last file."""
        self._finish()

    @owned_by(OWNER)
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wait until all processes have written their files."""
        if self._begun:
            self.written = sum(len(begun.shared.missing) for begun in self._begun)
            self.renewed = sum(len(begun.shared.changed) for begun in self._begun)
            wait_for_other_processes()
        self._forget(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Drop the rows of the incomplete file."""
        self._forget(trainer)

    @owned_by(OWNER)
    def _distribute(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loaders: Any) -> Any:
        """Replace the loaders of all images by loaders of the images that this process embeds."""
        if isinstance(loaders, CombinedLoader):
            loaders = loaders.iterables
        if isinstance(loaders, Mapping):
            return {name: self._distribute_set(trainer, pl_module, one, str(name)) for name, one in loaders.items()}
        if not isinstance(loaders, (list, tuple)):
            return self._distribute_set(trainer, pl_module, loaders, "")
        names = list(map(str, range(len(loaders))))
        if len(loaders) == 1:
            names = [""]
        return [self._distribute_set(trainer, pl_module, one, name) for name, one in zip(names, loaders)]

    def _folder(self, trainer: pl.Trainer) -> Path:
        """The folder of the embeddings. That of the run is not looked up earlier, when it may differ between ranks."""
        if self.output is None:
            self.output = run_folder(trainer) / "embeddings"
        return self.output

    def _distribute_set(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Any, name: str) -> Any:
        """Begin or continue the folder of a set, and return the loader of the set."""
        if getattr(loader.dataset, "two_sided", False):
            raise InvalidValue(
                "a prediction set must have one side",
                got="queries and candidates",
                cure="predict with the data module of the candidates, and embed queries with `lightning-retrieval "
                "embed --side queries`",
            )
        count = self._number_of_images(loader, trainer.limit_predict_batches)
        about = describe_prediction(trainer, pl_module, loader.dataset)
        images = LoadedSet(loader.dataset, about)
        shared = share_folder(
            self._folder(trainer) / name, lambda: self._manifest(trainer, images, count), images.image_files
        )
        batches = RangeBatches(list(shared.ranges), loader.batch_size)
        images.begin(shared, batches)
        self._begun.append(images)
        return ShardLoader(loader, batches, has_length=shared.every_rank_has_images)

    def _number_of_images(self, loader: Any, limit: float) -> int:
        """The number of images that are embedded; raises unless the images of each file are known before."""
        if is_in_order(loader):
            images = len(loader.dataset)
            if isinstance(limit, float) and limit == 1:
                return images
            # Batches end where a file ends, so that in several files there are more batches than Lightning counts.
            first = min(images, int(limit * loader.batch_size))
            if isinstance(limit, int) and first <= self.shard_size:
                return first
        sampler = type(getattr(loader, "sampler", None)).__name__
        raise InvalidValue(
            "the loader must be a DataLoader of a map-style data set that gives all images in order, without `sampler` "
            "or `shuffle`, and `limit_predict_batches` at most the number of batches of one file",
            got=f"{type(loader).__name__} with {sampler} and limit_predict_batches={limit}",
            cure="give a Subset to embed a part of the images",
        )

    def _manifest(self, trainer: pl.Trainer, images: LoadedSet, count: int) -> EmbeddingManifest:
        """The manifest of the folder; raises if the files cannot hold a path or a label."""
        if images.index is not None:
            check_unicode("paths", images.index.paths)
            check_unicode("labels", images.index.names or ())
        return EmbeddingManifest(
            images=count,
            images_sha256=digest_of_list(images.fields(count)),
            model_sha256=images.about["checkpoint_sha256"],
            preparation=images.about["preparation"],
            dim=0,  # not known before the first batch
            shard_size=self.shard_size,
            dtype=self.dtype,
            precision=str(trainer.precision),
            about=images.about,
        )

    def _finish(self) -> None:
        """Write the last file of the current set."""
        if self._current is not None:
            self._current.finish()
        self._current = None

    def _forget(self, trainer: pl.Trainer) -> None:
        """Restore the original loaders, release the locks of the folders, and drop rows that have not been written."""
        if self._source is not None:
            trainer.predict_loop._data_source = self._source
        self._source = None
        for begun in self._begun:
            begun.shared.close()
        self._begun = []
        self._current = None


@dataclass(frozen=True)
class _SharedLoaders:
    """Gives the prediction loop loaders of the images that this process embeds, in place of those of all images.

    Args:
        source: Lightning's source of the loaders.
        distribute: replaces the loaders.
    """

    source: Any
    distribute: Callable[[Any], Any]

    def dataloader(self) -> Any:
        return self.distribute(self.source.dataloader())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)
