"""CUB-200-2011: photographs of 200 bird species."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import Table, enclosing_pixels, number_splits, read_list
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.paths import find_file

SPECIES = {"train": list(range(1, 101)), "test": list(range(101, 201))}


class CUB200(ImageDataModule):
    """Caltech-UCSD Birds 200-2011: 11,788 images of 200 species.

    Species 1 to 100 are for training, 101 to 200 for testing. In the test each image is a query, and all other test
    images are its gallery. `train_test_split.txt`, a split for classification within each species, is not used.

    Args:
        root: the folder that contains `images.txt`, `image_class_labels.txt` and `images`.
        boxes: whether each image is cropped to the bird's box in `bounding_boxes.txt`, rounded outwards to
            pixels.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if a list or the folder of images is missing.
        ValueError: if a line lacks a field; if an id is not an integer or occurs twice, or an image is missing in
            another list; if a class is not from 1 to 200; if a box is empty or not four finite numbers.

    Example:
        >>> from lightning_retrieval.datamodules import CUB200
        >>> CUB200("CUB_200_2011", boxes=True).splits
        Traceback (most recent call last):
            ...
        lightning_retrieval.invalid.MissingFile: CUB200: `root` must be a folder that contains images.txt, got
        CUB_200_2011, which does not exist.

    Relations:
        CUB has few classes with many images each; `StanfordOnlineProducts` has many classes with few images.

    Source:
        Wah, Branson, Welinder, Perona and Belongie, The Caltech-UCSD Birds-200-2011 Dataset, Caltech 2011. Split by
        species: Oh Song et al., CVPR 2016.
    """

    boxes_before_rotation = True
    published_counts = MappingProxyType({"train": [(5_864, 100)], "test": [(5_924, 100)]})

    def __init__(self, root: str | Path, *, boxes: bool = False, **settings: Unpack[ImageSettings]) -> None:
        super().__init__(root, **settings)
        self.boxes = boxes

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images in the order of `images.txt`, joined with the other lists by image id."""
        images = read_list(find_file(self.root, "images.txt"), "image_id path")
        find_file(self.root, "images")
        images.check_unique("image_id")
        images.check_unique("path")
        ids = images.parsed("image_id", int)
        species, boxes = self._joined("image_class_labels.txt", ids, "class_id"), None
        species = species.with_columns(label=species.parsed("class_id", int))
        species.check("label", lambda label: not 1 <= label <= 200, "be a class from 1 to 200")
        if self.boxes:
            boxes = self._joined("bounding_boxes.txt", ids, "x y width height")
        images = images.with_columns(
            path=[f"images/{path}" for path in images["path"]],
            label=species["label"],
            box=None if boxes is None else boxes.parsed("box", enclosing_pixels),
        )
        # macOS writes its metadata to files with names such as ._1.jpg.
        is_image = np.array(["/._" not in path for path in images["path"]])
        kinds = np.array(images["label"])
        return number_splits(
            {
                split: images.chosen(np.flatnonzero(is_image & np.isin(kinds, of_split)))
                for split, of_split in SPECIES.items()
            }
        )

    def _joined(self, name: str, ids: Sequence[int], columns: str) -> Table:
        """The rows of another list in the order of these image ids; several columns become one, `box`."""
        table = read_list(find_file(self.root, name), f"image_id {columns}")
        table.check_unique("image_id")
        row_of = {image: row for row, image in enumerate(table.parsed("image_id", int))}
        missing = [image for image in ids if image not in row_of]
        if missing:
            raise InvalidValue(f"{table.file} must list each image", got=f"no line for the image {missing[0]}")
        sides = list(zip(*(table[column] for column in columns.split())))
        return table.with_columns(box=sides).chosen(np.array([row_of[image] for image in ids]))
