"""Checks that every room shares: each refuses bad input in one sentence.

A sentence says who speaks, which argument is meant, the rule, what came and, where it is known, the cure.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def check_positive(who: str, name: str, value: float) -> float:
    """Return `value` as it came, refused unless it is a finite number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{who}: `{name}` must be a number > 0, got {value!r} ({type(value).__name__}).")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{who}: `{name}` must be a finite number > 0, got {value!r}.")
    return value


def check_integer(who: str, name: str, value: int, least: int) -> int:
    """Return `value` as it came, refused unless it is an integer >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{who}: `{name}` must be an integer >= {least}, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{who}: `{name}` must be an integer >= {least}, got {value}.")
    return value


def check_choice(who: str, name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value` as it came, refused unless it is one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{who}: `{name}` must be one of {listed}, got {value!r}.")
    return value


def check_flag(who: str, name: str, value: bool | None) -> bool | None:
    """The value, refused if it is neither True nor False nor None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{who}: `{name}` must be True, False or None, got {value!r}.")
    return value


def check_tensor(who: str, name: str, value: Any) -> None:
    """Refuse anything but a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{who}: `{name}` must be a tensor, got {type(value).__name__}.")


def check_embeddings(who: str, name: str, embeddings: Tensor, ids: Tensor | None = None) -> None:
    """Refuse anything but a floating-point matrix (rows, D) with D > 0 and only finite numbers in it."""
    check_matrix(who, name, embeddings)
    check_finite(who, name, embeddings, ids)


def check_matrix(who: str, name: str, embeddings: Tensor) -> None:
    """Refuse anything but a floating-point matrix (rows, D) with D > 0."""
    check_tensor(who, name, embeddings)
    if embeddings.ndim != 2 or embeddings.shape[1] == 0:
        raise ValueError(f"{who}: `{name}` must have shape (rows, D) with D > 0, got {tuple(embeddings.shape)}.")
    if not embeddings.is_floating_point():
        raise TypeError(f"{who}: `{name}` must be floating point, got {embeddings.dtype}.")


def check_finite(who: str, name: str, values: Tensor, ids: Tensor | None = None) -> None:
    """Refuse NaN and infinities, naming the first rows that hold one, by their ids where there are any."""
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        wrong = (~finite).reshape(len(values), -1).any(1).nonzero()[:, 0]
        rows = (wrong if ids is None else ids[wrong]).tolist()
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise ValueError(
            f"{who}: `{name}` must hold finite numbers only, got NaN or inf in {len(rows)} of {len(values)} rows "
            f"({'' if ids is None else 'ids '}{shown})."
        )


def check_integers(who: str, name: str, values: Tensor, rows: int, of: str) -> None:
    """Refuse anything but one integer for each of the `rows` rows of `of`."""
    check_tensor(who, name, values)
    if not is_integer(values):
        raise TypeError(f"{who}: `{name}` must be integers, got {values.dtype}.")
    if values.shape != (rows,):
        raise ValueError(
            f"{who}: `{name}` must have shape ({rows},), one for each row of `{of}`, got {tuple(values.shape)}."
        )


def is_integer(values: Tensor) -> bool:
    """Whether a tensor holds integers, bool not being one."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def check_labels(who: str, name: str, labels: Tensor, rows: int, of: str) -> None:
    """Refuse anything but one integer for each of the `rows` rows of `of`, or several, finest level first."""
    levels = isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] > 0
    check_integers(who, name, labels[:, 0] if levels else labels, rows, of)


def check_finite_number(who: str, name: str, value: float) -> float:
    """Return `value` as it came, refused unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{who}: `{name}` must be a number, got {value!r} ({type(value).__name__}).")
    if not math.isfinite(value):
        raise ValueError(f"{who}: `{name}` must be a finite number, got {value!r}.")
    return value


def check_not_negative(who: str, name: str, value: float) -> float:
    """Return `value` as it came, refused unless it is a finite number >= 0."""
    if check_finite_number(who, name, value) < 0:
        raise ValueError(f"{who}: `{name}` must be a finite number >= 0, got {value!r}.")
    return value
