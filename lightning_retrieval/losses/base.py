"""The base class of the losses over ranked lists.

Each loss of this library defines a formula, `query_losses`, which maps a block of scores to one value for each query.
The base class does the rest: cosine scores, relevance, the exclusion of the query itself, evaluation in blocks of
queries, class balancing, reduction and validation.

Conventions: a query is never in its own list (unless `include_self`); a query without any relevant candidate has no
value and is skipped in every mean.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from lightning_retrieval.arguments import checked
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned, owned_by
from lightning_retrieval.losses.batch_loss import BatchLoss, QueryRange, RankedBatch
from lightning_retrieval.losses.blockwise import Block, BlockPlan, QueryValues, WeightedMean, cut_into_blocks
from lightning_retrieval.losses.lists import EmbeddingLists, RankedLists, ScoreLists
from lightning_retrieval.losses.positives import ScoreBlock, true_indices
from lightning_retrieval.ranking.relevance import Relevance, SameLabel

Reduction = Literal["mean", "sum", "none"]


class RetrievalLoss(BatchLoss, ABC):
    """Base of the losses over ranked lists: one list for each query, one value for each list.

    Args:
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"`: one value for each
            query, NaN for a query without a positive.
        class_balanced: weight each query by 1 / (queries of its class in the batch), rescaled to mean 1, so that each
            class of the batch has the same weight (Revaud et al., ICCV 2019, section 4.2 and Fig. 7).
        include_self: count the query in its own list and as its own positive, as some official implementations do. Use
            this only for comparison with them.

    Raises:
        ValueError: if `reduction` is not one of the three.

    Relations:
        The loss normalises the embeddings, in float32 or better, also under autocast. No tensor of size (B, B, B) is
        ever allocated. One of size (B, B) is allocated only if B is small; otherwise the scores are computed block by
        block. `torch.compile` gives the same numbers but breaks the graph at the checks and the blocks, whose sizes
        depend on the labels; `fullgraph=True` raises.
    """

    # `self_is_positive`: whether a query in its own list is its own positive. `graded`: whether relevance is a level
    # instead of a bool. `approximates_ap`: whether the value is 1 - an approximation of AP, of which `APMonitor` logs
    # the error.
    self_is_positive = True
    graded = False
    approximates_ap = False

    def __init__(
        self, *, reduction: Reduction = "mean", class_balanced: bool = False, include_self: bool = False
    ) -> None:
        super().__init__()
        self.reduction = checked(self, reduction=reduction)
        self.class_balanced = class_balanced
        self.include_self = include_self
        self._warned_of_no_positive = False

    @property
    def name(self) -> str:
        """The class name, the prefix of error messages."""
        return type(self).__name__

    @abstractmethod
    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        """The formula of the loss: one value for each list. Each list has at least one positive."""

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        """Number of elements of the formula's largest tensor, for each query. It determines the size of the blocks.

        Args:
            positives: number of positives of each query.
            gallery: number of references.
        """
        return torch.full_like(positives, gallery)

    def of_batch(self, batch: RankedBatch) -> Float[Tensor, "..."]:
        """The loss of a batch. For the contents of a batch and the errors, see `forward`."""
        if not isinstance(batch.lists.rule, SameLabel):
            self.check_relevance(batch.lists.rule)
        with owned_by(self.name):
            lists = EmbeddingLists(
                batch, include_self=self.include_self, self_is_positive=self.self_is_positive, graded=self.graded
            )
            return self._value(lists, batch.queries)

    def check_relevance(self, relevance: Relevance) -> None:
        """Raise if the loss cannot follow this rule: it has levels of relevance, or weights classes that do not exist.

        Args:
            relevance: a rule of relevance.
        """
        if self.graded:
            raise InvalidType(
                "must be None, because the relevance of this loss is the number of label levels that two images share",
                self.name,
                "relevance",
                got=relevance,
                cure="use a loss of AP, such as SupAPLoss",
            )
        if self.class_balanced and not relevance.has_classes:
            rule = f"weights the queries of each class, and {relevance} has no classes"
            raise InvalidValue(rule, self.name, "class_balanced", cure="set class_balanced=False")

    def from_scores(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"] | Integer[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"] | None = None,
    ) -> Float[Tensor, "..."]:
        """The loss of a score matrix; the scores are not normalised.

        Args:
            scores: higher is nearer.
            relevant: which references are relevant.
            candidate: which references are in the query's list; None for all.

        Raises:
            ValueError: if shapes differ, a score is not finite, or the loss is `class_balanced` (a score matrix has no
                classes).
            TypeError: if scores are not floating point or the masks not bool.
        """
        if self.class_balanced:
            rule = "needs labels, which a score matrix does not have"
            cure = "call the loss with embeddings and labels, or set class_balanced=False"
            raise InvalidValue(rule, self.name, "class_balanced", cure=cure)
        with owned_by(self.name):
            return self._value(ScoreLists(scores, relevant, candidate=candidate, graded=self.graded))

    @owned
    def queries_without_value(self, batch: RankedBatch) -> int:
        """Number of queries of a batch that the loss skips, because no other image in their list is relevant."""
        lists = EmbeddingLists(batch, include_self=False, graded=self.graded)
        positives = lists.count_positives()[1]
        return int((~self._has_value(positives)).sum())

    def _value(self, lists: RankedLists, queries: QueryRange | None = None) -> Float[Tensor, "..."]:
        """The loss of ranked lists, reduced as `reduction` says; `queries` is as in `RankedBatch`."""
        with torch.autocast(lists.device.type, enabled=False):
            plan = self._plan(lists, queries)
            if self.reduction == "none":
                values: Tensor = QueryValues.apply(plan, *plan.inputs)
                return values
            mean: Tensor = WeightedMean.apply(plan, *plan.inputs)
            if self.reduction == "sum":
                return mean * plan.count
            return mean

    def _plan(self, lists: RankedLists, queries: QueryRange | None) -> BlockPlan:
        """Which queries are computed, in which blocks, and with which weights."""
        if queries is not None and self.reduction == "none":
            raise InvalidValue("must be 'mean' or 'sum' for a range of `queries`", argument="reduction", got="'none'")
        positives, positives_on_host = lists.count_positives(queries)
        valid, valid_on_host = self._has_value(positives), self._has_value(positives_on_host)
        if not valid_on_host.any():
            self._warn_of_no_positive()
        count = valid.sum().clamp(min=1)
        weights = valid.to(lists.dtype)
        if self.class_balanced:
            weights = lists.class_weights(valid)

        taken, taken_on_host = valid, valid_on_host
        if queries is not None:
            taken = queries.among(valid)
            taken_on_host = queries.among(valid_on_host)
        counts = positives_on_host[taken_on_host]
        (rows,) = true_indices(taken, len(counts))
        blocks = cut_into_blocks(rows, self.elements(counts, lists.gallery), counts)
        return BlockPlan(
            formula=self._formula(lists, blocks, queries),
            lists=lists,
            blocks=blocks,
            # For every reduction, these are the weights of the mean; `_value` scales the result afterwards. The
            # black-box losses need this order, because their gradient is not linear in the gradient that they receive.
            weights=weights / count,
            count=count,
            parameters=tuple(p for p in self.parameters() if p.requires_grad),
        )

    def _has_value(self, positives: Int[Tensor, " query"]) -> Bool[Tensor, " query"]:
        """Which queries have a value."""
        return positives > 0

    def _formula(
        self, lists: RankedLists, blocks: tuple[Block, ...], queries: QueryRange | None
    ) -> Callable[[ScoreBlock], Tensor]:
        """The formula to evaluate for each block. A subclass may first compute sums over all lists here."""
        return self.query_losses

    def _warn_of_no_positive(self) -> None:
        if not self._warned_of_no_positive:
            self._warned_of_no_positive = True
            warnings.warn(
                f"{self.name}: no row of the batch has a positive, so the loss is 0 and nothing is learned from it; "
                "put images that are relevant to each other, with different ids, into each batch (PKSampler draws "
                "several of each class).",
                stacklevel=5,
            )
