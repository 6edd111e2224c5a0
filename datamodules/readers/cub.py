"""CUB-200-2011: birds of 200 species."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import (
    check_not_empty,
    check_unique,
    line_number,
    parse_integers,
    read_rows,
)
from lightning_retrieval.datamodules.images.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

CLASSES, TRAIN_CLASSES = 200, 100


class CUB200(ImageDataModule):
    """Caltech-UCSD Birds 200-2011: 11,788 images of 200 species.

    Species 1 to 100 are for training, 101 to 200 for the test, in which each image is ranked for against all others.
    `train_test_split.txt`, which splits the images of each species for classification, is not looked at.

    Args:
        root: the folder that holds `images.txt`, `image_class_labels.txt` and `images`.
        boxes: crop each image to the bird, as `bounding_boxes.txt` says, to whole pixels that hold the box.
        settings: those of `ImageDataModule`: `transform`, `on_error`, `num_workers` and so on.

    Raises:
        FileNotFoundError: if the lists or the images are not there, saying where they may be.
        ValueError: if a list has lines with missing fields, an id that is no integer, comes twice or is not in the
            other lists, a class beyond 1 to 200, or a box that is no box.

    Example:
        >>> from lightning_retrieval.datamodules import CUB200
        >>> CUB200("CUB_200_2011", boxes=True).splits
        Traceback (most recent call last):
            ...
        FileNotFoundError: CUB200: `root` must be a folder that holds images.txt, got CUB_200_2011, which is not there.

    Relations:
        A few large classes, where `StanfordOnlineProducts` has many small ones.

    Source:
        Wah, Branson, Welinder, Perona and Belongie, The Caltech-UCSD Birds-200-2011 Dataset, Caltech 2011. The split by
        species is that of Oh Song et al., CVPR 2016.
    """

    published_counts = MappingProxyType({"train": [(5_864, 100)], "test": [(5_924, 100)]})

    def __init__(self, root: str | Path, boxes: bool = False, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.boxes = boxes

    def sources(self) -> list[Path]:
        """The lists of images, of their classes and, where wanted, of their boxes."""
        names = ["images.txt", "image_class_labels.txt", *(["bounding_boxes.txt"] if self.boxes else [])]
        return [find_file(type(self).__name__, self.root, name) for name in names]

    def read(self) -> Mapping[str, ImageIndex]:
        """The images in the order of `images.txt`, joined with the other lists by id."""
        who, (of_paths, of_classes, *of_boxes) = type(self).__name__, self.sources()
        find_file(who, self.root, "images")
        paths = self._by_id(of_paths, 2)
        check_unique(who, of_paths, "path", [row[1] for row in paths.values()])
        classes = self._by_id(of_classes, 2)
        boxes = self._by_id(of_boxes[0], 5) if of_boxes else {}
        for path, others in [(of_classes, classes), *((path, boxes) for path in of_boxes)]:
            self._refuse_unmatched(of_paths, paths, path, others)
        for image, row in classes.items():
            if not re.fullmatch("[0-9]{1,9}", row[1]) or not 1 <= int(row[1]) <= CLASSES:
                raise ValueError(
                    f"{who}: the class must be an integer from 1 to {CLASSES}, got {row[1]!r} for image {image} in "
                    f"line {line_number(of_classes, row)} of {of_classes}."
                )
        # macOS leaves files ._name behind, which are no images.
        images = [image for image, row in paths.items() if not row[1].rpartition("/")[2].startswith("._")]
        splits = {}
        for split in ("train", "test"):
            chosen = [image for image in images if (int(classes[image][1]) <= TRAIN_CLASSES) == (split == "train")]
            check_not_empty(who, of_classes, split, chosen)
            labels, names = class_numbers([int(classes[image][1]) for image in chosen])
            splits[split] = ImageIndex(
                [f"images/{paths[image][1]}" for image in chosen],
                labels,
                boxes=[self._box(of_boxes[0], boxes[image]) for image in chosen] if of_boxes else None,
                names=names,
            )
        return splits

    def _by_id(self, path: Path, fields: int) -> dict[int, list[str]]:
        who = type(self).__name__
        rows = list(read_rows(who, path, fields))
        ids = parse_integers(who, path, "image_id", [row[0] for row in rows])
        check_unique(who, path, "image_id", ids)
        return dict(zip(ids, rows))

    def _refuse_unmatched(self, one: Path, of_one: Mapping[int, Any], other: Path, of_other: Mapping[int, Any]) -> None:
        for here, there, odd in ((one, other, of_one.keys() - of_other), (other, one, of_other.keys() - of_one)):
            if odd:
                raise ValueError(
                    f"{type(self).__name__}: each image_id must be in {one.name} and in {other.name}, got {len(odd)} "
                    f"in {here} that are not in {there}, such as {min(odd)}."
                )

    def _box(self, path: Path, row: Sequence[str]) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the whole pixels that hold x, y, width and height."""
        try:
            x, y, width, height = (float(value) for value in row[1:])
            box = math.floor(x), math.floor(y), math.ceil(x + width), math.ceil(y + height)
            if all(abs(side) < 2**31 for side in box):
                return box
        except (ValueError, OverflowError):
            pass
        raise ValueError(
            f"{type(self).__name__}: a box must be four finite numbers, got {' '.join(row[1:])!r} in line "
            f"{line_number(path, row)} of {path}."
        )
