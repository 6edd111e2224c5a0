"""Finds and reads the files that list the images of a data set; error messages give the file and the line.

The formats are: fields separated by whitespace, CSV files, and tables of images in CSV or Parquet.
"""

import csv
import math
import posixpath
import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import first_of
from lightning_retrieval.csv_rows import CSVError, CSVRow, csv_rows
from lightning_retrieval.datamodules.item_seeds import all_different
from lightning_retrieval.datamodules.table_format import (
    COLUMNS,
    OML_ROLES,
    OML_SPLITS,
    SIDES,
    TableFormat,
    names_image_file,
    role_of_oml,
)
from lightning_retrieval.files import is_system_error
from lightning_retrieval.invalid import InvalidValue, MissingFile

LARGEST_PIXEL = 2**31  # the smallest number that is too large for boxes of 32 bits


def normalized_path(path: str) -> str:
    """Return a relative path without `./` and `//`; `..` is kept, so that it can be rejected."""
    if not path or ".." in path.split("/"):
        return path
    return posixpath.normpath(path)


def composed(name: str) -> str:
    """Return the name of a class or tag in the Unicode form NFC. macOS may write é as two characters."""
    return unicodedata.normalize("NFC", name)


def join_paths(folder: str, names: Iterable[str], suffix: str = "") -> list[str]:
    """Return the paths of the files with these names in a folder."""
    return [f"{folder}/{name}{suffix}" for name in names]


def find_missing(wanted: Iterable[str], found: Container[str]) -> list[str]:
    """Return the items of `wanted` that are not in `found`, in order."""
    return [name for name in wanted if name not in found]


