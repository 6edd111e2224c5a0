"""Pascal VOC 2007 and 2012: everyday photographs with boxes around objects of twenty classes."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from lightning_retrieval.checks import check_choice, check_strings
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.detection.boxes import BoxDataModule, BoxIndex, DetectionSettings
from lightning_retrieval.datamodules.table import read_list
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned, reported_as
from lightning_retrieval.paths import find_file

Year = Literal["VOC2007", "VOC2012"]

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)

LABELS = {name: label for label, name in enumerate(CLASSES, 1)}

# (number of images, number of objects that are not difficult)
TRAIN_COUNTS = {"VOC2007": (5011, 12608), "VOC2012": (11540, 27450)}
TEST_COUNTS = (4952, 12032)

_SIDES = ("xmin", "ymin", "xmax", "ymax")

Objects = tuple[list[list[float]], list[int], list[bool]]


class PascalVOC(BoxDataModule):
    """Pascal VOC: the training set is `trainval` of 2007, of 2012 or of both; the test set is `test` of 2007.

    In training, difficult objects are skipped; in evaluation they are ignored, as in the development kit.

    Args:
        root: the folder `VOCdevkit`, which contains the folders `VOC2007` and `VOC2012`, or the parent folder of
            `VOCdevkit`.
        train_sets: the years to train on: `"VOC2007"`, `"VOC2012"` or both, which are known as 07+12.
        settings: arguments of `DetectionDataModule`: `batch_size`, `eval_batch_size`, `num_workers`, `seed`,
            `pin_memory`.

    Raises:
        FileNotFoundError: if `root` does not contain the files; the message says where they may be.
        ValueError: if a file is not as expected, or an argument is invalid.
        TypeError: if `train_sets` is a string.

    Example:
        >>> from lightning_retrieval.datamodules import PascalVOC
        >>> PascalVOC("VOCdevkit", train_sets=["VOC2007", "VOC2012"], batch_size=2).train_sets
        ('VOC2007', 'VOC2012')

    Relations:
        `VOCMetrics` computes AP by VOC's rules. `BoxSet` describes the targets. In the files, pixels are counted from
        1, and the right and bottom pixels belong to the box; so 1 is subtracted from left and top.

    Source:
        Everingham et al., The Pascal Visual Object Classes (VOC) Challenge, IJCV 2010.
    """

    def __init__(
        self, root: str | Path, *, train_sets: Sequence[Year] = ("VOC2007",), **settings: Unpack[DetectionSettings]
    ) -> None:
        super().__init__(root, **settings)
        check_strings("train_sets", train_sets, owner="PascalVOC")
        for year in train_sets:
            check_choice("train_sets", year, tuple(TRAIN_COUNTS), owner="PascalVOC")
        if len(train_sets) == 0 or len(set(train_sets)) < len(train_sets):
            raise InvalidValue("must name different years", "PascalVOC", "train_sets", got=list(train_sets))
        self.train_sets = tuple(train_sets)

    @property
    def published_objects(self) -> Mapping[str, tuple[int, int]]:  # type: ignore[override]
        """Numbers of images and objects in each split; training numbers are summed over the years."""
        images = sum(TRAIN_COUNTS[year][0] for year in self.train_sets)
        objects = sum(TRAIN_COUNTS[year][1] for year in self.train_sets)
        return {"train": (images, objects), "test": TEST_COUNTS}

    @owned
    def read(self) -> Mapping[str, BoxIndex]:
        """Read the sets `trainval` of the years, and `test` of 2007."""
        train = [self._read_set(year, "trainval") for year in self.train_sets]
        paths = [path for set_paths, _ in train for path in set_paths]
        objects = [image for _, set_objects in train for image in set_objects]
        test_paths, test_objects = self._read_set("VOC2007", "test")
        with reported_as("PascalVOC"):
            return {
                "train": BoxIndex(paths, objects, class_names=CLASSES),
                "test": BoxIndex(test_paths, test_objects, class_names=CLASSES),
            }

    def _read_set(self, year: str, name: str) -> tuple[list[str], list[Objects]]:
        """Paths of the images of a set, relative to the root, and their objects."""
        listed = f"{year}/ImageSets/Main/{name}.txt"
        found = find_file(self.root, listed, f"VOCdevkit/{listed}")
        table = read_list(found, "image")
        table.check_unique("image")
        table.check("image", leaves_root, "lie inside the root")
        folder = found.parents[2]
        relative = folder.relative_to(self.root).as_posix()
        paths, objects = [], []
        for image in table["image"]:
            paths.append(f"{relative}/JPEGImages/{image}.jpg")
            objects.append(read_annotation(folder / "Annotations" / f"{image}.xml"))
        return paths, objects


def read_annotation(path: Path) -> Objects:
    """The boxes, labels and difficult flags of the objects in an annotation. Label 1 is the first of `CLASSES`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not XML (the message has the line), or if an object is invalid.
    """
    if not path.is_file():
        rule = f"the annotation {path} does not exist, but its image is listed"
        raise MissingFile(rule, cure="unpack the archive again")
    boxes, labels, difficult = [], [], []
    try:
        for thing in ElementTree.parse(path).getroot().findall("object"):
            labels.append(LABELS[thing.findtext("name", "").strip()])
            left, top, right, bottom = (float(thing.findtext(f"bndbox/{side}", "")) for side in _SIDES)
            boxes.append([left - 1, top - 1, right, bottom])
            difficult.append(thing.findtext("difficult", "0").strip() == "1")
    except (ElementTree.ParseError, ValueError, KeyError) as error:
        rule = f"{path} must be an annotation of Pascal VOC"
        got = f"one that cannot be read ({error!r})"
        raise InvalidValue(rule, got=got, cure="unpack the archive again") from None
    return boxes, labels, difficult
