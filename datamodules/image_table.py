"""Reads the user's images from a CSV or Parquet table with labels and, optionally, splits, roles and boxes.

The columns are read as text and converted to arrays, and each value is checked.
"""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_integer, check_path
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import (
    DISTRACTOR,
    ROLES,
    ImageIndex,
    check_test_fraction,
    class_numbers,
    split_by_class,
    tag_numbers,
)
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import (
    TAG_SEPARATOR,
    TableColumns,
    find_file,
    normalized_path,
    read_table,
)
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned, owned_by

WHOLE_IMAGE = (0, 0, 2**31 - 1, 2**31 - 1)  # the box of an image without a box; boxes are clipped to the image


def find_rows(values: Sequence[str], condition: Callable[[str], bool]) -> list[int]:
    """Return the indices of the rows whose value meets a condition."""
    rows = []
    for row, value in enumerate(values):
        if condition(value):
            rows.append(row)
    return rows


def is_empty(text: str) -> bool:
    """Whether a field is empty."""
    return text == ""


def is_integer(text: str) -> bool:
    """Whether a text is an integer in canonical form, such as 7. The text 007 is not, since it may be another class."""
    return re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) is not None


def is_unknown_role(name: str) -> bool:
    """Whether a name is not one of the roles; an empty field is the role `both`."""
    return name != "" and name not in ROLES


def is_written_missing(text: str) -> bool:
    """Whether a text is what programs write for a missing value, such as `nan` of pandas."""
    return text.lower() in ("nan", "<na>", "nat", "null")


def is_other_case(name: str) -> bool:
    """Whether a name is that of a split, but not in lower case."""
    return name.lower() in ("train", "val", "test") and name != name.lower()


def is_invalid_split(name: str) -> bool:
    """Whether a text cannot be the name of a split."""
    return re.fullmatch(r"[\w-]+", name) is None


def parse_images(table: TableColumns, root: Path | None) -> list[str]:
    """The path of each image relative to the root, without `./` and `//`.

    Args:
        table: the table.
        root: the folder that the paths are relative to. Absolute paths must lie in it; if it is None, there are none.
    """
    images = table.columns["image"]
    if root is not None:
        images = paths_in_root(images, root)
    table.check(find_rows(images, is_empty), "`image` must not be empty in any row")
    rule = "`image` must be a path, not an address"
    table.check(find_rows(images, is_address), rule, images, cure="name the column with the paths of the files")
    outside = find_rows(images, leaves_root)
    if outside:
        rule, cure = "`image` must lie inside the root", _cure_outside(images[outside[0]])
        table.check(outside, rule, images, cure=cure)
    return [normalized_path(image) for image in images]


def is_address(text: str) -> bool:
    """Whether a text is an address such as `https://...`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def _cure_outside(path: str) -> str:
    """What helps if a path leads out of the root."""
    if not os.path.isabs(path):
        return "write paths without '..', relative to a root that contains the images"
    if os.path.exists(path):
        return "give a root that contains the images"
    return "there is no such file on this machine, so write the paths relative to the root"


def paths_in_root(paths: Sequence[str], root: Path) -> list[str]:
    """Make absolute paths in a folder relative to it; all other paths do not change.

    What a path is made of decides, not what its symbolic links lead to.

    Args:
        paths: the paths.
        root: the folder.
    """
    tops = [PurePath(os.path.abspath(root)), PurePath(os.path.realpath(root))]
    relative = []
    for path in paths:
        if os.path.isabs(path) and ".." not in PurePath(path).parts:
            for top in tops:
                if top in PurePath(path).parents:
                    path = PurePath(path).relative_to(top).as_posix()
                    break
        relative.append(path)
    return relative


def check_values(table: TableColumns, column: str, skipped: NDArray[np.bool_] | None = None) -> None:
    """Raise if a column has a missing value that was written as text, or one number in two forms.

    Args:
        table: the table.
        column: name of the column.
        skipped: whether each row does not count.
    """
    texts = table.columns[column]
    if skipped is not None:
        texts = np.where(skipped, "", texts).tolist()
    rule = f"`{column}` must not be the text of a missing value; leave out such rows"
    table.check(find_rows(texts, is_written_missing), rule, texts)
    integers = set(filter(is_integer, texts))
    twice = find_rows(
        texts, lambda text: re.fullmatch(r"-?\d+\.0+", text) is not None and text.split(".")[0] in integers
    )
    rule = f"`{column}` must not be one number in two forms, such as 1 and 1.0, which are two classes"
    table.check(twice, rule, texts)


def parse_labels(table: TableColumns, distractors: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the label of each image: integers if all labels are integers, else text; arbitrary for distractors.

    Without the column `label`, each file is a class of its own.
    """
    if "label" not in table.columns:
        return np.array(table.columns["image"])
    texts = table.columns["label"]
    unlabelled = [row for row in find_rows(texts, is_empty) if not distractors[row]]
    table.check(unlabelled, "`label` must not be empty in any row")
    check_values(table, "label", distractors)
    labels = np.array(texts)
    known = ~distractors
    if not all(map(is_integer, labels[known].tolist())):
        return labels
    numbers = np.zeros(len(texts), dtype=np.int64)
    numbers[known] = labels[known].astype(np.int64)
    return numbers


