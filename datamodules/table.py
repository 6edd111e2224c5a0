"""Images as columns, as a list, a table or a folder gives them, and the index of each split that is made of them.

A column is a list, or a column of an Arrow table that is converted when it is needed. An error about a row, whatever
raised it, names the line and the file. What all data sets must have is checked here and in `ImageIndex`, once.
"""

import csv
import itertools
import math
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import short_repr
from lightning_retrieval.datamodules.image_index import (
    DISTRACTOR,
    ImageIndex,
    class_numbers,
    split_by_class,
    tag_numbers,
)
from lightning_retrieval.datamodules.item_seeds import all_different
from lightning_retrieval.invalid import InvalidValue

LARGEST_PIXEL = 2**31  # the smallest number that is too large for boxes of 32 bits
LARGEST_BLOCK = 1 << 26  # bytes of a CSV file that are parsed at a time; no row may be larger
# A quote that is not closed in its line joins rows, and Arrow takes one after a space for a part of the value. Of the
# text "a \"b\" c" it makes a \b\" c".
_STRAY_QUOTE = r'[\r\n\x00]|^\s+"|^[^"].*\\".*"$'
# Columns of a table, and the arguments of `ImageIndex` that hold them as they are.
_GIVEN = {"role": "roles", "box": "boxes", "instance": "instances", "levels": "levels", "text": "texts"}
_NUMBERED = {"category": "categories", "camera": "cameras"}


@dataclass(frozen=True)
class Table:
    """Images, or texts, as columns with one value for each row.

    Args:
        columns: the values by the name of the column. An index is made of `path`, `label` (the original id of the
            class; None for a distractor), `category`, `camera`, `tags`, `role`, `box`, `instance`, `levels` and `text`.
        file: the file that lists the images; None if no file does.
        positions: position of each row in the file; None if the rows are all that the file has.
        header: number of lines before the first row, without blank ones; None if the file has no lines, but rows.
        blank: the characters of blank lines, which are skipped; None for white space.
    """

    columns: Mapping[str, Any]
    file: Path | None = None
    positions: NDArray[np.intp] | None = None
    header: int | None = 0
    blank: str | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Any:
        """The values of a column as a list or an array."""
        column = self.columns[name]
        if hasattr(column, "to_pylist"):
            return column.to_pylist()
        return column

    def get(self, name: str) -> Any:
        """The values of a column; None if there is no such column."""
        return self[name] if name in self.columns else None

    def with_columns(self, **columns: Any) -> "Table":
        """The same rows with further or other columns; a column that is None is left out."""
        merged = {**self.columns, **columns}
        return replace(self, columns={name: column for name, column in merged.items() if column is not None})

    def chosen(self, rows: NDArray[np.intp]) -> "Table":
        """The table of some rows."""
        columns = {}
        for name, column in self.columns.items():
            if hasattr(column, "to_pylist"):
                columns[name] = column.take(rows)
            else:
                columns[name] = [column[row] for row in rows.tolist()]
        positions = rows if self.positions is None else self.positions[rows]
        return replace(self, columns=columns, positions=positions)

    def where(self, row: int) -> str:
        """The number of a row's line, and the file, for an error message."""
        position = row if self.positions is None else int(self.positions[row])
        if self.file is None or self.header is None:
            return f"row {position + 1} of {self.file}"
        return f"line {_line_number(self.file, position + self.header, self.blank)} of {self.file}"

    def error(self, rows: Sequence[int], rule: str, got: object = "", cure: str = "") -> InvalidValue:
        """The error for some rows: the rule, the value of the first of them, and its line."""
        where = f"at {self.where(rows[0])}"
        if len(rows) > 1:
            where += f" ({len(rows)} such rows)"
        if not str(got):
            return InvalidValue(f"{rule}, {where}", cure=cure)
        return InvalidValue(rule, got=f"{got}, {where}", cure=cure)

    def check(self, name: str, is_wrong: Callable[[Any], bool], rule: str, cure: str = "") -> None:
        """Raise if a value of a column is wrong; `{name} must` precedes the rule.

        Args:
            name: name of the column.
            is_wrong: whether a value is wrong.
            rule: what the values must be.
            cure: what helps.
        """
        values = self[name]
        wrong = [row for row, value in enumerate(values) if is_wrong(value)]
        if wrong:
            raise self.error(wrong, f"`{name}` must {rule}", repr(values[wrong[0]]), cure)

    def check_unique(self, *names: str, rule: str = "be different in each row") -> None:
        """Raise if two rows have the same values in these columns."""
        keys: Sequence[Any] = self[names[0]]
        if len(names) > 1:
            keys = list(zip(*(self[name] for name in names)))
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))  # hashes need less memory than a set of keys
        if all_different(hashes):
            return
        first_with: dict[Any, int] = {}
        for row, key in enumerate(keys):
            first = first_with.setdefault(key, row)
            if first != row:
                got = f"{self[names[0]][row]!r} in {self.where(first)} and {self.where(row)}"
                raise InvalidValue(f"`{names[0]}` must {rule}", got=got)

    def parsed(self, name: str, parse: Callable[[Any], Any]) -> list[Any]:
        """The values of a column as a function returns them, whose errors name the line."""
        values = self[name]
        found: list[Any] = []
        try:
            for value in values:
                found.append(parse(value))
        except (ValueError, OverflowError) as error:
            row = len(found)
            raise self.error([row], f"`{name}` cannot be read", f"{short_repr(values[row])} ({error})") from None
        return found


