"""A block of ranked lists, the input of a formula, and its positives, found without waiting for the device.

The host queues work on a device without waiting for results. But `nonzero` makes the host wait, because the size of its
result depends on values; a loss would wait in each block. So the number of positives of each query is read once, before
the first block, and passed to each `ScoreBlock`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor

from lightning_retrieval.distributed import is_accelerator, to_host


def at(
    matrix: Float[Tensor, "query gallery"], rows: Int[Tensor, " pair"], columns: Int[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """`matrix[rows, columns]`, with a backward pass that sums gradients without first sorting the indices."""
    return matrix.flatten().index_select(0, rows * matrix.shape[1] + columns)


def constants(values: float | Sequence[float], like: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A number, or a vector of numbers, in the dtype and on the device of `like`.

    Unlike `torch.tensor`, this copies nothing from the host to the device, so the host does not wait.
    """
    if not isinstance(values, Sequence):
        return like.new_full((), values)
    return torch.cat([like.new_full((1,), value) for value in values])


@dataclass(frozen=True, eq=False)
class Positives:
    """The positives of a block of lists, ordered by query and then by their index.

    Args:
        query: the query of each positive.
        index: the index of each positive among the references.
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

    def of_each_query(self) -> Int[Tensor, " query"]:
        """Number of positives of each query, on the device of the scores."""
        queries = torch.arange(len(self.counts) + 1, device=self.query.device)
        return torch.searchsorted(self.query, queries).diff()

    def column(self) -> Int[Tensor, " pos"]:
        """The index of each positive among the positives of its query, from 0."""
        position = torch.arange(len(self.query), device=self.query.device)
        return position - torch.searchsorted(self.query, self.query)

    def in_columns(self, values: Float[Tensor, " pos"]) -> Float[Tensor, "query most"]:
        """Values of the positives, such as scores, with a row for each query; -inf where a query has fewer."""
        most = self.most
        columns = values.new_full((len(self.counts) * most,), -torch.inf)
        return columns.index_copy(0, self.query * most + self.column(), values).view(-1, most)

    def pairs(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """All pairs of positives of the same query, including each with itself, as indices of positives."""
        first = torch.searchsorted(self.query, self.query)  # (pos,): the first positive of the same query
        count = torch.searchsorted(self.query, self.query, right=True) - first  # (pos,)
        end = count.cumsum(0)  # (pos,): where the pairs of each positive end
        number = int((self.counts * self.counts).sum())
        pair = torch.arange(number, device=self.query.device)
        i = torch.searchsorted(end, pair, right=True)  # (pair,)
        j = pair + (first + count - end)[i]  # (pair,)
        return i, j


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """The ranked lists of a block of queries, from which a formula computes one value for each query.

    Args:
        scores: similarities, higher is nearer; meaningless for references that are not candidates.
        relevant: True, or a level above 0, for positives. All positives are candidates.
        candidate: which references are in the query's list.
        counts: number of positives of each query, on the CPU; if None, the host waits while they are counted.
        levels: the possible levels of relevance above 0.
    """

    scores: Float[Tensor, "query gallery"]
    relevant: Bool[Tensor, "query gallery"] | Integer[Tensor, "query gallery"]
    candidate: Bool[Tensor, "query gallery"]
    counts: Int[Tensor, " query"] | None = None
    levels: tuple[int, ...] = (1,)

    @cached_property
    def positives(self) -> Positives:
        """The positives of all queries."""
        counts = self.counts
        if counts is None:
            counts = to_host(self.relevant.count_nonzero(1))
        query, index = true_indices(self.relevant, int(counts.sum()))
        return Positives(query, index, counts)


def joined(parts: Sequence[Positives]) -> tuple[Positives, Int[Tensor, " pos"]]:
    """Merge the positives of several lists of the same queries.

    Also return the position of each merged positive in the concatenated `parts`.
    """
    query, order = torch.cat([part.query for part in parts]).sort(stable=True)
    index = torch.cat([part.index for part in parts])[order]
    counts = torch.stack([part.counts for part in parts]).sum(0)
    return Positives(query, index, counts), order


def true_indices(mask: Shaped[Tensor, "*shape"], number: int) -> tuple[Int[Tensor, " true"], ...]:
    """`mask.nonzero(as_tuple=True)` of a vector or a matrix in which `number` elements are not 0."""
    if not is_accelerator(mask.device):  # there is nothing to wait for
        return mask.nonzero(as_tuple=True)
    true_so_far = (mask != 0).flatten().cumsum(0, dtype=torch.int32)
    nth = torch.arange(1, number + 1, dtype=torch.int32, device=mask.device)
    position = torch.searchsorted(true_so_far, nth)
    if mask.ndim == 1:
        return (position,)
    return position // mask.shape[1], position % mask.shape[1]