def parse_roles(table: TableColumns) -> tuple[NDArray[np.uint8] | None, NDArray[np.bool_]]:
    """Return the role of each image, or None without the column `role`; and whether each image is a distractor."""
    if "role" not in table.columns:
        return None, np.zeros(len(table.lines), dtype=bool)
    names = table.columns["role"]
    table.check(find_rows(names, is_unknown_role), f"`role` must be one of {', '.join(ROLES)}", names)
    roles = np.array([ROLES[name or "both"] for name in names], dtype=np.uint8)
    return roles, np.array(names) == "distractor"


def parse_tags(
    table: TableColumns, distractors: NDArray[np.bool_]
) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Return the tags of each image, padded, and the names of the tags; None without the column `tags`.

    Distractors have no tags, because they are relevant to no query.
    """
    if "tags" not in table.columns:
        return None, None
    tags_of_images: list[list[str]] = []
    for text, is_distractor in zip(table.columns["tags"], distractors.tolist()):
        tags = [tag.strip() for tag in text.split(TAG_SEPARATOR)]
        if is_distractor:
            tags = []
        tags_of_images.append(list(filter(None, tags)))
    rule = "`tags` must not be the text of a missing value; leave them empty"
    table.check(find_rows(table.columns["tags"], is_written_missing), rule, table.columns["tags"])
    _warn_of_other_separators(table)
    return tag_numbers(tags_of_images)


def _warn_of_other_separators(table: TableColumns) -> None:
    """Warn of tags that seem to be separated by another character than `;`. A tag may have a comma."""
    texts, separators = table.columns["tags"], r"[|,\t]"
    if any(TAG_SEPARATOR in text for text in texts):
        separators = r"[|\t]"
    separated = find_rows(texts, lambda text: re.search(separators, text) is not None)
    if separated:
        row = separated[0]
        warnings.warn(
            f"`tags` must be separated by {TAG_SEPARATOR!r}, got {texts[row]!r} at {table.unit} "
            f"{table.lines[row]} of {table.path}, which has another separator and so is not split there "
            f"({len(separated)} such rows); write {TAG_SEPARATOR!r} between tags.",
            stacklevel=2,
        )


def check_splits(table: TableColumns) -> None:
    """Raise unless all texts of the column `split` are names of splits."""
    splits = table.columns["split"]
    rule = "`split` must be train, val, test or another name of letters, digits, '_' and '-'"
    table.check(find_rows(splits, is_invalid_split), rule, splits)
    table.check(find_rows(splits, is_other_case), "`split` must be train, val or test in lower case", splits)
    check_values(table, "split")
    of_roles = find_rows(splits, lambda name: name.lower() in ROLES)
    rule = "`split` must be a split, but this is a role"
    table.check(of_roles, rule, splits, cure="write test, and the role in the column role")


def parse_splits(table: TableColumns) -> NDArray[Any] | None:
    """The split of each image, or None without the column `split`."""
    if "split" not in table.columns:
        return None
    check_splits(table)
    splits = table.columns["split"]
    names = sorted(set(splits))
    if "train" not in names or len(names) == 1:
        got = f"{', '.join(map(repr, names))} in {table.path}"
        raise InvalidValue("must have rows of train and of val, test or others", argument="split", got=got)
    return np.array(splits)


def draw_splits(labels: NDArray[Any], distractors: NDArray[np.bool_], test_fraction: float, seed: int) -> NDArray[Any]:
    """Split the classes between training and test; distractors belong to the test set.

    Args:
        labels: the label of each row.
        distractors: whether each row is a distractor, whose label does not count.
        test_fraction: fraction of the classes that form the test set.
        seed: determines which classes form the test set.
    """
    classes = np.unique(labels[~distractors]).tolist()
    test = split_by_class("test_fraction", classes, test_fraction, seed)
    is_test = distractors | np.isin(labels, sorted(test))
    return np.where(is_test, "test", "train")


def parse_numbers(table: TableColumns, column: Literal["category", "camera"]) -> NDArray[np.int64] | None:
    """Return the number of each image's category or camera, None without the column. Splits share the numbering."""
    if column not in table.columns:
        return None
    texts = table.columns[column]
    table.check(find_rows(texts, is_empty), f"`{column}` must not be empty in any row")
    check_values(table, column)
    values = np.array(texts)
    if all(map(is_integer, texts)):
        values = values.astype(np.int64)
    numbers, _ = class_numbers(values)
    return numbers