def normalized_path(path: str) -> str:
    """Return a relative path without `./` and `//`; `..` is kept, so that it can be rejected."""
    if not path or ".." in path.split("/"):
        return path
    return posixpath.normpath(path)


def text_lines(file: Path) -> Iterator[str]:
    """The lines of a text in UTF-8, with the line ends of any system, without a byte order mark.

    Raises:
        ValueError: if a line is not in UTF-8.
    """
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError:
        number = _undecodable_line(file)
        rule = f"{file} must be text in UTF-8"
        raise InvalidValue(rule, got=f"other bytes in line {number}", cure="save it as UTF-8") from None


def _undecodable_line(file: Path) -> int:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _line_number(file: Path, position: int, blank: str | None = None) -> int:
    """The number of a line, of which only the position among the lines that are not blank is known.

    Args:
        file: the file.
        position: the position.
        blank: the characters of a blank line; None for white space. Arrow skips only empty lines.
    """
    numbers = (number for number, line in enumerate(text_lines(file), 1) if line.strip(blank))
    return next(itertools.islice(numbers, position, None))


def read_list(file: Path, names: str, *, header: bool = False, skip: int = 0, more: bool = False) -> Table:
    """The columns of a list whose fields are separated by white space; the only field may have spaces.

    Args:
        file: the list.
        names: names of the columns, with spaces between them.
        header: whether the first line after the skipped ones has these names.
        skip: number of lines before the header.
        more: whether lines may have further fields.

    Raises:
        ValueError: if the header differs, a line has another number of fields, or there is no row.
    """
    wanted = names.split()
    values: list[str] = []  # of all rows, one after another
    lines = itertools.islice(text_lines(file), skip, None)
    if header:
        line = next(lines, "")
        if line.split() != wanted:
            raise InvalidValue(f"line {skip + 1} of {file} must be the header {names!r}", got=repr(line.strip()))
    for line in lines:
        fields = [line.strip()] if len(wanted) == 1 else line.split()
        if not fields or not fields[0]:
            continue
        if len(fields) < len(wanted) or (len(fields) > len(wanted) and not more):
            number = _line_number(file, skip + header + len(values) // len(wanted))
            got = short_repr(line.strip())
            raise InvalidValue(f"line {number} of {file} must have the fields {', '.join(wanted)}", got=got)
        values += fields[: len(wanted)] if more else fields
    columns = {name: values[position :: len(wanted)] for position, name in enumerate(wanted)}
    table = Table(columns, file, header=skip + header)
    if len(table) == 0:
        raise InvalidValue(f"{file} must list at least one image", got="none")
    return table


def read_csv(file: Path, delimiter: str = ",") -> Any:
    """A CSV file as an Arrow table, in which all values are text, without spaces around them.

    Args:
        file: the file, in UTF-8 with a line of names.
        delimiter: separates the fields.

    Raises:
        ValueError: if the file is not in UTF-8, a row has more or fewer fields than the header, or a value has several
            lines, as after a quote that is not closed, or quotes that are written as \\".
    """
    import pyarrow
    from pyarrow import compute
    from pyarrow import csv as arrow_csv

    first_line = next((line for line in text_lines(file) if line.strip("\n")), "")
    header = [name.strip() for names in csv.reader([first_line], delimiter=delimiter) for name in names]
    if not header:
        return pyarrow.table({})
    invalid: list[Any] = []

    def note(row: Any) -> str:
        invalid.append(row)
        return "skip"

    names = list(map(str, range(len(header))))  # since names may be missing or repeated
    size = min(file.stat().st_size + 1, LARGEST_BLOCK)
    try:
        table = arrow_csv.read_csv(
            file,
            arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=size),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False),
        )
    except pyarrow.ArrowInvalid as error:
        for _ in text_lines(file):  # raises if the file is not in UTF-8
            pass
        raise InvalidValue(f"{file} must be a CSV file", got=f"one that cannot be read ({error})") from None
    before = table
    if invalid:
        before = table.slice(0, invalid[0].number - 1)
    _check_quotes(file, header, before)
    if invalid:
        number = _line_number(file, invalid[0].number - 1, "\n")
        got = f"{invalid[0].actual_columns}, at line {number} of {file}"
        raise InvalidValue(f"each row must have the header's {len(header)} fields", got=got)
    columns = [compute.utf8_trim_whitespace(column) for column in table.slice(1).columns]
    return pyarrow.Table.from_arrays(columns, names=header)


