"""DeepFashion's In-Shop Clothes Retrieval: clothing items in a shop's photographs from several sides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import short_repr
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.image_index import ROLES, ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, find_file, find_missing
from lightning_retrieval.invalid import InvalidValue, owned

PARTITION, BOXES = "list_eval_partition.txt", "list_bbox_inshop.txt"
PARTITION_HEADER = ("image_name", "item_id", "evaluation_status")
BOXES_HEADER = ("image_name", "clothes_type", "pose_type", "x_1", "y_1", "x_2", "y_2")
STATUSES = {"train": ("train",), "test": ("query", "gallery")}


class _Partition(NamedTuple):
    """The columns of the list of all images."""

    images: NDArray[np.str_]
    items: NDArray[np.str_]
    statuses: NDArray[np.str_]  # "train", "query" or "gallery"


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
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the folder of images is missing; the message suggests where it may be.
        ValueError: if both `boxes` and `high_res` are True; if the number of images in a list differs from the number
            in its first line, the header differs, or a line lacks a field; if an image occurs twice, has an unknown
            status, or has no box or an empty box.

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
    def sources(self) -> list[Path]:
        """The partition and, if `boxes` is True, the list of boxes."""
        found = [self._list(PARTITION).path]
        if self.boxes:
            found.append(self._list(BOXES).path)
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of the partition, in its order."""
        self.sources()  # raises an error if a list is missing
        partition = self._read_partition()
        paths = self._image_paths(partition)
        # Gender and kind are the two folders below `img`.
        categories, _ = class_numbers(["/".join(image.split("/")[1:3]) for image in partition.images])
        boxes = None
        if self.boxes:
            boxes = self._read_boxes(partition.images)
        splits = {}
        for split, statuses in STATUSES.items():
            rows = self._rows_of(partition, statuses)
            labels, names = class_numbers(partition.items[rows])
            roles = None
            if split != "train":
                roles = np.where(partition.statuses[rows] == "query", ROLES["query"], ROLES["gallery"])
            splits[split] = ImageIndex(
                paths[rows].tolist(),
                labels,
                categories=categories[rows],
                boxes=None if boxes is None else boxes[rows],
                roles=roles,
                names=names,
                lines=ListLines(self._list(PARTITION), rows, skip=2),
            )
        return splits

    def check(self) -> DataReport:
        """Count the images and classes of splits, queries and gallery, and look for missing files."""
        report = super().check()
        test = self.splits["test"]
        for status in STATUSES["test"]:
            labels = test.labels[test.roles == ROLES[status]]
            counts = (len(labels), len(np.unique(labels)))
            report.splits[status] = (counts, self.published_counts[status])
        return report

    def _list(self, name: str) -> ListFile:
        return ListFile(find_file(self.root, name, f"Eval/{name}", f"Anno/{name}"))

    def _read_partition(self) -> _Partition:
        file = self._list(PARTITION)
        images, items, statuses = _read_counted(file, PARTITION_HEADER)
        file.check_unique("image_name", images, skip=2)
        # The first two lines are the count and the header.
        for position, (image, status) in enumerate(zip(images, statuses), 2):
            if status not in ("train", "query", "gallery"):
                raise file.error(f"`evaluation_status` must be train, query or gallery, got {status!r}", position)
            folders = image.split("/")
            if folders[0] != "img" or len(folders) < 4 or ".." in folders:
                raise file.error(f"`image_name` must be img/gender/kind/..., got {image!r}", position)
        return _Partition(np.array(images, str), np.array(items, str), np.array(statuses, str))

    def _image_paths(self, partition: _Partition) -> NDArray[np.str_]:
        """The path of each image below the root, in the chosen resolution."""
        images = partition.images
        if self.high_res:
            images = np.char.replace(images, "img/", "img_highres/", 1)
        example = "img"
        if len(images):
            example = "/".join(images[0].split("/")[:2])
        folder = find_file(self.root, example, f"Img/{example}")
        if folder.relative_to(self.root).parts[0] == "Img":
            images = np.char.add("Img/", images)
        return images

    def _rows_of(self, partition: _Partition, statuses: Sequence[str]) -> NDArray[np.intp]:
        """The positions of the images with these statuses; raises if a status does not occur."""
        for status in statuses:
            of_status = np.flatnonzero(partition.statuses == status)
            self._list(PARTITION).check_not_empty(status, of_status)
        return np.flatnonzero(np.isin(partition.statuses, statuses))

    def _read_boxes(self, wanted: NDArray[np.str_]) -> NDArray[np.int32]:
        """The box of each of these images, of shape (images, 4)."""
        file = self._list(BOXES)
        images, _, _, *columns = _read_counted(file, BOXES_HEADER)
        file.check_unique("image_name", images, skip=2)
        corners = np.empty((len(images), 4), dtype=np.int32)
        for side, texts in enumerate(columns):
            corners[:, side] = file.integers(BOXES_HEADER[3 + side], texts, bits=32, skip=2)
        row_of = dict(zip(images, range(len(images))))
        without = find_missing(wanted.tolist(), row_of)
        if without:
            raise file.error(
                f"{file.path} must have a box for each image, got none for {len(without)} images, such as {without[0]}"
            )
        rows = np.array([row_of[image] for image in wanted.tolist()])
        boxes: NDArray[np.int32] = corners[rows]
        left, top, right, bottom = boxes.T
        empty = rows[(right <= left) | (bottom <= top)]
        if len(empty):
            first = int(empty.min())
            problem = f"`boxes` must contain at least one pixel, got {corners[first].tolist()} for {images[first]}"
            raise file.error(problem, first + 2)
        return boxes


def _read_counted(file: ListFile, header: Sequence[str]) -> list[list[str]]:
    """The columns of a list whose first line is the number of its rows."""
    first_line = next(file.lines(), "")
    try:
        count = int(first_line)
    except ValueError:
        raise file.error(
            f"line 1 of {file.path} must be the number of images, got {short_repr(first_line.strip())}"
        ) from None
    columns = file.columns(len(header), header=header, skip=1)
    rows = len(columns[0])
    if count != rows:
        raise file.error(f"{file.path} must have as many images as its first line says, {count:,}, got {rows:,}")
    return columns
