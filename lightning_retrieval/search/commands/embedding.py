"""Embeds image files with the model of a checkpoint, or with a pretrained backbone, for all commands.

`list_images` lists the images of a folder or of a table, `ImageEmbedder.load` loads the model and the preparation that
its evaluation uses, and `ImageEmbedder.embed` returns the embeddings batch by batch. Unreadable files are reported, not
fatal.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval.checkpoints import (
    checkpoint_digest,
    find_checkpoint,
    find_damage,
    is_checkpoint,
    read_checkpoint,
)
from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.command_line import printable
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.table_file import COMMON_FORMAT, read_table
from lightning_retrieval.datamodules.table_format import TableFormat
from lightning_retrieval.distributed import rank
from lightning_retrieval.files import TOO_MANY_FILES, reason
from lightning_retrieval.first_checks import folder_of_images
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.models.features import image_channels
from lightning_retrieval.models.retrieval_network import RetrievalNetwork
from lightning_retrieval.models.sides import Side, side_of_module
from lightning_retrieval.paths import check_path, cure_of_missing
from lightning_retrieval.preparation.decoding import UNREAD_PICTURES, image_files, shown_suffixes
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import shown_transform
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.commands.of_backbone import (
    BACKBONE,
    load_backbone,
    rebuild_backbone,
    record_of_backbone,
    shown_backbone,
)
from lightning_retrieval.search.commands.of_checkpoint import PROBED_SIZE, choose_transform, print_guess
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.shared_folder import RangeBatches
from lightning_retrieval.search.store.rows import Rows
from lightning_retrieval.training.checkpoint_files import network_digest, restored_network
from lightning_retrieval.training.chunk_size import is_out_of_memory

NETWORK = "network_sha256"  # entry of the metadata of embeddings: the digest of the network of candidates


@dataclass(frozen=True)
class ListedImages:
    """A list of images, with their labels as text if known.

    Args:
        root: folder that the paths are relative to.
        index: paths and boxes of the images; the labels and instances of `index` have no meaning.
        labels: label of each image; None if the label is unknown.
        names: names of the images in messages; if None, their paths.
    """

    root: Path
    index: ImageIndex
    labels: Sequence[str | None]
    names: Sequence[str] | None = None

    @property
    def paths(self) -> Sequence[str]:
        """The paths of the images."""
        return self.index.paths

    def files(self, positions: range) -> Iterator[Path]:
        """The files of some of the images."""
        for position in positions:
            yield self.root / self.paths[position]

    def fields(self) -> Iterator[list[Any]]:
        """Path, label and box of each image, which identify the list."""
        boxes = self.index.boxes
        for position, (path, label) in enumerate(zip(self.index.paths, self.labels)):
            box = None
            if boxes is not None:
                box = boxes[position].tolist()
            yield [path, label, box]

    def name(self, position: int) -> str:
        """The name of an image in messages."""
        if self.names is not None:
            return self.names[position]
        path: str = self.index.paths[position]
        return path


def list_images(images: Path, root: Path | None = None, table_format: TableFormat = COMMON_FORMAT) -> ListedImages:
    """List the images in a folder or in a table.

    Args:
        images: a folder, or a table in the format of `ImageTable`; only its column `image` is required.
        root: folder that the paths of a table are relative to; if None, the folder of the table.
        table_format: the names of a table's columns, and the separator of its fields.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if there is no image, the table cannot be read, or `root` or a format is given for a folder.
    """
    images = check_path("images", images, exists=True)
    if root is not None:
        root = check_path("root", root, exists=True)
    if not images.is_file():
        check_table_given(images, "images", table_format, root)
        return images_in_folder(images)
    from lightning_retrieval.datamodules.image_table import boxes_of, check_values, with_paths  # needs Lightning

    root = root or images.parent
    table = with_paths(read_table(images, required=("image",), table_format=table_format), root)
    paths = table["path"]
    if not any((root / path).is_file() for path in paths):
        got = f"{images}, of whose {len(paths):,} images none is in {root}, such as {paths[0]}"
        cure = cure_of_missing(root / paths[0]) or "give the folder that the paths are relative to as `root`"
        raise InvalidValue("must be a table of images that exist", argument="images", got=got, cure=cure)
    labels: list[str | None] = [None] * len(paths)
    if "label" in table:
        check_values(table, "label")
        labels = [label or None for label in table["label"]]
    index = ImageIndex(paths, [0] * len(paths), boxes=boxes_of(table))
    return ListedImages(root, index, labels)


def check_table_given(given: Path | None, argument: str, table_format: TableFormat, root: Path | None = None) -> None:
    """Raise if arguments say how a table is read, and there is none.

    Args:
        given: the argument that may be a table, but is a folder or None.
        argument: its name.
        table_format: how the table would be read.
        root: folder that the paths of the table would be relative to.
    """
    for name, value in {**vars(table_format), "root": root}.items():
        if value not in (None, ","):
            got = f"{value} without `{argument}`"
            if given is not None:
                got = f"{value} for the folder {given}"
            raise InvalidValue("must be given for a table only", argument=name, got=got)


def images_in_folder(folder: Path) -> ListedImages:
    """The images in a folder at any depth, without labels; see `image_files`.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if there is no image in it.
        OSError: if a folder in it cannot be opened.
    """
    folder = folder_of_images(folder)
    found = image_files(folder)
    if not found.paths:
        got = f"{folder}, which holds no image"
        if found.others:
            got += f", but other files: {shown_suffixes(found.others)}"
        raise InvalidValue("must be a folder of images", argument="images", got=got)
    pictures = [path for path in found.others if Path(path).suffix.lower() in UNREAD_PICTURES]
    if pictures and rank() == 0:
        shown = printable(shown_suffixes(pictures))
        print(f"Skipped {len(pictures):,} pictures that are not decoded: {shown}.", file=sys.stderr)
    count = len(found.paths)
    return ListedImages(folder, ImageIndex(found.paths, [0] * count), [None] * count)


@dataclass(frozen=True)
class LoadedModel:
    """A model on the CPU, and what embeddings record of it.

    Args:
        module: a `RetrievalNetwork` or `RetrievalModule`.
        about: plain values: the path of the checkpoint as `checkpoint`, or the arguments of a pretrained backbone as
            `backbone`; and `checkpoint_sha256`, the digest of the checkpoint or of the network.
    """

    module: Any
    about: dict[str, Any]

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "LoadedModel":
        """The model of an existing checkpoint."""
        about = {"checkpoint": checkpoint.absolute().as_posix(), "checkpoint_sha256": checkpoint_digest(checkpoint)}
        return cls(load_checkpoint(checkpoint), about)

    @classmethod
    def of_backbone(cls, network: RetrievalNetwork) -> "LoadedModel":
        """A pretrained backbone."""
        sha256 = network_digest(network)
        return cls(network, {BACKBONE: record_of_backbone(network), "checkpoint_sha256": sha256, NETWORK: sha256})


def load_model(given: Path | PretrainedBackbone) -> LoadedModel:
    """Load the model that a user has given.

    Args:
        given: checkpoint of a `RetrievalModule`, or the folder of its runs, see `find_checkpoint`; or a pretrained
            backbone, whose weights may be downloaded.

    Raises:
        FileNotFoundError: if the checkpoint or the file of weights does not exist.
        ValueError: if the checkpoint cannot be rebuilt, or there is no such backbone.
    """
    if isinstance(given, PretrainedBackbone):
        return LoadedModel.of_backbone(load_backbone(given))
    return LoadedModel.of_checkpoint(find_checkpoint(given))


def shown_model(about: Mapping[str, Any]) -> str:
    """The model that embeddings record, for messages."""
    if BACKBONE in about:
        return shown_backbone(about[BACKBONE])
    return str(about.get("checkpoint"))


def recorded_model(about: Mapping[str, Any], given: Path | PretrainedBackbone | None, *, made: str) -> LoadedModel:
    """The model that embeddings were made with: the given one, else the one that they record.

    Args:
        about: metadata of the embeddings.
        given: as for `load_model`. A backbone without settings of its preparation is built for the recorded ones.
        made: what was made with the model, with a verb, for error messages.

    Raises:
        FileNotFoundError: if the recorded checkpoint does not exist.
        ValueError: if the model has another network, or images were prepared otherwise.
    """
    if isinstance(given, PretrainedBackbone) or (given is None and BACKBONE in about):
        return _recorded_backbone(about, given, made=made)
    if given is not None:
        checkpoint = find_checkpoint(given)
    else:
        checkpoint = Path(str(about.get("checkpoint")))
        if not is_checkpoint(checkpoint):
            rule = f"must be given, because the checkpoint that the {made} made with is no longer at {checkpoint}"
            raise MissingFile(rule, argument="checkpoint")
    loaded = LoadedModel.of_checkpoint(checkpoint)
    if loaded.about["checkpoint_sha256"] == about.get("checkpoint_sha256"):
        return loaded
    prepared = json.loads(json.dumps(loaded.module.preparation))  # in the form that `about` has in a file
    is_prepared_alike = prepared in (None, about.get("preparation"))
    network = {**loaded.about, NETWORK: network_digest(loaded.module)}
    if not (is_prepared_alike and is_same_network(about, network)):
        raise _another_model("checkpoint", checkpoint.absolute(), made)
    return loaded


def _recorded_backbone(about: Mapping[str, Any], given: Any, *, made: str) -> LoadedModel:
    """The pretrained backbone that embeddings were made with, see `recorded_model`."""
    record = about.get(BACKBONE)
    if given is None:
        network = rebuild_backbone(record, made=made)
    else:
        network = load_backbone(given.prepared_as((record or {}).get("preparation")))
    loaded = LoadedModel.of_backbone(network)
    if not is_same_network(about, loaded.about):
        raise _another_model(BACKBONE, shown_backbone(loaded.about[BACKBONE]), made)
    return loaded


def _another_model(argument: str, got: object, made: str) -> InvalidValue:
    """The error for a model that is not the one that embeddings were made with."""
    rule = f"must be the one that the {made} made with, because embeddings of different models cannot be compared"
    cure = f"give the right {argument}, or embed the images again"
    return InvalidValue(rule, argument=argument, got=f"another, {got}", cure=cure)


def is_same_network(earlier: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether embeddings come from the same network, although perhaps from another checkpoint of it.

    Embeddings without a recorded network are compared with their checkpoint, if it still exists and can be rebuilt.

    Args:
        earlier: metadata of existing embeddings.
        about: metadata of an `ImageEmbedder`.
    """
    if earlier.get("checkpoint_sha256") == about.get("checkpoint_sha256"):
        return True
    recorded = earlier.get(NETWORK)
    file = Path(str(earlier.get("checkpoint")))
    if recorded is None and is_checkpoint(file) and checkpoint_digest(file) == earlier.get("checkpoint_sha256"):
        with suppress(ValueError):
            recorded = network_digest(load_checkpoint(file))
    return recorded is not None and recorded == about.get(NETWORK)


