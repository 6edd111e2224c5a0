"""Evaluation of a loss in blocks of queries, so that no tensor grows with the square of a large batch.

The scores of a group of blocks are computed by one large, and therefore fast, matrix product. The formula is then
evaluated block by block, on tensors that fit into a CPU's caches. The gradient of a block overwrites its scores, so
that a group needs no second matrix; one or two products then propagate the gradient to the embeddings.

The weight of each query in the result is known before the first block. So the gradient of each block is computed
immediately and its graph freed: memory is that of one group and one block, and nothing is computed twice. With
`reduction="none"`, the weights are known only in the backward pass, which therefore computes each block again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.distributed import size_for
from lightning_retrieval.losses.lists import RankedLists
from lightning_retrieval.losses.positives import ScoreBlock

# Number of elements of a formula's largest tensor in one block. The numbers affect results only by rounding. They
# depend only on the type of the device, so that a run can be reproduced on another machine.
BLOCK_ELEMENTS = 1 << 20  # 4 MiB of float32: large enough for a CPU's full speed, small enough to stay in its caches
ACCELERATOR_BLOCK_ELEMENTS = 1 << 25  # 128 MiB: few kernel launches, each with enough work for all cores
# Number of scores in a group of blocks: all scores of a batch of 4,096 on a CPU, and of a batch of 8,192 on an
# accelerator.
GROUP_ELEMENTS = 1 << 24  # 64 MiB
ACCELERATOR_GROUP_ELEMENTS = 1 << 26  # 256 MiB


@dataclass(frozen=True, eq=False)
class Block:
    """Queries that are computed together.

    Args:
        rows: indices of the queries.
        counts: number of positives of each query, on the CPU.
    """

    rows: Int[Tensor, " block"]
    counts: Int[Tensor, " block"]

    def with_scores(self, lists: RankedLists, scores: Float[Tensor, "block gallery"]) -> ScoreBlock:
        """The ranked lists of the block: these scores, with the masks of relevant references and of candidates."""
        relevant, candidate = lists.masks(self.rows)
        return ScoreBlock(scores, relevant, candidate, self.counts, lists.levels)


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """Consecutive blocks whose scores are computed by one matrix product.

    Args:
        rows: the queries of all blocks.
        blocks: the blocks.
    """

    rows: Int[Tensor, " group"]
    blocks: tuple[Block, ...]

    def split(self, scores: Float[Tensor, "group gallery"]) -> Iterator[tuple[Block, Float[Tensor, "block gallery"]]]:
        """Each block with its scores, which are a view of the group's scores, without a graph."""
        sizes = [len(block.rows) for block in self.blocks]
        for block, of_block in zip(self.blocks, scores.split(sizes)):
            yield block, of_block.detach()


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The inputs of one call, before a formula is evaluated.

    Args:
        formula: maps a block of ranked lists to the value of each query.
        lists: the ranked lists.
        blocks: the queries that are computed, block by block.
        weights: weight of each query in the mean.
        count: number of queries in the mean, at least 1.
        parameters: the parameters of the loss that need a gradient.
    """

    formula: Callable[[ScoreBlock], Tensor]
    lists: RankedLists
    blocks: tuple[Block, ...]
    weights: Tensor
    count: Tensor
    parameters: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that gradients are computed for: the tensors of the lists, then the parameters."""
        return (*self.lists.tensors, *self.parameters)

    def groups(self) -> Iterator[BlockGroup]:
        """The blocks in groups of at most `GROUP_ELEMENTS` scores; a larger block is a group by itself."""
        device = self.lists.device
        most = size_for(device, cpu=GROUP_ELEMENTS, accelerator=ACCELERATOR_GROUP_ELEMENTS) // max(
            1, self.lists.gallery
        )
        group: list[Block] = []
        rows = 0
        for block in self.blocks:
            if group and rows + len(block.rows) > most:
                yield _group_of(group)
                group, rows = [], 0
            group.append(block)
            rows += len(block.rows)
        if group:
            yield _group_of(group)


