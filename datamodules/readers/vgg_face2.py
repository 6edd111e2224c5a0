"""VGGFace2: faces, told apart by whose they are."""

import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_unique, read_csv_rows, read_lines
from lightning_retrieval.datamodules.images.image_folder import image_suffixes
from lightning_retrieval.datamodules.images.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

SPLITS = ("train", "test")
BOX_HEADER = ["NAME_ID", "X", "Y", "W", "H"]


class VGGFace2(ImageDataModule):
    """Faces: 3.14 million training images of 8,631 people, 169,396 test images of 500 others, ranked against the rest.

    `root` holds the folders `train/` and `test/`, and the lists `train_list.txt` and `test_list.txt`, by themselves or
    in `meta/`, with or without the split before each path. Without lists all images in the folders are taken.

    Args:
        root: the folder that holds `train/` and `test/`.
        boxes: whether each image is cropped to its box in `bb_landmark/loose_bb_train.csv` and `loose_bb_test.csv`.
        settings: those of `ImageDataModule`, such as `transform` and `cache_dir`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if neither lists nor folders are there, or `boxes` are wanted and their files are not.
        ValueError: if a line is no path of an image in a person's folder, or an image comes twice or has no box.

    Example:
        >>> from pathlib import Path
        >>> meta = Path("vgg", "meta")
        >>> meta.mkdir(parents=True)
        >>> lines = ["n000002/0001_01.jpg", "n000002/0002_01.jpg", "n000003/0001_01.jpg"]
        >>> _ = (meta / "train_list.txt").write_text("\\n".join(lines))
        >>> _ = (meta / "test_list.txt").write_text("n000001/0001_01.jpg\\n")
        >>> data = VGGFace2("vgg", cache_dir="cache")
        >>> data.splits["train"].paths[2], data.splits["train"].labels, list(data.splits["test"].names)
        ('train/n000003/0001_01.jpg', array([0, 0, 1]), ['n000001'])

    Relations:
        Reading 3.3 million lines takes some seconds; with `cache_dir` it happens once.

    Source:
        Cao et al., "VGGFace2: a dataset for recognising faces across pose and age", FG 2018.
    """

    published_counts = MappingProxyType({"train": [(3_141_890, 8_631)], "test": [(169_396, 500)]})

    def __init__(self, root: str | Path, boxes: bool = False, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.boxes = boxes

    def sources(self) -> list[Path]:
        """The lists, or the folders where there are none, and the boxes."""
        lists = [self._list(split) for split in SPLITS]
        found = [path for path in lists if path is not None]
        if not found:
            for split in SPLITS:
                folder = find_file("VGGFace2", self.root, split)
                found += [folder, *(folder / name for name in _folders(folder))]
        return [*found, *(self._boxes(split) for split in SPLITS)] if self.boxes else found

    def read(self) -> Mapping[str, ImageIndex]:
        """Every line of the lists, or every image of the folders."""
        splits = {}
        for split in SPLITS:
            path = self._list(split)
            if path is None:
                people, paths = _walk(find_file("VGGFace2", self.root, split), split)
            else:
                people, paths = _read_list(path, split)
            boxes = _read_boxes(self._boxes(split), split, paths) if self.boxes else None
            labels, names = class_numbers(people)
            del people
            splits[split] = ImageIndex(paths, labels, boxes=boxes, names=names)
        return splits

    def _list(self, split: str) -> Path | None:
        """The list of a split; None where both are missing and the folders are there."""
        places = [self.root / folder / f"{name}_list.txt" for name in SPLITS for folder in ("", "meta")]
        if not any(place.is_file() for place in places) and all((self.root / name).is_dir() for name in SPLITS):
            return None
        return find_file("VGGFace2", self.root, f"meta/{split}_list.txt", f"{split}_list.txt", beside=split)

    def _boxes(self, split: str) -> Path:
        name = f"loose_bb_{split}.csv"
        return find_file("VGGFace2", self.root, f"bb_landmark/{name}", f"meta/bb_landmark/{name}", name)


def _read_list(path: Path, split: str) -> tuple[list[str], list[str]]:
    """Whose image each is, and its path from the root."""
    people: list[str] = []
    paths: list[str] = []
    known: dict[str, str] = {}  # one string for each person, not for each image
    prefix = f"{split}/"
    for number, line in enumerate(read_lines("VGGFace2", path), 1):
        image = line.strip()
        if not image:
            continue
        parts = image.split("/")
        if ".." in parts:
            raise ValueError(f"VGGFace2: the images of {path} must lie inside the root, got {image!r} (line {number}).")
        if len(parts) == 2:
            image, person = prefix + image, parts[0]
        elif len(parts) == 3 and parts[0] == split:
            person = parts[1]
        else:
            raise ValueError(
                f"VGGFace2: each line of {path} must be <person>/<image> or {split}/<person>/<image>, got {image!r} "
                f"(line {number})."
            )
        people.append(known.setdefault(person, person))
        paths.append(image)
    if not paths:
        raise ValueError(f"VGGFace2: {path} must name at least one image, got none.")
    check_unique("VGGFace2", path, "image", paths)
    return people, paths


def _walk(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """The same of all images in a folder of people."""
    suffixes = image_suffixes()
    people: list[str] = []
    paths: list[str] = []
    for person in _folders(folder):
        names = sorted(
            name
            for name in os.listdir(folder / person)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in suffixes
        )
        people += [person] * len(names)
        paths += [f"{split}/{person}/{name}" for name in names]
    if not paths:
        raise ValueError(
            f"VGGFace2: `root` must hold lists, or images as {split}/<person>/<image>; there is none in {folder}."
        )
    return people, paths


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _read_boxes(path: Path, split: str, paths: Sequence[str]) -> NDArray[np.int32]:
    """(images, 4) left, top, right, bottom, in the order of the paths; the official rows have it already."""
    prefix, sides, order = f"{split}/", array("i"), array("q")
    place: dict[str, int] | None = None
    rows = read_csv_rows("VGGFace2", path)
    header = [name.strip() for name in next(rows, ([], 1))[0]]
    if header != BOX_HEADER:
        raise ValueError(
            f"VGGFace2: line 1 of {path} must be the header {','.join(BOX_HEADER)!r}, got {','.join(header)!r}."
        )
    for row, (fields, line) in enumerate(rows):
        try:
            name, (x, y, width, height) = fields[0], map(int, fields[1:])
            box = array("i", (x, y, x + width, y + height))
        except (ValueError, IndexError, OverflowError):
            raise ValueError(
                f"VGGFace2: each line of {path} must be a name and four integers, got {','.join(fields)[:80]!r} (line "
                f"{line})."
            ) from None
        stem = prefix + name
        if place is None and (row >= len(paths) or _stem(paths[row]) != stem):
            place = {_stem(image): i for i, image in enumerate(paths)}
        found = row if place is None else place.get(stem, -1)
        if found >= 0:
            sides.extend(box)
            order.append(found)
    boxes = np.zeros((len(paths), 4), dtype=np.int32)
    given = np.zeros(len(paths), dtype=bool)
    rows_of, boxes_of = np.asarray(order, dtype=np.int64), np.asarray(sides, dtype=np.int32).reshape(-1, 4)
    boxes[rows_of] = boxes_of
    given[rows_of] = True
    other = np.flatnonzero((boxes[rows_of] != boxes_of).any(1))
    if len(other):
        raise ValueError(
            f"VGGFace2: {path} must have one box for each image, got several for {paths[rows_of[other[0]]]}."
        )
    lacking = np.flatnonzero(~given)
    if len(lacking):
        raise ValueError(
            f"VGGFace2: {path} must have a box for each image of {split}, got none for {paths[lacking[0]]} "
            f"({len(lacking)} such images)."
        )
    return boxes


def _stem(path: str) -> str:
    return path.rpartition(".")[0]
