"""Write the embeddings of `Trainer.predict` to the files that `lightning-retrieval embed` writes.

Each process embeds the images of the files that are missing, by a loader of these images alone.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from lightning_retrieval.checks import check_choice, check_integer, check_path, first_line
from lightning_retrieval.distributed import gather_objects
from lightning_retrieval.files import file_digest
from lightning_retrieval.search.embedding_folder import (
    DTYPES,
    FILE_FORMATS,
    SHARD_SIZE,
    EmbeddingManifest,
    ShardRows,
    digest_of_files,
    digest_of_list,
    load_pyarrow,
)
from lightning_retrieval.search.shared_folder import ShardCollector, SharedFolder, share_folder

DISTRACTOR = -1  # the label of images without a class


class LoadedSet:
    """A data set whose batches `predict_step` embeds.

    Args:
        owner: prefix of error messages.
        dataset: an `ImageSet`, which has paths, and may skip images that it cannot read; or any other data set.
        about: what an index of the embeddings should say, with `checkpoint_sha256` and `preparation`.
    """

    def __init__(self, owner: str, dataset: Any, about: dict[str, Any]) -> None:
        self.owner = owner
        self.dataset = dataset
        self.about = about
        self.index = _index_of(dataset)
        self.begin([])

    def fields(self, images: int) -> Iterator[Sequence[Any]]:
        """Of each image path and box, or the position alone, and the label."""
        labels = getattr(self.dataset, "labels", None)
        for position in range(images):
            fields: list[Any] = [position]
            if self.index is not None:
                fields = list(map(str, self.index.key(position)))
            if isinstance(labels, Tensor):
                fields.append(labels[position].tolist())
            yield fields

    def image_files(self, positions: range) -> str:
        """The digest of the files of the images at these positions; "" for a data set without image files."""
        root = getattr(self.dataset, "root", None)
        if self.index is None or root is None:
            return ""
        return digest_of_files(Path(root, self.index.paths[position]) for position in positions)

    def begin(self, ranges: Sequence[range]) -> None:
        """Expect the images at these positions."""
        self._expected: Iterator[int] = chain.from_iterable(ranges)

    def dim_of(self, outputs: Any) -> int:
        """The dimension of the embeddings; raise unless `predict_step` has returned what fits together."""
        if not isinstance(outputs, dict) or not isinstance(outputs.get("embeddings"), Tensor):
            raise TypeError(
                f"{self.owner}: `predict_step` must return a dict with the tensor `embeddings`, as that of "
                f"RetrievalModule does, got {type(outputs).__name__}."
            )
        embeddings = outputs["embeddings"]
        if embeddings.ndim != 2:
            raise ValueError(
                f"{self.owner}: `embeddings` must have shape (images, dim), got {tuple(embeddings.shape)}."
            )
        for name in ("ids", "labels"):
            values = outputs.get(name)
            if values is not None and len(values) != len(embeddings):
                raise ValueError(
                    f"{self.owner}: `{name}` must have one entry for each row of `embeddings` "
                    f"{tuple(embeddings.shape)}, got {tuple(values.shape)}."
                )
        dim: int = embeddings.shape[1]
        return dim

    def collect(self, outputs: Any, collector: ShardCollector) -> None:
        """Pass the rows of a batch on, with the paths and labels that the data set knows."""
        embeddings = outputs["embeddings"].detach().float().cpu()
        count = len(embeddings)
        ids = outputs.get("ids")
        if ids is None:
            self._expected, ahead = tee(self._expected)
            ids = torch.tensor(list(islice(ahead, count)))
        ids = ids.cpu()
        labels = _label_texts(outputs.get("labels"), self.index, count)
        if self.index is None:
            positions = list(islice(self._expected, count))
            collector.add(positions, ShardRows(ids.numpy(), embeddings.numpy(), [""] * count, labels))
            return
        skipped = set(self.dataset.skipped)
        for row, position in enumerate(ids.tolist()):
            path = self.index.paths[position]
            if path in skipped:  # the black image that stands for a batch of which no image could be read
                continue
            self._skip_to(position, skipped, collector)
            part = slice(row, row + 1)
            rows = ShardRows(ids[part].numpy(), embeddings[part].numpy(), [path], labels[part])
            collector.add([position], rows)

    def finish(self, collector: ShardCollector) -> None:
        """Record the images after the last row."""
        if self.index is not None:
            self._skip_to(None, set(self.dataset.skipped), collector)

    def _skip_to(self, position: int | None, skipped: set[str], collector: ShardCollector) -> None:
        """Record the expected images before a position, all of which must be among those that were skipped."""
        for between in self._expected:
            if between == position:
                return
            path = self.index.paths[between]
            if path not in skipped:
                raise ValueError(
                    f"{self.owner}: images must come in the order of their ids, got {position} instead of {between}; "
                    "use a loader that does not shuffle, and gives all images."
                )
            collector.add_unreadable(between, path, "skipped by the data module")


def describe_prediction(trainer: pl.Trainer, module: nn.Module, dataset: Any) -> dict[str, Any]:
    """What an index of the embeddings should say: the model, the preparation and the folder of the images."""
    checkpoint = trainer.ckpt_path
    about: dict[str, Any] = {"preparation": _preparation(trainer), "preparation_from": "checkpoint"}
    if checkpoint is not None and Path(checkpoint).is_file():
        about["checkpoint"] = str(Path(checkpoint).absolute())
        about["checkpoint_sha256"] = file_digest(Path(checkpoint))
    else:
        about["checkpoint_sha256"] = _digest_of_weights(module)
    root = getattr(dataset, "root", None)
    if root is not None:
        about["images"] = str(Path(root).absolute())
    return about


def _index_of(dataset: Any) -> Any:
    """The index of the images of an `ImageSet`; None for another data set."""
    index = getattr(dataset, "index", None)
    if not hasattr(index, "paths") or not hasattr(dataset, "skipped"):
        return None
    return index


def _label_texts(labels: Tensor | None, index: Any, rows: int) -> list[str | None]:
    """The class of each row as text: its name if it has one, else its number."""
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
    """What the data module does to an image, as plain data; empty if it has no preparation."""
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
)  # settings of a `DataLoader` that the new one has, too


class RangeBatches(Sampler[list[int]]):
    """Yields the positions of each batch.

    Args:
        ranges: positions, in the order in which they are loaded.
        batch_size: number of images of a batch; the last one of a range may have fewer.
    """

    def __init__(self, ranges: Sequence[Sequence[int]], batch_size: int) -> None:
        self.ranges = ranges
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(-(-len(positions) // self.batch_size) for positions in self.ranges)

    def __iter__(self) -> Iterator[list[int]]:
        for positions in self.ranges:
            for begin in range(0, len(positions), self.batch_size):
                yield list(positions[begin : begin + self.batch_size])


def is_in_order(loader: Any) -> bool:
    """Whether a loader gives all images of a data set once, in order, so that they can be distributed in shards."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:  # a subclass that does more than to load
        return False
    batches = loader.batch_sampler
    is_plain = type(batches) is BatchSampler and not batches.drop_last
    return is_plain and type(loader.sampler) is SequentialSampler


