"""The images that a command works on: all in a folder, or those that a table lists."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_retrieval.datamodules.images.image_file import image_suffixes
from lightning_retrieval.datamodules.images.image_index import ImageIndex
from lightning_retrieval.datamodules.images.table_columns import parse_boxes, parse_images
from lightning_retrieval.datamodules.images.table_file import read_table


@dataclass(frozen=True)
class ListedImages:
    """Images with their labels as text, where these are known.

    Args:
        root: folder that the paths are relative to.
        index: paths and boxes of the images; its labels and instances have no meaning.
        labels: one for each image, None where it is not known.
    """

    root: Path
    index: ImageIndex
    labels: list[str | None]

    def fields(self) -> Iterator[list[Any]]:
        """Path, label and box of each image: what two lists of the same images have in common."""
        boxes = self.index.boxes
        for position, (path, label) in enumerate(zip(self.index.paths, self.labels)):
            box = None
            if boxes is not None:
                box = boxes[position].tolist()
            yield [path, label, box]


def list_images(owner: str, images: Path, root: Path | None = None) -> ListedImages:
    """The images in a folder, or those of a table.

    Args:
        owner: prefix of error messages.
        images: a folder, or a table as `ImageTable` reads it, of which only the column `image` is required.
        root: folder that the paths of a table are relative to; if None, the one that the table is in.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if there is no image, the table cannot be read, or `root` is given for a folder.
    """
    if not images.is_file():
        if root is not None:
            raise ValueError(f"{owner}: `root` must be given for a table only, got {root} for the folder {images}.")
        return images_in_folder(owner, images)
    table = read_table(images, required=("image",))
    paths = parse_images(table)
    labels: list[str | None] = []
    for label in table.columns.get("label", [""] * len(paths)):
        labels.append(label or None)
    index = ImageIndex(paths, [0] * len(paths), boxes=parse_boxes(table))
    return ListedImages(root or images.parent, index, labels)


def images_in_folder(owner: str, folder: Path) -> ListedImages:
    """The images in a folder at any depth, without labels.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if there is no image in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{owner}: `images` must be a folder of images, got {folder}, which is not a folder.")
    paths = _image_paths(folder)
    if not paths:
        raise ValueError(f"{owner}: `images` must be a folder of images, got {folder}, which holds no image.")
    return ListedImages(folder, ImageIndex(paths, [0] * len(paths)), [None] * len(paths))


def _image_paths(folder: Path) -> list[str]:
    """Sorted paths, relative to the folder, of the files at any depth with a suffix that Pillow opens, in any case."""
    suffixes = image_suffixes()
    found = []
    for parent, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)