@dataclass(frozen=True)
class ListFile:
    """A text file in UTF-8 that lists images. Its error messages give the file and the line.

    The position of a line is the number of lines before it that are not blank.

    Args:
        path: path of the file.
    """

    path: Path

    def error(self, problem: str, position: int | None = None) -> ValueError:
        """Create an error with the message `problem`, and with the line at `position`, if a position is given."""
        if position is not None:
            problem += f" in {self.where(position)}"
        return InvalidValue(problem)

    def where(self, position: int) -> str:
        """The number of the line at a position, and the file, for an error message."""
        return f"line {self.line_number(position)} of {self.path}"

    def line_number(self, position: int) -> int:
        """The number of the line at a position."""
        not_blank = 0
        for number, line in enumerate(self.lines(), 1):
            if line.strip():
                not_blank += 1
            if not_blank > position:
                return number
        raise IndexError(f"{self.path} has {not_blank} lines that are not blank, so there is none at {position}")

    def lines(self) -> Iterator[str]:
        """Yield the lines with their line endings, without a leading byte order mark.

        Raises:
            ValueError: if the path is a folder, or a line is not in UTF-8.
        """
        if self.path.is_dir():
            raise self.error(f"{self.path} must be a text file, got a folder")
        encoding = "utf-8-sig"
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode(encoding)
                except UnicodeDecodeError as error:
                    raise self.error(
                        f"{self.path} must be text in UTF-8, got the byte {line[error.start]:#x} in line {number}; "
                        "save it as UTF-8"
                    ) from None
                if "\0" in text:
                    raise self.error(f"{self.path} must be a text file, got a null character in line {number}")
                yield text
                encoding = "utf-8"  # only the first line may begin with a byte order mark

    def rows(
        self, fields: int, *, header: Sequence[str] | None = None, skip: int = 0, more: bool = False
    ) -> Iterator[list[str]]:
        """Yield the fields, separated by whitespace, of each line that is not blank.

        Args:
            fields: number of fields that each line must have.
            header: the fields of the header, which is the first line after the skipped lines; None if there is none.
            skip: number of lines to skip before the header.
            more: whether a line may have further fields.

        Raises:
            ValueError: if the header differs, or lines have a different number of fields.
        """
        invalid_lines: list[int] = []
        for number, line in enumerate(self.lines(), 1):
            if number <= skip:
                continue
            row = line.split()
            if header is not None and number == skip + 1:
                if row != list(header):
                    wanted = " ".join(header)
                    raise self.error(
                        f"line {number} of {self.path} must be the header {wanted!r}, got {line.strip()!r}"
                    )
                continue
            if not row:
                continue
            has_excess = len(row) > fields and not more
            if len(row) < fields or has_excess:
                invalid_lines.append(number)
            elif not invalid_lines:
                yield row
        self._check_no_invalid_lines(fields, invalid_lines)

    def columns(self, fields: int, *, header: Sequence[str] | None = None, skip: int = 0) -> list[list[str]]:
        """The columns of `rows`: for each of the fields, the values of all lines."""
        columns: list[list[str]] = []
        for _ in range(fields):
            columns.append([])
        for row in self.rows(fields, header=header, skip=skip):
            for column, value in zip(columns, row):
                column.append(value)
        return columns

    def csv_rows(self, *, may_span_lines: bool = False, delimiter: str = ",") -> Iterator[CSVRow]:
        """Yield each row of a CSV file that is not blank, header included.

        Args:
            may_span_lines: whether quoted fields may have several lines.
            delimiter: separates the fields.

        Raises:
            ValueError: if the file is not CSV, such as one with a stray quote.
        """
        try:
            yield from csv_rows(self.lines(), may_span_lines=may_span_lines, delimiter=delimiter)
        except CSVError as error:
            raise self.error(f"{self.path} must be a CSV file, got {error}") from None

    def csv_columns(self, columns: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield, for each row of a CSV file, its fields in the named columns and its line number.

        Args:
            columns: names of the columns, in the order of the yielded fields; the file may have further columns.

        Raises:
            ValueError: if the header lacks a column, or rows are too short.
        """
        rows = self.csv_rows()
        header = read_csv_header(rows)
        missing = find_missing(columns, header)
        if missing:
            raise self.error(
                f"line 1 of {self.path} must name the columns {', '.join(columns)}, separated by commas, got "
                f"{','.join(header)!r}, which lacks {', '.join(missing)}"
            )
        positions = list(map(header.index, columns))
        required = max(positions) + 1
        invalid_lines: list[int] = []
        for row, line, _ in rows:
            if len(row) < required:
                invalid_lines.append(line)
            elif not invalid_lines:
                yield tuple(row[position].strip() for position in positions), line
        self._check_no_invalid_lines(required, invalid_lines)

    def _check_no_invalid_lines(self, fields: int, invalid_lines: Sequence[int]) -> None:
        if not invalid_lines:
            return
        raise self.error(
            f"each line of {self.path} must have {fields} fields, got {len(invalid_lines)} with a different number of "
            f"fields (line {first_of(invalid_lines)})"
        )

    def integers(self, column: str, values: Sequence[str], *, bits: int = 64, skip: int = 0) -> list[int]:
        """Convert the fields of a column to integers.

        Args:
            column: name of the column, for the message.
            values: the fields, one from each line that is not blank.
            bits: number of bits that each integer must fit into, as a signed number.
            skip: number of lines that are not blank before the first field.

        Raises:
            ValueError: if a field is not an integer, or does not fit into `bits` bits.
        """
        try:
            numbers = list(map(int, values))
            smallest, largest = min(numbers, default=0), max(numbers, default=0)
            if _fits(smallest, bits) and _fits(largest, bits):
                return numbers
        except ValueError:
            pass
        position = next(position for position, value in enumerate(values) if not _fits(value, bits))
        shown = repr(values[position])
        if len(values[position]) > 40:
            shown = f"{values[position][:40]!r}..."
        line = self.line_number(skip + position)
        raise self.error(f"`{column}` must be integers in {self.path}, got {shown} in line {line}")

    def check_unique(self, column: str, values: Sequence[object], *, skip: int = 0) -> None:
        """Check that no value of a column occurs twice.

        Args:
            column: name of the column, for the message.
            values: the values, one from each line that is not blank.
            skip: number of lines that are not blank before the first value.

        Raises:
            ValueError: if a value occurs twice; the message has both line numbers.
        """
        hashes = np.fromiter(map(hash, values), np.int64, len(values))  # hashes need less memory than values
        if all_different(hashes):
            return
        first_with: dict[object, int] = {}
        for position, value in enumerate(values):
            first = first_with.setdefault(value, position)
            if first != position:
                raise self.error(
                    f"`{column}` must be different in each line of {self.path}, got {value!r} twice, in lines "
                    f"{self.line_number(skip + first)} and {self.line_number(skip + position)}"
                )

    def check_not_empty(self, split: str, rows: Sized) -> None:
        """Check that a split has images; raise a ValueError otherwise."""
        if len(rows) == 0:
            raise self.error(f"the split {split!r} must have at least one image, got none in {self.path}")


def read_csv_header(rows: Iterator[CSVRow]) -> list[str]:
    """Take the first row of `ListFile.csv_rows` and return the names of the columns; empty if there is no row."""
    first_row = next(rows, CSVRow([], 1, 1))
    return list(map(str.strip, first_row.fields))


def _fits(value: int | str, bits: int) -> bool:
    bound: int = 2 ** (bits - 1)
    try:
        return -bound <= int(value) < bound
    except ValueError:
        return False


@dataclass(frozen=True)
class ListLines:
    """The line of a list that each image was read from, for error messages.

    Args:
        file: the file with the list.
        rows: for each image, the position of its line, counted from the first line after `skip` non-blank lines. If
            None, the images are in the order of the lines.
        skip: number of non-blank lines before the first image.
    """

    file: ListFile
    rows: Sequence[int] | NDArray[np.intp] | None = None
    skip: int = 0

    def where(self, image: int) -> str:
        """The line number of an image, and the file."""
        return self.file.where(self.row(image) + self.skip)

    def row(self, image: int) -> int:
        """The position of an image's line, counted from the first line after `skip` non-blank lines."""
        if self.rows is None:
            return image
        return int(self.rows[image])


def enclosing_pixels(texts: Sequence[str]) -> tuple[int, int, int, int] | None:
    """Convert a box x, y, width, height to left, top, right, bottom in pixels, rounded outwards; None if invalid."""
    try:
        x, y, width, height = map(float, texts)
        box = math.floor(x), math.floor(y), math.ceil(x + width), math.ceil(y + height)
    except (ValueError, OverflowError):
        return None
    if max(map(abs, box)) >= LARGEST_PIXEL:
        return None
    return box


SEARCH_DEPTH = 2  # number of levels of subfolders that are searched for a suggestion
MAX_ENTRIES = 1000  # subfolders are searched only among the first entries of a folder


def find_file(root: Path, *candidates: str, companion: str = "", root_name: str = "root", argument: str = "") -> Path:
    """Return the first of several paths below the root that exists, whether it is a file or a folder.

    Args:
        root: the data set's folder.
        candidates: paths relative to the root.
        companion: a path that a folder must also contain to be suggested as the root, in case other data sets use the
            same file names.
        root_name: name of the argument with the root, for the message.
        argument: name of the argument with the file name, for the message; empty if the data set defines the file name.

    Raises:
        FileNotFoundError: if none of the paths exists. If a folder nearby has such a file, the message names the
            folder.
    """
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    wanted = " or ".join(candidates)
    if argument:
        wanted += f", the `{argument}`"
    if not root.is_dir():
        found = _without_root(root, candidates, companion, root_name)
        raise MissingFile(f"must be a folder that contains {wanted}", argument=root_name, got=f"{root}, {found}")
    suggestion = _suggestion(root.absolute(), candidates, companion, root_name)
    if not suggestion:
        suggestion = _suggestion(root.absolute().parent, candidates, companion, root_name)
    if not suggestion:
        suggestion = "no folder near it contains one"
    raise MissingFile(f"must contain {wanted}", argument=root_name, got=f"{root}, which does not", cure=suggestion)


def _without_root(root: Path, candidates: Sequence[str], companion: str, root_name: str) -> str:
    """Say why the root is not a folder, and suggest the folder that may be meant."""
    problem = "which is a file" if root.is_file() else "which does not exist"
    nearest = root.absolute().parent
    while not nearest.is_dir():
        nearest = nearest.parent
    suggestion = _suggestion(nearest, candidates, companion, root_name)
    if suggestion:
        return f"{problem}; {suggestion}"
    return problem


def _suggestion(folder: Path, candidates: Sequence[str], companion: str, root_name: str) -> str:
    """Search below a folder; suggest the root with the files, or else say where such a file is.

    If nothing is found, the result is an empty text.
    """
    if folder == folder.parent:
        return ""  # do not search the whole disk
    found = list(_entries_below(folder, SEARCH_DEPTH))
    for candidate in sorted(candidates, key=lambda candidate: len(Path(candidate).parts), reverse=True):
        parts = Path(candidate).parts
        for path in found:
            if path.parts[-len(parts) :] != parts:
                continue
            root = path.parents[len(parts) - 1]
            if (root / companion).exists():
                return f"pass {root_name}={root}"
    if companion:
        return ""
    for path in found:
        for candidate in candidates:
            if path.name == Path(candidate).name:
                return f"{path.name} is in {path.parent}"
    return ""


def reason_of_missing(root: Path, path: str) -> str:
    """Why there is no file with a listed path, with what helps; empty if it is not known.

    Args:
        root: the folder that the path is relative to.
        path: the path.
    """
    slashed = path.replace("\\", "/")
    if slashed != path and (root / slashed).is_file():
        return "write / in place of \\ in the paths"
    for suffix in (".jpg", ".jpeg", ".png", ".JPG"):
        if (root / f"{path}{suffix}").is_file():
            return f"the file is {path}{suffix}, so add the suffix to the paths"
    found = _suggestion(root.absolute(), (path,), "", "root")
    if not found and not Path(path).suffix:
        return "the paths of files end with a suffix such as .jpg"
    return found


def _entries_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    yield from entries
    if depth == 0:
        return
    for entry in entries[:MAX_ENTRIES]:
        if entry.is_dir():
            yield from _entries_below(entry, depth - 1)


TAG_SEPARATOR = ";"
PARQUET_SUFFIXES = (".parquet", ".pq")
# What helps with files that are no tables here, by their suffix.
OF_JSON_LINES = "pandas converts it: pandas.read_json({name!r}, lines=True).to_csv('table.csv', index=False)"
CURES = {
    **dict.fromkeys((".jsonl", ".ndjson"), OF_JSON_LINES),
    ".json": "write a row for each image to a CSV file",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV in UTF-8"),
    **dict.fromkeys((".gz", ".tar", ".tgz", ".zip", ".7z"), "unpack it"),
    **dict.fromkeys((".arrow", ".feather", ".pkl", ".npy"), "write its rows to a CSV or Parquet file"),
}
COMMON_FORMAT = TableFormat()
NAME_COLUMNS = frozenset(("label", "tags", "category", "camera"))  # whose texts are names, not files or free text


@dataclass(frozen=True)
class TableLines(ListLines):
    """The row of a table that each image was read from, for error messages.

    Args:
        numbers: line or row number of each row in the file.
        unit: unit of `numbers`, `"line"` or `"row"`.
    """

    numbers: Sequence[int] = ()
    unit: str = "line"

    def where(self, image: int) -> str:
        """The row number of an image, and the table."""
        return f"{self.unit} {self.numbers[self.row(image)]} of {self.file.path}"


@dataclass
class TableColumns:
    """Columns of text, and the location of each row in the file for error messages.

    Args:
        path: path of the file.
        columns: the fields of each column, by the column's name.
        lines: line or row number of each row in the file.
        unit: unit of `lines`, `"line"` or `"row"`.
    """

    path: Path
    columns: dict[str, list[str]]
    lines: Sequence[int]
    unit: str = "line"

    def lines_of(self, rows: NDArray[np.intp]) -> TableLines:
        """Return the line numbers of the rows with these indices, for an `ImageIndex`."""
        return TableLines(ListFile(self.path), rows, numbers=self.lines, unit=self.unit)

    def check(
        self, invalid_rows: Sequence[int], rule: str, values: Sequence[str] | None = None, *, cure: str = ""
    ) -> None:
        """Raise a ValueError about the first of the invalid rows, if there are any.

        Args:
            invalid_rows: numbers of the invalid rows, from 0.
            rule: the rule that the invalid rows break, for the message.
            values: the value of each row; the message shows the value of the first invalid row.
            cure: what helps.
        """
        if len(invalid_rows) == 0:
            return
        row = invalid_rows[0]
        where = f"at {self.unit} {self.lines[row]} of {self.path}"
        if len(invalid_rows) > 1:
            where += f" ({len(invalid_rows)} such rows)"
        if values is None:
            raise InvalidValue(f"{rule}, {where}", cure=cure)
        raise InvalidValue(rule, got=f"{values[row]!r}, {where}", cure=cure)


def read_table(
    path: Path,
    required: Sequence[str] = ("image", "label"),
    *,
    all_columns: bool = False,
    table_format: TableFormat = COMMON_FORMAT,
) -> TableColumns:
    """Read the required columns, and those with the names `COLUMNS`, from a CSV or Parquet file.

    Args:
        path: a CSV file in UTF-8 with a header line, or a Parquet file, which has the suffix .parquet or .pq.
        required: the columns that the table must have; `tags` may stand in for `label`.
        all_columns: read the columns with other names as well, but none without a name.
        table_format: the names of the columns in the file, and the separator of its fields.

    Raises:
        ValueError: if the file cannot be read, a required column is missing or a column is named twice, there is no
            row, or the rows have different numbers of fields.
    """
    cure = CURES.get(path.suffix.lower())
    if cure is not None:
        raise InvalidValue(f"{path} must be a CSV or Parquet file", cure=cure.format(name=path.name))
    if path.suffix.lower() in PARQUET_SUFFIXES:
        table = _read_parquet(path, required, all_columns, table_format)
    else:
        table = _read_csv(path, required, all_columns, table_format)
    if not table.lines:
        raise InvalidValue(f"{path} must have rows", got="only the header")
    for name in NAME_COLUMNS & table.columns.keys():
        table.columns[name] = list(map(composed, table.columns[name]))
    if table_format.is_oml:
        _convert_oml(table)
    return table


def _wanted_columns(names: Sequence[str], required: Sequence[str], all_columns: bool, is_oml: bool) -> list[str]:
    """The columns to read: the required ones and those with the names `COLUMNS`, or all that have a name."""
    if all_columns:
        return list(filter(None, dict.fromkeys(names)))
    further = OML_ROLES if is_oml else ()
    return [name for name in dict.fromkeys((*required, *COLUMNS, *further)) if name in names]


def _convert_oml(table: TableColumns) -> None:
    """Give a table of open-metric-learning the splits and roles of this library."""
    columns = table.columns
    if "split" in columns:
        columns["split"] = [OML_SPLITS.get(name, name) for name in columns["split"]]
    if OML_ROLES[0] not in columns:
        return
    is_query, is_gallery = columns.pop("is_query"), columns.pop("is_gallery", None)
    splits = columns.get("split", is_query)
    roles, shown = [], []
    unknown: list[int] = []
    unused: list[int] = []
    for row, text in enumerate(is_query):
        texts = (text,) if is_gallery is None else (text, is_gallery[row])
        role = role_of_oml(*texts)
        shown.append(", ".join(texts))
        in_training = splits[row] == "train"
        if role is None:
            unknown.append(row)
        elif not role and not in_training:
            unused.append(row)
        roles.append("" if in_training else role or "")
    table.check(unknown, "`is_query` and `is_gallery` must be True or False, or empty in training", shown)
    table.check(unused, "`is_query` or `is_gallery` must be True in evaluation", shown)
    columns["role"] = roles


def _read_csv(path: Path, required: Sequence[str], all_columns: bool, table_format: TableFormat) -> TableColumns:
    delimiter = table_format.delimiter
    rows = ListFile(path).csv_rows(may_span_lines=True, delimiter=delimiter)
    named = read_csv_header(rows)
    header = table_format.renamed(named)
    wanted = _wanted_columns(header, required, all_columns, table_format.is_oml)
    _check_header(path, named, required, wanted, table_format)
    positions: list[tuple[str, int]] = []
    table: dict[str, list[str]] = {}
    for name in wanted:
        positions.append((name, header.index(name)))
        table[name] = []
    lines: list[int] = []
    spanning: list[CSVRow] = []
    for row in rows:
        if len(row.fields) != len(header):
            raise _wrong_number_of_fields(path, named, row, delimiter)
        if row.last > row.first:
            spanning.append(row)
        lines.append(row.first)
        for name, position in positions:
            table[name].append(row.fields[position].strip())
    if spanning:
        values = {name: frozenset(column) for name, column in table.items()}
        forms = {name: frozenset(map(_form, column)) for name, column in table.items()}
        for row in spanning:
            _check_lines_of_row(path, header, values, forms, row, delimiter)
    return TableColumns(path, table, lines)


def _wrong_number_of_fields(path: Path, header: Sequence[str], row: CSVRow, delimiter: str) -> InvalidValue:
    """The error for a row that has more or fewer fields than the header."""
    rule = f"each row must have the header's {len(header)} fields"
    got = f"{len(row.fields)}, at line {row.first} of {path}"
    cure = ""
    if len(row.fields) == len(header) + 1 and not row.fields[-1].strip():
        got += ", which ends with a separator"
        cure = f"remove the {delimiter!r} at the end of the lines, or add one to the header"
    elif len(row.fields) == len(header) - 1 and not header[-1]:
        got += ", while the header ends with a separator"
        cure = f"remove the {delimiter!r} at the end of the header"
    return InvalidValue(rule, got=got, cure=cure)


def _check_lines_of_row(
    path: Path,
    header: Sequence[str],
    values: Mapping[str, Container[str]],
    forms: Mapping[str, Container[str]],
    row: CSVRow,
    delimiter: str,
) -> None:
    """Raise if a row of several lines probably holds other rows, between a stray quote and the next one.

    Only free text may have several lines. None of them may be a row of the table, with a value of another column that
    occurs in the table. Not all of them may have the form of a row, with values of other columns that differ from
    those in the table only in numbers, or file names of a type that occurs there.

    Args:
        path: path of the table.
        header: names of all columns.
        values: the fields of each column that is read.
        forms: the forms of these fields.
        row: the row.
        delimiter: separates the fields.
    """
    for position, (name, field) in enumerate(zip(header, row.fields)):
        is_structured = name in COLUMNS and "\n" in field.strip()
        lines = list(_lines_as_rows(row.fields, position, delimiter))
        has_row = any(_is_row(header, values, line) for line in lines)
        if is_structured or has_row or _have_form_of_rows(header, forms, lines):
            got = f"one row in lines {row.first} to {row.last} of {path}"
            cure = f"close the quote that line {row.first} opens, or write two quotes for a quote in a field"
            raise InvalidValue("must not hold other rows", argument=name, got=got, cure=cure)


def _lines_as_rows(fields: Sequence[str], position: int, delimiter: str) -> Iterator[list[str | None]]:
    """The fields that each line of a row has by itself, without the quotes of the field that has several lines.

    Fields of the row itself, and of this column, are None.

    Args:
        fields: the fields of the row.
        position: the position of the field that has several lines.
        delimiter: separates the fields.
    """
    first, *others = fields[position].split("\n")
    if not others:
        return
    yield [*[None] * (position + 1), *_split(first, delimiter)[1:]]
    for line in others[:-1]:
        inner = _split(line, delimiter)
        yield [*inner[:position], None, *inner[position + 1 :]]
    yield [*_split(others[-1], delimiter)[:-1], *[None] * (len(fields) - position)]


def _split(line: str, delimiter: str) -> list[str]:
    for fields in csv.reader([line.replace("\r", "")], skipinitialspace=True, delimiter=delimiter):
        return fields
    return [""]


def _is_row(header: Sequence[str], values: Mapping[str, Container[str]], fields: Sequence[str | None]) -> bool:
    """Whether a line has as many fields as the header, of which one occurs in the table; see `_lines_as_rows`."""
    if len(fields) != len(header):
        return False
    return any(field is not None and field.strip() in values.get(name, ()) for name, field in zip(header, fields))


def _have_form_of_rows(
    header: Sequence[str], forms: Mapping[str, Container[str]], lines: Iterable[Sequence[str | None]]
) -> bool:
    """Whether all lines have as many fields as the header, and fields with forms of the table; see `_lines_as_rows`."""
    found = False
    for fields in lines:
        if len(fields) != len(header):
            return False
        is_known = [field is not None for field in fields]
        has_form = any(_form(field) in forms.get(name, ()) for name, field in zip(header, fields) if field is not None)
        if any(is_known) and not has_form:
            return False
        found |= has_form
    return found


def _form(field: str) -> str:
    """The suffix of a file name, or else the text, with 0 for each number."""
    text = re.sub(r"\d+", "0", field.strip())
    suffix = re.search(r"\.[A-Za-z]\w{1,4}$", text)
    if suffix is not None:
        return suffix.group().lower()
    return text


def _read_parquet(path: Path, required: Sequence[str], all_columns: bool, table_format: TableFormat) -> TableColumns:
    import pyarrow.parquet

    table: dict[str, list[str]] = {}
    try:
        metadata = pyarrow.parquet.read_metadata(path)
        if metadata.num_rows > path.stat().st_size:  # rows that repeat a value take nearly no space
            raise ValueError(f"it has {metadata.num_rows:,} rows, more than bytes")
        named = metadata.schema.to_arrow_schema().names
        header = table_format.renamed(named)
        wanted = _wanted_columns(header, required, all_columns, table_format.is_oml)
        readable = {name: named[header.index(name)] for name in wanted if header.count(name) == 1}
        content = pyarrow.parquet.read_table(path, columns=list(readable.values()))
    except Exception as error:  # pyarrow raises errors of many types, few of which give the file
        if is_system_error(error):
            raise
        raise InvalidValue(f"{path} must be a Parquet file, but cannot be read as one ({error})") from None
    for name, theirs in readable.items():
        separator = TAG_SEPARATOR if name == "tags" else " "
        column = content.column(theirs)
        try:
            table[name] = [as_text(value, separator) for value in column.to_pylist()]
        except (TypeError, ValueError):  # also a date that Python does not have
            rule = "must hold text in UTF-8, numbers, or lists of them"
            got = f"the type {column.type} in {path}"
            cure = "for images in a Parquet file, use HuggingFaceImages"
            raise InvalidValue(rule, argument=theirs, got=got, cure=cure) from None
    _check_header(path, named, required, wanted, table_format)
    return TableColumns(path, table, range(1, content.num_rows + 1), unit="row")


def as_text(value: Any, separator: str) -> str:
    """Return a value of a Parquet file as a CSV file would have it; empty if the value is missing.

    Args:
        value: a value of a column.
        separator: stands between the elements of a list.

    Raises:
        TypeError: if the value is a mapping.
        UnicodeDecodeError: if the value is not text in UTF-8.
    """
    if isinstance(value, (list, tuple)):
        return separator.join(as_text(element, separator) for element in value)
    if value is None:
        return ""
    if isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} is not text")
    if isinstance(value, bytes):  # Impala and older versions of Spark write text without its type
        return value.decode().strip()
    if isinstance(value, (float, Decimal)):  # pandas stores integers with gaps as floats such as 3.0 and NaN
        if math.isnan(value):
            return ""
        if math.isfinite(value) and value == int(value):
            return str(int(value))
    return str(value).strip()


