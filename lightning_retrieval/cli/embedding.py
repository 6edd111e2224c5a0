"""Embed image files with the model of a checkpoint; files that cannot be read are reported, not fatal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_retrieval.callbacks.embedding_writer import ShardLoader
from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.cli.options import printable
from lightning_retrieval.datamodules import ImageIndex, ImageSet
from lightning_retrieval.files import file_digest
from lightning_retrieval.models import Preparation
from lightning_retrieval.models.features import image_channels
from lightning_retrieval.preparation.of_checkpoint import PROBED_SIZE, choose_transform
from lightning_retrieval.preparation.serialised import shown_transform
from lightning_retrieval.training.checkpoint_files import find_damage
from lightning_retrieval.training.checkpointed_module import restored_module
from lightning_retrieval.training.chunk_size import is_out_of_memory
from lightning_retrieval.training.module import RetrievalModule

# Load the module of a checkpoint for embedding, without the pretrained weights that its training began with.


def load_checkpoint(owner: str, checkpoint: Path) -> RetrievalModule:
    """Load a module on the CPU.

    Args:
        owner: prefix of error messages.
        checkpoint: the file. Its classes are rebuilt from plain values; nothing is unpickled that could run code.

    Returns:
        The module, whose `preparation` is what its evaluation did to an image, None if the checkpoint does not say it.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, or is not the checkpoint of a `RetrievalModule` that can be rebuilt.
    """
    if not checkpoint.is_file():
        reason = "is a folder" if checkpoint.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{owner}: `checkpoint` must be a file that training wrote, got {checkpoint}, which {reason}."
        )
    damage = find_damage(checkpoint)
    if damage is not None:
        raise ValueError(
            f"{owner}: `checkpoint` must be the checkpoint of a RetrievalModule that can be rebuilt from it, got "
            f"{checkpoint}, which is damaged: {damage}."
        )
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        module: RetrievalModule = restored_module(RetrievalModule, saved)
    except Exception as error:  # unpickling, class paths and constructors raise errors of many kinds
        raise ValueError(
            f"{owner}: `checkpoint` must be the checkpoint of a RetrievalModule that can be rebuilt from it, got "
            f"{checkpoint} ({first_line(error)})."
        ) from None
    return module


@dataclass(frozen=True)
class UnreadableImage:
    """An image file that could not be read, and its position among the images."""

    path: str
    reason: str
    position: int = 0

    def __str__(self) -> str:
        return f"cannot read the image {printable(self.path)} ({self.reason})"


@dataclass(frozen=True)
class EmbeddedBatch:
    """Positions and embeddings of the images of a batch that could be read, and the images that could not."""

    positions: list[int]
    embeddings: Float[Tensor, "rows dim"] | None  # None if no image of the batch could be read
    unreadable: list[UnreadableImage]


class EmbeddedImages:
    """The embeddings of several batches, collected in one tensor that is allocated once.

    Args:
        count: number of images, an upper bound of the number of embeddings.
    """

    def __init__(self, count: int) -> None:
        self.positions: list[int] = []
        self.unreadable: list[UnreadableImage] = []
        self._count = count
        self._embeddings = torch.empty(0, 0)

    def add(self, batch: EmbeddedBatch) -> None:
        """Append a batch."""
        self.unreadable += batch.unreadable
        if batch.embeddings is None:
            return
        if not self.positions:
            self._embeddings = torch.empty(self._count, batch.embeddings.shape[1])
        first = len(self.positions)
        self._embeddings[first : first + len(batch.positions)] = batch.embeddings
        self.positions += batch.positions

    @property
    def embeddings(self) -> Float[Tensor, "rows dim"]:
        """The embeddings in the order of `positions`."""
        return self._embeddings[: len(self.positions)]


@dataclass(frozen=True)
class ImageEmbedder:
    """A model that is ready to embed image files; `load` makes one from a checkpoint.

    `about` describes the model with plain values: its checkpoint, the transform and where the choice of that transform
    came from. An index is saved with it.
    """

    owner: str
    module: RetrievalModule
    transform: Callable[[Any], Tensor]
    about: dict[str, Any]
    batch_size: int
    num_workers: int
    device: str
    normalizes: bool = True  # whether the module gets normalised images; else those of uint8, from a `Preparation`

    @classmethod
    def load(
        cls,
        owner: str,
        checkpoint: Path,
        *,
        transform: str | None,
        recorded: dict[str, Any] | None = None,
        sha256: str | None = None,
        batch_size: int,
        num_workers: int,
        device: str | None,
    ) -> "ImageEmbedder":
        """Load the model of a checkpoint.

        Args:
            owner: prefix of error messages.
            checkpoint: of a `RetrievalModule`.
            transform: the name that the user gave, see `choose_transform`.
            recorded: how the images of an index were prepared; if None, what the checkpoint says.
            sha256: of the checkpoint, if the caller has read it already.
            batch_size: number of images embedded at a time; 1 if images keep their sizes.
            num_workers: number of processes that read images.
            device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.

        Raises:
            FileNotFoundError: if the checkpoint does not exist.
            ValueError: if an argument is invalid, or the transform does not fit the model.
        """
        check_integer(owner, "batch_size", batch_size, least=1)
        check_integer(owner, "num_workers", num_workers, least=0)
        module = load_checkpoint(owner, checkpoint)
        if recorded is None:
            recorded = module.preparation
        channels = image_channels(module)
        prepare, serialised, source = choose_transform(owner, checkpoint, module, transform, recorded, channels)
        about = {
            "checkpoint": str(checkpoint.absolute()),
            "checkpoint_sha256": sha256 or file_digest(checkpoint),
            "preparation": serialised,
            "preparation_from": source,
            "channels": channels,
        }
        if isinstance(prepare, Preparation) and not prepare.gives_one_size:
            batch_size = 1
        if device is None:
            device = default_device()
        module = move_to(owner, module, device).eval()
        return cls(owner, module, prepare, about, batch_size, num_workers, device)

    def embed(
        self,
        root: Path,
        index: ImageIndex,
        *,
        names: Sequence[str] | None = None,
        ranges: Sequence[range] | None = None,
    ) -> Iterator[EmbeddedBatch]:
        """Embed images batch by batch, in their order, with a progress bar if the output is a terminal.

        Args:
            root: folder that the paths are relative to.
            index: the images.
            names: how messages refer to the images; if None, by their paths.
            ranges: positions of the images to embed; no batch reaches from one range into the next. If None, all.

        Raises:
            ValueError: if the model cannot embed images as the transform gives them, or an embedding is not finite.
        """
        if names is None:
            names = index.paths
        if ranges is None:
            ranges = [range(len(index))]
        loader = ShardLoader(self.loader(root, index), ranges, has_length=True)
        count = sum(map(len, ranges))
        # disable=None: no progress bar if the output goes to a file.
        with tqdm(total=count, desc="Embedding", unit="image", disable=None, leave=False) as progress:
            for items in loader:
                progress.update(len(items))
                yield self.embed_items(items, names)

    def loader(self, root: Path, index: ImageIndex) -> DataLoader[Any]:
        """A loader of the images in their order, whose batches `embed_items` embeds."""
        images = ImageSet(index, root, self.transform)
        if isinstance(self.transform, Preparation):
            images = images.in_uint8()
        return DataLoader(
            ReadableImages(images), batch_size=self.batch_size, num_workers=self.num_workers, collate_fn=list
        )

    def dim(self) -> int:
        """The length of an embedding: that of a black image."""
        transform = self.transform
        if isinstance(transform, Preparation):
            transform = transform.to_uint8
        image = transform(Image.new("RGB", PROBED_SIZE))
        return self._embed_batch(self._stack([image])).shape[1]

    def _stack(self, images: Sequence[Any]) -> Tensor:
        """The transformed images as one batch."""
        for image in images:
            if not isinstance(image, Tensor):
                raise ValueError(
                    f"{self.owner}: `transform` must return a tensor (channels, height, width), got "
                    f"{type(image).__name__}; end it with v2.ToImage() and v2.ToDtype(torch.float32, scale=True)."
                )
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise ValueError(
                f"{self.owner}: `transform` must give images of one size, got {sorted(shapes)[:3]}; set "
                "`batch_size` to 1, or use a transform that crops."
            )
        return torch.stack(list(images))

    def embed_items(self, items: Sequence["LoadedImage"], names: Sequence[str]) -> EmbeddedBatch:
        """Embed a batch of the images of `loader`.

        Raises:
            ValueError: if the model cannot embed images as the transform gives them, or an embedding is not finite.
        """
        positions: list[int] = []
        images: list[Tensor] = []
        readable: list[str] = []
        unreadable: list[UnreadableImage] = []
        for item in items:
            if item.image is None:
                unreadable.append(UnreadableImage(names[item.position], item.reason, item.position))
            else:
                positions.append(item.position)
                images.append(item.image)
                readable.append(names[item.position])
        embeddings = None
        if images:
            embeddings = self._embed_batch(self._stack(images))
            self._check_finite(embeddings, readable)
        return EmbeddedBatch(positions, embeddings, unreadable)

    @torch.inference_mode()
    def _embed_batch(self, images: Tensor) -> Tensor:
        try:
            images = images.to(self.device)
            if self.normalizes and isinstance(self.transform, Preparation):
                images = self.transform.normalize(images)
            embeddings: Tensor = self.module.embed(images).float().cpu()
        except (RuntimeError, ValueError, AssertionError) as error:
            if is_out_of_memory(error):
                raise ValueError(
                    f"{self.owner}: `batch_size` must be small enough for the memory of the device, got {len(images)}; "
                    "lower it."
                ) from None
            shown = shown_transform(self.about["preparation"])
            raise ValueError(
                f"{self.owner}: `transform` must give images that the model can embed, got {shown}, which gives shape "
                f"{tuple(images.shape)} ({first_line(error)}); take another."
            ) from None
        return embeddings

    def _check_finite(self, embeddings: Tensor, names: Sequence[str]) -> None:
        for name, finite in zip(names, torch.isfinite(embeddings).all(1).tolist()):
            if not finite:
                raise ValueError(
                    f"{self.owner}: embeddings must be finite, but the model gives NaN or inf for {printable(name)}; "
                    "look at its training."
                )


@dataclass(frozen=True)
class LoadedImage:
    """An image of a data set, or the reason why it could not be read."""

    position: int
    image: Tensor | None
    reason: str = ""


class ReadableImages(Dataset[LoadedImage]):
    """The images of an `ImageSet`; one that cannot be read gives the reason instead of an exception."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> LoadedImage:
        try:
            image = self.images.input_of_transform(position)
        except Exception as error:  # Pillow's readers raise errors of many kinds for damaged files
            return LoadedImage(position, None, _reason(error))
        return LoadedImage(position, self.images.transformed(image))


def _reason(error: Exception) -> str:
    """Why an image could not be read, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    if lines and lines[0]:
        return lines[0]
    return type(error).__name__


def default_device() -> str:
    """`"cuda"` if there is a GPU, else `"cpu"`."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def move_to(owner: str, module: RetrievalModule, device: str) -> RetrievalModule:
    """The module on a device.

    Raises:
        ValueError: if torch cannot use the device.
    """
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{owner}: {unusable_device(device, error)}") from None


def unusable_device(device: str, error: Exception) -> str:
    """A sentence about a device that torch has an error for."""
    return f"`device` must be a device that torch can use here, got {device!r} ({first_line(error)})."
