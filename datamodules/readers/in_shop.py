"""DeepFashion's In-Shop Clothes Retrieval: pieces of clothing, shown by a shop from several sides."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

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

PARTITION = ("image_name", "item_id", "evaluation_status")
BOXES = ("image_name", "clothes_type", "pose_type", "x_1", "y_1", "x_2", "y_2")
FOLDERS = ("", "Eval/", "Anno/")  # in which the lists lie in one release or another


class InShop(ImageDataModule):
    """In-Shop Clothes Retrieval: 52,712 images of 7,982 items.

    The test set has roles: each query is ranked for against the gallery, which are other images of the same items. The
    splits are those of `list_eval_partition.txt`, the categories `gender/kind` as the folders of the images say.

    Args:
        root: the folder that holds `list_eval_partition.txt`, itself or in `Eval` or `Anno`, and the images in `img` or
            `Img/img`.
        boxes: crop each image to the piece of clothing, as `list_bbox_inshop.txt` says.
        high_res: take the images of `img_highres` in place of those of 256 x 256 pixels, which the boxes belong to.
        settings: those of `ImageDataModule`: `transform`, `on_error`, `num_workers` and so on.

    Raises:
        FileNotFoundError: if the lists or the images are not there, saying where they may be.
        ValueError: if both `boxes` and `high_res` are given; if a list has another number of images than its first
            line says, another header, lines with missing fields, an image twice, an unknown status, or no box for an
            image.

    Example:
        >>> from lightning_retrieval.datamodules import InShop
        >>> InShop("In-shop", num_workers=4).splits
        Traceback (most recent call last):
            ...
        FileNotFoundError: InShop: `root` must be a folder that holds list_eval_partition.txt or
        Eval/list_eval_partition.txt or Anno/list_eval_partition.txt, got In-shop, which is not there.

    Relations:
        Queries and gallery share no image, unlike in `StanfordOnlineProducts`.

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

    def __init__(self, root: str | Path, boxes: bool = False, high_res: bool = False, **settings: Any) -> None:
        super().__init__(root, **settings)
        if boxes and high_res:
            raise ValueError(
                f"{type(self).__name__}: `boxes` are in pixels of the images of 256 x 256, not of those of `high_res`; "
                "give one of them."
            )
        self.boxes = boxes
        self.high_res = high_res

    def sources(self) -> list[Path]:
        """The partition and, where boxes are wanted, their list."""
        names = ["list_eval_partition.txt", *(["list_bbox_inshop.txt"] if self.boxes else [])]
        return [find_file(type(self).__name__, self.root, *(folder + name for folder in FOLDERS)) for name in names]

    def read(self) -> Mapping[str, ImageIndex]:
        """The images of the partition, in its order."""
        who, (path, *of_boxes) = type(self).__name__, self.sources()
        rows = self._counted(path, PARTITION)
        check_unique(who, path, "image_name", [row[0] for row in rows])
        for row in rows:
            self._check(path, row)
        names = [row[0].replace("img/", "img_highres/", 1) if self.high_res else row[0] for row in rows]
        beginning = "/".join(names[0].split("/")[:2]) if names else "img"
        outer = find_file(who, self.root, beginning, f"Img/{beginning}").relative_to(self.root).parts[0]
        prefix = "Img/" if outer == "Img" else ""
        categories, _ = class_numbers(["/".join(row[0].split("/")[1:3]) for row in rows])
        boxes = self._boxes(of_boxes[0], [row[0] for row in rows]) if of_boxes else None
        splits = {}
        for split, statuses in {"train": ("train",), "test": ("query", "gallery")}.items():
            chosen = [place for place, row in enumerate(rows) if row[2] in statuses]
            for status in statuses:
                check_not_empty(who, path, status, [place for place in chosen if rows[place][2] == status])
            labels, items = class_numbers([rows[place][1] for place in chosen])
            splits[split] = ImageIndex(
                [prefix + names[place] for place in chosen],
                labels,
                categories=categories[chosen],
                boxes=None if boxes is None else boxes[chosen],
                roles=None if split == "train" else [ROLES[rows[place][2]] for place in chosen],
                names=items,
            )
        return splits

    def check(self) -> DataReport:
        """Look at the layout: counts, also of queries and gallery, beside the published ones, and missing files."""
        report, test = super().check(), self.splits["test"]
        for status in ("query", "gallery"):
            labels = test.labels[test.roles == ROLES[status]]
            report.splits[status] = ((len(labels), len(np.unique(labels))), self.published_counts[status])
        return report

    def _counted(self, path: Path, header: tuple[str, ...]) -> list[list[str]]:
        """The rows of a list whose first line says how many there are."""
        who = type(self).__name__
        first = next(read_lines(who, path), "")
        (count,) = parse_integers(who, path, "the number of images in line 1", [first.strip()])
        rows = list(read_rows(who, path, len(header), header=header, skip=1))
        if count != len(rows):
            raise ValueError(
                f"{who}: {path} must hold as many images as its first line says, {count:,}, got {len(rows):,}."
            )
        return rows

    def _check(self, path: Path, row: list[str]) -> None:
        """Refuse a row whose status is unknown, or whose image does not lie in a folder of a gender and a kind."""
        who, (name, _, status) = type(self).__name__, row
        if status not in ("train", "query", "gallery"):
            raise ValueError(
                f"{who}: `evaluation_status` must be train, query or gallery, got {status!r} in line "
                f"{line_number(path, row)} of {path}."
            )
        if not name.startswith("img/") or name.count("/") < 3 or ".." in name.split("/"):
            raise ValueError(
                f"{who}: `image_name` must be img/gender/kind/..., got {name!r} in line {line_number(path, row)} of "
                f"{path}."
            )

    def _boxes(self, path: Path, images: list[str]) -> NDArray[np.int32]:
        who = type(self).__name__
        rows = self._counted(path, BOXES)
        check_unique(who, path, "image_name", [row[0] for row in rows])
        columns = [parse_integers(who, path, BOXES[i], [row[i] for row in rows], bits=32) for i in range(3, 7)]
        places = {row[0]: place for place, row in enumerate(rows)}
        without = [image for image in images if image not in places]
        if without:
            raise ValueError(
                f"{who}: {path} must hold a box for each image, which {len(without)} have not, such as {without[0]}."
            )
        corners: NDArray[np.int32] = np.array(columns, dtype=np.int32).T
        return corners[[places[image] for image in images]]
