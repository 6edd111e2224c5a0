"""Write the embeddings of `Trainer.predict` to the files that `lightning-retrieval embed` writes."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_choice, check_integer, check_path
from lightning_retrieval.search.embedding_folder import (
    SHARD_SIZE,
    EmbeddingFolder,
    EmbeddingManifest,
    check_output,
    digest_of_list,
)
from lightning_retrieval.search.embedding_shards import FILE_FORMATS, ShardRows, load_pyarrow
from lightning_retrieval.search.files import file_digest
from lightning_retrieval.search.shard_collector import ShardCollector

OWNER = "EmbeddingWriter"
DISTRACTOR = -1  # the label of images without a class


class EmbeddingWriter(pl.Callback):
    """Writes what `predict_step` returns to a folder of Parquet or .npy files, instead of keeping it in memory.

    Each file has the embeddings of `shard_size` images with their ids, paths and labels, and appears when it is
    complete. Several prediction sets get a folder each, by their names or numbers.

    Args:
        output: folder of the embeddings: new, or one that was begun with the same model and images; files that are
            there are not written again.
        file_format: `"parquet"`, or `"npy"` with a JSON file beside each.
        shard_size: number of images of a file, >= 1.

    Raises:
        ValueError: if a value is out of its range; when the prediction begins, if there are several processes; with the
            first batch, if the folder holds embeddings of another model or of other images, or something else; with any
            batch, if ids or labels do not fit the embeddings, or images do not come in the order of their ids.
        ModuleNotFoundError: when the prediction begins, if pyarrow is not installed and the format is Parquet.
        TypeError: if `predict_step` returns no dict with `embeddings`.

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
        Memory for the embeddings of one file.

    Relations:
        `lightning-retrieval predict` uses it. `lightning-retrieval embed` needs no data module, and continues after a
        kill without embedding the images of complete files again. `lightning-retrieval index --embeddings` makes an
        index of the folder.
    """

    def __init__(
        self, output: str | Path, *, file_format: Literal["parquet", "npy"] = "parquet", shard_size: int = SHARD_SIZE
    ) -> None:
        self.output = check_path(OWNER, "output", output)
        self.file_format = check_choice(OWNER, "file_format", file_format, FILE_FORMATS)
        self.shard_size = check_integer(OWNER, "shard_size", shard_size, least=1)
        self._current: _PredictionSet | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check what can be checked before any image is embedded."""
        if stage != "predict":
            return
        if trainer.world_size > 1:
            raise ValueError(
                f"{OWNER}: the prediction must run in one process, got {trainer.world_size}, each of which has only "
                "some images of each file; set devices=1 and num_nodes=1."
            )
        if self.file_format == "parquet":
            load_pyarrow(OWNER)
        check_output(OWNER, self.output)

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
        _check_outputs(outputs)
        current = self._current
        if current is None or current.number != dataloader_idx:
            self._finish()
            current = self._current = self._begin(trainer, pl_module, outputs["embeddings"], dataloader_idx)
        current.add(outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the last file."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Drop the rows of the file that is not complete."""
        self._forget()

    def _finish(self) -> None:
        """Write the last file of the set that was embedded until now."""
        if self._current is not None:
            self._current.finish()
        self._forget()

    def _forget(self) -> None:
        """Release the folder, and the rows that are not written."""
        if self._current is not None:
            self._current.lock.close()
        self._current = None

    def _begin(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, embeddings: Tensor, number: int
    ) -> "_PredictionSet":
        """Create the folder of a prediction set, or continue it."""
        names, loaders = _prediction_loaders(trainer)
        dataset = loaders[number].dataset
        images = _number_of_images(loaders[number], trainer.num_predict_batches[number])
        output = self.output
        if len(names) > 1:
            output = output / names[number]
        about = _about(trainer, pl_module, dataset)
        manifest = EmbeddingManifest(
            images=images,
            images_sha256=digest_of_list(_fields(dataset, images)),
            model_sha256=about["checkpoint_sha256"],
            preparation=about["preparation"],
            dim=embeddings.shape[1],
            shard_size=self.shard_size,
            file_format=self.file_format,
            about=about,
        )
        folder = EmbeddingFolder.create(OWNER, output, manifest)
        return _PredictionSet(number, folder, dataset)


class _PredictionSet:
    """Passes the rows of one prediction set on to the files, with the paths and labels that its data set knows.

    Args:
        number: of the set.
        folder: where the files are written.
        dataset: an `ImageSet`, which has paths, and may skip images that it cannot read; or any other data set.
    """

    def __init__(self, number: int, folder: EmbeddingFolder, dataset: Any) -> None:
        self.number = number
        self.images = folder.manifest.images
        self.dataset = dataset
        self.index = _index_of(dataset)
        self.collector = ShardCollector(folder)
        self.lock = ExitStack()  # whoever ends the set closes it
        self.lock.enter_context(folder.lock())
        self._next = 0  # the position that follows the last one

    def add(self, outputs: dict[str, Any]) -> None:
        """Collect the rows of a batch."""
        embeddings = outputs["embeddings"].detach().float().cpu()
        count = len(embeddings)
        ids = torch.arange(self._next, self._next + count)
        if outputs.get("ids") is not None:
            ids = outputs["ids"].cpu()
        labels = _label_texts(outputs.get("labels"), self.index, count)
        if self.index is None:
            positions = range(self._next, self._next + count)
            self._next += count
            self.collector.add(positions, ShardRows(ids.numpy(), embeddings.numpy(), [""] * count, labels))
            return
        skipped = set(self.dataset.skipped)
        for row, position in enumerate(ids.tolist()):
            path = self.index.paths[position]
            if path in skipped:  # the black image that stands for a batch of which no image could be read
                continue
            self._skip_to(position, skipped)
            part = slice(row, row + 1)
            rows = ShardRows(ids[part].numpy(), embeddings[part].numpy(), [path], labels[part])
            self.collector.add([position], rows)
            self._next = position + 1

    def finish(self) -> None:
        """Write the last file."""
        if self.index is not None:
            self._skip_to(self.images, set(self.dataset.skipped))
        self.collector.finish()

    def _skip_to(self, position: int, skipped: set[str]) -> None:
        """Record the images before a position, all of which must be among those that the data set has skipped."""
        for between in range(self._next, position):
            path = self.index.paths[between]
            if path not in skipped:
                raise ValueError(
                    f"{OWNER}: images must come in the order of their ids, got {position} instead of {between}; use a "
                    "loader that does not shuffle, and gives all images."
                )
            self.collector.add_unreadable(between, path, "skipped by the data module")


def _check_outputs(outputs: Any) -> None:
    """Raise unless `predict_step` has returned embeddings, and ids and labels of as many images if it has any."""
    if not isinstance(outputs, dict) or not isinstance(outputs.get("embeddings"), Tensor):
        raise TypeError(
            f"{OWNER}: `predict_step` must return a dict with the tensor `embeddings`, as that of RetrievalModule "
            f"does, got {type(outputs).__name__}."
        )
    embeddings = outputs["embeddings"]
    if embeddings.ndim != 2:
        raise ValueError(f"{OWNER}: `embeddings` must have shape (images, dim), got {tuple(embeddings.shape)}.")
    for name in ("ids", "labels"):
        values = outputs.get(name)
        if values is not None and len(values) != len(embeddings):
            raise ValueError(
                f"{OWNER}: `{name}` must have one entry for each row of `embeddings` {tuple(embeddings.shape)}, got "
                f"{tuple(values.shape)}."
            )


def _index_of(dataset: Any) -> Any:
    """The index of the images of an `ImageSet`; None for another data set."""
    index = getattr(dataset, "index", None)
    if not hasattr(index, "paths") or not hasattr(dataset, "skipped"):
        return None
    return index


def _prediction_loaders(trainer: pl.Trainer) -> tuple[list[str], list[Any]]:
    """The names and the loaders of the prediction sets."""
    loaders: Any = trainer.predict_dataloaders
    if isinstance(loaders, dict):
        return list(map(str, loaders)), list(loaders.values())
    if not isinstance(loaders, list):
        loaders = [loaders]
    return list(map(str, range(len(loaders)))), loaders


def _number_of_images(loader: Any, batches: float) -> int:
    """Number of images that the loader gives in this number of batches."""
    try:
        images = len(loader.dataset)
    except TypeError:
        raise TypeError(
            f"{OWNER}: the prediction set must have a length, which {type(loader.dataset).__name__} has not; use a "
            "map-style data set."
        ) from None
    # Lightning replaces the batch sampler of a loader by one of its own, which leaves `batch_size` to the sampler.
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if batch_size is None:
        return images
    return int(min(images, batches * batch_size))


def _fields(dataset: Any, images: int) -> Iterator[list[Any]]:
    """What is known of each image: path and box, or the position alone, and the label."""
    index, labels = _index_of(dataset), getattr(dataset, "labels", None)
    for position in range(images):
        fields: list[Any] = [position]
        if index is not None:
            fields = list(map(str, index.key(position)))
        if isinstance(labels, Tensor):
            fields.append(labels[position].tolist())
        yield fields


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
    """What the data module does to an image, as plain data; empty if it does not say it."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is None:
        return {}
    described = getattr(datamodule, "described_preparation", None)
    return dict(described or datamodule.state_dict())


def _about(trainer: pl.Trainer, module: nn.Module, dataset: Any) -> dict[str, Any]:
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


def _digest_of_weights(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, for a model that was not loaded from a file."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
