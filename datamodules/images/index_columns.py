"""The arguments of an `ImageIndex` as arrays of the right type and shape."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import LARGEST_INTEGER, check_strings
from lightning_retrieval.datamodules.arrays import as_array
from lightning_retrieval.datamodules.files.lists import ListLines
from lightning_retrieval.ranking.roles import Role
from lightning_retrieval.search.packed_strings import PackedStrings


def packed(name: str, strings: PackedStrings | Sequence[str]) -> PackedStrings:
    """The strings, packed; raise unless they are a sequence of strings."""
    if isinstance(strings, PackedStrings):
        return strings
    check_strings("ImageIndex", name, strings)
    return PackedStrings(strings)


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    """The values as an array of any shape; raise unless they are integers of 64 bits."""
    array = as_array("ImageIndex", name, values)
    is_empty = array.size == 0
    is_integer = np.issubdtype(array.dtype, np.integer)
    if not is_empty and not (is_integer and array.max() <= LARGEST_INTEGER):
        raise TypeError(f"ImageIndex: `{name}` must be integers of 64 bits, got {array.dtype}.")
    return array.astype(np.int64, copy=False)


def integer_array(name: str, values: Any) -> NDArray[np.int64]:
    """One integer for each image; raise unless the values are that."""
    array = _integers(name, values)
    if array.ndim != 1:
        raise ValueError(f"ImageIndex: `{name}` must be one integer for each image, got shape {array.shape}.")
    return array


def optional_array(name: str, values: Any) -> NDArray[np.int64] | None:
    """One integer for each image, or None."""
    if values is None:
        return None
    return integer_array(name, values)


def level_array(levels: Any) -> NDArray[np.int64] | None:
    """The labels of each image at each level, or None."""
    if levels is None:
        return None
    array = _integers("levels", levels)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"ImageIndex: `levels` must be (images, levels), got shape {array.shape}.")
    return array


def role_array(roles: Any) -> NDArray[np.uint8] | None:
    """The number of each image's role, or None."""
    if roles is None:
        return None
    numbers = integer_array("roles", roles)
    invalid = np.flatnonzero((numbers < Role.JUNK) | (numbers > Role.BOTH))
    if len(invalid):
        raise ValueError(f"ImageIndex: `roles` must be from 0 to 3, got {numbers[invalid[0]]}; take them from ROLES.")
    return numbers.astype(np.uint8)


def box_array(boxes: Any) -> NDArray[np.int32] | None:
    """The box of each image, or None."""
    if boxes is None:
        return None
    array = _integers("boxes", boxes)
    if array.ndim != 2 or array.shape[1] != 4:
        raise ValueError(f"ImageIndex: `boxes` must be (images, 4), got shape {array.shape}.")
    too_large = np.flatnonzero((abs(array) >= 2**31).any(1))
    if len(too_large):
        first = array[too_large[0]].tolist()
        raise ValueError(f"ImageIndex: `boxes` must hold numbers of pixels below 2**31, got {first}.")
    return array.astype(np.int32)


def check_lines(lines: Any) -> ListLines | None:
    """Return `lines`; raise unless it is a `ListLines` or None."""
    if lines is not None and not isinstance(lines, ListLines):
        raise TypeError(f"ImageIndex: `lines` must be a ListLines or None, got {type(lines).__name__}.")
    return lines