def _check_header(
    path: Path,
    named: Sequence[str],
    required: Sequence[str],
    wanted: Sequence[str],
    table_format: TableFormat,
) -> None:
    is_parquet = path.suffix.lower() in PARQUET_SUFFIXES
    absent = table_format.absent(named)
    if absent is not None:
        place = path if is_parquet else f"line 1 of {path}"
        raise InvalidValue(absent, argument="columns", got=f"{','.join(named)!r} in {place}")
    header = table_format.renamed(named)
    missing = _missing_columns(header, required)
    if missing:
        columns = " and ".join(required).replace("label", "label (or tags)")
        sides = ""
        if "image" in required:
            sides = f", and all of {', '.join(SIDES)} or none"
        separator = "commas" if table_format.delimiter == "," else repr(table_format.delimiter)
        rule = f"line 1 of {path} must name the columns {columns}{sides}, separated by {separator}"
        if is_parquet:
            rule = f"{path} must have the columns {columns}{sides}"
        got = f"{','.join(named)!r}, which lacks {', '.join(missing)}"
        raise InvalidValue(rule, got=got, cure=table_format.cure(named))
    if not is_parquet:
        _check_no_row(path, named, table_format)
    for name in wanted:
        if list(header).count(name) > 1:
            raise InvalidValue(f"line 1 of {path} must name each column once", got=f"{name} twice")


def _missing_columns(header: Sequence[str], required: Sequence[str]) -> list[str]:
    """The required columns that a header lacks."""
    missing = find_missing(required, header)
    if "tags" in header and "label" in missing:
        missing.remove("label")
    missing_sides = find_missing(SIDES, header)
    if "image" in required and "box" not in header and len(missing_sides) < len(SIDES):
        missing += missing_sides
    return missing


def _check_no_row(path: Path, named: Sequence[str], table_format: TableFormat) -> None:
    """Raise if the column of the images has the name of an image file: the first line is then a row."""
    if names_image_file(table_format.names.get("image", "")):
        got = repr(table_format.delimiter.join(named))
        raise InvalidValue(f"line 1 of {path} must name the columns", got=got, cure=table_format.cure(named))
