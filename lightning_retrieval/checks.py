"""Argument checks for all packages. An error message is one sentence: owner, argument, rule, value and how to fix it.

`name` is the name of the argument. `owner` is the class or function whose argument it is, and the prefix of the
message. Without one, the error has no owner until a public function names itself, see `owned_by`.
"""

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_retrieval.invalid import InvalidType, InvalidValue

# With settings outside this range, a formula overflows or underflows in float32, so that a loss becomes NaN.
SMALLEST, LARGEST = 1e-12, 1e12


def short_repr(value: Any) -> str:
    """A value as text for error messages: one line of at most 100 characters."""
    text = " ".join(repr(value).split())
    if len(text) > 100:
        return f"{text[:97]}..."
    return text


def first_line(error: Exception) -> str:
    """The first line of the message of an error, without a full stop; the name of its type if it has no message.

    The message of `torch.load` about an object in a file is long and advises to trust the file; of it, the line has the
    name of the object.
    """
    message = str(error).strip()
    if isinstance(error, LookupError):  # whose message is but a key
        return f"{type(error).__name__}: {message}"
    if message.startswith("Weights only load failed"):
        named = re.search(r"GLOBAL ([\w.]+)", message)
        if named is not None:
            return f"it holds {named[1]}, which is neither a tensor nor a plain value"
        message = message.partition("WeightsUnpickler error:")[2].strip() or message
    lines = message.splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")


def first_of(values: Sequence[Any], most: int = 5) -> str:
    """The first of many values, as text for error messages."""
    shown = ", ".join(map(str, values[:most]))
    if len(values) > most:
        shown += ", ..."
    return shown


def check_positive(name: str, value: Any, *, least: float = SMALLEST, most: float = LARGEST, owner: str = "") -> float:
    """Return `value`; raise unless it is a number > 0, from `least` to `most`."""
    return check_finite_number(name, value, least=least, most=most, owner=owner)


def check_finite_number(
    name: str, value: Any, *, least: float = -LARGEST, most: float = LARGEST, owner: str = ""
) -> float:
    """Return `value`; raise unless it is a number from `least` to `most`. A bool is not a number."""
    if not _is_number(value, Real):
        raise InvalidType("must be a number", owner, name, got=short_repr(value))
    if not least <= value <= most:
        raise InvalidValue(f"must be a number from {least:g} to {most:g}", owner, name, got=short_repr(value))
    if isinstance(value, np.generic):  # becomes a number of Python, because checkpoints cannot hold NumPy's types
        value = value.item()
    plain: float = value
    return plain


def check_integer(name: str, value: Any, least: int, most: float = math.inf, *, owner: str = "") -> int:
    """Return `value`; raise unless it is an integer from `least` to `most`. A bool is not an integer."""
    rule = f"must be an integer >= {least}"
    if most < math.inf:
        rule = f"must be an integer from {least} to {most}"
    if not _is_number(value, Integral):
        raise InvalidType(rule, owner, name, got=short_repr(value))
    if not least <= value <= most:
        raise InvalidValue(rule, owner, name, got=short_repr(value))
    return int(value)  # a number of NumPy becomes one of Python, because checkpoints cannot hold NumPy's types


def _is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of this kind, of Python or NumPy; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_counts(name: str, values: Any, *, may_be_empty: bool = False, owner: str = "") -> tuple[int, ...]:
    """Return a tuple; raise unless `values` are integers >= 1, at least one unless there may be none."""
    is_given = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_given or (len(values) == 0 and not may_be_empty):
        raise InvalidValue("must hold integers >= 1, such as (1, 10)", owner, name, got=short_repr(values))
    return tuple(check_integer(name, value, least=1, owner=owner) for value in values)


def check_choice(name: str, value: Any, choices: Sequence[Any], *, owner: str = "") -> Any:
    """Return the choice that equals `value`; raise if there is none."""
    for choice in choices:
        if choice == value:
            return choice
    listed = ", ".join(map(repr, choices))
    raise InvalidValue(f"must be one of {listed}", owner, name, got=short_repr(value))