def cut_into_blocks(
    rows: Int[Tensor, " query"], elements: Int[Tensor, " query"], counts: Int[Tensor, " query"]
) -> tuple[Block, ...]:
    """Cut rows into consecutive blocks that are as large as possible. A row that is too large is a block by itself.

    Args:
        rows: indices of queries.
        elements: for each query, the number of elements of the formula's largest tensor, on the CPU.
        counts: number of positives of each query, on the CPU.
    """
    most = size_for(rows.device, cpu=BLOCK_ELEMENTS, accelerator=ACCELERATOR_BLOCK_ELEMENTS)
    ends = elements.cumsum(0).numpy()
    sizes: list[int] = []
    begin = before = 0  # the first row of a block, and the number of elements before it
    while begin < len(ends):
        end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
        sizes.append(end - begin)
        begin, before = end, int(ends[end - 1])
    return tuple(map(Block, rows.split(sizes), counts.split(sizes)))


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

    def replace_scores(self, scores: Tensor, values: Tensor, upstream: Tensor | None = None) -> None:
        """Replace the scores of one block by their gradient, and add the gradient of the parameters.

        Args:
            scores: the scores that `values` was computed from.
            values: the weighted value of each query, with a graph.
            upstream: the incoming gradient of each value; 1 if None. A score affects the value of one query only, so
                the gradient of the scores is multiplied by `upstream` afterwards. The parameters affect all values, so
                for the gradient of the parameters, the values are multiplied by `upstream` before they are summed.
        """
        gradient = None
        if self.of_scores:
            ones, keep_graph = torch.ones_like(values), len(self.parameters) > 0
            (gradient,) = torch.autograd.grad(values, scores, ones, retain_graph=keep_graph, allow_unused=True)
        if self.parameters:
            self._add_to_parameters(values, upstream)
        memory = scores.detach()
        if gradient is None:
            memory.zero_()
        elif upstream is None:
            memory.copy_(gradient)
        else:
            torch.mul(gradient, upstream[:, None], out=memory)

    def add_group(self, rows: Tensor, gradient: Tensor) -> None:
        """Propagate the gradient of a group's scores to the tensors of the lists. `gradient` may be overwritten."""
        if self.of_scores:
            self.lists.add_gradient(rows, gradient, self.all)

    def _add_to_parameters(self, values: Tensor, upstream: Tensor | None) -> None:
        if upstream is None:
            upstream = torch.ones_like(values)
        gradients = torch.autograd.grad(values, self.parameters, upstream, allow_unused=True)
        for total, gradient in zip(self.of_parameters, gradients):
            if gradient is not None:
                total += gradient


class WeightedMean(torch.autograd.Function):
    """The sum over queries of weight x value. The gradient is computed in the forward pass, block by block."""

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, *inputs: Tensor) -> Tensor:
        gradients = _BlockGradients(plan, ctx.needs_input_grad[1:])
        total = torch.zeros((), dtype=plan.lists.dtype, device=plan.lists.device)
        for group in plan.groups():
            all_scores = plan.lists.scores(group.rows)
            for block, scores in group.split(all_scores):
                score_block = block.with_scores(plan.lists, scores.requires_grad_(gradients.needed))
                with torch.set_grad_enabled(gradients.needed):
                    values = plan.weights[block.rows] * plan.formula(score_block)
                total += values.detach().sum()
                if gradients.needed:
                    gradients.replace_scores(scores, values)
                del score_block, values  # freed before the next block is computed
            gradients.add_group(group.rows, all_scores)
            del all_scores, scores
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
        for group in plan.groups():
            for block, scores in group.split(plan.lists.scores(group.rows)):
                losses = plan.formula(block.with_scores(plan.lists, scores))
                values[block.rows] = plan.count * plan.weights[block.rows] * losses
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        _ = ctx.saved_tensors  # raises if an input was changed in place since the forward pass
        gradients = _BlockGradients(plan, ctx.needs_input_grad[1:])
        upstream = plan.count * grad
        with torch.autocast(plan.lists.device.type, enabled=False):
            for group in plan.groups():
                all_scores = plan.lists.scores(group.rows)
                for block, scores in group.split(all_scores):
                    score_block = block.with_scores(plan.lists, scores.requires_grad_())
                    with torch.enable_grad():
                        values = plan.weights[block.rows] * plan.formula(score_block)
                    gradients.replace_scores(scores, values, upstream[block.rows])
                    del score_block, values  # freed before the next block is computed
                gradients.add_group(group.rows, all_scores)
                del all_scores, scores
        return None, *gradients.all


def _group_of(blocks: list[Block]) -> BlockGroup:
    return BlockGroup(torch.cat([block.rows for block in blocks]), tuple(blocks))


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    return factor * gradient