def load_checkpoint(checkpoint: Path) -> Any:
    """Load a network on the CPU, without downloading the pretrained weights that its training began with.

    Args:
        checkpoint: path of an existing file. Its objects are rebuilt from plain values, so loading runs no code of the
            file.

    Returns:
        The `RetrievalNetwork` or, for the checkpoint of a subclass, the `RetrievalModule`. Its attribute `preparation`
            is the preparation of images in its evaluation; None if the checkpoint does not record the preparation. Its
            attribute `steps_of_training` is 0 if the network is as it was built.

    Raises:
        ValueError: if the file is damaged, or is not the checkpoint of a `RetrievalModule` that can be rebuilt.
    """
    rule = "must be the checkpoint of a RetrievalModule that can be rebuilt from it"
    damage = find_damage(checkpoint)
    if damage is not None:
        raise InvalidValue(rule, argument="checkpoint", got=f"{checkpoint}, which is damaged: {damage}")
    try:
        saved = read_checkpoint(checkpoint)
        network: Any = restored_network(saved)
        if network is None:
            network = _restored_module(saved)
    except Exception as error:  # unpickling, class paths and constructors raise errors of many types
        raise InvalidValue(rule, argument="checkpoint", got=f"{checkpoint} ({first_line(error)})") from None
    network.steps_of_training = int(saved.get("global_step") or 0)
    return network


