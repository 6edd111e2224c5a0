"""Indexing of score matrices that is cheap in the backward pass, and constants beside them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def at(
    matrix: Float[Tensor, "query gallery"], rows: Int[Tensor, " pair"], columns: Int[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """`matrix[rows, columns]`, with a backward pass that adds up without sorting the positions first."""
    return matrix.flatten().index_select(0, rows * matrix.shape[1] + columns)


def constants(values: float | Sequence[float], like: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """One number, or a vector of several, in the dtype and on the device of `like`.

    Unlike `torch.tensor`, it copies nothing to the device, for which the host would wait.
    """
    if not isinstance(values, Sequence):
        return like.new_full((), values)
    return torch.cat([like.new_full((1,), value) for value in values])
