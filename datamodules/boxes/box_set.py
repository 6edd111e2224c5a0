"""A dataset of images with boxes, in the form that torchvision's detectors take."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional

from lightning_retrieval.checks import check_bool, check_instance, check_path
from lightning_retrieval.datamodules.boxes.box_index import BoxIndex
from lightning_retrieval.datamodules.item_seeds import item_generator
from lightning_retrieval.models.colours import to_rgb

Item = tuple[Tensor, dict[str, Tensor]]


class BoxSet(Dataset[Item]):
    """A map-style dataset of pairs of an image and its target, as torchvision's detectors take them.

    The image is a float tensor (3, height, width) from 0 to 1. The target is a dict of `boxes` (objects, 4) in pixels,
    left, top, right and bottom, `labels` (objects,), `difficult` (objects,), and the number `image_id`, which is the
    image's position in the index. Images are not rotated by their EXIF orientation, since boxes refer to the pixels of
    the file; a box is cut off at the edges of its image.

    Args:
        index: the images and their objects.
        root: the folder that the paths are relative to.
        train: whether difficult objects are left out, and half of the images are flipped. Which ones is determined by
            the seed that `RetrievalDataLoader` gives each index.

    Raises:
        TypeError: if `train` is not a bool.
        ValueError: for an item, if the image cannot be decoded, or a box is outside of it.
        FileNotFoundError: for an item, if the file does not exist.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import BoxIndex, BoxSet
        >>> Image.new("RGB", (20, 10)).save("a.png")
        >>> image, target = BoxSet(BoxIndex(["a.png"], [([[2, 3, 9, 8]], [1], [False])], class_names=["cat"]), ".")[0]
        >>> image.shape, target["boxes"].tolist(), target["labels"]
        (torch.Size([3, 10, 20]), [[2.0, 3.0, 9.0, 8.0]], tensor([1]))

    Relations:
        `collate_boxes` makes a batch of items: a list of images and a list of targets.
    """

    def __init__(self, index: BoxIndex, root: str | Path, *, train: bool = False) -> None:
        check_instance("BoxSet", "index", index, BoxIndex)
        self.index = index
        self.root = check_path("BoxSet", "root", root)
        self.train = check_bool("BoxSet", "train", train)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Item:
        image = self._read(position)
        objects = self.index.objects(position)
        boxes, labels = torch.tensor(objects.boxes), torch.tensor(objects.labels)
        difficult = torch.tensor(objects.difficult)
        height, width = image.shape[-2:]
        boxes = self._inside(position, boxes, height, width)
        if self.train:
            boxes, labels, difficult = boxes[~difficult], labels[~difficult], difficult[~difficult]
            if bool(torch.rand((), generator=item_generator(position)) < 0.5):
                image = image.flip(-1)
                boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
        target = {"boxes": boxes, "labels": labels, "difficult": difficult, "image_id": torch.tensor(int(position))}
        return image, target

    def _read(self, position: int) -> Tensor:
        path = self.root / self.index.paths[position]
        try:
            with Image.open(path) as file:
                pixels = functional.pil_to_tensor(to_rgb(file))
        except FileNotFoundError:
            raise FileNotFoundError(f"BoxSet: cannot read the image {path}, which does not exist.") from None
        except Exception as error:  # Pillow raises errors of many kinds
            raise ValueError(f"BoxSet: cannot read the image {path} ({error}); repair or remove it.") from error
        image: Tensor = functional.to_dtype(pixels, torch.float32, scale=True)
        return image

    def _inside(self, position: int, boxes: Tensor, height: int, width: int) -> Tensor:
        """The boxes, cut off at the edges of the image."""
        inside = boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
        empty = (inside[:, 0] >= inside[:, 2]) | (inside[:, 1] >= inside[:, 3])
        if bool(empty.any()):
            outside = boxes[empty][0].tolist()
            raise ValueError(
                f"BoxSet: boxes must be inside of their image, got {outside} in {self.index.paths[position]}, which "
                f"has {width} x {height} pixels; correct the annotation."
            )
        return inside


def collate_boxes(items: list[Item]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A batch: a list of images, whose sizes may differ, and a list of targets."""
    images, targets = zip(*items)
    return list(images), list(targets)
