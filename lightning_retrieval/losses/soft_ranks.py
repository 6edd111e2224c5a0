"""Ranks counted by a step function with a slope, in place of the step from 0 to 1, whose slope is 0.

The rank of an item is 1 + the number of items that score above it. Smooth-AP, HAP, ROADMAP, log rank and recall at k
count with different step functions.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

# A `Step` maps t = s_j - s_i to the sum over j of a step function, and to the slope of this function at each t. It may
# overwrite `t`.
Step = Callable[[Tensor], tuple[Tensor, Tensor]]


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


def sigmoid_step(t: Float[Tensor, "pos gallery"]) -> tuple[Float[Tensor, " pos"], Float[Tensor, "pos gallery"]]:
    """sigma(t), summed over j, and its slope sigma(t) (1 - sigma(t))."""
    above = t.sigmoid_()
    return above.sum(1), torch.addcmul(above, above, above, value=-1)


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
