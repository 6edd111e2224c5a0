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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_retrieval.checks import check_choice
from lightning_retrieval.losses.ranked_lists import EmbeddingLists, RankedLists, ScoreLists

Reduction = Literal["mean", "sum", "none"]

# Elements of a formula's largest tensor in one block (8 MiB of float32): large enough for full speed, small enough to
# stay near the caches. The value changes no result beyond rounding.
BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class QueryShare:
    """The queries that one process takes of a batch that several processes have.

    Args:
        begin: the first of its rows.
        end: the row after the last.
        total: the sum over all processes of a tensor that each has.
    """

    begin: int
    end: int
    total: Callable[[Tensor], Tensor]


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
        made, and of (B, B) only the blocks, however large the batch. `torch.compile` gives the same numbers but breaks
        the graph at the checks and the blocks, whose sizes depend on the labels; `fullgraph=True` is refused.
    """

    # Whether include_self makes the query a positive too, and whether relevance has levels instead of yes and no.
    self_is_positive = True
    graded = False

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
        labels: Int[Tensor, "query ..."],
        ref_emb: Float[Tensor, "gallery dim"] | None = None,
        ref_labels: Int[Tensor, "gallery ..."] | None = None,
        *,
        ids: Int[Tensor, " query"] | None = None,
        ref_ids: Int[Tensor, " gallery"] | None = None,
        queries: QueryShare | None = None,
    ) -> Float[Tensor, "..."]:
        """The loss of a batch, each row the query of a list.

        Args:
            embeddings: one row for each query, normalised here.
            labels: any integers; the same label means relevant.
            ref_emb: what is ranked for each query; the batch itself where not given.
            ref_labels: labels of `ref_emb`.
            ids: dataset index of each row; a reference with the query's own id is not in the query's list.
            ref_ids: dataset index of each reference, together with `ids`.
            queries: which rows' lists this process takes; all where not given. The values of all processes then add up
                to the loss, as do their gradients.

        Raises:
            ValueError: if shapes do not fit together, or an embedding is not finite.
            TypeError: if embeddings are not floating point or labels not integers.
        """
        lists = EmbeddingLists(
            self.name,
            embeddings,
            labels,
            ref_emb,
            ref_labels,
            ids,
            ref_ids,
            include_self=self.include_self,
            self_is_positive=self.self_is_positive,
            graded=self.graded,
        )
        return self._reduce(lists, queries)

    def from_scores(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"] | Integer[Tensor, "query gallery"],
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
        return self._reduce(ScoreLists(self.name, scores, relevant, candidate, graded=self.graded))

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, class_balanced={self.class_balanced}, include_self={self.include_self}"

    def _reduce(self, lists: RankedLists, queries: QueryShare | None = None) -> Tensor:
        if queries is not None and self.reduction == "none":
            raise ValueError(f"{self.name}: values that are to be added up need a `reduction`, got 'none'.")
        with torch.autocast(lists.device.type, enabled=False):
            positives = lists.count_positives()
            valid = self._takes_part(positives)
            if not bool(valid.any()):
                self._warn_of_no_positive()
            count = valid.sum().clamp(min=1)
            # Weights are always those of the mean, so that a loss whose gradient is not linear in what arrives (the
            # black-box ones) sees its own mean, whatever is made of the values afterwards.
            weights = (lists.class_weights(valid) if self.class_balanced else valid.to(lists.dtype)) / count
            taken = valid if queries is None else valid & _between(queries, valid)
            self._prepare(lists, positives, taken, queries)
            parameters = [p for p in self.parameters() if p.requires_grad]
            arguments = (self, lists, positives, taken, weights, *lists.tensors, *parameters)
            if self.reduction == "none":
                values: Tensor = _EachQuery.apply(*arguments)
                return values
            mean: Tensor = _WeightedSum.apply(*arguments)
            return mean * count if self.reduction == "sum" else mean

    def _takes_part(self, positives: Int[Tensor, " query"]) -> Bool[Tensor, " query"]:
        """Which queries have a value."""
        return positives > 0

    def _prepare(self, lists: RankedLists, positives: Tensor, taken: Tensor, queries: QueryShare | None) -> None:
        """A first pass over the lists, for losses whose divisors depend on all of them."""

    def _warn_of_no_positive(self) -> None:
        if not self._warned_of_no_positive:
            self._warned_of_no_positive = True
            warnings.warn(
                f"{self.name}: no row of the batch has a positive, so the loss is 0 and nothing is learned from it; "
                "put at least two images of a class into each batch (PKSampler does).",
                stacklevel=4,
            )

    def _blocks(self, positives: Tensor, taken: Tensor, gallery: int) -> Iterator[Tensor]:
        """Rows of the queries taken, cut so that each block's tensors stay near `BLOCK_ELEMENTS`."""
        rows = taken.nonzero()[:, 0]
        block = self.elements(positives[rows], gallery).cumsum(0) // BLOCK_ELEMENTS
        yield from torch.split(rows, torch.unique_consecutive(block, return_counts=True)[1].tolist())


