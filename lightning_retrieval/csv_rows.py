"""Reads rows of CSV files strictly, so that a stray quote is an error and does not hide the lines after it."""

import csv
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class CSVError(ValueError):
    """The text is not a valid CSV file. The message has no owner and no file."""


class CSVRow(NamedTuple):
    """A row of a CSV file.

    Attributes:
        fields: its fields, without quotes and without the spaces before them.
        first: number of its first line.
        last: number of its last line; a quoted field may have several lines.
    """

    fields: list[str]
    first: int
    last: int


def csv_rows(lines: Iterable[str], *, may_span_lines: bool = False, delimiter: str = ",") -> Iterator[CSVRow]:
    """Yield the rows of a CSV file that are not blank, header included.

    Args:
        lines: the lines of the file, with their line endings.
        may_span_lines: whether quoted fields may have several lines.
        delimiter: separates the fields.

    Raises:
        CSVError: if a quote is not closed, or text follows a closing quote; without `may_span_lines`, if a row has
            several lines.
    """
    reader = csv.reader(lines, skipinitialspace=True, strict=True, delimiter=delimiter)
    first = 1
    try:
        for fields in reader:
            row = CSVRow(fields, first, reader.line_num)
            if row.last > first and not may_span_lines:
                raise CSVError(f"one row in lines {first} to {row.last}; close the quote that line {first} opens")
            if fields:
                yield row
            first = reader.line_num + 1
    except csv.Error as error:
        where = f"line {reader.line_num}"
        if reader.line_num > first:
            where += f", in the row that begins in line {first}, which opens a quote"
        raise CSVError(f"{error} in {where}") from None
