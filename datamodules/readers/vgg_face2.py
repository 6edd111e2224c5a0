"""VGGFace2: faces; the classes are people."""

import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import first_of
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, find_file, read_csv_header
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.preparation.decoding import image_suffixes, list_folder

SPLITS = ("train", "test")
BOX_HEADER = ["NAME_ID", "X", "Y", "W", "H"]

_Images = tuple[list[str], list[str]]  # the person of each image, and its path below the root


class VGGFace2(ImageDataModule):
    """VGGFace2: 3.14 million training images of 8,631 people, 169,396 test images of 500 other people.

    In the test each image is a query, and all other test images are its gallery. `root` contains the folders `train/`
    and `test/`, and the lists `train_list.txt` and `test_list.txt`, directly or in `meta/`. Paths in the lists may
    begin with the name of the split. Without lists, all images in the folders are used.

    Args:
        root: the folder that contains `train/` and `test/`.
        boxes: whether each image is cropped to its box, read from `loose_bb_train.csv` and `loose_bb_test.csv` in
            `bb_landmark/`.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if neither lists nor folders exist, or the files of the boxes are missing.
        ValueError: if a line is not the path of an image in a person's folder; if an image occurs twice, or has no box,
            an empty box or several different boxes.

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

    Cost:
        Reading 3.3 million lines takes some seconds; with `cache_dir` they are read only once.

    Relations:
        `IJBC` evaluates faces; VGGFace2 is its usual training set.

    Source:
        Cao et al., "VGGFace2: a dataset for recognising faces across pose and age", FG 2018.
    """

    published_counts = MappingProxyType({"train": [(3_141_890, 8_631)], "test": [(169_396, 500)]})

    def __init__(self, root: str | Path, *, boxes: bool = False, **settings: Unpack[ImageSettings]) -> None:
        super().__init__(root, **settings)
        self.boxes = boxes

    @owned
    def sources(self) -> list[Path]:
        """The lists, or the folders if there are no lists, and the files of the boxes."""
        found = []
        for split in SPLITS:
            path = self._list(split)
            if path is not None:
                found.append(path)
                continue
            folder = find_file(self.root, split)
            found.append(folder)
            found += list_folder(folder).folders
        if self.boxes:
            found += map(self._boxes_file, SPLITS)
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of all lines of the lists, or all images in the folders."""
        splits = {}
        for split in SPLITS:
            path = self._list(split)
            lines = None
            if path is None:
                people, paths = _read_folder(find_file(self.root, split), split)
            else:
                file = ListFile(path)
                people, paths = _read_list(file, split)
                lines = ListLines(file)
            boxes = None
            if self.boxes:
                boxes = _read_boxes(ListFile(self._boxes_file(split)), split, paths)
            labels, names = class_numbers(people)
            del people  # frees millions of entries before the index is made
            splits[split] = ImageIndex(paths, labels, boxes=boxes, names=names, lines=lines)
        return splits

    def _list(self, split: str) -> Path | None:
        """Path of the list of a split; None if the splits have folders instead of lists."""
        has_folders = (self.root / "train").is_dir() and (self.root / "test").is_dir()
        if has_folders and not self._has_lists():
            return None
        return find_file(self.root, f"meta/{split}_list.txt", f"{split}_list.txt", companion=split)

    def _has_lists(self) -> bool:
        for split in SPLITS:
            name = f"{split}_list.txt"
            if (self.root / name).is_file() or (self.root / "meta" / name).is_file():
                return True
        return False

    def _boxes_file(self, split: str) -> Path:
        name = f"loose_bb_{split}.csv"
        return find_file(self.root, f"bb_landmark/{name}", f"meta/bb_landmark/{name}", name)


def _read_list(file: ListFile, split: str) -> _Images:
    people: list[str] = []
    paths: list[str] = []
    known: dict[str, str] = {}  # one string for each person, instead of one for each image
    prefix = f"{split}/"
    for number, line in enumerate(file.lines(), 1):
        image = line.strip()
        if not image:
            continue
        parts = image.split("/")
        if len(parts) == 2:
            image, person = prefix + image, parts[0]
        elif len(parts) == 3 and parts[0] == split:
            person = parts[1]
        else:
            raise file.error(
                f"each line of {file.path} must be <person>/<image> or {split}/<person>/<image>, got {image!r} (line "
                f"{number})"
            )
        people.append(known.setdefault(person, person))
        paths.append(image)
    if not paths:
        raise file.error(f"{file.path} must name at least one image, got none")
    file.check_unique("image", paths)
    return people, paths


def _read_folder(folder: Path, split: str) -> _Images:
    """All images in the subfolders of a split's folder, one for each person."""
    suffixes = image_suffixes()
    people: list[str] = []
    paths: list[str] = []
    for person in list_folder(folder).folders:
        entries = list_folder(person)
        if entries.special:
            warnings.warn(
                f"VGGFace2: skipped FIFOs, sockets or devices in {person}: {first_of(entries.special)}.", stacklevel=2
            )
        for file in entries.files:
            if file.suffix.lower() in suffixes:
                people.append(person.name)
                paths.append(f"{split}/{person.name}/{file.name}")
    if not paths:
        rule = f"must contain lists, or images as {split}/<person>/<image>"
        raise InvalidValue(rule, "VGGFace2", "root", got=f"none in {folder}")
    return people, paths


