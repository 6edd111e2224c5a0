"""Validates ids of the rows of an index."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_retrieval.checks import as_int64, check_integers, check_tensor
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.search.store.rows import Ids

LARGEST_ID = int(np.iinfo(np.int64).max)


def integer_ids(ids: Any) -> NDArray[np.int64]:
    """Validate ids and convert them to an array.

    Raises:
        ValueError: if the ids are not one-dimensional.
        TypeError: if the ids are not a tensor or an array of integers.
    """
    ids = as_int64("ids", _as_tensor(ids))
    check_tensor("ids", ids)
    if ids.ndim != 1:
        raise InvalidValue("must have shape (rows,)", argument="ids", got=tuple(ids.shape))
    check_integers("ids", ids, len(ids), "ids")
    array: NDArray[np.int64] = ids.cpu().numpy().astype(np.int64)
    return array


def _as_tensor(ids: Any) -> Any:
    """A copy of an array of numbers, of any byte order, as a tensor; any other object as it is."""
    if not isinstance(ids, np.ndarray):
        return ids
    if ids.dtype.kind not in "iuf":
        raise InvalidType("must be integers", argument="ids", got=f"a NumPy array of {ids.dtype}")
    return torch.from_numpy(ids.astype(ids.dtype.newbyteorder("="), order="C"))


def check_new_ids(ids: Ids, rows: int) -> NDArray[np.int64]:
    """Validate the ids of new rows and convert them to an array, which may share the memory of a tensor.

    Raises:
        ValueError: if the number of ids differs from the number of rows, or an id is negative or occurs twice.
        TypeError: if the ids are not integers.
    """
    given = as_int64("ids", _as_tensor(ids))
    check_integers("ids", given, rows, "embeddings")
    new: NDArray[np.int64] = given.cpu().numpy().astype(np.int64, copy=False)
    if rows > 0 and new.min() < 0:
        raise InvalidValue("must be >= 0", argument="ids", got=new.min())
    distinct, counts = np.unique(new, return_counts=True)
    repeated = distinct[counts > 1]
    if len(repeated) > 0:
        raise InvalidValue("must differ", argument="ids", got=f"{repeated[0]} for several rows")
    return new


def ids_after(largest: int, rows: int) -> NDArray[np.int64]:
    """The next `rows` integers after the largest id of an index (-1 for an empty index).

    Raises:
        ValueError: if the integers do not fit into 64 bits.
    """
    if rows > LARGEST_ID - largest:
        rule = f"must be given, because there are no {rows} integers of 64 bits after the largest id, {largest}"
        raise InvalidValue(rule, argument="ids")
    return largest + np.arange(1, rows + 1)


def check_none_known(known: NDArray[np.int64]) -> None:
    """Raise if `known`, the new ids that are already in the index, is not empty."""
    if len(known) > 0:
        got = f"{len(known)} that are in the index, such as {known.min()}"
        raise InvalidValue("must be new", argument="ids", got=got, cure="remove those first")


def check_all_known(unknown: NDArray[np.int64]) -> None:
    """Raise if `unknown`, the requested ids that are not in the index, is not empty."""
    if len(unknown) > 0:
        raise InvalidValue("must be in the index", argument="ids", got=f"{unknown[0]}, which is not")
