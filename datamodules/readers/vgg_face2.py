"""VGGFace2: faces; the classes are people."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import LARGEST_PIXEL, Table, number_splits, read_csv_list, read_list
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.paths import find_file
from lightning_retrieval.preparation.decoding import image_suffixes, list_folder

SPLITS = ("train", "test")
BOX_COLUMNS = ("NAME_ID", "X", "Y", "W", "H")


class VGGFace2(ImageDataModule):
    """VGGFace2: 3.14 million training images of 8,631 people, 169,396 test images of 500 other people.

    In the test each image is a query, and all other test images are its gallery. `root` contains the folders `train/`
    and `test/`, and the lists `train_list.txt` and `test_list.txt`, directly or in `meta/`. Paths in the lists may
    begin with the name of the split. Without lists, all images in the folders are used.

    Args:
        root: the folder that contains `train/` and `test/`.
        boxes: whether each image is cropped to its box, read from `loose_bb_train.csv` and `loose_bb_test.csv` in
            `bb_landmark/`.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

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
        >>> data = VGGFace2("vgg")
        >>> data.splits["train"].paths[2], data.splits["train"].labels, list(data.splits["test"].names)
        ('train/n000003/0001_01.jpg', array([0, 0, 1]), ['n000001'])

    Cost:
        Reading 3.3 million lines takes some seconds.

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
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of all lines of the lists, or all images in the folders."""
        return number_splits({split: self._table(split) for split in SPLITS})

    def _table(self, split: str) -> Table:
        lists = [f"{folder}{name}_list.txt" for folder in ("meta/", "") for name in SPLITS]
        has_lists = any((self.root / name).is_file() for name in lists)
        if not has_lists and all((self.root / name).is_dir() for name in SPLITS):
            table = self._of_folder(split)
        else:
            file = find_file(self.root, f"meta/{split}_list.txt", f"{split}_list.txt")
            table = read_list(file, "path")
            table = table.with_columns(path=table.parsed("path", partial(_below_root, split)))
            table.check_unique("path")
        boxes = self._boxes(split, table["path"]) if self.boxes else None
        return table.with_columns(label=[sys.intern(path.split("/", 2)[1]) for path in table["path"]], box=boxes)

    def _of_folder(self, split: str) -> Table:
        """All images in the folders of people."""
        suffixes = image_suffixes()
        paths = []
        for person in list_folder(self.root / split).folders:
            for file in list_folder(person).files:
                if file.suffix.lower() in suffixes:
                    paths.append(f"{split}/{person.name}/{file.name}")
        if not paths:
            rule = f"must contain lists, or images as {split}/<person>/<image>"
            raise InvalidValue(rule, "VGGFace2", "root", got=f"none in {self.root / split}")
        return Table({"path": paths})

    def _boxes(self, split: str, paths: Sequence[str]) -> NDArray[np.int64]:
        """The left, top, right and bottom of each image's box, in the order of the paths, of shape (images, 4)."""
        import pyarrow
        from pyarrow import compute

        name = f"loose_bb_{split}.csv"
        file = find_file(self.root, f"bb_landmark/{name}", f"meta/bb_landmark/{name}", name)
        table = read_csv_list(file, BOX_COLUMNS)
        x, y, width, height = (_integers(table, side) for side in BOX_COLUMNS[1:])
        boxes = np.stack([x, y, x + width, y + height], 1)
        below_split = compute.utf8_slice_codeunits(pyarrow.array(paths), len(split) + 1)
        stems = compute.replace_substring_regex(below_split, r"\.[^.]*$", "")
        names = table.columns["NAME_ID"].combine_chunks()
        _check_one_box_each(table, boxes, compute.is_in(names, stems))
        rows = compute.index_in(stems, names)
        if rows.null_count:
            first = rows.is_null().index(True).as_py()
            got = f"none for {rows.null_count} images, such as {paths[first]}"
            raise InvalidValue(f"{file} must have a box for each image of {split}", got=got)
        found: NDArray[np.int64] = boxes[rows.to_numpy()]
        is_empty = (found[:, 2] <= found[:, 0]) | (found[:, 3] <= found[:, 1])
        wrong = np.flatnonzero(is_empty | (np.abs(found).max(1) >= LARGEST_PIXEL)).tolist()
        if wrong:
            row = rows[wrong[0]].as_py()
            rule = "`boxes` must contain at least one pixel, and fit into 32 bits"
            raise table.error([row], rule, boxes[row].tolist())
        return found


def _integers(table: Table, name: str) -> NDArray[np.int64]:
    """A column of Arrow as integers."""
    import pyarrow

    try:
        numbers: NDArray[np.int64] = table.columns[name].cast(pyarrow.int64()).to_numpy()
    except pyarrow.ArrowInvalid:
        numbers = np.array(table.parsed(name, int))
    return numbers


def _check_one_box_each(table: Table, boxes: NDArray[np.int64], is_used: Any) -> None:
    """Raise if an image has several different boxes; images that are not used do not count."""
    names = table.columns["NAME_ID"].combine_chunks().dictionary_encode()
    if len(names.dictionary) == len(names):
        return
    _, first_of_name, name = np.unique(names.indices.to_numpy(), return_index=True, return_inverse=True)
    differs = (boxes != boxes[first_of_name][name]).any(1) & is_used.to_numpy(zero_copy_only=False)
    second = np.flatnonzero(differs).tolist()
    if second:
        first = int(first_of_name[name[second[0]]])
        got = f"several for {table['NAME_ID'][first]} in {table.where(first)} and {table.where(second[0])}"
        raise InvalidValue("`boxes` must be one for each image", got=got)


def _below_root(split: str, path: str) -> str:
    """The path of an image that is listed as `<person>/<image>` or with the split before it."""
    folders = path.count("/")
    if folders == 1 and not path.startswith("/"):
        return f"{split}/{path}"
    if folders == 2 and path.startswith(f"{split}/"):
        return path
    raise ValueError(f"it must be <person>/<image> or {split}/<person>/<image>")
