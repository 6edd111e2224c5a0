"""Images of an `ImageIndex`, decoded, cropped and transformed one by one."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_retrieval.checks import check_choice
from lightning_retrieval.datamodules.images.image_index import ImageIndex
from lightning_retrieval.datamodules.item_seeds import SeededIndex

BLACK = (224, 224)  # pixels of the image in place of a batch that cannot be read


class ImageSet(Dataset[dict[str, Any]]):
    """A map-style dataset of dicts with `images`, `labels`, `ids` and, where there are any, `roles` and `instances`.

    Images are decoded to RGB, from 16 bits too, and turned as their EXIF orientation says, then cropped to their box.
    An image that cannot be decoded is refused with its path, or skipped, warned of and counted.

    Args:
        index: paths, labels and so on.
        root: the folder that the paths are relative to.
        transform: from a PIL image to a tensor; its random numbers, if it draws torch's, follow from the item's
            `SeededIndex`.
        on_error: `"raise"` or `"skip"`; a skipped image is missing in its batch. In place of an evaluation batch of
            which no image can be read stands a black one with the role 0: neither query nor gallery.

    Raises:
        ValueError: if `on_error` is unknown; at an item, if the image cannot be decoded and is not to be skipped.
        FileNotFoundError: at an item, if the file is not there and is not to be skipped.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import ImageIndex, ImageSet, reference_transform
        >>> Image.new("L", (300, 260)).save("a.png")
        >>> images = ImageSet(ImageIndex(["a.png"], [7]), ".", reference_transform("plain", train=False))
        >>> images[0]["images"].shape, images[0]["labels"], images[0]["ids"]
        (torch.Size([3, 224, 224]), tensor(7), tensor(0))

    Relations:
        `collate` makes batches, without the skipped images.
    """

    def __init__(
        self,
        index: ImageIndex,
        root: str | Path,
        transform: Callable[[Any], Tensor],
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.index = index
        self.root = Path(root)
        self.transform = transform
        self.on_error = check_choice("ImageSet", "on_error", on_error, ("raise", "skip"))
        self.labels = torch.from_numpy(index.labels)
        self.categories = None if index.categories is None else torch.from_numpy(index.categories)
        self._targets = self.labels if index.levels is None else torch.from_numpy(index.levels)
        of_index = {"roles": index.roles, "instances": index.instances}
        self._for_metrics = {name: torch.from_numpy(part) for name, part in of_index.items() if part is not None}
        self._skipped = torch.zeros(len(index), dtype=torch.bool).share_memory_()  # also what workers have skipped

    @property
    def skipped(self) -> list[str]:
        """Paths of the images that could not be decoded so far, in all workers."""
        return [self.index.paths[i] for i in self._skipped.nonzero()[:, 0].tolist()]

    @staticmethod
    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of the items that could be read; in evaluation, where none could, of one that does not count.

        Raises:
            ValueError: if none could in training, or the images differ in size.
        """
        found = [item for item in items if "skipped" not in item]
        if not found:
            stand_ins = [item for item in items if "images" in item]
            if not stand_ins:
                paths = ", ".join(item["skipped"] for item in items[:3]) + (", ..." if len(items) > 3 else "")
                raise ValueError(
                    f"ImageSet: none of the {len(items)} images of a batch could be read ({paths}); mend or remove "
                    "them first."
                )
            found = [{name: part for name, part in stand_ins[0].items() if name != "skipped"}]
        sizes = {tuple(item["images"].shape) for item in found}
        if len(sizes) > 1:
            raise ValueError(
                f"ImageSet: images of a batch must have one size, got {sorted(sizes)[:3]}; take a transform that "
                "crops, or eval_batch_size=1."
            )
        batch: dict[str, Any] = default_collate(found)
        return batch

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """An image with what is known of it; one that was skipped has its path under `skipped`, see `collate`."""
        place = range(len(self))[index]
        try:
            image = self.read(place)
        except Exception as error:  # decoders promise no kind of their errors
            self._failed(place, error)
            skipped = {"skipped": str(self.root / self.index.paths[place])}
            return skipped if isinstance(index, SeededIndex) else {**self._stand_in(place), **skipped}
        with torch.random.fork_rng(devices=[], enabled=isinstance(index, SeededIndex)):
            if isinstance(index, SeededIndex):
                torch.manual_seed(index.seed)
            item = {"images": self.transform(image), "labels": self._targets[place], "ids": torch.tensor(place)}
        return {**item, **{name: part[place] for name, part in self._for_metrics.items()}}

    def read(self, place: int) -> Image.Image:
        """The image as it is, in RGB and upright, cropped to its box."""
        with Image.open(self.root / self.index.paths[place]) as file:
            image = _to_rgb(ImageOps.exif_transpose(file))
        if self.index.boxes is None:
            return image
        left, top, right, bottom = self.index.boxes[place].tolist()
        box = (max(0, left), max(0, top), min(image.width, right), min(image.height, bottom))
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"its box {[left, top, right, bottom]} lies outside of its {image.width} x {image.height}")
        return image.crop(box)

    def _stand_in(self, place: int) -> dict[str, Any]:
        """A black image that counts nowhere: without a role, and an instance of its own."""
        item = {"images": self.transform(Image.new("RGB", BLACK)), "labels": self._targets[place]}
        item |= {"ids": torch.tensor(place), "roles": torch.tensor(0, dtype=torch.uint8)}
        instances = self._for_metrics.get("instances")
        return item if instances is None else {**item, "instances": instances.max() + 1 + place}

    def _failed(self, place: int, error: Exception) -> None:
        path = self.root / self.index.paths[place]
        if self.on_error == "raise":
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
            raise kind(
                f"ImageSet: cannot read the image {path} ({error}); mend or remove it, or set on_error='skip'."
            ) from error
        if not self._skipped[place]:
            self._skipped[place] = True
            count = int(self._skipped.sum())
            warnings.warn(
                f"ImageSet: skipped {path}, which cannot be read ({error}); skipped so far: {count}.", stacklevel=3
            )


def _to_rgb(image: Image.Image) -> Image.Image:
    """In RGB. Pillow cuts off what is above 255 in images of more than 8 bits; here 16 bits are scaled to 8."""
    if image.mode == "F":
        raise ValueError("it holds floating-point numbers, of which it is not known what is white; save it in 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        low, high = int(values.min()), int(values.max())
        if image.mode == "I" and not (low >= 0 and 255 < high < 2**16):
            raise ValueError(
                f"it holds 32-bit integers from {low} to {high}, of which it is not known what is white; save it in 8 "
                "bits"
            )
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # the same colours, of which Pillow warns otherwise
    return image.convert("RGB")
