"""Columns of metadata of an index, conditions on them, and searches for one row of each group.

A condition is written like an expression of Python that compares columns with values, such as
`price <= 20 and brand not in ['Acme', 'Ajax']`:

    condition:   comparison | not condition | condition and condition | condition or condition | (condition)
    comparison:  column operator value | column in [value, ...] | column not in [value, ...]
    operator:    == != < <= > >=

The text of a condition is data. Python's parser splits it into its parts, but nothing is evaluated: everything except
these forms is invalid. What Milvus gets is written from the parts.
"""

import ast
import datetime
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_strings, short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.packed_strings import PackedStrings, as_arrow

Kind = Literal["text", "number"]
COLUMN_KINDS: tuple[Kind, ...] = ("text", "number")
Value = str | float | None  # of a row in a column; None for a number that is missing
Values = Any  # the values of a new column, strings or numbers, see `new_columns`
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
SPELLINGS = {  # what other languages write, and how it is written here
    r"=>|=<": ">= and <= for an order",
    r"(?<![=!<>])=(?!=)|===|\b(?i:is)\b": "== for equal",
    r"<>|!==": "!= for not equal",
    r"&|\bAND\b": "and in place of & and AND",
    r"\||\bOR\b": "or in place of | and OR",
    r"\bNOT\b|!(?!=)": "not in place of ! and NOT",
    r"\bIN\b": "in for one of several values",
    r"[=<>]\s*(?!(?i:nan|inf|none)\b)[A-Za-z_]": "text in quotes, such as 'a' or 'True'",
}
LARGEST_INTEGER = 2**53  # all integers up to this one are exact in float64
# For each operator, the name of a function of Arrow, and except for "in" also of NumPy.
OPERATORS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "in": "is_in",
}
SYMBOLS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in"}
SYMBOLS[ast.NotIn] = "in"
EXAMPLE = "price <= 20 and brand in ['a', 'b']"
MOST_CHARACTERS, MOST_COMPARISONS = 500_000, 200  # of a condition; a list of values is one comparison
MOST_NESTED = 100  # conditions inside each other; every function below can recurse so deeply
ROWS_PER_GROUP, FEWEST_ROWS = 4, 32  # the first search for k groups finds at least this many rows


# A value for each row, as an Arrow array: float64 for numbers, and for text a dictionary of large_binary (which also
# holds what is not valid UTF-8) with indices of 64 bits.
Column = Any


def kind_of(column: Column) -> Kind:
    """Whether the values of a column are numbers or text."""
    return "number" if column.type == "float64" else "text"


def kinds_of(columns: Mapping[str, Column]) -> dict[str, Kind]:
    """The kind of each column."""
    return {name: kind_of(column) for name, column in columns.items()}


def python_values(column: Column) -> list[Any]:
    """The values of a column as Python's objects; None for a number that is missing."""
    values: list[Any] = column.to_pylist()
    if kind_of(column) == "text":
        return [text.decode(errors="surrogateescape") for text in values]
    return list(map(_number_or_none, values))


def values_at(column: Column, positions: NDArray[np.intp]) -> list[Any]:
    """The values of some rows as `python_values` returns them; a copy of the column by Arrow would take longer."""
    if kind_of(column) == "number":
        return list(map(_number_or_none, np.from_dlpack(column)[positions].tolist()))
    texts, numbers = column.dictionary, np.from_dlpack(column.indices)[positions]
    return [texts[number].as_py().decode(errors="surrogateescape") for number in numbers.tolist()]


def _number_or_none(value: float) -> float | None:
    if math.isnan(value):
        return None
    return value


def joined(first: Column, second: Column) -> Column:
    """A column, followed by another one of the same kind."""
    import pyarrow

    return pyarrow.chunked_array([first, second]).unify_dictionaries().combine_chunks()


def shown_kinds(kinds: Mapping[str, Kind]) -> str:
    """The names of columns with their kinds, for error messages."""
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none"


