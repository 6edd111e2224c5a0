"""A dataset that decodes, crops and transforms the images of an `ImageIndex` one by one."""

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from lightning_retrieval.arguments import checked
from lightning_retrieval.checks import first_of, short_repr
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.indexed_set import IndexedSet
from lightning_retrieval.datamodules.item_seeds import SeededIndex, seeded_item
from lightning_retrieval.files import TOO_MANY_FILES, is_system_error
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.paths import check_path, cure_of_missing
from lightning_retrieval.preparation.decoding import CurrentTransform, read_image
from lightning_retrieval.preparation.pixels import UNNORMALIZED, Pixels

OnError = Literal["raise", "skip"]
Decoded = TypeVar("Decoded")
Self = TypeVar("Self", bound="ImageSet")

PLACEHOLDER_SIZE = (224, 224)  # size of the black image that replaces an evaluation batch without a readable image


class ImageSet(IndexedSet):
    """A map-style dataset of dicts with `images`, `labels` and `ids`, read from files.

    The dicts also have `roles`, `instances`, `cameras` and `tags`, if the index has them, for evaluation and for rules
    of relevance.
    Images are decoded to RGB (also from 16 bits), rotated as their EXIF orientation requires, and cropped to their box.
    If an image cannot be decoded, an error with its path is raised, or it is skipped with a warning and counted.

    Args:
        index: paths, labels and other annotations of the images.
        root: the folder that the paths are relative to.
        transform: a function from a PIL image to a tensor, such as a `Preparation`. The function may have these
            attributes. `background` is the colour behind transparent pixels (default white). If `takes_pixels` is True,
            the function takes a tensor (3, height, width) of uint8 instead of a PIL image, which is faster for JPEGs.
            `least_size` is a height and a width: a JPEG may be decoded at a reduced scale if neither the image nor its
            box becomes smaller than this size, see `Preparation(reduced_scale=True)`. `short_side` is the length to
            which the function resizes the short side; an image that is too thin for it counts as undecodable. Random
            numbers from the global generators of torch, Python and NumPy, and those of albumentations, are determined
            by the seed that `RetrievalDataLoader` gives each index.
        on_error: `"raise"` or `"skip"`. A skipped image is missing in its batch. An evaluation batch without any
            readable image is replaced by a black image with the role 0, which is neither query nor gallery.
        load_truncated: whether truncated files are decoded as far as possible, with the rest grey. If False, a
            truncated file counts as undecodable.
        boxes_before_rotation: whether boxes are in pixels of the files, before the rotation by EXIF orientation,
            instead of pixels of the upright images.

    Raises:
        TypeError: for an item, if `transform` does not return a tensor.
        ValueError: if `on_error` is unknown; for an item, if the image cannot be decoded and `on_error` is `"raise"`.
        FileNotFoundError: for an item, if the file does not exist and `on_error` is `"raise"`.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import ImageIndex, ImageSet
        >>> from lightning_retrieval.preparation.preparation import Preparation
        >>> Image.new("L", (300, 260)).save("a.png")
        >>> images = ImageSet(ImageIndex(["a.png"], [7]), ".", Preparation(64))
        >>> images[0]["images"].shape, images[0]["labels"], images[0]["ids"]
        (torch.Size([3, 64, 64]), tensor(7), tensor(0))

    Relations:
        Use `collate` as the `collate_fn` of a loader; it drops skipped images from the batch.
    """

    def __init__(
        self,
        index: ImageIndex,
        root: str | Path,
        transform: Callable[[Any], Tensor],
        *,
        on_error: OnError = "raise",
        load_truncated: bool = False,
        boxes_before_rotation: bool = False,
    ) -> None:
        self.index = index
        self.root = check_path("root", root, owner="ImageSet")
        if isinstance(transform, CurrentTransform):
            self.transform = transform
        else:
            with owned_by("ImageSet"):
                self.transform = CurrentTransform(transform)
        self.on_error = checked(self, on_error=on_error)
        self.load_truncated = load_truncated
        self.boxes_before_rotation = boxes_before_rotation
        self._gives_uint8 = False
        self._positions = range(len(index))
        self._skipped = torch.zeros(len(index), dtype=torch.bool).share_memory_()  # the workers share this memory

    @property
    def skipped(self) -> list[str]:
        """Paths of the images that could not be decoded so far, in all workers."""
        return [self.index.paths[position] for position in self._skipped.nonzero()[:, 0].tolist()]

    @staticmethod
    @owned_by("ImageSet")
    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of the readable items. If no item of an evaluation batch is readable, use one black image.

        Raises:
            ValueError: if no item of a training batch could be read, or the images differ in size.
        """
        found = [item for item in items if "skipped" not in item]
        if not found:
            found = [_placeholder_of_batch(items)]
        check_image_sizes(found, "use a transform that crops, or, in evaluation, eval_batch_size=1")
        batch: dict[str, Any] = default_collate(found)
        return batch

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an image with its annotations. The item of a skipped image has an entry `skipped`, see `collate`."""
        position = self._positions[index]
        try:
            image = self.input_of_transform(position)
        except Exception as error:  # the decoders do not document the types of their errors
            self._raise_or_count(position, error)
            return self._skipped_item(position, in_training=isinstance(index, SeededIndex))
        with seeded_item(index):
            images = self.transformed(image)
        return self._item(position, images)

    def in_uint8(self: Self) -> Self:
        """Return a copy of the set that does not normalise its images, but returns them in uint8.

        The transform needs a method `to_uint8`, which a `Preparation` has. The items of the copy then have a further
        entry `unnormalized`, and a data module normalises the batches on the run's device. A transform without this
        method is applied as usual.
        """
        other = copy.copy(self)
        other._gives_uint8 = True
        return other

    def read(self, position: int) -> Image.Image:
        """The image at full scale, before the transform: in RGB, upright, and cropped to its box."""
        return self._decoded(read_image, position, background=self.transform.background)

    def input_of_transform(self, position: int) -> Image.Image | Pixels:
        """Return the image before the transform: pixels (3, height, width) if `takes_pixels`, else a PIL image.

        JPEGs are decoded at a reduced scale if the transform has a `least_size`. If a subclass overrides `read`, the
        result is always that of `read`.
        """
        if type(self).read is not ImageSet.read:
            return self.read(position)
        return self._decoded(self.transform.read, position)

    def _decoded(self, read: Callable[..., Decoded], position: int, **settings: Any) -> Decoded:
        box = None
        if self.index.boxes is not None:
            box = self.index.boxes[position]
        return read(
            self.file(position),
            box,
            load_truncated=self.load_truncated,
            boxes_before_rotation=self.boxes_before_rotation,
            **settings,
        )

    def transformed(self, image: Image.Image | Pixels) -> Any:
        """The transformed image; not normalised if the set was made by `in_uint8`."""
        if self._gives_uint8 and self.transform.to_uint8 is not None:
            return self.transform.to_uint8(image)
        return self.transform.current(image)

    def file(self, position: int) -> Path | BinaryIO:
        """The file of the encoded image."""
        path: Path = self.root / self.index.paths[position]
        return path

    def _item(self, position: int, images: Any) -> dict[str, Any]:
        """An item of the set.

        Args:
            position: position of the image.
            images: what the transform has returned.

        Raises:
            TypeError: if it is no tensor.
        """
        if not isinstance(images, Tensor):
            raise InvalidType(
                "must return a tensor (channels, height, width)",
                "ImageSet",
                "transform",
                got=type(images).__name__,
                cure="end it with v2.ToImage() and v2.ToDtype(torch.float32, scale=True) of torchvision, or "
                "ToTensorV2() of albumentations",
            )
        item = {"images": images}
        if self._gives_uint8 and self.transform.to_uint8 is not None:
            item[UNNORMALIZED] = torch.tensor(True)
        return item | self.annotations(position)

    def _skipped_item(self, position: int, *, in_training: bool) -> dict[str, Any]:
        """Return the item of a skipped image: in training only its path, in evaluation a black image with role 0.

        If the index has instances, the black image forms an instance of its own.
        """
        path = str(self.root / self.index.paths[position])
        if in_training:
            return {"skipped": path}
        item = self._item(position, self.transformed(Image.new("RGB", PLACEHOLDER_SIZE)))
        item |= {"roles": torch.tensor(0, dtype=torch.uint8), "skipped": path}
        if self.index.instances is not None:
            item["instances"] = torch.from_numpy(self.index.instances).max() + 1 + position
        return item

    def _raise_or_count(self, position: int, error: Exception) -> None:
        path = self.root / self.index.paths[position]
        has_too_many = isinstance(error, OSError) and error.errno in TOO_MANY_FILES  # whatever file is opened
        if self.on_error == "raise" or has_too_many:
            kind: type[Exception] = ValueError
            cure = "repair or remove it"
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                kind = FileNotFoundError
                cure = cure_of_missing(path) or "correct `root`"
            elif isinstance(error, PermissionError):
                cure = "let this user read it"
            elif is_system_error(error):
                cure = "look at the disk and the memory of this machine"
            cure += ", or set on_error='skip'"
            if has_too_many:
                cure = "raise the limit of open files (ulimit -n), or lower `num_workers`"
            raise kind(f"ImageSet: cannot read the image {path} ({error}); {cure}.") from error
        if not self._skipped[position]:
            self._skipped[position] = True
            count = int(self._skipped.sum())
            # Without `stacklevel`: the caller is a data loader of torch, whose source would be shown.
            warnings.warn(  # noqa: B028
                f"ImageSet: skipped {path}, which cannot be read ({error}); skipped so far in this set: {count}."
            )