class PairLoss(RetrievalLoss):
    """Base of losses that are means over pairs of a query and a reference.

    Args:
        pair_mean: what a mean runs over: `"query"`, the pairs of each query, and then over queries; anything else, the
            pairs of all queries together, also of those without a positive. The subclass says which names there are.
        reduction: as in `RetrievalLoss`; only `"mean"` where `pair_mean` is not `"query"`.
        class_balanced: as in `RetrievalLoss`; only False where `pair_mean` is not `"query"`.
        include_self: as in `RetrievalLoss`.

    Raises:
        ValueError: if queries are to have values or weights of their own where `pair_mean` is not `"query"`.
    """

    def __init__(self, pair_mean: str, *, reduction: Reduction, class_balanced: bool, include_self: bool) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.pair_mean = pair_mean
        if pair_mean != "query" and (reduction != "mean" or class_balanced):
            raise ValueError(
                f"{self.name}: `pair_mean` {pair_mean!r} is a mean over the pairs of all queries, in which a query has "
                f"neither value nor weight of its own, got reduction={reduction!r}, class_balanced={class_balanced}; "
                "set pair_mean='query'."
            )
        self._pairs_per_query: Tensor | None = None

    @abstractmethod
    def pair_sums(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> tuple[Float[Tensor, "query term"], Float[Tensor, "query term"]]:
        """For each query and term the sum over its pairs and the number of pairs; the loss adds the terms' means."""

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """Each query's means, or its share in the means over all pairs."""
        sums, counts = self.pair_sums(scores, relevant, candidate)
        pairs = counts.clamp(min=1) if self._pairs_per_query is None else self._pairs_per_query
        return (sums / pairs).sum(1)

    def extra_repr(self) -> str:
        return f"pair_mean={self.pair_mean!r}, {super().extra_repr()}"

    def _takes_part(self, positives: Int[Tensor, " query"]) -> Bool[Tensor, " query"]:
        return positives > 0 if self.pair_mean == "query" else torch.ones_like(positives, dtype=torch.bool)

    def _prepare(self, lists: RankedLists, positives: Tensor, taken: Tensor, queries: QueryShare | None) -> None:
        if self.pair_mean == "query":
            return
        # A share without a row counts no pairs, one 0 for each term, which the others' counts can be added to.
        blocks = list(self._blocks(positives, taken, lists.gallery)) or [taken.nonzero()[:, 0]]
        with torch.no_grad():
            counts = [self.pair_sums(lists.scores(rows), *lists.masks(rows))[1].sum(0) for rows in blocks]
            total = torch.stack(counts).sum(0)
            total = total if queries is None else queries.total(total)
        self._pairs_per_query = total.clamp(min=1) / len(taken)


class _WeightedSum(torch.autograd.Function):
    """Sum over queries of weight x value; the gradient is taken in forward, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: RetrievalLoss,
        lists: RankedLists,
        positives: Tensor,
        taken: Tensor,
        weights: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        gradients = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[5:])]
        parameters = inputs[len(lists.tensors) :]
        total = torch.zeros((), dtype=lists.dtype, device=lists.device)
        for rows in loss._blocks(positives, taken, lists.gallery):
            total += _block(loss, lists, rows, weights[rows], parameters, gradients)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, None, *(None if g is None else grad * g for g in ctx.saved_tensors)


class _EachQuery(torch.autograd.Function):
    """Weight x value of every query; each block is computed again in backward, where its weights are known."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: RetrievalLoss,
        lists: RankedLists,
        positives: Tensor,
        taken: Tensor,
        weights: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.loss, ctx.lists = loss, lists
        ctx.save_for_backward(positives, taken, weights, *inputs)
        values = torch.full_like(weights, torch.nan)
        for rows in loss._blocks(positives, taken, lists.gallery):
            values[rows] = taken.sum() * weights[rows] * loss.query_losses(lists.scores(rows), *lists.masks(rows))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positives, taken, weights, *inputs = ctx.saved_tensors
        gradients = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[5:])]
        parameters = inputs[len(ctx.lists.tensors) :]
        upstream = taken.sum() * grad
        with torch.autocast(ctx.lists.device.type, enabled=False):
            for rows in ctx.loss._blocks(positives, taken, ctx.lists.gallery):
                _block(ctx.loss, ctx.lists, rows, weights[rows], parameters, gradients, upstream[rows])
        return None, None, None, None, None, *gradients


def _between(queries: QueryShare, valid: Tensor) -> Tensor:
    row = torch.arange(len(valid), device=valid.device)
    return (queries.begin <= row) & (row < queries.end)


def _block(
    loss: RetrievalLoss,
    lists: RankedLists,
    rows: Tensor,
    weights: Tensor,
    parameters: tuple[Tensor, ...] | list[Tensor],
    gradients: list[Tensor | None],
    upstream: Tensor | None = None,
) -> Tensor:
    """Weighted sum of one block; adds its gradient to `gradients` (lists' tensors first, then the parameters).

    `upstream` is what arrived for each query. A query's scores are its own, so their gradient is scaled afterwards; the
    parameters are everybody's, so theirs is taken of the scaled sum.
    """
    scores = lists.scores(rows)
    masks = lists.masks(rows)
    wanted = [p for p, g in zip(parameters, gradients[len(lists.tensors) :]) if g is not None]
    needs_scores = any(g is not None for g in gradients[: len(lists.tensors)])
    if not (needs_scores or wanted):
        return (weights * loss.query_losses(scores, *masks)).sum()
    with torch.enable_grad():
        scores.requires_grad_()
        values = weights * loss.query_losses(scores, *masks)
        total = values.sum()
    grad_scores = torch.autograd.grad(total, scores, retain_graph=bool(wanted), allow_unused=True)[0]
    if needs_scores and grad_scores is not None:
        lists.add_gradient(rows, grad_scores if upstream is None else grad_scores * upstream[:, None], gradients)
    if wanted:
        own = torch.autograd.grad(
            values, wanted, torch.ones_like(values) if upstream is None else upstream, allow_unused=True
        )
        for kept, gradient in zip((g for g in gradients[len(lists.tensors) :] if g is not None), own):
            if gradient is not None:
                kept += gradient
    return total.detach()