def parse_boxes(table: TableColumns) -> NDArray[np.int32] | None:
    """The box of each image, shape (rows, 4); None if neither `box` nor the sides are columns."""
    columns = table.columns
    if "box" in columns:
        texts = columns["box"]
    elif "left" in columns:
        sides = zip(columns["left"], columns["top"], columns["right"], columns["bottom"])
        texts = [" ".join(numbers) for numbers in sides]
    else:
        return None
    boxes: list[tuple[int, ...]] = []
    invalid_rows: list[int] = []
    for row, text in enumerate(texts):
        box = parse_box(text)
        if box is None:
            invalid_rows.append(row)
        else:
            boxes.append(box)
    table.check(invalid_rows, "`box` must be `left top right bottom` with right > left and bottom > top", texts)
    return np.array(boxes, dtype=np.int32)


def parse_box(text: str) -> tuple[int, ...] | None:
    """Parse the four numbers of a box, separated by spaces or commas, and round them.

    An empty text is the box of the whole image. For an invalid text, the result is None.
    """
    if not text.strip():
        return WHOLE_IMAGE
    try:
        left, top, right, bottom = (round(float(number)) for number in text.replace(",", " ").split())
    except (ValueError, OverflowError):
        return None
    fits_32_bits = max(map(abs, (left, top, right, bottom))) < 2**31
    if left < right and top < bottom and fits_32_bits:
        return left, top, right, bottom
    return None


def check_unique_images(table: TableColumns, images: Sequence[str], boxes: NDArray[np.int32] | None) -> None:
    """Check that no image is listed twice with the same box. Otherwise, a query would be in its own ranked list."""
    keys: Sequence[Any] = images
    if boxes is not None:
        keys = list(zip(images, map(tuple, boxes.tolist())))
    if len(set(keys)) == len(keys):
        return
    first_row: dict[Any, int] = {}
    duplicates: list[int] = []
    for row, key in enumerate(keys):
        if first_row.setdefault(key, row) != row:
            duplicates.append(row)
    image = images[duplicates[0]]
    line = table.lines[first_row[keys[duplicates[0]]]]
    rule = "`image` must be different in each row, or have another box"
    table.check(duplicates, f"{rule}, got {image!r} as in {table.unit} {line}")