def _placeholder_of_batch(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The first black image of a batch in which no image could be read."""
    for item in items:
        if "images" in item:
            placeholder = dict(item)
            del placeholder["skipped"]
            return placeholder
    paths = first_of([item["skipped"] for item in items], 3)
    rule = f"none of the {len(items)} images of a batch could be read ({paths})"
    raise InvalidValue(rule, cure="repair or remove them first")


def check_image_sizes(items: Any, cure: str) -> None:
    """Raise unless the images of a batch have the same size.

    Args:
        items: items of a dataset: dicts with `images`, tuples that begin with an image, or images; other items are not
            checked.
        cure: the end of the error message.

    Raises:
        ValueError: if sizes differ; the message gives the first image of each size, by its id or else its position in
            the batch.
    """
    found: dict[tuple[int, ...], str] = {}
    for position, item in enumerate(items):
        image, id_ = item, None
        if isinstance(item, Mapping):
            image, id_ = item.get("images"), item.get("ids")
        elif isinstance(item, (tuple, list)) and item:
            image, id_ = item[0], next(iter(item[2:]), None)
        if not isinstance(image, (Tensor, np.ndarray)) or tuple(image.shape) in found:
            continue
        if isinstance(id_, Tensor):
            id_ = id_.tolist()
        which = f"position {position}"
        if id_ is not None:
            which = f"id {short_repr(id_)}"
        found[tuple(image.shape)] = which
    if len(found) > 1:
        sizes = ", ".join(f"{size} of {which}" for size, which in list(found.items())[:3])
        raise InvalidValue("images of a batch must have the same size", got=sizes, cure=cure)
