"""What the columns of the user's table are named, and what separates its fields.

`columns` gives the names of a table's columns by the names of this library: `{"image": "path", "label": "class"}`, or
`"image=path,label=class"`, as it is written on a command line. The word `"oml"` stands for the tables of
open-metric-learning:

| here | in their tables |
| --- | --- |
| `image` | `path` |
| `camera` | `sequence` |
| `left`, `top`, `right`, `bottom` | `x_1`, `y_1`, `x_2`, `y_2` |
| `role` | `is_query`, `is_gallery` |
| `split`: `val` | `split`: `validation` |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.preparation.decoding import image_suffixes

SIDES = ("left", "top", "right", "bottom")
COLUMNS = ("image", "label", "tags", "category", "split", "role", "camera", "box", *SIDES)
NAMES = ("text", *COLUMNS)
OML = {"image": "path", "camera": "sequence", **dict(zip(SIDES, ("x_1", "y_1", "x_2", "y_2")))}
OML_ROLES = ("is_query", "is_gallery")
OML_SPLITS = {"validation": "val"}
TABS = ("tab", "\\t")  # names of the tab on a command line
DELIMITERS = (",", ";", "\t", "|")
TRUE, FALSE = ("true", "1", "1.0"), ("false", "0", "0.0", "")

ColumnNames = dict[str, str] | str | None


@dataclass(frozen=True)
class TableFormat:
    """The names of the columns of a table, and the separator of its fields.

    Args:
        columns: the name of each column in the table, by its name here; `"oml"`; or None for the names here.
        delimiter: one character, which separates the fields of a CSV file.
    """

    columns: ColumnNames = None
    delimiter: str = ","

    @staticmethod
    def checked(columns: Any, delimiter: Any) -> "TableFormat":
        """The format with these settings.

        Args:
            columns: as for the class, or pairs in a text such as `image=path,label=class`.
            delimiter: as for the class; `tab` and `\\t` are names of the tab.

        Raises:
            ValueError: if `columns` is another text, has an unknown name, or one column for two names, or `delimiter`
                is not one character that can separate fields.
        """
        separator = delimiter
        if delimiter in TABS:
            separator = "\t"
        if len(separator) != 1 or separator.isalnum() or separator in "\"'\r\n ._-/\\" or not separator.isascii():
            rule = "must be one character that separates fields, such as ';' or a tab"
            raise InvalidValue(rule, argument="delimiter", got=short_repr(delimiter))
        names = columns
        if isinstance(columns, str):
            names = _names_in_text(columns)
        _check_columns(names)
        return TableFormat(names, separator)

    @property
    def is_oml(self) -> bool:
        """Whether the table is one of open-metric-learning."""
        return isinstance(self.columns, str)

    @property
    def names(self) -> Mapping[str, str]:
        """The name of a column in the table by its name here, for those that differ."""
        if isinstance(self.columns, str):
            return OML
        return self.columns or {}

    def renamed(self, header: Sequence[str]) -> list[str]:
        """The names of a table's columns here; empty for a column without a name, or whose name another one has.

        Args:
            header: the names in the table.
        """
        names = {here: "" for here, theirs in self.names.items() if theirs in header}
        for here in list(names):
            names[self.names[here]] = here
        return [names.get(name, name) for name in header]

    def absent(self, header: Sequence[str]) -> str | None:
        """The sentence about the first column that `columns` names and a table lacks; None if it has all.

        Args:
            header: the names in the table.
        """
        if self.is_oml:
            return None
        for here, theirs in self.names.items():
            if theirs not in header:
                return f"must name columns of the table, but {theirs!r}, named as {here!r}, is none"
        return None

    def cure(self, header: Sequence[str]) -> str:
        """What helps if a table lacks columns.

        Args:
            header: the names in the table.
        """
        if header and header[0].startswith("sep="):
            return "delete this line, which only Excel reads"
        cure = _cure_of_lists(header)
        if cure:
            return cure
        for delimiter in DELIMITERS:
            if len(header) == 1 and delimiter in header[0]:
                return f"give `delimiter` {delimiter!r}"
        if "path" in header and not self.is_oml and set(OML_ROLES) & set(header):
            return "give `columns` 'oml', for tables of open-metric-learning"
        return "name columns that have other names with `columns`, such as image=path,label=class"


def names_image_file(text: str) -> bool:
    """Whether a word of a text is the name of an image file, so that a line with it names no columns."""
    suffixes = image_suffixes()
    return any(PurePath(word).suffix.lower() in suffixes for word in text.split())


def _cure_of_lists(header: Sequence[str]) -> str:
    """What helps if the first line is a row, or its fields are separated by spaces; empty if neither is so."""
    is_spaced = len(header) == 1 and len(header[0].split()) > 1
    has_no_names = any(map(names_image_file, header))
    if is_spaced and not set(header[0]) & set(DELIMITERS):
        names = " and add a first line such as image,label" if has_no_names else ""
        return f"write commas in place of the spaces{names}"
    if has_no_names:
        return "line 1 is a row, so add a line of names above it, such as image,label"
    return ""


def _check_columns(columns: Any) -> None:
    """Raise unless `columns` is a dict of names, `"oml"` or None."""
    if columns is None or (isinstance(columns, str) and columns == "oml"):
        return
    rule = "must be a dict from names of this library to those of the table, such as image=path,label=class, or 'oml'"
    if isinstance(columns, str):
        raise InvalidValue(rule, argument="columns", got=short_repr(columns))
    if not isinstance(columns, Mapping):
        raise InvalidType(rule, argument="columns", got=f"{short_repr(columns)} ({type(columns).__name__})")
    for here, theirs in columns.items():
        if here not in NAMES:
            raise InvalidValue(f"must have names among {', '.join(NAMES)}", argument="columns", got=short_repr(here))
        if not isinstance(theirs, str):
            raise InvalidType(rule, argument="columns", got=f"{short_repr(theirs)} ({type(theirs).__name__})")
    if len(set(columns.values())) < len(columns):
        raise InvalidValue("must have another column for each name", argument="columns", got=short_repr(columns))


def role_of_oml(is_query: str, is_gallery: str | None = None) -> str | None:
    """The role of an image in a table of open-metric-learning; empty in training, None if a value is unknown.

    Args:
        is_query: the value of the column of this name.
        is_gallery: the value of the column of this name; None if there is no such column, and all others are gallery.
    """
    values = []
    for text in (is_query, is_gallery or ""):
        if text.lower() not in TRUE + FALSE:
            return None
        values.append(text.lower() in TRUE)
    if is_gallery is None:
        values[1] = not values[0]
    names = {(True, True): "both", (True, False): "query", (False, True): "gallery"}
    return names.get((values[0], values[1]), "")


def _names_in_text(text: str) -> dict[str, str] | str:
    """The names of columns in pairs such as `image=path,label=class`; a text without pairs as it is.

    Args:
        text: the text, which is that of `columns`.

    Raises:
        ValueError: if a part is no pair, or a name has two.
    """
    if "=" not in text:
        return text
    names: dict[str, str] = {}
    for pair in text.split(","):
        here, _, theirs = map(str.strip, pair.partition("="))
        if not here or not theirs or here in names:
            raise InvalidValue("must be pairs such as image=path,label=class", argument="columns", got=text)
        names[here] = theirs
    return names