@dataclass
class ImageRows:
    """The rows of a table of images: one entry per row in each array.

    Args:
        images: paths of the images.
        labels: labels of the images, integers or text; arbitrary for distractors.
        distractors: whether each row is a distractor.
        tags: numbers of the tags of each image, padded, or None.
        tag_names: names of the tags, or None.
        categories: numbers of the categories, or None.
        boxes: boxes of the images, (rows, 4), or None.
        roles: numbers of the roles, or None.
        cameras: numbers of the cameras, or None.
        table: the table, for error messages.
    """

    images: list[str]
    labels: NDArray[Any]
    distractors: NDArray[np.bool_]
    tags: NDArray[np.int64] | None
    tag_names: list[str] | None
    categories: NDArray[np.int64] | None
    boxes: NDArray[np.int32] | None
    roles: NDArray[np.uint8] | None
    cameras: NDArray[np.int64] | None
    table: TableColumns

    def index(self, name: str, chosen: NDArray[np.bool_]) -> ImageIndex:
        """Create the index of the chosen rows, which form the split `name`; the classes are numbered 0, 1, ..."""
        known = chosen & ~self.distractors
        labels = np.full(len(self.images), DISTRACTOR)
        labels[known], class_names = class_numbers(self.labels[known])
        names = None
        if "label" in self.table.columns:
            names = class_names
        columns: dict[str, NDArray[Any] | None] = {
            "tags": self.tags,
            "categories": self.categories,
            "boxes": self.boxes,
            "cameras": self.cameras,
        }
        if name != "train" or self._has_lists(chosen):
            columns["roles"] = self.roles
        paths = list(itertools.compress(self.images, chosen.tolist()))
        lines = self.table.lines_of(np.flatnonzero(chosen))
        of_split = {column: values[chosen] for column, values in columns.items() if values is not None}
        return ImageIndex(paths, labels[chosen], names=names, tag_names=self.tag_names, lines=lines, **of_split)

    def _has_lists(self, chosen: NDArray[np.bool_]) -> bool:
        """Whether the roles of the chosen rows matter: some are queries, some are gallery, and not all are both."""
        if self.roles is None:
            return False
        roles = self.roles[chosen]
        has_queries, has_gallery = (roles & ROLES["query"]).any(), (roles & ROLES["gallery"]).any()
        return bool(has_queries and has_gallery and (roles != ROLES["both"]).any())