def _read_boxes(file: ListFile, split: str, paths: Sequence[str]) -> NDArray[np.int32]:
    """The left, top, right and bottom of each image's box, in the order of the paths, of shape (images, 4)."""
    sides = array("i")  # the box of each row that belongs to an image, as four numbers
    positions = array("q")  # for each of these rows, the position of its image
    for position, box, _ in _matching_rows(file, split, paths):
        positions.append(position)
        sides.extend(box)
    image_of_row = np.asarray(positions, dtype=np.int64)
    box_of_row = np.asarray(sides, dtype=np.int32).reshape(-1, 4)
    left, top, right, bottom = box_of_row.T
    empty = np.flatnonzero((right <= left) | (bottom <= top))
    if len(empty):
        first = int(empty[0])
        raise file.error(
            f"`boxes` must contain at least one pixel, got {box_of_row[first].tolist()} for "
            f"{paths[image_of_row[first]]} in line {_line_of_row(file, split, paths, first)} of {file.path}"
        )
    boxes = np.zeros((len(paths), 4), dtype=np.int32)
    boxes[image_of_row] = box_of_row
    has_box = np.zeros(len(paths), dtype=bool)
    has_box[image_of_row] = True

    overwritten = np.flatnonzero((boxes[image_of_row] != box_of_row).any(1))
    if len(overwritten):
        first = int(overwritten[0])
        last = int(np.flatnonzero(image_of_row == image_of_row[first])[-1])
        raise file.error(
            f"{file.path} must have one box for each image, got several for {paths[image_of_row[first]]}, in lines "
            f"{_line_of_row(file, split, paths, first)} and {_line_of_row(file, split, paths, last)}"
        )
    without = np.flatnonzero(~has_box)
    if len(without):
        raise file.error(
            f"{file.path} must have a box for each image of {split}, got none for {len(without)} images, such as "
            f"{paths[without[0]]}"
        )
    return boxes


def _line_of_row(file: ListFile, split: str, paths: Sequence[str], row: int) -> int:
    """The line number of row `row` of `_matching_rows`, for an error message."""
    _, _, line = next(islice(_matching_rows(file, split, paths), row, None))
    return line


def _matching_rows(file: ListFile, split: str, paths: Sequence[str]) -> Iterator[tuple[int, Sequence[int], int]]:
    """Yield the position in the paths, the box and the line number of each row that belongs to one of the paths.

    The rows of the official files have the order of the official lists. A table of all names is made only if a row is
    found in another order.
    """
    prefix = f"{split}/"
    position_of: dict[str, int] = {}
    in_order = True
    rows = file.csv_rows()
    header = read_csv_header(rows)
    if header != BOX_HEADER:
        raise file.error(f"line 1 of {file.path} must be the header {','.join(BOX_HEADER)!r}, got {','.join(header)!r}")
    for row, (fields, line, _) in enumerate(rows):
        box = _parse_box(file, fields, line)
        name = prefix + fields[0]
        if in_order and (row >= len(paths) or _without_suffix(paths[row]) != name):
            in_order = False
            position_of = {_without_suffix(image): position for position, image in enumerate(paths)}
        if in_order:
            yield row, box, line
        elif name in position_of:
            yield position_of[name], box, line


def _parse_box(file: ListFile, fields: Sequence[str], line: int) -> Sequence[int]:
    """Left, top, right and bottom of the box in a row of name, x, y, width and height."""
    try:
        x, y, width, height = map(int, fields[1:])
        return array("i", (x, y, x + width, y + height))
    except (ValueError, OverflowError):
        raise file.error(
            f"each line of {file.path} must be a name and four integers, got {','.join(fields)[:80]!r} (line {line})"
        ) from None


def _without_suffix(path: str) -> str:
    return path.rpartition(".")[0]