def _restored_module(saved: Any) -> Any:
    """The whole `RetrievalModule` of a checkpoint, or the subclass that LightningCLI has recorded; needs Lightning."""
    from lightning_retrieval.training.checkpointed_module import restored_module
    from lightning_retrieval.training.module import RetrievalModule

    return restored_module(RetrievalModule, saved)


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
    """The positions and embeddings of the readable images of a batch, and its unreadable images."""

    positions: list[int]
    embeddings: Float[Tensor, "rows dim"] | None  # None if no image of the batch could be read
    unreadable: list[UnreadableImage]


@dataclass(frozen=True)
class EmbeddedImages:
    """The embeddings of all readable images of a list, and the unreadable images.

    Args:
        positions: positions of the embedded images in the list.
        embeddings: one row for each position, in memory or in files.
        unreadable: the images of the list that could not be read.
    """

    positions: Int[Tensor, " rows"]
    embeddings: Rows
    unreadable: list[UnreadableImage]


@dataclass(frozen=True)
class LoadedImage:
    """An image of a data set, or the reason why it could not be read."""

    position: int
    image: Tensor | None
    reason: str = ""


class ReadableImages(Dataset[LoadedImage]):
    """The images of an `ImageSet`; the item of an unreadable image holds the reason, and no error is raised."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> LoadedImage:
        try:
            image = self.images.input_of_transform(position)
        except Exception as error:  # Pillow's readers raise errors of many kinds for damaged files
            if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
                raise  # whatever file is opened, so it says nothing about this image
            return LoadedImage(position, None, reason(error))
        return LoadedImage(position, self.images.transformed(image))


@dataclass(frozen=True)
class ImageEmbedder:
    """A model that is ready to embed image files; `load` makes it from a checkpoint or a pretrained backbone.

    `about` describes the model with plain values: its checkpoint or backbone, its transform, and where the choice of
    the transform came from (see `choose_transform`). It is saved with an index.
    """

    module: Any  # a `RetrievalNetwork` or `RetrievalModule`
    transform: Callable[[Any], Tensor]
    about: dict[str, Any]
    batch_size: int
    num_workers: int
    device: str
    normalizes: bool = True  # whether the module gets normalised images; if False, it gets uint8 images
    side: Side = "candidates"

    @classmethod
    def load(
        cls,
        model: Path | PretrainedBackbone | LoadedModel,
        *,
        transform: str | None,
        recorded: dict[str, Any] | None = None,
        batch_size: int,
        num_workers: int,
        device: str | None,
        side: Side = "candidates",
    ) -> "ImageEmbedder":
        """Load a model.

        Args:
            model: a loaded model, or what `load_model` loads.
            transform: name of the transform that the user gave, see `choose_transform`.
            recorded: the preparation recorded in an index; if None, or if queries have their own network, the
                preparation recorded in the checkpoint.
            batch_size: number of images embedded at a time; the number is 1 if images keep their sizes.
            num_workers: number of processes that read images.
            device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.
            side: what the images are, which decides by which network they are embedded. Images are embedded as
                candidates if the network of queries embeds texts.

        Raises:
            FileNotFoundError: if the checkpoint does not exist.
            ValueError: if an argument is invalid, or the transform does not fit the model.
        """
        check_integer("batch_size", batch_size, least=1)
        if not isinstance(model, LoadedModel):
            model = load_model(model)
        module = model.module
        if side_of_module(module, "queries").tokenizer is not None:
            side = "candidates"
        of_side = side_of_module(module, side)
        if recorded is None or of_side != side_of_module(module, "candidates"):
            recorded = of_side.recorded
        channels = image_channels(module)
        if module.query_embedder is not None:
            channels = image_channels(of_side.embedder)
        prepare, serialised, source = choose_transform(
            f"the model of {shown_model(model.about)}", of_side, transform, recorded, channels
        )
        if BACKBONE in model.about and source == "model":
            source = BACKBONE
        about = {**model.about, "preparation": serialised, "preparation_from": source, "channels": channels}
        if module.steps_of_training > 0:
            print_guess(about)
        if isinstance(prepare, Preparation) and not prepare.gives_one_size:
            batch_size = 1
        if device is None:
            device = default_device()
        return cls(module.eval(), prepare, about, batch_size, num_workers, "cpu", side=side).on(device)

    def description(self) -> dict[str, Any]:
        """What is stored with embeddings: `about`, and the digest of the network, for which all weights are read."""
        if NETWORK in self.about:
            return self.about
        return {**self.about, NETWORK: network_digest(self.module)}

    def on(self, device: str) -> "ImageEmbedder":
        """The same model on another device.

        Raises:
            ValueError: if torch cannot use the device.
        """
        try:
            module = self.module.to(device)
        except (RuntimeError, AssertionError) as error:
            raise unusable_device(device, error) from None
        return replace(self, module=module, device=device)

    def embed(self, listed: ListedImages, groups: Sequence[Sequence[int]] | None = None) -> Iterator[EmbeddedBatch]:
        """Embed images batch by batch, in order, and show the progress.

        Args:
            listed: the images.
            groups: positions of the images to embed; all images of a batch are of one group. If None, all images are
                embedded.

        Raises:
            ValueError: if the model cannot embed the output of the transform, or an embedding is not finite.
        """
        if groups is None:
            groups = [range(len(listed.index))]
        images = ImageSet(listed.index, listed.root, self.transform)
        if isinstance(self.transform, Preparation):
            images = images.in_uint8()
        batches = RangeBatches(groups, self.batch_size)
        loader = DataLoader(
            ReadableImages(images), batch_sampler=batches, num_workers=self.num_workers, collate_fn=list
        )
        count = sum(map(len, groups))
        with Progress("Embedding", total=count, units="images", hidden=rank() > 0) as progress:
            for items in loader:
                progress.update(len(items))
                yield self.embed_items(items, listed)

    def embed_all(self, listed: ListedImages, positions: Sequence[int] | None = None) -> EmbeddedImages:
        """Embed images into one tensor, which is allocated once.

        Args:
            listed: the images.
            positions: positions of the images to embed; if None, all images are embedded.

        Raises:
            ValueError: as for `embed`.
        """
        if positions is None:
            positions = range(len(listed.index))
        embedded: list[int] = []
        unreadable: list[UnreadableImage] = []
        embeddings = torch.empty(0, 0)
        for batch in self.embed(listed, [positions]):
            unreadable += batch.unreadable
            if batch.embeddings is None:
                continue
            if not embedded:
                embeddings = torch.empty(len(positions), batch.embeddings.shape[1])
            begin = len(embedded)
            embedded += batch.positions
            embeddings[begin : len(embedded)] = batch.embeddings
        return EmbeddedImages(torch.tensor(embedded, dtype=torch.int64), embeddings[: len(embedded)], unreadable)

    def dim(self) -> int:
        """The dimension of an embedding, found by embedding a black image."""
        transform = self.transform
        if isinstance(transform, Preparation):
            transform = transform.to_uint8
        image = transform(Image.new("RGB", PROBED_SIZE))
        return self._embed_batch(self._stack([image])).shape[1]

    def _stack(self, images: Sequence[Any]) -> Tensor:
        """The transformed images as one batch."""
        for image in images:
            if not isinstance(image, Tensor):
                rule = "must return a tensor (channels, height, width)"
                cure = "end it with v2.ToImage() and v2.ToDtype(torch.float32, scale=True)"
                raise InvalidValue(rule, argument="transform", got=type(image).__name__, cure=cure)
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            cure = "set `batch_size` to 1, or use a transform that crops"
            raise InvalidValue("must give images of one size", argument="transform", got=sorted(shapes)[:3], cure=cure)
        return torch.stack(list(images))

    def embed_items(self, items: Sequence[LoadedImage], listed: ListedImages) -> EmbeddedBatch:
        """Embed a batch of loaded images.

        Raises:
            ValueError: as for `embed`.
        """
        positions: list[int] = []
        images: list[Tensor] = []
        unreadable: list[UnreadableImage] = []
        for item in items:
            if item.image is None:
                unreadable.append(UnreadableImage(listed.name(item.position), item.reason, item.position))
            else:
                positions.append(item.position)
                images.append(item.image)
        embeddings = None
        if images:
            embeddings = self._embed_batch(self._stack(images))
            _check_finite(embeddings, [listed.name(position) for position in positions])
        return EmbeddedBatch(positions, embeddings, unreadable)

    @property
    def takes_texts(self) -> bool:
        """Whether a query may be a text."""
        return side_of_module(self.module, "queries").tokenizer is not None

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> Float[Tensor, "rows dim"]:
        """Embed texts as queries.

        Raises:
            ValueError: if the network of queries does not embed texts, or an embedding is not finite.
        """
        tokenizer = side_of_module(self.module, "queries").tokenizer
        if tokenizer is None:
            rule = "must be given for a checkpoint whose network of queries embeds texts"
            got = f"{shown_model(self.about)}, whose queries are images"
            raise InvalidValue(rule, argument="text", got=got, cure="give images, or train with a TextEmbedder")
        rows = []
        for begin in range(0, len(texts), self.batch_size):
            tokens = tokenizer(texts[begin : begin + self.batch_size]).to(self.device)
            rows.append(self.module.embed_queries(tokens).float().cpu())
        embeddings = torch.cat(rows)
        _check_finite(embeddings, texts)
        return embeddings

    @torch.inference_mode()
    def _embed_batch(self, images: Tensor) -> Tensor:
        try:
            images = images.to(self.device)
            if self.normalizes and isinstance(self.transform, Preparation):
                images = self.transform.normalize(images)
            embed: Callable[[Tensor], Tensor] = self.module.embed
            if self.side == "queries":
                embed = self.module.embed_queries
            embeddings: Tensor = embed(images).float().cpu()
        except (RuntimeError, ValueError, AssertionError) as error:
            if is_out_of_memory(error):
                rule = "must be small enough for the memory of the device"
                raise InvalidValue(rule, argument="batch_size", got=len(images), cure="lower it") from None
            shown = shown_transform(self.about["preparation"])
            raise InvalidValue(
                f"the model must embed the images that {shown} gives, of shape {tuple(images.shape)} and "
                f"{images.dtype}, but raises {type(error).__name__} ({first_line(error)})",
                cure="if it is made for other images, give another `transform`",
            ) from error
        return embeddings


def _check_finite(embeddings: Float[Tensor, "rows dim"], names: Sequence[str]) -> None:
    """Raise if a model gives NaN or inf for one of these images or texts."""
    is_finite = embeddings.isfinite().all(1)
    if not is_finite.all():
        first = printable(names[int(is_finite.int().argmin())])
        rule = f"embeddings must be finite, but the model gives NaN or inf for {first}"
        raise InvalidValue(rule, cure="look at its training")


def default_device() -> str:
    """`"cuda"` if there is a GPU, else `"cpu"`."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def unusable_device(device: str, error: Exception) -> InvalidValue:
    """The error for a device for which torch raised an error."""
    shown = f"{device!r} ({first_line(error)})"
    return InvalidValue("must be a device that torch can use here", argument="device", got=shown)
