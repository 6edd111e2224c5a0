"""Reads the user's images from a CSV or Parquet table with labels and, optionally, splits, roles and boxes.

The columns are read as text, and the functions here check a column and give its values.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ROLES, ImageIndex, check_test_fraction, splits_by_use
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import LARGEST_PIXEL, Table, drawn_splits, normalized_path, number_splits
from lightning_retrieval.datamodules.table_file import TAG_SEPARATOR, read_table
from lightning_retrieval.datamodules.table_format import SIDES, ColumnNames, TableFormat
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.paths import check_path, find_file

WHOLE_IMAGE = (0, 0, 2**31 - 1, 2**31 - 1)  # the box of an image without a box; boxes are clipped to the image


def is_empty(text: str) -> bool:
    """Whether a field is empty."""
    return text == ""


def is_integer(text: str) -> bool:
    """Whether a text is an integer in canonical form, such as 7. The text 007 is not, since it may be another class."""
    return re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) is not None


def is_written_missing(text: str | None) -> bool:
    """Whether a text is what programs write for a missing value, such as `nan` of pandas; Nat and Null are names."""
    return text in ("nan", "NaN", "<NA>", "NaT", "NULL", "null")


def is_address(text: str) -> bool:
    """Whether a text is an address such as `https://...`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def with_paths(table: Table, root: Path | None) -> Table:
    """A table whose columns `image` and `path` are paths relative to the root, without `./` and `//`.

    Args:
        table: the table.
        root: the folder that the paths are relative to. Absolute paths must lie in it; if it is None, there are none.
    """
    table.check("image", is_empty, "not be empty in any row")
    table.check("image", is_address, "be a path, not an address")
    images = table["image"]
    if root is not None:
        images = paths_in_root(images, root)
    cure = "write paths relative to a root that contains the images"
    table.with_columns(image=images).check("image", leaves_root, "lie inside the root", cure=cure)
    paths = list(map(normalized_path, images))
    return table.with_columns(image=paths, path=paths)


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


def check_values(table: Table, name: str) -> None:
    """Raise if a column has a missing value that was written as text, or one number in two forms; None is neither."""
    table.check(name, is_written_missing, "not be the text of a missing value; leave out such rows")
    integers = {text for text in table[name] if text is not None and is_integer(text)}

    def is_second_form(text: str | None) -> bool:
        return text is not None and re.fullmatch(r"-?\d+\.0+", text) is not None and text.split(".")[0] in integers

    table.check(name, is_second_form, "not be one number in two forms, such as 1 and 1.0, which are two classes")


def ids_of(table: Table, name: str) -> list[Any]:
    """The values of a column of classes, categories or cameras: integers if all are, else text; None stays None."""
    table.check(name, is_empty, "not be empty in any row")
    check_values(table, name)
    texts: list[Any] = table[name]
    if not all(text is None or is_integer(text) for text in texts):
        return texts
    return [None if text is None else int(text) for text in texts]


def labels_of(table: Table) -> list[Any]:
    """The label of each image, None for a distractor. Without the column `label`, each file is a class of its own."""
    is_labelled = "label" in table
    labels = table["label" if is_labelled else "image"]
    if "role" in table:
        is_distractor = [name == "distractor" for name in table["role_name"]]
        labels = [None if skipped else label for skipped, label in zip(is_distractor, labels)]
    if not is_labelled:
        return list(labels)
    return ids_of(table.with_columns(label=labels), "label")


def with_roles(table: Table) -> Table:
    """A table whose column `role` has the numbers of the roles, and `role_name` their names, if it has the column."""
    if "role" not in table:
        return table
    table.check("role", lambda name: name not in ("", *ROLES), f"be one of {', '.join(ROLES)}")
    names = table["role"]
    return table.with_columns(role=[int(ROLES[name or "both"]) for name in names], role_name=names)


def tags_of(table: Table) -> list[list[str]] | None:
    """The tags of each image; None without the column `tags`.

    Distractors have no tags, because they are relevant to no query.
    """
    if "tags" not in table:
        return None
    table.check("tags", is_written_missing, "not be the text of a missing value; leave them empty")
    texts = table["tags"]
    separators = r"[|\t]" if any(TAG_SEPARATOR in text for text in texts) else r"[|,\t]"  # a tag may have a comma
    separated = [row for row, text in enumerate(texts) if re.search(separators, text)]
    if separated:
        row = separated[0]
        warnings.warn(
            f"`tags` must be separated by {TAG_SEPARATOR!r}, got {texts[row]!r} at {table.where(row)}, which has "
            f"another separator and so is not split there ({len(separated)} such rows); write {TAG_SEPARATOR!r} "
            "between tags.",
            stacklevel=2,
        )
    names = table["role_name"] if "role" in table else [""] * len(table)
    found = []
    for text, name in zip(texts, names):
        tags = map(str.strip, text.split(TAG_SEPARATOR))
        found.append([] if name == "distractor" else list(filter(None, tags)))
    return found


