"""Read the columns of a table of images in a CSV or Parquet file, as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.files.lists import ListLines, read_csv_header, read_csv_rows
from lightning_retrieval.optional_packages import optional_import

SIDES = ("left", "top", "right", "bottom")
COLUMNS = ("image", "label", "category", "split", "role", "camera", "box", *SIDES)
PARQUET_SUFFIXES = (".parquet", ".pq")


@dataclass(frozen=True)
class TableLines(ListLines):
    """Which row of a table each image was read from, for error messages.

    Args:
        numbers: the number of each row in the file.
        unit: what `numbers` count, `"line"` or `"row"`.
    """

    numbers: Sequence[int] = ()
    unit: str = "line"

    def where(self, image: int) -> str:
        """The row of the image at a position, and the table."""
        return f"{self.unit} {self.numbers[self.row(image)]} of {self.path}"


@dataclass
class TextTable:
    """Columns of text, and the location of each row in the file for error messages.

    Args:
        path: the file.
        columns: the fields of each column, by the column's name.
        lines: the number of each row in the file.
        unit: what `lines` counts, `"line"` or `"row"`.
    """

    path: Path
    columns: dict[str, list[str]]
    lines: Sequence[int]
    unit: str = "line"

    def lines_of(self, rows: NDArray[np.intp]) -> TableLines:
        """The lines of some rows, from 0, for the index of their images."""
        return TableLines("ImageTable", self.path, rows, numbers=self.lines, unit=self.unit)

    def check(self, invalid_rows: Sequence[int], rule: str, values: Sequence[str] | None = None) -> None:
        """Raise a ValueError about the first of the invalid rows, if there are any.

        Args:
            invalid_rows: numbers of the invalid rows, from 0.
            rule: the rule that they break, for the message.
            values: the value of each row; the one of the first invalid row is shown in the message.
        """
        if len(invalid_rows) == 0:
            return
        row = invalid_rows[0]
        message = f"ImageTable: {rule}"
        if values is not None:
            message += f", got {values[row]!r}"
        message += f", at {self.unit} {self.lines[row]} of {self.path}"
        if len(invalid_rows) > 1:
            message += f" ({len(invalid_rows)} such rows)"
        raise ValueError(f"{message}.")


def read_table(path: Path, required: Sequence[str] = ("image", "label")) -> TextTable:
    """Read those of the columns `COLUMNS` that a CSV or Parquet file has.

    Args:
        path: a CSV file in UTF-8 with a header line, or a Parquet file, which has the suffix .parquet or .pq.
        required: the columns that the table must have.

    Raises:
        ModuleNotFoundError: if the file is Parquet and pyarrow is not installed.
        ValueError: if the file cannot be read, a required column is missing or a column is named twice, there is no
            row, or the rows have different numbers of fields.
    """
    if path.suffix.lower() in PARQUET_SUFFIXES:
        table = _read_parquet(path, required)
    else:
        table = _read_csv(path, required)
    if not table.lines:
        raise ValueError(f"ImageTable: {path} must have rows, got only the header.")
    return table


def _read_csv(path: Path, required: Sequence[str]) -> TextTable:
    rows = read_csv_rows("ImageTable", path)
    header = read_csv_header(rows)
    _check_header(path, header, required)
    positions: list[tuple[str, int]] = []
    table: dict[str, list[str]] = {}
    for name in COLUMNS:
        if name in header:
            positions.append((name, header.index(name)))
            table[name] = []
    lines: list[int] = []
    for row, line in rows:
        if len(row) != len(header):
            raise ValueError(
                f"ImageTable: each row must have the header's {len(header)} fields, got {len(row)}, at line {line} of "
                f"{path}."
            )
        lines.append(line)
        for name, position in positions:
            table[name].append(row[position].strip())
    return TextTable(path, table, lines)


def _read_parquet(path: Path, required: Sequence[str]) -> TextTable:
    with optional_import(
        f"ImageTable: pyarrow must be installed to read {path}: pip install 'lightning-retrieval[parquet]'; "
        "or provide the table as CSV."
    ):
        import pyarrow.parquet
    table: dict[str, list[str]] = {}
    try:
        header = pyarrow.parquet.read_schema(path).names
        readable = [name for name in COLUMNS if header.count(name) == 1]
        content = pyarrow.parquet.read_table(path, columns=readable)
        for name in readable:
            table[name] = [as_text(value) for value in content.column(name).to_pylist()]
    except Exception as error:  # pyarrow has many types of errors, few of which name the file
        raise ValueError(f"ImageTable: {path} must be a Parquet file, but cannot be read as one ({error}).") from None
    _check_header(path, header, required)
    return TextTable(path, table, range(1, content.num_rows + 1), unit="row")


def as_text(value: Any) -> str:
    """A value of a Parquet file as it would be written in a CSV file; empty if it is missing."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if value is None:
        return ""
    if isinstance(value, float):  # pandas stores integers with gaps as floats such as 3.0 and NaN
        if math.isnan(value):
            return ""
        if value.is_integer():
            return str(int(value))
    return str(value).strip()


def _missing(names: Sequence[str], header: Sequence[str]) -> list[str]:
    return [name for name in names if name not in header]


def _check_header(path: Path, header: Sequence[str], required: Sequence[str]) -> None:
    missing = _missing(required, header)
    missing_sides = _missing(SIDES, header)
    if "box" not in header and len(missing_sides) < len(SIDES):
        missing += missing_sides
    if missing:
        raise ValueError(
            f"ImageTable: line 1 of {path} must name the columns {' and '.join(required)}, and all of "
            f"{', '.join(SIDES)} or none, separated by commas; {', '.join(missing)} missing in {','.join(header)!r}."
        )
    for name in COLUMNS:
        if list(header).count(name) > 1:
            raise ValueError(f"ImageTable: line 1 of {path} must name each column once, got {name} twice.")
