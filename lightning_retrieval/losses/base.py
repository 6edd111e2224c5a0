"""What every loss shares: cosine scores, relevance, the query's own exclusion, blocks of queries, reduction.

A loss of this library is a formula from a block of scores to one value for each query (`query_losses`); all the rest is
here. The queries are gone through in blocks. Because the weight of each query in the result is known beforehand, a
block's gradient is taken at once and its graph dropped, so the memory needed is that of one block, and nothing is
computed twice. Only `reduction="none"`, where the weights arrive with the gradient, computes each block again.

Conventions: a query is never in its own list (unless `include_self`), a query without any relevant candidate has no
value and is left out of every mean.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_retrieval.checks import check_choice
from lightning_retrieval.losses.lists import EmbeddingLists, RankedLists, ScoreLists

Reduction = Literal["mean", "sum", "none"]

# Elements of a formula's largest tensor in one block (8 MiB of float32): large enough for full speed, small enough to
# stay near the caches. The value changes no result beyond rounding.
BLOCK_ELEMENTS = 1 << 21


class RetrievalLoss(nn.Module, ABC):
    """Base of the losses over ranked lists: one list for each query, one value for each list.

    Args:
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"`: one value for each
            query, NaN for a query without a positive.
        class_balanced: weigh each query by 1 / (queries of its class in the batch), rescaled to mean 1, so that each
            class of the batch weighs the same (Revaud et al., ICCV 2019, section 4.5 and Fig. 7).
        include_self: count the query in its own list and as its own positive, as some official codes do. For
            comparison with them only.

    Raises:
        ValueError: if `reduction` is not one of the three.

    Relations:
        Embeddings are normalised inside, in float32 or better, also under autocast. Nothing of size (B, B, B) is ever
        made, and of (B, B) only the blocks, however large the batch.
    """

    def __init__(
        self, *, reduction: Reduction = "mean", class_balanced: bool = False, include_self: bool = False
    ) -> None:
        super().__init__()
        self.reduction: Reduction = check_choice(self.name, "reduction", reduction, ("mean", "sum", "none"))
        self.class_balanced = class_balanced
        self.include_self = include_self
        self._warned_of_no_positive = False

    @property
    def name(self) -> str:
        """The class name, with which every message begins."""
        return type(self).__name__

    @abstractmethod
    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """The paper's formula: the value of each query's list.

        Args:
            scores: similarities, higher is nearer; those of non-candidates mean nothing.
            relevant: the positives, all of them candidates, at least one in each row.
            candidate: what is in the query's list.
        """

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        """How many elements the formula's largest tensor has for each query, from which the blocks are cut."""
        return torch.full_like(positives, gallery)

    def forward(
        self,
        embeddings: Float[Tensor, "query dim"],
        labels: Int[Tensor, " query"],
        ref_emb: Float[Tensor, "gallery dim"] | None = None,
        ref_labels: Int[Tensor, " gallery"] | None = None,
        *,
        ids: Int[Tensor, " query"] | None = None,
        ref_ids: Int[Tensor, " gallery"] | None = None,
    ) -> Float[Tensor, "..."]:
        """The loss of a batch, each row the query of a list.

        Args:
            embeddings: one row for each query, normalised here.
            labels: any integers; the same label means relevant.
            ref_emb: what is ranked for each query; the batch itself where not given.
            ref_labels: labels of `ref_emb`.
            ids: dataset index of each row; a reference with the query's own id is not in the query's list.
            ref_ids: dataset index of each reference, together with `ids`.

        Raises:
            ValueError: if shapes do not fit together, or an embedding is not finite.
            TypeError: if embeddings are not floating point or labels not integers.
        """
        lists = EmbeddingLists(
            self.name, embeddings, labels, ref_emb, ref_labels, ids, ref_ids, include_self=self.include_self
        )
        return self._reduce(lists)

    def from_scores(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"] | None = None,
    ) -> Float[Tensor, "..."]:
        """The same from a score matrix, used as it is.

        Args:
            scores: higher is nearer.
            relevant: which references count as right answers.
            candidate: which references are in the query's list; all where not given.

        Raises:
            ValueError: if shapes differ, a score is not finite, or the loss is `class_balanced` (a score matrix has no
                classes).
            TypeError: if scores are not floating point or the masks not bool.
        """
        if self.class_balanced:
            raise ValueError(
                f"{self.name}: `class_balanced` needs labels, which a score matrix does not have; call the loss with "
                "embeddings and labels, or set class_balanced=False."
            )
        return self._reduce(ScoreLists(self.name, scores, relevant, candidate))

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, class_balanced={self.class_balanced}, include_self={self.include_self}"

    def _reduce(self, lists: RankedLists) -> Tensor:
        with torch.autocast(lists.device.type, enabled=False):
            positives = lists.count_positives()
            valid = positives > 0
            if not bool(valid.any()):
                self._warn_of_no_positive()
            weights = lists.class_weights(valid) if self.class_balanced else valid.to(lists.dtype)
            if self.reduction == "mean":
                weights = weights / valid.sum().clamp(min=1)
            parameters = [p for p in self.parameters() if p.requires_grad]
            arguments = (self, lists, positives, weights, *lists.tensors, *parameters)
            if self.reduction == "none":
                values: Tensor = _EachQuery.apply(*arguments)
                return values
            total: Tensor = _WeightedSum.apply(*arguments)
            return total

    def _warn_of_no_positive(self) -> None:
        if not self._warned_of_no_positive:
            self._warned_of_no_positive = True
            warnings.warn(
                f"{self.name}: no row of the batch has a positive, so the loss is 0 and nothing is learned from it; "
                "put at least two images of a class into each batch (PKSampler does).",
                stacklevel=4,
            )

    def _blocks(self, positives: Tensor, gallery: int) -> Iterator[Tensor]:
        """Rows of the queries that have a positive, cut so that each block's tensors stay near `BLOCK_ELEMENTS`."""
        rows = positives.nonzero()[:, 0]
        block = self.elements(positives[rows], gallery).cumsum(0) // BLOCK_ELEMENTS
        yield from torch.split(rows, torch.unique_consecutive(block, return_counts=True)[1].tolist())


