"""Evaluation of a formula in blocks of queries, so that no tensor grows with the square of a large batch.

The scores of a group of blocks are computed by one large, and therefore fast, matrix product. The formula is then
evaluated block by block, on tensors that fit into a CPU's caches. The gradient of a block overwrites its scores, so
that a group needs no second matrix; one or two products then propagate the gradient to the embeddings.

The weight of each query in the mean is known before the first block. So the gradient of each block is computed
immediately and its graph freed: memory is that of one group and one block, and nothing is computed twice. If each query
gives a value of its own, its weight is known only in the backward pass, which therefore computes each block again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.distributed import size_for
from lightning_retrieval.losses.score_block import ScoreBlock
from lightning_retrieval.losses.scores import Scores

Formula = Callable[[ScoreBlock], Tensor]

# Number of elements of a formula's largest tensor in one block. The numbers affect results only by rounding. They
# depend only on the type of the device, so that a run can be reproduced on another machine.
BLOCK_ELEMENTS = 1 << 20  # 4 MiB of float32: large enough for a CPU's full speed, small enough to stay in its caches
ACCELERATOR_BLOCK_ELEMENTS = 1 << 25  # 128 MiB: few kernel launches, each with enough work for all cores
# Number of scores in a group of blocks: all scores of a batch of 4,096 on a CPU, and of a batch of 8,192 on an
# accelerator.
GROUP_ELEMENTS = 1 << 24  # 64 MiB
ACCELERATOR_GROUP_ELEMENTS = 1 << 26  # 256 MiB


@dataclass(frozen=True, eq=False)
class ComputedQueries:
    """The queries of a batch that have a value and are computed by this process.

    Args:
        scores: the scores of all queries.
        masks: maps indices of queries to two masks: the relevant references, or their levels, and the candidates.
        rows: indices of the computed queries, in ascending order.
        counts: number of positives of each of them, on the CPU.
        elements: number of elements of the formula's largest tensor, for each of them, on the CPU.
        weights: the weight of each of them in the mean over all queries.
        count: number of queries that have a value, whatever process computes them.
        levels: the possible levels of relevance above 0.
    """

    scores: Scores
    masks: Callable[[Tensor], tuple[Tensor, Tensor]]
    rows: Int[Tensor, " computed"]
    counts: Int[Tensor, " computed"]
    elements: Int[Tensor, " computed"]
    weights: Float[Tensor, " computed"]
    count: int
    levels: tuple[int, ...] = (1,)

    def mean(self, formula: Formula, parameters: Sequence[Tensor] = ()) -> Float[Tensor, ""]:
        """The sum of weight x value, with a graph.

        Args:
            formula: maps a block of ranked lists to the value of each query.
            parameters: parameters of the formula that get a gradient.
        """
        mean: Tensor = _Mean.apply(self, formula, parameters, *self.scores.given.values(), *parameters)
        return mean

    def values(self, formula: Formula, parameters: Sequence[Tensor] = ()) -> Float[Tensor, " computed"]:
        """Weight x value of each query, with a graph; for the arguments, see `mean`."""
        values: Tensor = _Values.apply(self, formula, parameters, *self.scores.given.values(), *parameters)
        return values

    def block(self, part: slice, scores: Float[Tensor, "block gallery"]) -> ScoreBlock:
        """The ranked lists of some of the queries, with their scores."""
        relevant, candidate = self.masks(self.rows[part])
        return ScoreBlock(scores, relevant, candidate, self.counts[part], self.levels)

    def groups(self) -> list[list[slice]]:
        """The queries cut into blocks, which are as large as possible, and the blocks of each group.

        A query that is too large for a block is a block by itself; a block that is too large for a group is a group.
        """
        device, ends = self.rows.device, self.elements.cumsum(0).numpy()
        most = size_for(device, cpu=BLOCK_ELEMENTS, accelerator=ACCELERATOR_BLOCK_ELEMENTS)
        most_of_group = size_for(device, cpu=GROUP_ELEMENTS, accelerator=ACCELERATOR_GROUP_ELEMENTS)
        groups: list[list[slice]] = []
        begin = before = 0  # the first query of a block, and the number of elements before it
        while begin < len(ends):
            end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
            if not groups or (end - groups[-1][0].start) * self.scores.gallery > most_of_group:
                groups.append([])
            groups[-1].append(slice(begin, end))
            begin, before = end, int(ends[end - 1])
        return groups


def blockwise(
    formula: Formula,
    queries: ComputedQueries,
    parameters: Sequence[Tensor] = (),
    needed: Sequence[bool] = (),
    upstream: Float[Tensor, " computed"] | None = None,
) -> tuple[Float[Tensor, "computed ..."], list[Tensor | None]]:
    """The value of each query and, if an input needs one, the gradient of weight x value x upstream, summed over them.

    Args:
        formula: maps a block of ranked lists to the value of each query.
        queries: the computed queries.
        parameters: parameters of the formula.
        needed: whether each input needs a gradient: those of the scores, then the parameters; empty if none does.
        upstream: the incoming gradient of each weighted value; all 1 if None.

    Returns:
        The values, and the gradient of each input, None where none is needed.
    """
    scores = queries.scores
    inputs = (*scores.given.values(), *parameters)
    gradients = [torch.zeros_like(tensor) if is_needed else None for tensor, is_needed in zip(inputs, needed)]
    of_scores, of_parameters = gradients[: len(scores.given)], gradients[len(scores.given) :]
    totals = {parameter: total for parameter, total in zip(parameters, of_parameters) if total is not None}
    if upstream is None:
        upstream = torch.ones_like(queries.weights)
    values = torch.zeros_like(queries.weights)
    for blocks in queries.groups():
        begin = blocks[0].start
        rows = queries.rows[begin : blocks[-1].stop]
        group = scores.of(rows)
        for part in blocks:
            block = queries.block(part, group[part.start - begin : part.stop - begin].detach())
            if any(needed):
                of_block = _replace_scores(formula, block, queries.weights[part], upstream[part], totals)
            else:
                of_block = formula(block)
            if part.start == 0:  # one tensor for all: small ones that live on would fragment the freed memory
                values = of_block.new_empty(len(queries.rows), *of_block.shape[1:])
            values[part] = of_block
            del block, of_block  # freed before the next block is computed
        if any(needed):
            scores.add_gradient(rows, group, of_scores)
        del group
    return values, gradients


def _replace_scores(
    formula: Formula,
    block: ScoreBlock,
    weights: Float[Tensor, " query"],
    upstream: Float[Tensor, " query"],
    totals: dict[Tensor, Tensor],
) -> Float[Tensor, " query"]:
    """The values of a block, whose scores are replaced by the gradient of weight x value x upstream.

    A score affects the value of one query only, so the gradient of the scores is multiplied by `upstream` afterwards:
    the gradient of a black-box loss is not linear in the gradient that it receives.

    Args:
        formula: as for `blockwise`.
        block: the lists of the block.
        weights: the weights of these queries.
        upstream: the incoming gradient of their weighted values.
        totals: the gradient of each parameter that needs one, to which that of the block is added.
    """
    storage = block.scores.detach()  # the same memory, without a graph
    with torch.enable_grad():
        block.scores.requires_grad_()
        values = formula(block)
    keep_graph = len(totals) > 0
    (gradient,) = torch.autograd.grad(
        values, block.scores, weights, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
    )
    if totals:
        of_block = torch.autograd.grad(
            values, list(totals), weights * upstream, allow_unused=True, materialize_grads=True
        )
        for total, of_parameter in zip(totals.values(), of_block):
            total += of_parameter
    torch.mul(gradient, upstream[:, None], out=storage)
    return values.detach()


class _Mean(torch.autograd.Function):
    """The sum of weight x value. The gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, queries: ComputedQueries, formula: Formula, parameters: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        values, gradients = blockwise(formula, queries, parameters, ctx.needs_input_grad[3:])
        ctx.save_for_backward(*gradients)
        return (queries.weights * values).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if gradient is None else grad * gradient for gradient in ctx.saved_tensors]
        return None, None, None, *gradients


class _Values(torch.autograd.Function):
    """Weight x value of each query. Each block is computed again in the backward pass, where its gradient is known."""

    @staticmethod
    def forward(
        ctx: Any, queries: ComputedQueries, formula: Formula, parameters: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.queries, ctx.formula, ctx.parameters = queries, formula, parameters
        ctx.save_for_backward(*inputs)
        return queries.weights * blockwise(formula, queries)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if an input was changed in place since the forward pass
        with torch.autocast(grad.device.type, enabled=False):
            _, gradients = blockwise(ctx.formula, ctx.queries, ctx.parameters, ctx.needs_input_grad[3:], grad)
        return None, None, None, *gradients