class ShardLoader:
    """Loads the images of some ranges of positions, as another loader would load them.

    It is no `DataLoader`, because Lightning would replace the batch sampler of one.

    Args:
        loader: of all images, see `is_in_order`.
        ranges: positions of the images; no batch reaches from one range into the next.
        has_length: whether Lightning is to know the number of batches, which it does only if no process has none.
    """

    def __init__(self, loader: DataLoader[Any], ranges: Sequence[range], *, has_length: bool) -> None:
        self.dataset = loader.dataset
        self._has_length = has_length
        settings = {name: getattr(loader, name) for name in KEPT}
        batches = RangeBatches(ranges, loader.batch_size or 1)
        self._loader = DataLoader(self.dataset, batch_sampler=batches, **settings)

    def __len__(self) -> int:
        if not self._has_length:
            raise TypeError("the number of batches is not known to all processes")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """A generator, so workers start with the first batch: Lightning also calls `iter` to check the loader."""
        yield from self._loader


def wait_for_other_processes(owner: str) -> None:
    """Wait until all processes have written their files.

    Raises:
        ConnectionError: if one of them has ended before it has written all of its files.
    """
    try:
        gather_objects(None)
    except RuntimeError as error:
        raise ConnectionError(
            f"{owner}: all files of this process are written, but another process has ended early or is late "
            f"({first_line(error)}); run the same command again, which continues."
        ) from None


