"""DeepFashion's In-Shop Clothes Retrieval: clothing items in a shop's photographs from several sides."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.image_index import ROLES, ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import Table, number_splits, read_list
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.paths import find_file

STATUSES = ("train", "query", "gallery")


class InShop(ImageDataModule):
    """In-Shop Clothes Retrieval: 52,712 images of 7,982 items.

    The test set has roles: the gallery of each query consists of other images of the test items. The splits are those
    of `list_eval_partition.txt`; the categories are `gender/kind`, taken from the folders of the images.

    Args:
        root: the folder that contains `list_eval_partition.txt`, directly or in `Eval` or `Anno`, and the images in
            `img` or `Img/img`.
        boxes: whether each image is cropped to the clothing item's box in `list_bbox_inshop.txt`.
        high_res: whether images are read from `img_highres` instead of `img`, whose images have 256 x 256 pixels. The
            boxes refer to the images in `img`.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if a list or the folder of images is missing.
        ValueError: if both `boxes` and `high_res` are True; if the header of a list differs, or a line lacks a field;
            if an image occurs twice, has an unknown status, or has no box or an empty box.

    Example:
        >>> from lightning_retrieval.datamodules import InShop
        >>> InShop("In-shop", num_workers=4).splits
        Traceback (most recent call last):
            ...
        lightning_retrieval.invalid.MissingFile: InShop: `root` must be a folder that contains list_eval_partition.txt
        or Eval/list_eval_partition.txt or Anno/list_eval_partition.txt, got In-shop, which does not exist.

    Relations:
        Queries and gallery have no image in common, unlike in `StanfordOnlineProducts`.

    Source:
        Liu, Luo, Qiu, Wang and Tang, DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich
        Annotations, CVPR 2016.
    """

    boxes_before_rotation = True
    published_counts = MappingProxyType(
        {
            "train": [(25_882, 3_997)],
            "test": [(26_830, 3_985)],
            "query": [(14_218, 3_985)],
            "gallery": [(12_612, 3_985)],
        }
    )

    def __init__(
        self, root: str | Path, *, boxes: bool = False, high_res: bool = False, **settings: Unpack[ImageSettings]
    ) -> None:
        super().__init__(root, **settings)
        self.boxes = boxes
        self.high_res = high_res
        if boxes and high_res:
            raise InvalidValue(
                "`boxes` and `high_res` must not both be True, since the boxes are in pixels of the images of 256 "
                "x 256",
                type(self).__name__,
                cure="set one of them",
            )

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of the partition, in its order."""
        table = read_list(
            self._list("list_eval_partition.txt"), "image_name item_id evaluation_status", header=True, skip=1
        )
        table.check_unique("image_name")
        table.check("evaluation_status", lambda status: status not in STATUSES, "be train, query or gallery")
        names = table["image_name"]
        # Gender and kind are the two folders below `img`.
        kinds = table.parsed("image_name", lambda name: "/".join(_below_img(name)[:2]))
        folder = self._folder(names[0].split("/")[1])
        table = table.with_columns(
            path=[f"{folder}/{name.removeprefix('img/')}" for name in names],
            label=table["item_id"],
            category=kinds,
            box=self._boxes(table) if self.boxes else None,
        )
        statuses = np.array(table["evaluation_status"])
        for status in STATUSES:
            if not (statuses == status).any():
                raise InvalidValue(f"the split {status!r} must have at least one image", got=f"none in {table.file}")
        train, test = (table.chosen(np.flatnonzero((statuses == "train") == of_train)) for of_train in (True, False))
        roles = [ROLES[status] for status in test["evaluation_status"]]
        return number_splits({"train": train, "test": test.with_columns(role=roles)})

    def check(self) -> DataReport:
        """Count the images and classes of splits, queries and gallery, and look for missing files."""
        report = super().check()
        test = self.splits["test"]
        for status in STATUSES[1:]:
            labels = test.labels[test.roles == ROLES[status]]
            counts = (len(labels), len(np.unique(labels)))
            report.splits[status] = (counts, self.published_counts[status])
        return report

    def _list(self, name: str) -> Path:
        return find_file(self.root, name, f"Eval/{name}", f"Anno/{name}")

    def _folder(self, gender: str) -> str:
        """The folder with the images in the chosen resolution, below the root."""
        name = "img_highres" if self.high_res else "img"
        found = find_file(self.root, f"{name}/{gender}", f"Img/{name}/{gender}")
        return found.parent.relative_to(self.root).as_posix()

    def _boxes(self, images: Table) -> list[tuple[int, ...]]:
        """The box of each image."""
        names = "image_name clothes_type pose_type x_1 y_1 x_2 y_2"
        table = read_list(self._list("list_bbox_inshop.txt"), names, header=True, skip=1)
        table.check_unique("image_name")
        sides = [table.parsed(side, int) for side in ("x_1", "y_1", "x_2", "y_2")]
        table = table.with_columns(box=list(zip(*sides)))
        table.check("box", lambda box: box[0] >= box[2] or box[1] >= box[3], "contain at least one pixel")
        box_of = dict(zip(table["image_name"], table["box"]))
        missing = [name for name in images["image_name"] if name not in box_of]
        if missing:
            rule = f"{table.file} must have a box for each image"
            raise InvalidValue(rule, got=f"none for {len(missing)} images, such as {missing[0]}")
        return [box_of[name] for name in images["image_name"]]


def _below_img(name: str) -> list[str]:
    """The parts of the name of an image below `img`."""
    top, *parts = name.split("/")
    if top != "img" or len(parts) < 3 or ".." in parts:
        raise ValueError("it must be img/gender/kind/...")
    return parts
