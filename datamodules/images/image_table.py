"""The user's own images in a table: CSV or Parquet, with their labels and, where wanted, splits, roles and boxes."""

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import normalized_path, read_csv_rows
from lightning_retrieval.datamodules.images.image_folder import check_test_fraction
from lightning_retrieval.datamodules.images.image_index import (
    DISTRACTOR,
    LEAVES,
    ROLES,
    ImageIndex,
    class_numbers,
    split_by_class,
)
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

SIDES = ("left", "top", "right", "bottom")
COLUMNS = ("image", "label", "category", "split", "role", "box", *SIDES)
WHOLE = (0, 0, 2**31 - 1, 2**31 - 1)  # the box of an image that has none: boxes are cut to the image


class ImageTable(ImageDataModule):
    """Images that a table lists, with the columns `image` and `label`, in any order; others are passed over.

    | column | what it holds |
    | --- | --- |
    | `image` | the path, relative to the root |
    | `label` | the class, text or an integer; may be empty for distractors |
    | `category` | a coarser class, for `sampler="category"` |
    | `split` | `train`, `val`, `test` or the name of another evaluation set |
    | `role` | in evaluation: `query`, `gallery`, `both` (also where empty) or `distractor` |
    | `box` | `left top right bottom` in pixels; the whole image where empty |
    | `left`, `top`, `right`, `bottom` | the same in four columns |

    Without the column `split`, the classes are split between training and test, so that test classes were never seen.

    Args:
        root: the folder that the paths are relative to.
        table: a CSV file with a header line in UTF-8, or a Parquet file (.parquet), below the root or from here.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there is a column
            `split`.
        split_seed: another one draws other test classes.
        settings: those of `ImageDataModule`, such as `transform` and `cache_dir`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if the table is not there.
        ModuleNotFoundError: if the table is Parquet and pyarrow is not installed.
        ValueError: if a column is missing, or a row is not as it should be, with its line number.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> for i in range(8):
        ...     Image.new("RGB", (60, 50), (30 * i, 0, 0)).save(f"{i}.png")
        >>> rows = [f"{i}.png,{'cat' if i < 2 else 'dog' if i < 4 else 'owl'},{'train' if i < 4 else 'test'}"
        ...         for i in range(8)]
        >>> _ = Path("pets.csv").write_text("image,label,split\\n" + "\\n".join(rows))
        >>> data = ImageTable(".", "pets.csv", classes_per_batch=2, samples_per_class=2)
        >>> data.splits["train"].labels, list(data.splits["test"].names)
        (array([0, 0, 1, 1]), ['owl'])

    Relations:
        `ImageFolder` needs no table, where the folders are the classes.
    """

    def __init__(
        self,
        root: str | Path,
        table: str | Path,
        test_fraction: float = 0.5,
        split_seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(root, **settings)
        self.table = Path(table).expanduser()
        self.test_fraction = check_test_fraction("ImageTable", test_fraction)
        self.split_seed = check_integer("ImageTable", "split_seed", split_seed, least=0)

    def sources(self) -> list[Path]:
        """The table."""
        return [self._path()]

    def read(self) -> Mapping[str, ImageIndex]:
        """The rows of the table, each in its split."""
        path = self._path()
        table = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
        roles, distractors = table.roles()
        labels = table.labels(distractors)
        splits = table.splits()
        if splits is None:
            classes = np.unique(labels[~distractors]).tolist()
            test = split_by_class("ImageTable", "test_fraction", classes, self.test_fraction, self.split_seed)
            held = distractors | np.isin(labels, sorted(test))
            splits = np.where(held, "test", "train")
        else:
            table.refuse(
                distractors & (splits == "train"),
                lambda row: f"`role` must be query, gallery or both in training, got {table.columns['role'][row]!r}",
            )
        boxes = table.boxes()
        table.refuse_duplicates(boxes)
        if roles is not None:
            self._refuse_one_sided(path, splits, roles, distractors)
        categories = table.categories()
        return {
            name: _split(name, splits == name, table.columns["image"], labels, distractors, categories, boxes, roles)
            for name in dict.fromkeys(["train", *sorted(set(splits.tolist()))])
        }

    def _path(self) -> Path:
        here = not (self.root / self.table).exists() and self.table.is_file()
        path = self.table if here else find_file("ImageTable", self.root, str(self.table))
        if path.is_dir():
            raise ValueError(f"ImageTable: `table` must be a CSV or Parquet file, got the folder {path}.")
        return path

    def _refuse_one_sided(self, path: Path, splits: Any, roles: Any, distractors: Any) -> None:
        """Refuse an evaluation set in which nothing is ranked for, or nothing that could be right."""
        for name in sorted(set(splits.tolist()) - {"train"}):
            known = roles[(splits == name) & ~distractors]
            for side in ("query", "gallery"):
                if not (known & ROLES[side]).any():
                    raise ValueError(
                        f"ImageTable: `role` must be {side} or both in one row of {name!r} or more, got none in {path}."
                    )


class _Table:
    """Columns of text or None, and the place of each row in the file.

    Args:
        path: the file, for messages.
        columns: by name, of equal lengths.
        lines: the line of each row.
        word: what `lines` count.
    """

    def __init__(
        self, path: Path, columns: Mapping[str, Sequence[str]], lines: Sequence[int], word: str = "line"
    ) -> None:
        self.path, self.columns, self.lines, self.word = path, columns, lines, word
        if not lines:
            raise ValueError(f"ImageTable: {path} must have rows, got the header alone.")
        images = columns["image"]
        self.refuse(np.array([not image for image in images]), lambda row: "`image` must not be empty in any row")
        self.refuse(
            np.array([LEAVES.search(image) is not None for image in images]),
            lambda row: f"`image` must lie inside the root, got {images[row]!r}",
        )
        self.columns = {**columns, "image": [normalized_path(image) for image in images]}

    def refuse(self, odd: Any, sentence: Any) -> None:
        """Raise the sentence about the first of the odd rows."""
        rows = np.flatnonzero(odd)
        if len(rows):
            more = f" ({len(rows)} such rows)" if len(rows) > 1 else ""
            place = f"{self.word} {self.lines[rows[0]]} of {self.path}"
            raise ValueError(f"ImageTable: {sentence(rows[0])}, at {place}{more}.")

    def refuse_duplicates(self, boxes: Any) -> None:
        """An image that is listed twice with one box, or without, would be ranked against itself."""
        images: Sequence[str] = self.columns["image"]
        keys: Sequence[Any] = images if boxes is None else list(zip(images, map(tuple, boxes.tolist())))
        first: dict[Any, int] = {}
        if len(set(keys)) < len(keys):
            odd = [first.setdefault(key, row) != row for row, key in enumerate(keys)]
            self.refuse(
                odd,
                lambda row: (
                    f"`image` must be another in each row, or have another box, got {images[row]!r} as in {self.word} "
                    f"{self.lines[first[keys[row]]]}"
                ),
            )

    def labels(self, distractors: Any) -> Any:
        """Labels as integers if all are such, else as text; of distractors, any."""
        found = self.columns["label"]
        self.refuse(
            ~distractors & np.array([not label for label in found]), lambda row: "`label` must not be empty in any row"
        )
        known = [label for label, distractor in zip(found, distractors) if not distractor]
        if all(map(_is_integer, known)):
            return np.array([0 if distractor else int(label) for label, distractor in zip(found, distractors)])
        return np.array(found)

    def roles(self) -> tuple[Any, Any]:
        """The role of each row, or None, and which are distractors."""
        if "role" not in self.columns:
            return None, np.zeros(len(self.lines), dtype=bool)
        found = [role or "both" for role in self.columns["role"]]
        self.refuse(
            np.array([role not in ROLES for role in found]),
            lambda row: f"`role` must be one of {', '.join(ROLES)}, got {found[row]!r}",
        )
        return np.array([ROLES[role] for role in found], dtype=np.uint8), np.array(found) == "distractor"

    def splits(self) -> Any:
        """The split of each row, or None."""
        if "split" not in self.columns:
            return None
        found = self.columns["split"]
        self.refuse(
            np.array([re.fullmatch(r"[\w-]+", split) is None for split in found]),
            lambda row: (
                f"`split` must be train, val, test or another name of letters, digits, '_' and '-', got {found[row]!r}"
            ),
        )
        names = set(found)
        if "train" not in names or len(names) == 1:
            listed = ", ".join(repr(name) for name in sorted(names))
            raise ValueError(
                f"ImageTable: `split` must have rows of train and of val, test or others, got {listed} in {self.path}."
            )
        return np.array(found)

    def categories(self) -> Any:
        """The number of each row's category, the same in all splits, or None."""
        if "category" not in self.columns:
            return None
        found = self.columns["category"]
        self.refuse(
            np.array([not category for category in found]), lambda row: "`category` must not be empty in any row"
        )
        return class_numbers(list(map(int, found)) if all(map(_is_integer, found)) else found)[0]

    def boxes(self) -> Any:
        """(rows, 4), or None."""
        if "box" in self.columns:
            texts = self.columns["box"]
        elif "left" in self.columns:
            texts = [" ".join(sides) for sides in zip(*(self.columns[side] for side in SIDES))]
        else:
            return None
        found = [_box(text) for text in texts]
        self.refuse(
            np.array([box is None for box in found]),
            lambda row: f"`box` must be `left top right bottom` with right > left and bottom > top, got {texts[row]!r}",
        )
        return np.array(found, dtype=np.int32)


def _csv(path: Path) -> _Table:
    rows = read_csv_rows("ImageTable", path)
    header = [name.strip() for name in next(rows, ([], 1))[0]]
    _check_header(path, header)
    places = [(name, header.index(name)) for name in COLUMNS if name in header]
    columns: dict[str, list[str]] = {name: [] for name, _ in places}
    lines: list[int] = []
    for row, line in rows:
        if len(row) != len(header):
            raise ValueError(
                f"ImageTable: each row must have the header's {len(header)} fields, got {len(row)}, at line {line} "
                f"of {path}."
            )
        lines.append(line)
        for name, place in places:
            columns[name].append(row[place].strip())
    return _Table(path, columns, lines)


def _parquet(path: Path) -> _Table:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ModuleNotFoundError(
            f"ImageTable: pyarrow must be installed to read {path}: pip install lightning-retrieval[parquet]; "
            "or give the table as CSV."
        ) from None
    try:
        header = parquet.read_schema(path).names
        wanted = [name for name in COLUMNS if header.count(name) == 1]  # other counts are refused below
        table = parquet.read_table(path, columns=wanted)
        columns = {name: [_text(value) for value in table.column(name).to_pylist()] for name in wanted}
    except Exception as error:  # pyarrow has many kinds, few of which name the file
        raise ValueError(
            f"ImageTable: {path} must be a Parquet file, which this one cannot be read as ({error})."
        ) from None
    _check_header(path, header)
    return _Table(path, columns, range(1, table.num_rows + 1), "row")


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if isinstance(value, float):  # as pandas has integers with gaps: 3.0 and NaN
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None else str(value).strip()


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in ("image", "label") if name not in header]
    sides = [side for side in SIDES if side in header]
    if sides and len(sides) < 4 and "box" not in header:
        missing += [side for side in SIDES if side not in header]
    if missing:
        raise ValueError(
            f"ImageTable: line 1 of {path} must name the columns image and label, and all of {', '.join(SIDES)} or "
            f"none, separated by commas; {', '.join(missing)} missing in {','.join(header)!r}."
        )
    twice = [name for name in COLUMNS if list(header).count(name) > 1]
    if twice:
        raise ValueError(f"ImageTable: line 1 of {path} must name each column once, got {twice[0]} twice.")


def _is_integer(text: str) -> bool:
    """Whether it is an integer as Python writes it: 7, not 007, which may stand beside 7."""
    return re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) is not None


def _box(text: str) -> tuple[int, ...] | None:
    if not text.strip():
        return WHOLE
    try:
        left, top, right, bottom = (round(float(number)) for number in text.replace(",", " ").split())
    except (ValueError, OverflowError):
        return None
    inside = all(abs(side) < 2**31 for side in (left, top, right, bottom))
    return (left, top, right, bottom) if left < right and top < bottom and inside else None


def _split(
    name: str,
    chosen: Any,
    images: Sequence[str],
    labels: Any,
    distractors: Any,
    categories: Any,
    boxes: Any,
    roles: Any,
) -> ImageIndex:
    known = chosen & ~distractors
    numbers = np.full(len(images), DISTRACTOR)
    numbers[known], names = class_numbers(labels[known])
    return ImageIndex(
        [images[row] for row in np.flatnonzero(chosen).tolist()],
        numbers[chosen],
        categories=None if categories is None else categories[chosen],
        boxes=None if boxes is None else boxes[chosen],
        roles=None if roles is None or name == "train" else roles[chosen],
        names=names,
    )
