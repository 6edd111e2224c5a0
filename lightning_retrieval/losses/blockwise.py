"""Evaluation of a loss in blocks of queries, so that no tensor of the size of all lists is ever made.

The weight of each query in the result is known before the first block. So a block's gradient is computed at once and
its graph freed: memory is that of one block, and nothing is computed twice. Only with `reduction="none"`, where the
weights arrive with the gradient, each block is computed again in the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.losses.ranked_lists import RankedLists

# Elements of a formula's largest tensor in one block (8 MiB of float32): large enough for full speed, small enough to
# stay near the caches. The value changes no result beyond rounding.
BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """All that is known of one call before a formula is evaluated.

    Args:
        formula: maps scores, relevant and candidate of a block of queries to the value of each query.
        lists: what is ranked.
        blocks: the queries that are computed, as row indices, block by block.
        weights: weight of each query in the mean.
        count: number of queries in the mean, at least 1.
        parameters: the loss's own parameters that need a gradient.
    """

    formula: Callable[[Tensor, Tensor, Tensor], Tensor]
    lists: RankedLists
    blocks: tuple[Tensor, ...]
    weights: Tensor
    count: Tensor
    parameters: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What gradients are computed for: the tensors of the lists, then the parameters."""
        return (*self.lists.tensors, *self.parameters)


def cut_into_blocks(rows: Int[Tensor, " query"], elements: Int[Tensor, " query"]) -> tuple[Int[Tensor, " block"], ...]:
    """Cut rows into consecutive blocks of about `BLOCK_ELEMENTS` elements each.

    Args:
        rows: indices of queries.
        elements: how many elements the formula's largest tensor has for each of them.
    """
    block = elements.cumsum(0) // BLOCK_ELEMENTS
    sizes = torch.unique_consecutive(block, return_counts=True)[1]
    return torch.split(rows, sizes.tolist())


class _BlockGradients:
    """The gradients of a plan's inputs, summed over the blocks."""

    def __init__(self, plan: BlockPlan, needed: Sequence[bool]) -> None:
        self.lists = plan.lists
        self.all: list[Tensor | None] = []
        for tensor, is_needed in zip(plan.inputs, needed):
            self.all.append(torch.zeros_like(tensor) if is_needed else None)
        of_lists = len(plan.lists.tensors)
        self.of_scores = any(needed[:of_lists])
        self.parameters: list[Tensor] = []
        self.of_parameters: list[Tensor] = []
        for parameter, gradient in zip(plan.parameters, self.all[of_lists:]):
            if gradient is not None:
                self.parameters.append(parameter)
                self.of_parameters.append(gradient)

    @property
    def needed(self) -> bool:
        return self.of_scores or len(self.parameters) > 0

    def add(self, rows: Tensor, scores: Tensor, values: Tensor, upstream: Tensor | None = None) -> None:
        """Add the gradient of one block.

        Args:
            rows: the block's queries.
            scores: their scores, which `values` was computed from.
            values: the weighted value of each query, with a graph.
            upstream: the incoming gradient of each value; 1 if None. A score affects the value of one query only, so
                its gradient is scaled afterwards. The parameters affect all values, so these are scaled before the sum.
        """
        if self.of_scores:
            ones, keep_graph = torch.ones_like(values), len(self.parameters) > 0
            (gradient,) = torch.autograd.grad(values, scores, ones, retain_graph=keep_graph, allow_unused=True)
            if gradient is not None and upstream is not None:
                gradient = gradient * upstream[:, None]
            if gradient is not None:
                self.lists.add_gradient(rows, gradient, self.all)
        if self.parameters:
            if upstream is None:
                upstream = torch.ones_like(values)
            gradients = torch.autograd.grad(values, self.parameters, upstream, allow_unused=True)
            for total, gradient in zip(self.of_parameters, gradients):
                if gradient is not None:
                    total += gradient


class WeightedMean(torch.autograd.Function):
    """Sum over queries of weight x value; the gradient is computed in the forward pass, block by block."""

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, *inputs: Tensor) -> Tensor:
        gradients = _BlockGradients(plan, ctx.needs_input_grad[1:])
        total = torch.zeros((), dtype=plan.lists.dtype, device=plan.lists.device)
        for rows in plan.blocks:
            scores = plan.lists.scores(rows).requires_grad_(gradients.needed)
            relevant, candidate = plan.lists.masks(rows)
            with torch.set_grad_enabled(gradients.needed):
                values = plan.weights[rows] * plan.formula(scores, relevant, candidate)
            if gradients.needed:
                gradients.add(rows, scores, values)
            total += values.detach().sum()
            del scores, relevant, candidate, values  # freed before the next block is computed
        ctx.save_for_backward(*gradients.all)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[_scaled(gradient, grad) for gradient in ctx.saved_tensors]


class QueryValues(torch.autograd.Function):
    """The value of each query times its weight relative to the mean; NaN for queries that are not computed.

    Each block is computed again in the backward pass, where its gradient is known.
    """

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, *inputs: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*inputs)
        values = torch.full_like(plan.weights, torch.nan)
        for rows in plan.blocks:
            relevant, candidate = plan.lists.masks(rows)
            losses = plan.formula(plan.lists.scores(rows), relevant, candidate)
            values[rows] = plan.count * plan.weights[rows] * losses
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        _ = ctx.saved_tensors  # raises if an input was changed in place since the forward pass
        gradients = _BlockGradients(plan, ctx.needs_input_grad[1:])
        upstream = plan.count * grad
        with torch.autocast(plan.lists.device.type, enabled=False):
            for rows in plan.blocks:
                scores = plan.lists.scores(rows).requires_grad_()
                relevant, candidate = plan.lists.masks(rows)
                with torch.enable_grad():
                    values = plan.weights[rows] * plan.formula(scores, relevant, candidate)
                gradients.add(rows, scores, values, upstream[rows])
                del scores, relevant, candidate, values  # freed before the next block is computed
        return None, *gradients.all


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    return factor * gradient
