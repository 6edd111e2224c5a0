"""The positives of a block of lists, found without waiting for the device.

The host gives work to a device without waiting for results. But `nonzero` makes it wait, because the size of its result
depends on values, and a loss would wait in each block. So the number of positives of each query is read once, before
the first block, and is attached to the mask of each block (`attach_facts`). With a mask without these facts the result
is the same, but the host waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor

from lightning_retrieval.distributed import is_accelerator, to_host

# Indexing of score matrices that is cheap in the backward pass, and constants beside them.


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


_ATTRIBUTE = "_mask_facts"


@dataclass(frozen=True, eq=False)
class MaskFacts:
    """What the host knows of a mask.

    Args:
        counts: number of positives in each row, on the CPU.
        levels: the levels of relevance above 0 that may occur.
    """

    counts: Int[Tensor, " query"]
    levels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Positives:
    """The positives of a block of lists, ordered by query and then by their index.

    Args:
        query: the query of each positive.
        index: its index among the references.
        counts: number of positives of each query, on the CPU.
    """

    query: Int[Tensor, " pos"]
    index: Int[Tensor, " pos"]
    counts: Int[Tensor, " query"]

    @property
    def most(self) -> int:
        """The largest number of positives of a query."""
        if len(self.counts) == 0:
            return 0
        return int(self.counts.max())

    def column(self) -> Int[Tensor, " pos"]:
        """The number of each positive among those of its query, from 0."""
        position = torch.arange(len(self.query), device=self.query.device)
        return position - torch.searchsorted(self.query, self.query)

    def pairs(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """All pairs of positives of the same query, also of one with itself, as two indices of positives."""
        first = torch.searchsorted(self.query, self.query)  # (pos,): the first positive of the same query
        count = torch.searchsorted(self.query, self.query, right=True) - first  # (pos,)
        end = count.cumsum(0)  # (pos,): where the pairs of each positive end
        number = int((self.counts * self.counts).sum())
        pair = torch.arange(number, device=self.query.device)
        i = torch.searchsorted(end, pair, right=True)  # (pair,)
        j = pair + (first + count - end)[i]  # (pair,)
        return i, j


def attach_facts(mask: Shaped[Tensor, "query gallery"], facts: MaskFacts) -> Shaped[Tensor, "query gallery"]:
    """Return `mask`, with which `find_positives` and `levels_in` do not wait. It must not be changed afterwards."""
    setattr(mask, _ATTRIBUTE, facts)
    return mask


def find_positives(relevant: Bool[Tensor, "query gallery"] | Integer[Tensor, "query gallery"]) -> Positives:
    """The positives of a block of lists.

    Args:
        relevant: True, or a level above 0, for positives.
    """
    facts = _facts_of(relevant)
    if facts is not None:
        counts = facts.counts
    else:
        counts = to_host(relevant.count_nonzero(1))
    query, index = true_indices(relevant, int(counts.sum()))
    return Positives(query, index, counts)


def joined(parts: Sequence[Positives]) -> tuple[Positives, Int[Tensor, " pos"]]:
    """The positives that the same queries have in several lists, and the position of each among those of all parts."""
    query, order = torch.cat([part.query for part in parts]).sort(stable=True)
    index = torch.cat([part.index for part in parts])[order]
    counts = torch.stack([part.counts for part in parts]).sum(0)
    return Positives(query, index, counts), order


def levels_in(relevant: Integer[Tensor, "query gallery"]) -> tuple[int, ...]:
    """The levels of relevance above 0 that may occur."""
    facts = _facts_of(relevant)
    if facts is not None:
        return facts.levels
    return tuple(level for level in to_host(relevant.unique()).tolist() if level > 0)


def true_indices(mask: Shaped[Tensor, "*shape"], number: int) -> tuple[Int[Tensor, " true"], ...]:
    """`mask.nonzero(as_tuple=True)` of a vector or a matrix with this number of elements that are not 0."""
    if not is_accelerator(mask.device):  # there is nothing to wait for
        return mask.nonzero(as_tuple=True)
    true_so_far = (mask != 0).flatten().cumsum(0, dtype=torch.int32)
    nth = torch.arange(1, number + 1, dtype=torch.int32, device=mask.device)
    position = torch.searchsorted(true_so_far, nth)
    if mask.ndim == 1:
        return (position,)
    return position // mask.shape[1], position % mask.shape[1]


def _facts_of(mask: Tensor) -> MaskFacts | None:
    facts: MaskFacts | None = getattr(mask, _ATTRIBUTE, None)
    return facts