def _check_quotes(file: Path, header: Sequence[str], table: Any) -> None:
    """Raise if a value has several lines, or a quote after a space."""
    from pyarrow import compute

    first: dict[int, str] = {}
    for name, column in zip(header, table.columns):
        row = compute.index(compute.match_substring_regex(column, _STRAY_QUOTE), True).as_py()
        if row >= 0:
            first.setdefault(row, name)
    if first:
        row = min(first)
        number = _line_number(file, row, "\n")
        got = f"other text in line {number} of {file}"
        cure = "open each quote at the separator, close it in its line, and write two quotes for a quote in a field"
        raise InvalidValue("must hold text of one line, in quotes or without", argument=first[row], got=got, cure=cure)


def read_csv_list(file: Path, names: Sequence[str]) -> Table:
    """The named columns of a CSV file.

    Raises:
        ValueError: as `read_csv`, or if the header lacks a column.
    """
    table = read_csv(file)
    missing = [name for name in names if name not in table.column_names]
    if missing:
        rule = f"line 1 of {file} must name the columns {', '.join(names)}, separated by commas"
        raise InvalidValue(rule, got=f"{','.join(table.column_names)!r}, which lacks {', '.join(missing)}")
    return Table({name: table.column(name) for name in names}, file, header=1, blank="\n")


def enclosing_pixels(texts: Sequence[str]) -> tuple[int, int, int, int]:
    """A box x, y, width, height as left, top, right, bottom in pixels, rounded outwards.

    Raises:
        ValueError: if it is not four numbers, contains no pixel, or does not fit into 32 bits.
    """
    x, y, width, height = map(float, texts)
    box = math.floor(x), math.floor(y), math.ceil(x + width), math.ceil(y + height)
    if max(map(abs, box)) >= LARGEST_PIXEL or box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError("a box must contain at least one pixel")
    return box


