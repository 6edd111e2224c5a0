"""Reads the user's tables of images or texts, CSV or Parquet, as columns of text."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from lightning_retrieval.datamodules.image_index import use_of
from lightning_retrieval.datamodules.table import Table, read_csv
from lightning_retrieval.datamodules.table_format import COLUMNS, OML_ROLES, SIDES, TableFormat, flag_of_oml
from lightning_retrieval.files import is_system_error
from lightning_retrieval.invalid import InvalidValue

TAG_SEPARATOR = ";"
PARQUET_SUFFIXES = (".parquet", ".pq")
COMMON_FORMAT = TableFormat()
NAME_COLUMNS = ("label", "tags", "category", "camera")  # whose texts are names, not files or free text
ROLE_OF_FLAGS = {(True, True): "both", (True, False): "query", (False, True): "gallery", (False, False): ""}


def composed(name: str) -> str:
    """Return the name of a class or tag in the Unicode form NFC. macOS may write é as two characters."""
    return unicodedata.normalize("NFC", name)


def read_table(
    path: Path,
    required: Sequence[str] = ("image", "label"),
    *,
    all_columns: bool = False,
    table_format: TableFormat = COMMON_FORMAT,
) -> Table:
    """Read the required columns, and those with the names `COLUMNS`, from a CSV or Parquet file.

    Args:
        path: a CSV file in UTF-8 with a header line, or a Parquet file, which has the suffix .parquet or .pq.
        required: the columns that the table must have; `tags` may stand in for `label`.
        all_columns: read the columns with other names as well, but none without a name.
        table_format: the names of the columns in the file, and the separator of its fields.

    Raises:
        ValueError: if the file cannot be read, a required column is missing or a column is named twice, there is no
            row, or, in a CSV file, a row has another number of fields than the header or a value has several lines.
    """
    if path.is_dir():
        raise InvalidValue(f"{path} must be a CSV or Parquet file", got="a folder")
    is_parquet = path.suffix.lower() in PARQUET_SUFFIXES
    found = _opened_parquet(path) if is_parquet else read_csv(path, table_format.delimiter)
    names = list(found.schema_arrow.names if is_parquet else found.column_names)
    header = table_format.renamed(names)
    _check_columns(path, names, header, required, table_format)
    wanted = [*required, *COLUMNS, *(OML_ROLES if table_format.is_oml else ())]
    if all_columns:
        wanted = list(filter(None, header))
    columns = {}
    for name in dict.fromkeys(wanted):
        if header.count(name) > 1:
            raise InvalidValue(f"line 1 of {path} must name each column once", got=f"{name} twice")
        if name not in header:
            continue
        position = header.index(name)
        if is_parquet:
            columns[name] = _texts(path, found, names[position], TAG_SEPARATOR if name == "tags" else " ")
        else:
            columns[name] = found.column(position)
    table = Table(columns, path, header=None if is_parquet else 1, blank="\n")
    if len(table) == 0:
        raise InvalidValue(f"{path} must have rows", got="only the header")
    names_of_rows = {name: list(map(composed, table[name])) for name in NAME_COLUMNS if name in table}
    table = table.with_columns(**names_of_rows)
    return _converted_oml(table) if table_format.is_oml else table


def _opened_parquet(path: Path) -> Any:
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises errors of many types, few of which give the file
        if is_system_error(error):
            raise
        raise InvalidValue(f"{path} must be a Parquet file, but cannot be read as one ({error})") from None


def _texts(path: Path, file: Any, name: str, separator: str) -> list[str]:
    """The values of a column of a Parquet file as text."""
    try:
        return [as_text(value, separator) for value in file.read([name]).column(0).to_pylist()]
    except Exception as error:  # also damaged data, and a date that Python does not have
        if is_system_error(error):
            raise
        rule = "must hold text in UTF-8, numbers, or lists of them"
        got = f"the type {file.schema_arrow.field(name).type} in {path} ({error})"
        cure = "for images in a Parquet file, use HuggingFaceImages"
        raise InvalidValue(rule, argument=name, got=got, cure=cure) from None


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


def _check_columns(
    path: Path, names: Sequence[str], header: Sequence[str], required: Sequence[str], table_format: TableFormat
) -> None:
    """Raise if a table lacks a column that is required or named in `columns`."""
    shown = f"{table_format.delimiter.join(names)!r} in {path}"
    for here, theirs in table_format.names.items():
        if not table_format.is_oml and theirs not in names:
            rule = f"must name columns of the table, but {theirs!r}, named as {here!r}, is none"
            raise InvalidValue(rule, argument="columns", got=shown)
    missing = [name for name in required if name not in header and not (name == "label" and "tags" in header)]
    sides = [side for side in SIDES if side not in header]
    if "image" in required and "box" not in header and len(sides) < len(SIDES):
        missing += sides
    if missing:
        columns = " and ".join(required).replace("label", "label (or tags)")
        rule = f"{path} must have the columns {columns}, and all of {', '.join(SIDES)} or none"
        cure = "line 1 of a CSV file has these names, or others that are given as `columns`, separated by `delimiter`"
        got = f"{table_format.delimiter.join(names)!r}, which lacks {', '.join(missing)}"
        raise InvalidValue(rule, got=got, cure=cure)


def _converted_oml(table: Table) -> Table:
    """A table of open-metric-learning with the roles of this library."""
    if OML_ROLES[0] not in table:
        return table
    queries = table.parsed("is_query", flag_of_oml)
    gallery = [not is_query for is_query in queries]
    if OML_ROLES[1] in table:
        gallery = table.parsed("is_gallery", flag_of_oml)
    roles = [ROLE_OF_FLAGS[flags] for flags in zip(queries, gallery)]
    in_training = [use_of(split) == "train" for split in table.get("split") or [""] * len(table)]
    unused = [row for row, role in enumerate(roles) if not role and not in_training[row]]
    if unused:
        raise table.error(unused, "`is_query` or `is_gallery` must be True in evaluation")
    return table.with_columns(role=["" if train else role for train, role in zip(in_training, roles)])