class _WeightedSum(torch.autograd.Function):
    """Sum over queries of weight x value; the gradient is taken in forward, block by block."""

    @staticmethod
    def forward(
        ctx: Any, loss: RetrievalLoss, lists: RankedLists, positives: Tensor, weights: Tensor, *inputs: Tensor
    ) -> Tensor:
        gradients = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[4:])]
        parameters = inputs[len(lists.tensors) :]
        total = torch.zeros((), dtype=lists.dtype, device=lists.device)
        for rows in loss._blocks(positives, lists.gallery):
            total += _block(loss, lists, rows, weights[rows], parameters, gradients)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(None if g is None else grad * g for g in ctx.saved_tensors)


class _EachQuery(torch.autograd.Function):
    """Weight x value of every query; each block is computed again in backward, where its weights are known."""

    @staticmethod
    def forward(
        ctx: Any, loss: RetrievalLoss, lists: RankedLists, positives: Tensor, weights: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.loss, ctx.lists = loss, lists
        ctx.save_for_backward(positives, weights, *inputs)
        values = torch.full_like(weights, torch.nan)
        for rows in loss._blocks(positives, lists.gallery):
            scores = lists.scores(rows)
            values[rows] = weights[rows] * loss.query_losses(scores, *lists.masks(rows))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positives, weights, *inputs = ctx.saved_tensors
        gradients = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[4:])]
        parameters = inputs[len(ctx.lists.tensors) :]
        with torch.autocast(ctx.lists.device.type, enabled=False):
            for rows in ctx.loss._blocks(positives, ctx.lists.gallery):
                _block(ctx.loss, ctx.lists, rows, (grad * weights)[rows], parameters, gradients)
        return None, None, None, None, *gradients


def _block(
    loss: RetrievalLoss,
    lists: RankedLists,
    rows: Tensor,
    weights: Tensor,
    parameters: tuple[Tensor, ...] | list[Tensor],
    gradients: list[Tensor | None],
) -> Tensor:
    """Weighted sum of one block; adds its gradient to `gradients` (lists' tensors first, then the parameters)."""
    scores = lists.scores(rows)
    masks = lists.masks(rows)
    wanted = [p for p, g in zip(parameters, gradients[len(lists.tensors) :]) if g is not None]
    needs_scores = any(g is not None for g in gradients[: len(lists.tensors)])
    if not (needs_scores or wanted):
        return (weights * loss.query_losses(scores, *masks)).sum()
    with torch.enable_grad():
        scores.requires_grad_()
        value = (weights * loss.query_losses(scores, *masks)).sum()
    grad_scores, *grad_parameters = torch.autograd.grad(value, [scores, *wanted], allow_unused=True)
    if needs_scores and grad_scores is not None:
        lists.add_gradient(rows, grad_scores, gradients)
    filled = (g for g in gradients[len(lists.tensors) :] if g is not None)
    for total, gradient in zip(filled, grad_parameters):
        if gradient is not None:
            total += gradient
    return value.detach()