def check_column_name(name: Any) -> None:
    """Raise unless a column may have this name.

    Raises:
        ValueError: if a condition could not contain the name.
    """
    is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
    if not is_name or keyword.iskeyword(name):
        raise InvalidValue(
            "must have names of letters from a to z, digits and _ that do not begin with a digit and are no keyword of "
            "Python, such as class",
            argument="columns",
            got=short_repr(name),
            cure="rename the column",
        )


def new_columns(columns: Mapping[str, Values] | None, rows: int) -> dict[str, Column]:
    """The columns of new rows.

    Args:
        columns: by name, the values of all rows, as a sequence, a tensor, an array, or a column of Arrow or pandas;
            None for no columns. A value may be missing (None), but not all of a column.
        rows: number of rows.

    Raises:
        ValueError: if a name is invalid, the number of values is not `rows`, or a number is not finite or not exact in
            64 bits.
        TypeError: if a column is not a sequence of strings or of numbers.
    """
    if columns is None:
        return {}
    made = {}
    for name, values in columns.items():
        check_column_name(name)
        made[name] = _column(name, values, rows)
    return made


def _column(name: str, values: Values, rows: int) -> Column:
    if not hasattr(values, "__len__") or isinstance(values, str):
        raise InvalidType(f"must have a sequence of values for {name}", argument="columns", got=short_repr(values))
    if len(values) != rows:
        rule = f"must have one value for each of {rows} rows"
        raise InvalidValue(rule, argument="columns", got=f"{len(values)} for {name}")
    if _is_column(values):
        return _one_zero(np.from_dlpack(values)) if values.type == "float64" else values
    listed = list(map(_plain, _listed(values)))
    types = set(map(type, listed))
    if types <= {int, float, NoneType} and types & {int, float}:
        return _numbers(name, listed)
    if not types <= {str, NoneType} or types == {NoneType}:
        shown = ", ".join(sorted(kind.__name__ for kind in types))
        raise InvalidType(f"must hold only strings or only numbers for {name}", argument="columns", got=shown)
    return _texts(name, listed)


def _is_column(values: Any) -> bool:
    """Whether values are already a `Column`."""
    import pyarrow

    if not isinstance(values, pyarrow.Array) or values.null_count > 0:
        return False
    if values.type == pyarrow.dictionary(pyarrow.int64(), pyarrow.large_binary()):
        return True
    return values.type == "float64" and not np.isinf(np.from_dlpack(values)).any()


def _listed(values: Any) -> list[Any]:
    """Values as objects of Python; None for one that is missing."""
    import pyarrow

    if isinstance(values, (Tensor, np.ndarray)):
        return list(values.tolist())
    if isinstance(values, (pyarrow.Array, pyarrow.ChunkedArray)):
        return list(values.to_pylist())
    if hasattr(values, "to_numpy"):  # a column of pandas
        return list(pyarrow.array(values, from_pandas=True).to_pylist())
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def _plain(value: Any) -> Any:
    """A value as a number or a text, as a table in CSV has it."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, (bool, datetime.date, datetime.time, datetime.timedelta)):
        return str(value)
    return value


def _texts(name: str, listed: Sequence[str | None]) -> Column:
    """A column of texts; None, one that is missing, becomes ""."""
    import pyarrow

    try:
        texts = PackedStrings([text or "" for text in listed]).arrow().dictionary_encode()
    except UnicodeEncodeError as error:
        rule = f"must hold valid Unicode for {name}"
        raise InvalidValue(rule, argument="columns", got=short_repr(error.object)) from None
    return pyarrow.DictionaryArray.from_arrays(texts.indices.cast(pyarrow.int64()), texts.dictionary)


def _numbers(name: str, listed: Sequence[float | None]) -> Column:
    """A column of numbers; None, one that is missing, becomes NaN."""
    given = [value for value in listed if value is not None]
    if not all(map(is_exact, given)):
        rule = f"must hold finite numbers, integers up to 2**53, for {name}"
        raise InvalidValue(rule, argument="columns", got="others")
    return _one_zero(np.array(listed, np.float64))


def _one_zero(numbers: NDArray[Any]) -> Column:
    """A column of numbers, in which -0.0 is 0.0, since Milvus tells them apart where it looks for one of several."""
    return as_arrow(numbers + 0.0)


def is_exact(value: float) -> bool:
    """Whether a number is finite and, if it is an integer, exact in float64."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    return math.isfinite(value)