def drawn_splits(table: Table, test_fraction: float, seed: int) -> dict[str, Table]:
    """Split the classes of a table between training and test; distractors belong to the test.

    Args:
        table: the table, with the column `label`.
        test_fraction: fraction of the classes that form the test set.
        seed: determines which classes form the test set.
    """
    labels = table["label"]
    test = split_by_class("test_fraction", list({*labels} - {None}), test_fraction, seed)
    is_test = np.array([label is None or label in test for label in labels])
    return {"train": table.chosen(np.flatnonzero(~is_test)), "test": table.chosen(np.flatnonzero(is_test))}


def number_splits(
    splits: Mapping[str, Table],
    *,
    common: Collection[str] = tuple(_NUMBERED),
    name_of_class: Callable[[Any], str] | None = str,
) -> dict[str, ImageIndex]:
    """The index of each split, whose classes have the numbers 0, 1, ... in the order of their sorted original ids.

    Args:
        splits: the table of each split.
        common: columns that all splits number alike; a split numbers the others for itself. Tags are numbered alike.
        name_of_class: gives the name of a class for its original id; None for classes without names.

    Raises:
        ValueError: if a split has no image, or `ImageIndex` raises.
    """
    for split, table in splits.items():
        if len(table) == 0:
            raise InvalidValue(f"the split {split!r} must have at least one image", got=f"none in {table.file}")
    tags, tag_names = _common_tags(splits)
    numbered_alike = {name: _numbers_of(splits, name) for name in _NUMBERED if name in common}
    labelled_alike = _labels_of(splits if "label" in common else {})
    found = {}
    for split, table in splits.items():
        columns: dict[str, Any] = {"tags": tags.get(split), "tag_names": tag_names}
        for name, argument in _NUMBERED.items():
            of_splits = numbered_alike[name] if name in common else _numbers_of({split: table}, name)
            columns[argument] = of_splits.get(split)
        for name, argument in _GIVEN.items():
            columns[argument] = table.get(name)
        labels, classes = labelled_alike if "label" in common else _labels_of({split: table})
        names = None if name_of_class is None else list(map(name_of_class, classes))
        lines = None if table.file is None else table
        found[split] = ImageIndex(table["path"], labels[split], names=names, lines=lines, **columns)
    return found


def _labels_of(splits: Mapping[str, Table]) -> tuple[dict[str, NDArray[np.int64]], list[Any]]:
    """The class numbers of the images of each split, `DISTRACTOR` for None, and the original id of each class."""
    labels = [label for table in splits.values() for label in table["label"]]
    known = np.array([label is not None for label in labels], dtype=bool)
    numbers = np.full(len(labels), DISTRACTOR)
    numbers[known], classes = class_numbers(list(itertools.compress(labels, known)))
    return _of_split(numbers, splits), classes


def _of_split(values: NDArray[np.int64], splits: Mapping[str, Table]) -> dict[str, NDArray[np.int64]]:
    """The values of each split, of those of all splits one after another."""
    ends = np.cumsum(list(map(len, splits.values())))
    return dict(zip(splits, np.split(values, ends[:-1])))


def _numbers_of(splits: Mapping[str, Table], name: str) -> dict[str, NDArray[np.int64]]:
    """The numbers of a column in each split; empty if the splits do not have it."""
    if not all(name in table for table in splits.values()):
        return {}
    numbers, _ = class_numbers([value for table in splits.values() for value in table[name]])
    return _of_split(numbers, splits)


def _common_tags(splits: Mapping[str, Table]) -> tuple[dict[str, NDArray[np.int64]], list[str] | None]:
    """The tag numbers of each split, and the names of all tags; none of them if the splits have no tags."""
    if not all("tags" in table for table in splits.values()):
        return {}, None
    numbers, names = tag_numbers([tags for table in splits.values() for tags in table["tags"]])
    return _of_split(numbers, splits), names