def is_traced() -> bool:
    """Whether `torch.jit.trace` is recording; a check that depends on values would be a constant in the trace."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def check_strings(name: str, values: Any, *, owner: str = "") -> None:
    """Raise if a single string is given where several are meant: each of its characters would be one of them."""
    if isinstance(values, str):
        raise InvalidType("must be a sequence of strings", owner, name, got=f"one string, {short_repr(values)}")


def check_tensor(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise InvalidType("must be a tensor", owner, name, got=type(value).__name__)


def check_float(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a floating-point tensor."""
    check_tensor(name, value, owner=owner)
    if not value.is_floating_point():
        raise InvalidType("must be floating point", owner, name, got=str(value.dtype))


def check_maps(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a floating-point tensor (N, C, H, W)."""
    check_float(name, value, owner=owner)
    if value.ndim != 4:
        raise InvalidValue("must have shape (N, C, H, W)", owner, name, got=str(tuple(value.shape)))


def check_matrix(name: str, embeddings: Tensor, *, finite: bool = False, owner: str = "") -> None:
    """Raise unless `embeddings` is a floating-point matrix (rows, D) with D > 0.

    With `finite`, its numbers are read, and NaN and infinities are invalid.
    """
    check_float(name, embeddings, owner=owner)
    if embeddings.ndim != 2 or embeddings.shape[1] == 0:
        raise InvalidValue("must have shape (rows, D) with D > 0", owner, name, got=str(tuple(embeddings.shape)))
    if finite:
        check_finite(name, embeddings, owner=owner)


def has_finite_sum(values: Tensor) -> Tensor:
    """Whether the sum of values is finite, as a bool tensor, in less time than it takes to look at each value.

    If it is, all values are finite. If it is not, `check_finite` finds out whether a value is not.
    """
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).isfinite()


def check_finite(name: str, values: Tensor, ids: Tensor | None = None, *, owner: str = "") -> None:
    """Raise if there are NaN or infinities; the message lists the first such rows, by id if `ids` are given."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    invalid = (~finite).reshape(len(values), -1).any(1).nonzero()[:, 0]
    what = ""
    if ids is not None:
        what, invalid = "ids ", ids[invalid]
    raise InvalidValue(
        "must hold finite numbers only",
        owner,
        name,
        got=f"NaN or inf in {len(invalid)} of {len(values)} rows ({what}{first_of(invalid.tolist())})",
    )


UNSIGNED_TYPES = (torch.uint16, torch.uint32, torch.uint64)  # torch computes little with these


def as_int64(name: str, values: Any, *, owner: str = "") -> Any:
    """Return a tensor of one of `UNSIGNED_TYPES` as int64, and anything else unchanged.

    Raises:
        ValueError: if a number is 2**63 or more, which int64 cannot hold.
    """
    if not isinstance(values, Tensor) or values.dtype not in UNSIGNED_TYPES:
        return values
    converted = values.long()
    if values.dtype == torch.uint64 and bool((converted < 0).any()):
        raise InvalidValue("must be below 2**63", owner, name, got=f"{max(values.flatten().tolist())} of torch.uint64")
    return converted


def is_integer(values: Any) -> bool:
    """Whether a value is a tensor with an integer dtype; bool does not count."""
    if not isinstance(values, Tensor):
        return False
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def check_integers(name: str, values: Any, rows: int, of: str, *, levels: bool = False, owner: str = "") -> None:
    """Raise unless `values` holds one integer for each of the `rows` rows of the argument `of`.

    With `levels`, each row may have several integers: labels, finest level first.
    """
    check_tensor(name, values, owner=owner)
    if not is_integer(values):
        raise InvalidType("must be integers", owner, name, got=str(values.dtype))
    shape = values.shape
    if levels and values.ndim == 2 and shape[1] > 0:
        shape = shape[:1]
    if shape != (rows,):
        raise InvalidValue(
            f"must have shape ({rows},), one for each row of `{of}`", owner, name, got=str(tuple(values.shape))
        )