def check_same_columns(kinds: Mapping[str, Kind], new: Mapping[str, Kind]) -> None:
    """Raise unless new rows have the columns of the index.

    Raises:
        ValueError: if names or kinds differ.
    """
    if new != kinds:
        rule = f"must be the columns of the index, {shown_kinds(kinds)}"
        raise InvalidValue(rule, argument="columns", got=shown_kinds(new))


@dataclass(frozen=True)
class Compared:
    """A comparison of a column with a value, or with several values if `operator` is "in"."""

    column: str
    operator: str
    value: str | float | frozenset[str] | frozenset[float | None]


@dataclass(frozen=True)
class Combined:
    """All of the conditions (`word` is "and"), one of them ("or"), or the opposite of the only one ("not")."""

    word: str
    conditions: tuple["Condition", ...]


Condition = Compared | Combined


def parse_where(where: str | None, kinds: Mapping[str, Kind]) -> Condition | None:
    """Parse a condition.

    Args:
        where: the text of the condition; None for no condition.
        kinds: the kinds of the index's columns.

    Raises:
        ValueError: if the text is not a condition, names a column that the index does not have, or compares text with a
            number.
    """
    if where is None:
        return None
    try:
        if len(where) > MOST_CHARACTERS:
            raise ValueError(f"which has {len(where):,} characters, more than {MOST_CHARACTERS:,}")
        condition = _condition(ast.parse(where.strip(), mode="eval").body, kinds)
        number = _comparisons(condition)
        if number <= MOST_COMPARISONS:
            return condition
        reason = f"which has {number:,} comparisons, more than {MOST_COMPARISONS}; compare with a list of values"
    except SyntaxError as error:
        reason = f"which cannot be read ({error.msg})"
    except (MemoryError, RecursionError):
        reason = "which is nested too deeply"
    except ValueError as error:
        reason = str(error)
    got, cure = f"{short_repr(where)}, {reason}", _cure(where)
    raise InvalidValue(f"must be a condition such as {EXAMPLE}", argument="where", got=got, cure=cure)


def _cure(where: str) -> str:
    """How a condition is spelled that is written as in another language; "" if no such spelling is found."""
    unquoted = _QUOTED.sub("''", where)
    for pattern, cure in SPELLINGS.items():
        if re.search(pattern, unquoted):
            return f"write {cure}"
    return ""


def check_group(group_by: str | None, kinds: Mapping[str, Kind]) -> None:
    """Raise unless results can be grouped by a column; None for no groups.

    Raises:
        ValueError: if the index does not have this column.
    """
    if group_by is None:
        return
    if group_by not in kinds:
        rule = f"must be a column of the index, {shown_kinds(kinds)}"
        raise InvalidValue(rule, argument="group_by", got=repr(group_by))


@dataclass(frozen=True)
class Request:
    """What a search asks for, as the method `request` of an index has checked it.

    Args:
        k: number of results of each query.
        condition: condition that the rows must meet; None for no condition.
        group_by: name of the column of which each value is found once; None for no groups.
    """

    k: int
    condition: Condition | None = None
    group_by: str | None = None


def checked_columns(argument: str, names: Sequence[str] | None, kinds: Mapping[str, Kind]) -> list[str]:
    """The names of the columns whose values a search returns; all columns of the index for None.

    Args:
        argument: name of the argument, for error messages.
        names: names of columns.
        kinds: the kind of each column of the index.

    Raises:
        ValueError: if a name is no column of the index.
        TypeError: if `names` is a single string.
    """
    if names is None:
        return list(kinds)
    check_strings(argument, names)
    for name in names:
        if name not in kinds:
            rule = f"must be columns of the index, {shown_kinds(kinds)}"
            raise InvalidValue(rule, argument=argument, got=repr(name))
    return list(names)


