"""Numbers that users give as a tensor, an array or a sequence, as an array."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_tensor, is_integer


def as_array(owner: str, name: str, values: Any) -> NDArray[Any]:
    """The values as an array, whatever they are; the caller checks type and shape.

    Args:
        owner: prefix of error messages.
        name: the argument that the values are for.
        values: a tensor, an array, a sequence or anything else.

    Raises:
        ValueError: if rows are of unequal length, or a tensor has no values.
        TypeError: if a tensor does not hold integers, or is sparse.
    """
    if isinstance(values, Tensor):
        check_tensor(owner, name, values)
        if not is_integer(values):
            raise TypeError(f"{owner}: `{name}` must be integers, got {str(values.dtype).removeprefix('torch.')}.")
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{owner}: `{name}` must be one integer for each image, got rows of unequal length.") from None


def all_different(values: NDArray[np.int64]) -> bool:
    """Whether no number occurs twice. To sort is many times faster than `np.unique`, which fills a hash table."""
    ordered = np.sort(values)
    return bool((ordered[1:] != ordered[:-1]).all())