def splits_of(table: Table) -> list[str]:
    """The split of each image: `train`, `val`, `test` or the name of another evaluation set."""
    rule = "be train, val, test or another name of letters, digits, '_' and '-'"
    table.check("split", lambda name: re.fullmatch(r"[\w-]+", name) is None, rule)
    check_values(table, "split")
    rule = "be a split, but this is a role"
    table.check("split", lambda name: name.lower() in ROLES, rule, cure="write test, and the role in the column role")
    use_of_name = {name: use for use, name in splits_by_use(table["split"], "split").items()}
    return [use_of_name[name] for name in table["split"]]


def by_split(table: Table, test_fraction: float, seed: int) -> dict[str, Table]:
    """The table of each split: of the column `split`, else drawn by class. In training, roles stay if they make lists.

    Args:
        table: the table, with the column `label`.
        test_fraction: fraction of the classes that form the test set if it is drawn.
        seed: determines which classes form the test set.
    """
    if "split" in table:
        found = _given_splits(table)
    else:
        found = drawn_splits(table, test_fraction, seed)
    if "role" not in table:
        return found
    for name, of_split in list(found.items()):
        roles = [role for role, label in zip(of_split["role"], of_split["label"]) if label is not None]
        sides = {side: any(role & ROLES[side] for role in roles) for side in ("query", "gallery")}
        if name == "train":
            has_lists = all(sides.values()) and any(role != ROLES["both"] for role in roles)
            found[name] = of_split.with_columns(role=of_split["role"] if has_lists else None)
            continue
        for side, is_there in sides.items():
            if not is_there:
                rule = f"must be {side} or both in at least one row of {name!r}"
                raise InvalidValue(rule, argument="role", got=f"none in {table.file}")
    return found


def _given_splits(table: Table) -> dict[str, Table]:
    splits = np.array(splits_of(table))
    names = sorted(set(splits.tolist()))
    if "train" not in names or len(names) == 1:
        got = f"{', '.join(map(repr, names))} in {table.file}"
        raise InvalidValue("must have rows of train and of val, test or others", argument="split", got=got)
    found = {name: table.chosen(np.flatnonzero(splits == name)) for name in dict.fromkeys(["train", *names])}
    in_training = found["train"]
    wrong = [row for row, label in enumerate(in_training["label"]) if label is None]
    if wrong:
        raise in_training.error(wrong, "`role` must be query, gallery or both in training", "'distractor'")
    return found


def boxes_of(table: Table) -> list[tuple[int, ...]] | None:
    """The box of each image; None if neither `box` nor the sides are columns."""
    if "box" not in table and SIDES[0] in table:
        table = table.with_columns(box=list(map(" ".join, zip(*(table[side] for side in SIDES)))))
    if "box" not in table:
        return None
    return table.parsed("box", parse_box)


def parse_box(text: str) -> tuple[int, ...]:
    """Parse the four numbers of a box, separated by spaces or commas, and round them.

    An empty text is the box of the whole image.

    Raises:
        ValueError: if they are not the sides of a box.
    """
    if not text.strip():
        return WHOLE_IMAGE
    left, top, right, bottom = (round(float(number)) for number in text.replace(",", " ").split())
    if left >= right or top >= bottom or max(map(abs, (left, top, right, bottom))) >= LARGEST_PIXEL:
        raise ValueError("it must be `left top right bottom` with right > left and bottom > top")
    return left, top, right, bottom


def check_unique_images(table: Table) -> None:
    """Raise if an image is listed twice with the same box. Otherwise, a query would be in its own ranked list."""
    names = ["image", "box"] if "box" in table else ["image"]
    table.check_unique(*names, rule="be different in each row, or have another box")


class ImageTable(ImageDataModule):
    """Reads images that are listed in a table. Required are the columns `image` and `label` (or `tags`).

    Columns may be in any order. Columns with other names than the following are ignored.

    | column | content |
    | --- | --- |
    | `image` | the path, relative to the root, or an absolute path in the root |
    | `label` | the class, text or an integer; may be empty for distractors |
    | `tags` | tags such as `red; dress`, separated by `;`, for the rule `SharedTags`; may be empty |
    | `category` | a coarser class, for `sampler="category"` |
    | `split` | `train`, `val`, `test`, or a usual name of one of them; or the name of another evaluation set |
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
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

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

    def _held_out_images(self) -> ImageIndex:
        """The held-out images, without roles: their classes need not have both queries and gallery images."""
        images = super()._held_out_images()
        images.roles = None
        return images

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of the table, by split."""
        table = read_table(self._table_path(), table_format=self._format)
        table = with_roles(with_paths(table, self.root))
        is_labelled = "label" in table
        labels = labels_of(table)
        for name in ("category", "camera"):
            if name in table:
                table = table.with_columns(**{name: ids_of(table, name)})
        table = table.with_columns(label=labels, box=boxes_of(table), tags=tags_of(table))
        check_unique_images(table)
        splits = by_split(table, self.test_fraction, self.split_seed)
        return number_splits(splits, name_of_class=str if is_labelled else None)

    def _table_path(self) -> Path:
        if self.table.is_file() and not (self.root / self.table).exists():
            return self.table
        return find_file(self.root, str(self.table), argument="table")