def checked_request(k: int, where: str | None, group_by: str | None, kinds: Mapping[str, Kind]) -> Request:
    """What a search asks for, after its condition and its column of groups are checked.

    Args:
        k: number of results of each query, which the index has checked.
        where: the condition as text; None for no condition.
        group_by: name of a column; None for no groups.
        kinds: the kind of each column of the index.

    Raises:
        ValueError: if `where` is not a condition on the columns, or `group_by` is no column.
    """
    condition = parse_where(where, kinds)
    check_group(group_by, kinds)
    return Request(k, condition, group_by)


def _condition(node: ast.expr, kinds: Mapping[str, Kind], depth: int = 0) -> Condition:
    """The condition of a node of Python's syntax tree; raises a ValueError with the reason if it is none."""
    if depth > MOST_NESTED:
        raise ValueError("which is nested too deeply")
    if isinstance(node, ast.BoolOp):
        word = type(node.op).__name__.lower()  # "and" or "or"
        return Combined(word, tuple(_condition(part, kinds, depth + 1) for part in node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Combined("not", (_condition(node.operand, kinds, depth + 1),))
    return _comparison(node, kinds)


def _comparisons(condition: Condition) -> int:
    """The number of comparisons in a condition."""
    if isinstance(condition, Compared):
        return 1
    return sum(map(_comparisons, condition.conditions))


def _comparison(node: ast.expr, kinds: Mapping[str, Kind]) -> Condition:
    """The comparison of a node; raises a ValueError with the reason if it is none."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or not isinstance(node.left, ast.Name):
        raise ValueError("which is not made of comparisons of a column with a value")
    column, compared, symbol = node.left.id, node.comparators[0], SYMBOLS.get(type(node.ops[0]))
    if column not in kinds:
        raise ValueError(f"but the index has no column {column}, only {shown_kinds(kinds)}")
    if symbol is None:
        raise ValueError(f"where {column} must precede one of {', '.join(OPERATORS)}")
    if symbol != "in":
        return Compared(column, symbol, _value(compared, column, kinds))
    if not isinstance(compared, (ast.List, ast.Tuple)) or not compared.elts:
        raise ValueError(f"where in must precede a list of values of {column}")
    contained = Compared(column, "in", frozenset(_value(part, column, kinds) for part in compared.elts))
    if isinstance(node.ops[0], ast.NotIn):
        return Combined("not", (contained,))
    return contained


def _value(node: ast.expr, column: str, kinds: Mapping[str, Kind]) -> Any:
    """The value of a literal: text, or a number as float64."""
    try:
        value = ast.literal_eval(node)
    except (TypeError, ValueError):
        value = None
    kind = kinds[column]
    if kind == "text" and isinstance(value, str):
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "number" and is_number and is_exact(value):
        return float(value)
    raise ValueError(f"where {column} must be compared with a {kind}, not with {short_repr(ast.unparse(node))}")


def matching_rows(condition: Condition, columns: Mapping[str, Column]) -> Bool[np.ndarray, " rows"]:
    """Whether each row meets a condition that `parse_where` returned for these columns."""
    if isinstance(condition, Combined):
        parts = [matching_rows(part, columns) for part in condition.conditions]
        if condition.word == "not":
            return ~parts[0]
        join = {"and": np.logical_and, "or": np.logical_or}[condition.word]
        joined: NDArray[np.bool_] = join.reduce(parts)
        return joined
    column = columns[condition.column]
    value: Any = condition.value
    if kind_of(column) == "text":
        matches: NDArray[np.bool_] = _matching_texts(condition, column.dictionary)[np.from_dlpack(column.indices)]
    elif condition.operator == "in":
        numbers = np.from_dlpack(column)
        matches = np.isin(numbers, list(value - {None}))
        if None in value:  # the group of rows without a number
            matches |= np.isnan(numbers)
    else:
        matches = getattr(np, OPERATORS[condition.operator])(np.from_dlpack(column), value)
    return matches


def _matching_texts(condition: Compared, texts: Any) -> Bool[np.ndarray, " text"]:
    """Whether each text of an Arrow array meets a comparison. The order of texts is that of their bytes in UTF-8."""
    import pyarrow.compute

    value: Any = condition.value
    if condition.operator == "in":
        matches = pyarrow.compute.is_in(texts, value_set=PackedStrings(value).arrow())
    else:
        operands = [texts, PackedStrings([value]).arrow()[0]]
        matches = pyarrow.compute.call_function(OPERATORS[condition.operator], operands)
    return np.from_dlpack(matches.cast(pyarrow.uint8())).view(np.bool_)


def milvus_filter(condition: Condition, prefix: str) -> str:
    """Write a condition in the language of Milvus.

    Args:
        condition: condition that `parse_where` returned.
        prefix: prefix of the columns' names in Milvus, so that none of them is a word of that language.
    """
    if isinstance(condition, Combined):
        parts = [f"({milvus_filter(part, prefix)})" for part in condition.conditions]
        if condition.word == "not":
            return f"not {parts[0]}"
        return f" {condition.word} ".join(parts)
    value = condition.value
    written = _milvus_literal(value)
    if isinstance(value, frozenset):
        written = f"[{', '.join(sorted(map(_milvus_literal, value)))}]"
    return f"{prefix}{condition.column} {condition.operator} {written}"


def _milvus_literal(value: Any) -> str:
    """A value as Milvus reads it. Milvus Lite knows few escape sequences, so only four characters are escaped."""
    if not isinstance(value, str):
        return repr(value or 0.0)  # not -0.0
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        value = value.replace(character, escaped)
    return f'"{value}"'


class Found(NamedTuple):
    """A row that a search has found for a query, with the value of the column by which results are grouped."""

    similarity: float
    id: int
    group: Any = None
    path: str = ""
    metadata: Mapping[str, Any] = {}


Search = Callable[[Tensor, int, Condition | None], list[list[Found]]]


def search_groups(
    search: Search,
    queries: Float[Tensor, "query dim"],
    k: int,
    *,
    group_by: str,
    condition: Condition | None,
    most: int,
) -> list[list[Found]]:
    """For each query, the nearest row of each of the k nearest groups; fewer if there are fewer groups.

    A search for the nearest rows may find many rows of one group. It is therefore repeated for rows of other groups,
    until there are k groups or no more rows.

    Args:
        search: maps queries, a number of rows and a condition to the rows found for each query.
        queries: the embeddings to search for.
        k: number of groups.
        group_by: name of the column of the groups.
        condition: condition that all rows meet; None for no condition.
        most: maximum number of rows of a search.

    Cost:
        One search for 4 k rows of all queries. For each query with fewer than k groups among these rows, further
        searches, each for twice as many rows; each finds at least one more group.
    """
    rows = min(most, max(FEWEST_ROWS, ROWS_PER_GROUP * k))
    results = []
    for query, found in enumerate(search(queries, rows, condition)):
        wanted = rows
        nearest: dict[Any, Found] = {}
        while True:
            known = len(nearest)
            for row in found:
                nearest.setdefault(row.group, row)
            if len(nearest) >= k or len(found) < wanted or len(nearest) == known:
                break
            wanted = min(most, 2 * wanted)
            others: Condition = Combined("not", (Compared(group_by, "in", frozenset(nearest)),))
            if condition is not None:
                others = Combined("and", (condition, others))
            (found,) = search(queries[query : query + 1], wanted, others)
        # An approximate index may find a nearer row in a later search.
        results.append(sorted(nearest.values(), key=lambda row: -row.similarity)[:k])
    return results


def as_tensors(results: Sequence[Sequence[Found]], k: int) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
    """The similarities and ids of the rows found for each query; -inf and -1 if there are fewer than k."""
    similarities = torch.full((len(results), k), -torch.inf)
    ids = torch.full((len(results), k), -1, dtype=torch.int64)
    for query, found in enumerate(results):
        similarities[query, : len(found)] = torch.tensor([row.similarity for row in found])
        ids[query, : len(found)] = torch.tensor([row.id for row in found], dtype=torch.int64)
    return similarities, ids
