"""One prediction set on its way to the files: what is known of its images, and the rows that its batches give."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_retrieval.search.embedding_folder import digest_of_files
from lightning_retrieval.search.embedding_shards import ShardRows
from lightning_retrieval.search.files import file_digest
from lightning_retrieval.search.shard_collector import ShardCollector

DISTRACTOR = -1  # the label of images without a class


@runtime_checkable
class PredictionSet(Protocol):
    """What `EmbeddingWriter` needs to know of the images that are embedded."""

    @property
    def about(self) -> dict[str, Any]:
        """What an index of the embeddings should say, with `checkpoint_sha256` and `preparation`."""

    @property
    def dim(self) -> int:
        """The length of an embedding, 0 if it is not known before the first batch."""

    def fields(self, images: int) -> Iterator[Sequence[Any]]:
        """What says of each of the first images what is embedded, such as its path, box and label."""

    def image_files(self, positions: range) -> str:
        """The digest of the files of the images at these positions, see `digest_of_files`; "" if there are none."""

    def begin(self, ranges: Sequence[range]) -> None:
        """Expect the images at these positions."""

    def dim_of(self, outputs: Any) -> int:
        """The length of the embeddings of a batch."""

    def collect(self, outputs: Any, collector: ShardCollector) -> None:
        """Pass the rows of a batch on."""

    def finish(self, collector: ShardCollector) -> None:
        """Pass on what is left after the last batch."""


class LoadedSet:
    """A data set whose batches `predict_step` embeds.

    Args:
        owner: prefix of error messages.
        dataset: an `ImageSet`, which has paths, and may skip images that it cannot read; or any other data set.
        about: see `PredictionSet`.
    """

    dim = 0

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
        """The length of the embeddings; raise unless `predict_step` has returned what fits together."""
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
    """What the data module does to an image, as plain data; empty if it does not say it."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is None:
        return {}
    described = getattr(datamodule, "described_preparation", None)
    return dict(described or datamodule.state_dict())


def _digest_of_weights(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, for a model that was not loaded from a file."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
