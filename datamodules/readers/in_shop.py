"""DeepFashion's In-Shop Clothes Retrieval: clothing items that a shop shows from several sides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import (
    check_not_empty,
    check_unique,
    line_number,
    parse_integers,
    read_lines,
    read_rows,
)
from lightning_retrieval.datamodules.images.image_index import ROLES, ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

PARTITION, BOXES = "list_eval_partition.txt", "list_bbox_inshop.txt"
PARTITION_HEADER = ("image_name", "item_id", "evaluation_status")
BOXES_HEADER = ("image_name", "clothes_type", "pose_type", "x_1", "y_1", "x_2", "y_2")
LIST_FOLDERS = ("", "Eval/", "Anno/")  # where the releases keep their lists
STATUSES = {"train": ("train",), "test": ("query", "gallery")}


class _Row(NamedTuple):
    image: str
    item: str
    status: str  # "train", "query" or "gallery"


class InShop(ImageDataModule):
    """In-Shop Clothes Retrieval: 52,712 images of 7,982 items.

    The test set has roles: the gallery of each query consists of other images of the test items. The splits are those
    of `list_eval_partition.txt`; the categories are `gender/kind`, taken from the folders of the images.

    Args:
        root: the folder that contains `list_eval_partition.txt`, directly or in `Eval` or `Anno`, and the images in
            `img` or `Img/img`.
        boxes: whether each image is cropped to the clothing item's box in `list_bbox_inshop.txt`.
        high_res: whether the images are read from `img_highres` instead of `img`, which has them in 256 x 256 pixels.
            The boxes refer to the latter.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`, `on_error`,
            `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`,
            `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`, `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the folder of images is missing; the message suggests where it may be.
        ValueError: if both `boxes` and `high_res` are set; if the number of images in a list differs from its first
            line, the header differs, a line lacks a field, an image occurs twice, a status is unknown, or an image has
            no box.

    Example:
        >>> from lightning_retrieval.datamodules import InShop
        >>> InShop("In-shop", num_workers=4).splits
        Traceback (most recent call last):
            ...
        FileNotFoundError: InShop: `root` must be a folder that contains list_eval_partition.txt or
        Eval/list_eval_partition.txt or Anno/list_eval_partition.txt, got In-shop, which does not exist.

    Relations:
        Queries and gallery have no image in common, unlike in `StanfordOnlineProducts`.

    Source:
        Liu, Luo, Qiu, Wang and Tang, DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich
        Annotations, CVPR 2016.
    """

    published_counts = MappingProxyType(
        {
            "train": [(25_882, 3_997)],
            "test": [(26_830, 3_985)],
            "query": [(14_218, 3_985)],
            "gallery": [(12_612, 3_985)],
        }
    )

    def __init__(self, root: str | Path, *, boxes: bool = False, high_res: bool = False, **settings: Any) -> None:
        super().__init__(root, **settings)
        if boxes and high_res:
            raise ValueError(
                f"{type(self).__name__}: `boxes` and `high_res` must not both be True, since the boxes are in pixels of "
                "the images of 256 x 256; set one of them."
            )
        self.boxes = boxes
        self.high_res = high_res

    def sources(self) -> list[Path]:
        """The partition and, if `boxes`, the list of boxes."""
        found = [self._list(PARTITION)]
        if self.boxes:
            found.append(self._list(BOXES))
        return found

    def read(self) -> Mapping[str, ImageIndex]:
        """The images of the partition, in its order."""
        self.sources()  # raises if one is missing
        path = self._list(PARTITION)
        rows = self._read_partition(path)
        paths = self._image_paths(rows)
        categories, _ = class_numbers(["/".join(row.image.split("/")[1:3]) for row in rows])
        boxes = self._read_boxes(rows) if self.boxes else None
        splits = {}
        for split, statuses in STATUSES.items():
            positions = self._positions(path, rows, statuses)
            labels, names = class_numbers([rows[position].item for position in positions])
            splits[split] = ImageIndex(
                [paths[position] for position in positions],
                labels,
                categories=categories[positions],
                boxes=None if boxes is None else boxes[positions],
                roles=None if split == "train" else [ROLES[rows[position].status] for position in positions],
                names=names,
            )
        return splits

    def check(self) -> DataReport:
        """Count the images and classes, also of queries and gallery, and look for missing files."""
        report = super().check()
        test = self.splits["test"]
        for status in STATUSES["test"]:
            labels = test.labels[test.roles == ROLES[status]]
            counts = (len(labels), len(np.unique(labels)))
            report.splits[status] = (counts, self.published_counts[status])
        return report

    def _list(self, name: str) -> Path:
        candidates = [folder + name for folder in LIST_FOLDERS]
        return find_file(type(self).__name__, self.root, *candidates)

    def _read_partition(self, path: Path) -> list[_Row]:
        owner = type(self).__name__
        rows = []
        for image, item, status in self._read_counted(path, PARTITION_HEADER):
            rows.append(_Row(image, item, status))
        check_unique(owner, path, "image_name", [row.image for row in rows])
        for row in rows:
            if row.status not in ("train", "query", "gallery"):
                raise ValueError(
                    f"{owner}: `evaluation_status` must be train, query or gallery, got {row.status!r} in line "
                    f"{line_number(path, row)} of {path}."
                )
            folders = row.image.split("/")
            if folders[0] != "img" or len(folders) < 4 or ".." in folders:
                raise ValueError(
                    f"{owner}: `image_name` must be img/gender/kind/..., got {row.image!r} in line "
                    f"{line_number(path, row)} of {path}."
                )
        return rows

    def _read_counted(self, path: Path, header: Sequence[str]) -> list[list[str]]:
        """The rows of a list whose first line is their number."""
        owner = type(self).__name__
        first_line = next(read_lines(owner, path), "")
        (count,) = parse_integers(owner, path, "the number of images in line 1", [first_line.strip()])
        rows = list(read_rows(owner, path, len(header), header=header, skip=1))
        if count != len(rows):
            raise ValueError(
                f"{owner}: {path} must have as many images as its first line says, {count:,}, got {len(rows):,}."
            )
        return rows

    def _image_paths(self, rows: Sequence[_Row]) -> list[str]:
        """The path of each image below the root, in the chosen resolution."""
        names = [row.image for row in rows]
        if self.high_res:
            names = [name.replace("img/", "img_highres/", 1) for name in names]
        example = "img"
        if names:
            example = "/".join(names[0].split("/")[:2])
        folder = find_file(type(self).__name__, self.root, example, f"Img/{example}")
        if folder.relative_to(self.root).parts[0] == "Img":
            names = [f"Img/{name}" for name in names]
        return names

    def _positions(self, path: Path, rows: Sequence[_Row], statuses: Sequence[str]) -> list[int]:
        """The positions of the rows with these statuses, of which each must occur."""
        positions = [position for position, row in enumerate(rows) if row.status in statuses]
        for status in statuses:
            of_status = [position for position in positions if rows[position].status == status]
            check_not_empty(type(self).__name__, path, status, of_status)
        return positions

    def _read_boxes(self, rows: Sequence[_Row]) -> NDArray[np.int32]:
        """(images, 4) the box of each image."""
        owner, path = type(self).__name__, self._list(BOXES)
        listed = self._read_counted(path, BOXES_HEADER)
        images = [row[0] for row in listed]
        check_unique(owner, path, "image_name", images)
        columns = []
        for number, name in enumerate(BOXES_HEADER[3:], 3):
            columns.append(parse_integers(owner, path, name, [row[number] for row in listed], bits=32))
        corners: NDArray[np.int32] = np.array(columns, dtype=np.int32).T
        position_of = dict(zip(images, range(len(images))))
        without = [row.image for row in rows if row.image not in position_of]
        if without:
            raise ValueError(
                f"{owner}: {path} must have a box for each image, got none for {len(without)} images, such as "
                f"{without[0]}."
            )
        return corners[[position_of[row.image] for row in rows]]
