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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidValue

SIDES = ("left", "top", "right", "bottom")
COLUMNS = ("image", "label", "tags", "category", "split", "role", "camera", "box", *SIDES)
NAMES = ("text", *COLUMNS)
OML = {"image": "path", "camera": "sequence", **dict(zip(SIDES, ("x_1", "y_1", "x_2", "y_2")))}
OML_ROLES = ("is_query", "is_gallery")
TABS = ("tab", "\\t")  # names of the tab on a command line
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


def _check_columns(columns: Any) -> None:
    """Raise unless `columns` is a dict of names, `"oml"` or None."""
    if columns is None or columns == "oml":
        return
    rule = "must be a dict from names of this library to those of the table, such as image=path,label=class, or 'oml'"
    if not isinstance(columns, Mapping):
        raise InvalidValue(rule, argument="columns", got=short_repr(columns))
    unknown = [here for here in columns if here not in NAMES]
    if unknown:
        raise InvalidValue(f"must have names among {', '.join(NAMES)}", argument="columns", got=short_repr(unknown[0]))
    if len(set(columns.values())) < len(columns):
        raise InvalidValue("must have another column for each name", argument="columns", got=short_repr(columns))


def flag_of_oml(text: str) -> bool:
    """The value of `is_query` or `is_gallery`, which are empty in training.

    Raises:
        ValueError: if it is neither true nor false.
    """
    if text.lower() not in TRUE + FALSE:
        raise ValueError("it must be True or False, or empty in training")
    return text.lower() in TRUE


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
