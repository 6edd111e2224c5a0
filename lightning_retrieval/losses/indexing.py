"""Indexing of score matrices that is cheap in the backward pass."""

from jaxtyping import Float, Int
from torch import Tensor


def at(
    matrix: Float[Tensor, "query gallery"], rows: Int[Tensor, " pair"], columns: Int[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """`matrix[rows, columns]`, with a backward pass that adds up without sorting the positions first."""
    return matrix.flatten().index_select(0, rows * matrix.shape[1] + columns)
