"""A block of ranked lists, the input of a formula, and what formulas count in it.

A formula finds the positives of a block in `ScoreBlock.positives`. The rank of a positive is 1 + the number of items
that score above it. `count_above` counts them by a step function with a slope, in place of the step from 0 to 1, whose
slope is 0: Smooth-AP, HAP, ROADMAP, log rank and recall at k count with different step functions.

The host queues work on a device without waiting for results. But `nonzero` makes the host wait, because the size of its
result depends on values; a loss would wait in each block. So the number of positives of each query is read once, before
the first block, and passed to each `ScoreBlock`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.distributed import is_accelerator, to_host

# A `Step` maps t = s_j - s_i to the sum over j of a step function, and to the slope of this function at each t. It may
# overwrite `t`.
Step = Callable[[Tensor], tuple[Tensor, Tensor]]


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
    def positives(self) -> "Positives":
        """The positives of all queries."""
        counts = self.counts
        if counts is None:
            counts = to_host(self.relevant.count_nonzero(1))
        query, index = true_indices(self.relevant, int(counts.sum()))
        return Positives(query, index, counts)


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

    @cached_property
    def most(self) -> int:
        """The largest number of positives of a query."""
        if len(self.counts) == 0:
            return 0
        return int(self.counts.max())

    @cached_property
    def of_each_query(self) -> Int[Tensor, " query"]:
        """Number of positives of each query, on the device of the scores."""
        queries = torch.arange(len(self.counts) + 1, device=self.query.device)
        return torch.searchsorted(self.query, queries).diff()

    @cached_property
    def column(self) -> Int[Tensor, " pos"]:
        """The index of each positive among the positives of its query, from 0."""
        position = torch.arange(len(self.query), device=self.query.device)
        return position - torch.searchsorted(self.query, self.query)

    def mean(self, values: Float[Tensor, " pos"]) -> Float[Tensor, " query"]:
        """The mean over the positives of each query."""
        sums = values.new_zeros(len(self.counts)).index_add(0, self.query, values)
        return sums / self.of_each_query

    def in_columns(self, values: Float[Tensor, " pos"], padding: float = -torch.inf) -> Float[Tensor, "query most"]:
        """Values of the positives, such as scores, with a row for each query; `padding` where a query has fewer."""
        most = self.most
        columns = values.new_full((len(self.counts) * most,), padding)
        return columns.index_copy(0, self.query * most + self.column, values).view(len(self.counts), most)

    def pairs(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """All pairs of positives of the same query, including each with itself, as indices of positives."""
        first = torch.searchsorted(self.query, self.query)  # (pos,): the first positive of the same query
        count = torch.searchsorted(self.query, self.query, right=True) - first  # (pos,)
        end = count.cumsum(0)  # (pos,): where the pairs of each positive end
        number = int((self.counts * self.counts).sum())
        pair = torch.arange(number, device=self.query.device)
        i = torch.searchsorted(end, pair, right=True)  # (pair,)
        j = pair + (first + count - end)[i]  # (pair,): the pairs of i begin at end - count, with the positive `first`
        return i, j


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


def count_above(
    scores: Float[Tensor, "query gallery"], query: Int[Tensor, " pos"], s_i: Float[Tensor, " pos"], step: Step
) -> Float[Tensor, " pos"]:
    """For each positive i, the sum over all items j of its query of step(s_j - s_i).

    The losses with soft ranks spend most of their time here, on tensors of shape (positives, gallery). So the slope of
    the step function, which often follows from its value, is computed in the forward pass; the backward pass only
    multiplies.

    Args:
        scores: -inf for items that are not counted.
        query: the query (row of `scores`) of each positive.
        s_i: the score of each positive.
        step: computes the sum over j and the slopes, which must be 0 at -inf.
    """
    count: Tensor = _CountAbove.apply(scores, query, s_i, step)
    return count


class _CountAbove(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, query: Tensor, s_i: Tensor, step: Step) -> Tensor:
        t = scores.index_select(0, query).sub_(s_i[:, None])  # (pos, gallery)
        count, slope = step(t)
        ctx.save_for_backward(query, slope)
        ctx.queries = len(scores)
        return count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, slope = ctx.saved_tensors
        gradient = slope * grad[:, None]  # (pos, gallery)
        of_scores = gradient.new_zeros(ctx.queries, gradient.shape[1]).index_add_(0, query, gradient)
        return of_scores, None, -gradient.sum(1), None


def soft_ranks(
    s: Float[Tensor, "query gallery"], query: Int[Tensor, " pos"], s_i: Float[Tensor, " pos"]
) -> Float[Tensor, " pos"]:
    """The rank of each positive, counted by sigmoids: 1 + sum over j != i of sigma(s_j - s_i).

    Args:
        s: scores divided by the temperature, -inf for non-candidates.
        query: the query (row of `s`) of each positive.
        s_i: the score of each positive.
    """
    # The sum includes j = i, which adds sigma(0) = 1/2. So 1/2 is missing from 1 + sum over j != i.
    return 0.5 + count_above(s, query, s_i, sigmoid_step)


def sigmoid_step(t: Float[Tensor, "pos gallery"]) -> tuple[Float[Tensor, " pos"], Float[Tensor, "pos gallery"]]:
    """sigma(t), summed over j, and its slope sigma(t) (1 - sigma(t))."""
    above = t.sigmoid_()
    return above.sum(1), torch.addcmul(above, above, above, value=-1)
