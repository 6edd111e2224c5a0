"""Classes of images: numbering them, and splitting them between two sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_finite_number


def class_numbers(originals: Sequence[Any] | NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Number classes 0, 1, ... in the order of their sorted original ids.

    Args:
        originals: the original id of the class of each image.

    Returns:
        The class number of each image, and the original id of each class as text.
    """
    values = originals
    if isinstance(originals, np.ndarray):
        values = originals.tolist()
    classes = sorted(set(values))
    number_of_class = dict(zip(classes, range(len(classes))))
    numbers = np.fromiter((number_of_class[value] for value in values), np.int64, len(values))
    return numbers, list(map(str, classes))


def split_by_class(owner: str, setting: str, classes: Sequence[Any], fraction: float, seed: int) -> set[Any]:
    """Draw a fraction of the classes; the result does not depend on the order in which they are given.

    Args:
        owner: prefix of error messages.
        setting: name of the argument that is the fraction, for the message.
        classes: all classes.
        fraction: the fraction to draw.
        seed: determines the classes.

    Raises:
        ValueError: if no class is drawn, or all are.
    """
    count = round(fraction * len(classes))
    if not 0 < count < len(classes):
        raise ValueError(
            f"{owner}: `{setting}` must leave at least one class on each side of the split, got {fraction} "
            f"of {len(classes)} classes; change it, or add classes."
        )
    ordered = sorted(classes)
    drawn = np.random.default_rng(seed).permutation(len(ordered))[:count]
    return {ordered[index] for index in drawn}


def check_test_fraction(owner: str, test_fraction: float) -> float:
    """Return `test_fraction` unchanged; raise an error unless it is between 0 and 1."""
    fraction = check_finite_number(owner, "test_fraction", test_fraction)
    if not 0 < fraction < 1:
        raise ValueError(f"{owner}: `test_fraction` must be between 0 and 1, got {test_fraction}.")
    return fraction
