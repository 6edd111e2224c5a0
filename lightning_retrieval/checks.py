"""Checks that all packages share. An error message is one sentence: owner, argument, rule, value and how to fix it.

`owner` is the name of the class or function whose argument is checked, the prefix of the message; `name` is the
argument.
"""

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor


def check_positive(owner: str, name: str, value: float) -> float:
    """Return `value`; raise unless it is a finite number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: `{name}` must be a number > 0, got {value!r} ({type(value).__name__}).")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{owner}: `{name}` must be a finite number > 0, got {value!r}.")
    return value


def check_finite_number(owner: str, name: str, value: float) -> float:
    """Return `value`; raise unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: `{name}` must be a number, got {value!r} ({type(value).__name__}).")
    if not math.isfinite(value):
        raise ValueError(f"{owner}: `{name}` must be a finite number, got {value!r}.")
    return value


def check_not_negative(owner: str, name: str, value: float) -> float:
    """Return `value`; raise unless it is a finite number >= 0."""
    if check_finite_number(owner, name, value) < 0:
        raise ValueError(f"{owner}: `{name}` must be a finite number >= 0, got {value!r}.")
    return value


def check_integer(owner: str, name: str, value: int, least: int) -> int:
    """Return `value`; raise unless it is an integer >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: `{name}` must be an integer >= {least}, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{owner}: `{name}` must be an integer >= {least}, got {value}.")
    return value


def check_choice(owner: str, name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value`; raise unless it is one of `choices`."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{owner}: `{name}` must be one of {listed}, got {value!r}.")
    return value


def check_bool(owner: str, name: str, value: bool) -> bool:
    """Return `value`; raise unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be True or False, got {value!r}.")
    return value


def check_flag(owner: str, name: str, value: bool | None) -> bool | None:
    """Return `value`; raise unless it is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be True, False or None, got {value!r}.")
    return value


def check_callable(owner: str, name: str, value: Any) -> Any:
    """Return `value`; raise unless it can be called."""
    if not callable(value):
        raise TypeError(f"{owner}: `{name}` must be callable, got {value!r} ({type(value).__name__}).")
    return value


def check_strings(owner: str, name: str, values: Any) -> None:
    """Raise unless `values` is a sequence of strings; a single string is none, though it is one of characters."""
    is_sequence = isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping, Set))
    if not is_sequence:
        raise TypeError(f"{owner}: `{name}` must be a sequence of strings, got one {type(values).__name__}.")
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{owner}: `{name}` must hold strings only, got {value!r} ({type(value).__name__}).")


def check_tensor(owner: str, name: str, value: Any) -> None:
    """Raise unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner}: `{name}` must be a tensor, got {type(value).__name__}.")


def check_embeddings(owner: str, name: str, embeddings: Tensor, ids: Tensor | None = None) -> None:
    """Raise unless `embeddings` is a floating-point matrix (rows, D) with D > 0 and holds finite numbers only."""
    check_matrix(owner, name, embeddings)
    check_finite(owner, name, embeddings, ids)


def check_matrix(owner: str, name: str, embeddings: Tensor) -> None:
    """Raise unless `embeddings` is a floating-point matrix (rows, D) with D > 0."""
    check_tensor(owner, name, embeddings)
    if embeddings.ndim != 2 or embeddings.shape[1] == 0:
        raise ValueError(f"{owner}: `{name}` must have shape (rows, D) with D > 0, got {tuple(embeddings.shape)}.")
    if not embeddings.is_floating_point():
        raise TypeError(f"{owner}: `{name}` must be floating point, got {embeddings.dtype}.")


def check_finite(owner: str, name: str, values: Tensor, ids: Tensor | None = None) -> None:
    """Raise for NaN and infinities, with the first rows that hold one, or the ids of these rows if there are ids."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    invalid = (~finite).reshape(len(values), -1).any(1).nonzero()[:, 0]
    what, first = "", invalid[:5]
    if ids is not None:
        what, first = "ids ", ids[invalid][:5]
    shown = ", ".join(map(str, first.tolist()))
    if len(invalid) > 5:
        shown += ", ..."
    raise ValueError(
        f"{owner}: `{name}` must hold finite numbers only, got NaN or inf in {len(invalid)} of {len(values)} rows "
        f"({what}{shown})."
    )


def is_integer(values: Tensor) -> bool:
    """Whether a tensor holds integers; bool does not count as one."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def check_integers(owner: str, name: str, values: Tensor, rows: int, of: str) -> None:
    """Raise unless `values` holds one integer for each of the `rows` rows of the argument `of`."""
    check_tensor(owner, name, values)
    if not is_integer(values):
        raise TypeError(f"{owner}: `{name}` must be integers, got {values.dtype}.")
    if values.shape != (rows,):
        raise ValueError(
            f"{owner}: `{name}` must have shape ({rows},), one for each row of `{of}`, got {tuple(values.shape)}."
        )


def check_labels(owner: str, name: str, labels: Tensor, rows: int, of: str) -> None:
    """Raise unless each of the `rows` rows of the argument `of` has one integer, or several, finest level first."""
    if isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] > 0:
        labels = labels[:, 0]
    check_integers(owner, name, labels, rows, of)