class ImageTable(ImageDataModule):
    """Reads images that are listed in a table. Required are the columns `image` and `label` (or `tags`).

    Columns may be in any order. Columns with other names than the following are ignored.

    | column | content |
    | --- | --- |
    | `image` | the path, relative to the root, or an absolute path in the root |
    | `label` | the class, text or an integer; may be empty for distractors |
    | `tags` | tags such as `red; dress`, separated by `;`, for the rule `SharedTags`; may be empty |
    | `category` | a coarser class, for `sampler="category"` |
    | `split` | `train`, `val`, `test` or the name of another evaluation set |
    | `role` | `query`, `gallery`, `both` (also if empty) or `distractor` (not in training) |
    | `camera` | camera or sequence; in evaluation, a query's list has no images of the same class and camera |
    | `box` | `left top right bottom` in pixels of the upright image; the whole image if empty |
    | `left`, `top`, `right`, `bottom` | the box in four columns, instead of `box` |

    Without the column `split`, the classes are split between training and test, so no test class is used for training.
    Without the column `label`, each file is a class of its own. Then files are split at random, and training needs
    `sampler="tags"` and a rule of relevance. In a Parquet file, the tags of an image may be a list.

    Training ignores roles, unless some training images are queries, some are gallery images, and not all are both.
    Batches then have `roles`, for the rule `GalleryOnly`. The images that `val_fraction` holds out are evaluated
    without roles; for validation by roles, give the split `val`.

    Args:
        root: the folder that the paths are relative to.
        table: a CSV file in UTF-8 with a header line, or a Parquet file (.parquet); its path is relative to the root or
            to the working directory.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there is a column
            `split`.
        split_seed: determines which classes form the test set.
        columns: the names of the table's columns, if they differ, by the names above: `{"image": "path", "label":
            "class"}`, or the same as `"image=path,label=class"`. `"oml"` stands for the tables of open-metric-learning,
            with `path`, `is_query` and `is_gallery`.
        delimiter: the character that separates the fields of a CSV file, such as `";"` or a tab.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if the table does not exist.
        ValueError: if a column is missing or a value is invalid; the message has the line number.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> rows = ["image,label,split"]
        >>> for i, name in enumerate(["cat", "cat", "dog", "dog", "owl", "owl"]):
        ...     Image.new("RGB", (60, 50), (30 * i, 0, 0)).save(f"{i}.png")
        ...     rows.append(f"{i}.png,{name},{'train' if i < 4 else 'test'}")
        >>> _ = Path("pets.csv").write_text("\\n".join(rows))
        >>> data = ImageTable(".", "pets.csv", classes_per_batch=2, samples_per_class=2)
        >>> data.splits["train"].labels, list(data.splits["test"].names)
        (array([0, 0, 1, 1]), ['owl'])

    Relations:
        `ImageFolder` needs no table if each class has its own folder.
    """

    reads_in_check = True

    def __init__(
        self,
        root: str | Path,
        table: str | Path,
        *,
        test_fraction: float = 0.5,
        split_seed: int = 0,
        columns: ColumnNames = None,
        delimiter: str = ",",
        **settings: Unpack[ImageSettings],
    ) -> None:
        super().__init__(root, **settings)
        with owned_by("ImageTable"):
            self.table = check_path("table", table)
            self.test_fraction = check_test_fraction(test_fraction)
            self.split_seed = check_integer("split_seed", split_seed, least=0)
            self._format = TableFormat.checked(columns, delimiter)
        self.columns, self.delimiter = columns, delimiter

    @owned
    def sources(self) -> list[Path]:
        """The table."""
        return [self._table_path()]

    def _held_out_images(self) -> ImageIndex:
        """The held-out images, without roles: their classes need not have both queries and gallery images."""
        images = super()._held_out_images()
        images.roles = None
        return images

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of the table, by split."""
        path = self._table_path()
        table = read_table(path, table_format=self._format)
        images = parse_images(table, self.root)
        roles, distractors = parse_roles(table)
        labels = parse_labels(table, distractors)
        splits = parse_splits(table)
        if splits is None:
            splits = draw_splits(labels, distractors, self.test_fraction, self.split_seed)
        else:
            in_training = np.flatnonzero(distractors & (splits == "train")).tolist()
            table.check(in_training, "`role` must be query, gallery or both in training", table.columns.get("role"))
        boxes = parse_boxes(table)
        check_unique_images(table, images, boxes)
        if roles is not None:
            _check_queries_and_gallery(path, splits, roles, distractors)
        tags, tag_names = parse_tags(table, distractors)
        categories, cameras = parse_numbers(table, "category"), parse_numbers(table, "camera")
        rows = ImageRows(images, labels, distractors, tags, tag_names, categories, boxes, roles, cameras, table)
        names = dict.fromkeys(["train", *sorted(set(splits.tolist()))])
        return {name: rows.index(name, splits == name) for name in names}

    def _table_path(self) -> Path:
        path = self.table
        if (self.root / self.table).exists() or not self.table.is_file():
            path = find_file(self.root, str(self.table), argument="table")
        if path.is_dir():
            raise InvalidValue("must be a CSV or Parquet file", argument="table", got=f"the folder {path}")
        return path


def _check_queries_and_gallery(
    path: Path, splits: NDArray[Any], roles: NDArray[np.uint8], distractors: NDArray[np.bool_]
) -> None:
    """Check that each evaluation set has a query, and a gallery image that is not a distractor."""
    for name in sorted(set(splits.tolist()) - {"train"}):
        known_roles = roles[(splits == name) & ~distractors]
        for side in ("query", "gallery"):
            if not (known_roles & ROLES[side]).any():
                rule = f"must be {side} or both in at least one row of {name!r}"
                raise InvalidValue(rule, argument="role", got=f"none in {path}")
