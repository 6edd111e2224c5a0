"""Lengths at which nested embeddings are used: the first dimensions of each, for several numbers of them."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.checks import check_counts, short_repr


def check_dims(owner: str, dims: Sequence[int], *, may_be_empty: bool = False) -> tuple[int, ...]:
    """The numbers of dimensions as a tuple; raise unless they are integers >= 1 in ascending order.

    Args:
        owner: prefix of error messages.
        dims: how many of the first dimensions each length has.
        may_be_empty: whether there may be none.
    """
    checked = check_counts(owner, "dims", dims, may_be_empty=may_be_empty)
    if list(checked) != sorted(set(checked)):
        raise ValueError(f"{owner}: `dims` must be different numbers in ascending order, got {short_repr(dims)}.")
    return checked


def check_dims_fit(owner: str, dims: tuple[int, ...], embeddings: Float[Tensor, "batch dim"]) -> None:
    """Raise if a length is larger than that of the embeddings.

    Args:
        owner: prefix of error messages.
        dims: in ascending order; may be empty.
        embeddings: one row for each item.
    """
    dim = embeddings.shape[1]
    if dims and dims[-1] > dim:
        raise ValueError(
            f"{owner}: `dims` must be at most the dimension of the embeddings, {dim}, got {dims[-1]}; give smaller "
            "`dims`, or train embeddings of more dimensions."
        )