class EmbeddingWriter(pl.Callback):
    """Writes what `predict_step` returns to a folder of Parquet or .npy files, instead of keeping it in memory.

    Each file has the embeddings of `shard_size` images with their ids, paths and labels, and appears when it is
    complete. Several prediction sets get a folder each, by their names or numbers.

    Each process embeds the images of entire files that are missing, whatever the number of processes. So no image is
    embedded twice, the files are the same for any number, and after a kill the same command continues, also with
    another number.

    Args:
        output: folder of the embeddings: new, or one that was begun with the same model and images; files that are
            there are not written again, unless the size or the modification time of one of their images has changed.
        file_format: `"parquet"`, or `"npy"` with a JSON file beside each.
        shard_size: number of images of a file, >= 1.
        dtype: type of the numbers in the files, `"float32"` or `"float16"`, which takes half of the space.

    Raises:
        ValueError: if a value is out of its range; when the prediction begins, on all processes, if the folder holds
            embeddings of another model or of other images, a damaged file, or something else, if processes have
            different images, or if there are several processes and the loader does not give all images in order; with
            any batch, if ids or labels do not fit the embeddings, or images do not come in the order of their ids.
        ModuleNotFoundError: when the prediction begins, if pyarrow is not installed and the format is Parquet.
        TypeError: if `predict_step` returns no dict with `embeddings`.
        ConnectionError: at the end, if another process has ended early.

    Example:
        >>> import pytorch_lightning as pl, torch
        >>> from lightning_retrieval import RetrievalModule, SmoothAPLoss
        >>> from lightning_retrieval.callbacks import EmbeddingWriter
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss())
        >>> loader = torch.utils.data.DataLoader(torch.randn(10, 8), batch_size=4)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
        >>> trainer = pl.Trainer(callbacks=EmbeddingWriter("embeddings", file_format="npy"), **quiet)
        >>> trainer.predict(module, loader, return_predictions=False)
        >>> import numpy as np
        >>> np.load("embeddings/part-00000.npy").shape
        (10, 4)

    Cost:
        Memory for the embeddings of one file. At the end, processes wait for each other, at most for the timeout of the
        process group, which is 30 minutes by default.

    Relations:
        `lightning-retrieval predict` uses it, and `lightning-retrieval embed`, which needs no data module.
        `lightning-retrieval index --embeddings` makes an index of the folder. A loader that does not give all images in
        order, or `limit_predict_batches`, needs a single process; complete files are then embedded, but not written
        again.
    """

    owner = "EmbeddingWriter"  # prefix of error messages

    def __init__(
        self,
        output: str | Path,
        *,
        file_format: Literal["parquet", "npy"] = "parquet",
        shard_size: int = SHARD_SIZE,
        dtype: Literal["float32", "float16"] = "float32",
    ) -> None:
        self.output = check_path(self.owner, "output", output)
        self.file_format = check_choice(self.owner, "file_format", file_format, FILE_FORMATS)
        self.shard_size = check_integer(self.owner, "shard_size", shard_size, least=1)
        self.dtype = check_choice(self.owner, "dtype", dtype, DTYPES)
        self.written = 0
        """Number of files that the last prediction has written, in all processes."""
        self.renewed = 0
        """Number of these files that were there, with images that have changed since."""
        self._begun: list[_BegunSet] = []
        self._current: _BegunSet | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let Lightning load those images only that this process embeds.

        The loaders are replaced where the prediction loop asks for them, which is after the weights were restored.
        """
        if stage != "predict":
            return
        source = trainer.predict_loop._data_source
        ask = partial(type(source).dataloader, source)
        vars(source)["dataloader"] = lambda: self._distribute(trainer, pl_module, ask())

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the embeddings of a batch, and write a file that is complete."""
        current = self._begun[dataloader_idx]
        if current is not self._current:
            self._finish()
            self._current = current
        current.add(outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the last file."""
        self._finish()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wait until all processes have written their files."""
        if self._begun:
            self.written = sum(len(begun.shared.missing) for begun in self._begun)
            self.renewed = sum(len(begun.shared.changed) for begun in self._begun)
            wait_for_other_processes(self.owner)
        self._forget(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Drop the rows of the file that is not complete."""
        self._forget(trainer)

    def _distribute(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loaders: Any) -> Any:
        """The loaders of the images that this process embeds, in the place of loaders of all images."""
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

    def _distribute_set(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Any, name: str) -> Any:
        """The loader of one set, whose folder is begun or continued."""
        is_distributed = is_in_order(loader) and trainer.limit_predict_batches == 1.0
        about = describe_prediction(trainer, pl_module, loader.dataset)
        images = LoadedSet(self.owner, loader.dataset, about)
        shared = share_folder(
            self.owner, self.output / name, lambda: self._manifest(trainer, loader, images), images.image_files
        )
        self._begun.append(_BegunSet(shared, images))
        if not is_distributed:
            images.begin([range(shared.folder.manifest.images)])
            return loader
        ranges = list(shared.ranges)
        images.begin(ranges)
        return ShardLoader(loader, ranges, has_length=shared.every_rank_has_images)

    def _manifest(self, trainer: pl.Trainer, loader: Any, images: LoadedSet) -> EmbeddingManifest:
        """What is going to be in the folder; raise if the files cannot be written."""
        if self.file_format == "parquet":
            load_pyarrow(self.owner)
        if trainer.world_size > 1 and not (is_in_order(loader) and trainer.limit_predict_batches == 1.0):
            raise ValueError(
                f"{self.owner}: with several processes, the loader must be a DataLoader of a map-style data set that "
                "gives all images in order, without `sampler`, `shuffle`, `drop_last` or `limit_predict_batches`; "
                "or set devices=1 and num_nodes=1."
            )
        count = _number_of_images(self.owner, loader, trainer.limit_predict_batches)
        return EmbeddingManifest(
            images=count,
            images_sha256=digest_of_list(images.fields(count)),
            model_sha256=images.about["checkpoint_sha256"],
            preparation=images.about["preparation"],
            dim=0,  # not known before the first batch
            shard_size=self.shard_size,
            file_format=self.file_format,
            dtype=self.dtype,
            precision=str(trainer.precision),
            about=images.about,
        )

    def _finish(self) -> None:
        """Write the last file of the set that was embedded until now."""
        if self._current is not None:
            self._current.finish()
        self._current = None

    def _forget(self, trainer: pl.Trainer) -> None:
        """Release the folders, and the rows that are not written."""
        vars(trainer.predict_loop._data_source).pop("dataloader", None)
        for begun in self._begun:
            begun.shared.close()
        self._begun = []
        self._current = None


@dataclass
class _BegunSet:
    """A prediction set with the folder that it is written to.

    Args:
        shared: whose lock is held.
        images: what is known of the images.
    """

    shared: SharedFolder
    images: LoadedSet
    collector: ShardCollector | None = None

    def add(self, outputs: Any) -> None:
        """Collect the rows of a batch."""
        dim = self.images.dim_of(outputs)
        if self.collector is None:
            shared = self.shared
            self.collector = ShardCollector(shared.begin(dim), shared.missing, shared.image_files)
        self.images.collect(outputs, self.collector)

    def finish(self) -> None:
        """Write the last file."""
        if self.collector is not None:
            self.images.finish(self.collector)
            self.collector.finish()


def _number_of_images(owner: str, loader: Any, limit: float) -> int:
    """Number of images that the loader gives, at most those of the batches that `limit_predict_batches` allows."""
    try:
        images = len(loader.dataset)
    except TypeError:
        raise TypeError(
            f"{owner}: the prediction set must have a length, which {type(loader.dataset).__name__} has not; use a "
            "map-style data set."
        ) from None
    batch_size = loader.batch_size
    if batch_size is None:
        return images
    batches: float = limit
    if isinstance(limit, float):
        batches = int(len(loader) * limit)
    return int(min(images, batches * batch_size))
