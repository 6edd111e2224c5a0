"""Images of an `ImageIndex`, decoded, cropped and transformed one by one."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_retrieval.checks import check_choice
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.loader import SeededIndex


class ImageSet(Dataset[dict[str, Any]]):
    """A map-style dataset of dicts with `images`, `labels`, `ids` and, where there are any, `roles` and `instances`.

    Images are decoded to RGB and turned as their EXIF orientation says, then cropped to their box. An image that
    cannot be decoded is refused with its path, or skipped, warned of and counted.

    Args:
        index: paths, labels and so on.
        root: the folder that the paths are relative to.
        transform: from a PIL image to a tensor; its random numbers, if it draws torch's, follow from the item's
            `SeededIndex`.
        on_error: `"raise"` or `"skip"`; a skipped image is missing in its batch.

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
    def collate(items: list[dict[str, Any] | None]) -> dict[str, Any]:
        """A batch of the items that could be read.

        Raises:
            ValueError: if none could, or the images differ in size.
        """
        found = [item for item in items if item is not None]
        if not found:
            raise ValueError(
                f"ImageSet: none of the {len(items)} images of a batch could be read; mend the files first."
            )
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

    def __getitem__(self, index: int) -> dict[str, Any] | None:  # type: ignore[override]
        place = range(len(self))[index]
        try:
            image = self.read(place)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            self._failed(place, error)
            return None
        with torch.random.fork_rng(devices=[], enabled=isinstance(index, SeededIndex)):
            if isinstance(index, SeededIndex):
                torch.manual_seed(index.seed)
            item = {"images": self.transform(image), "labels": self._targets[place], "ids": torch.tensor(place)}
        return {**item, **{name: part[place] for name, part in self._for_metrics.items()}}

    def read(self, place: int) -> Image.Image:
        """The image as it is, in RGB and upright, cropped to its box."""
        with Image.open(self.root / self.index.paths[place]) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
        if self.index.boxes is None:
            return image
        left, top, right, bottom = self.index.boxes[place].tolist()
        box = (max(0, left), max(0, top), min(image.width, right), min(image.height, bottom))
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"its box {[left, top, right, bottom]} lies outside of its {image.width} x {image.height}")
        return image.crop(box)

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
