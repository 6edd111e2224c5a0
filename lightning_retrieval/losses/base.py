"""The base class of the losses over ranked lists.

Each loss of this library defines a formula, `query_losses`, which maps a block of scores to one value for each query.
The base class does the rest: cosine scores, relevance, the exclusion of the query itself, evaluation in blocks of
queries, class balancing, reduction and validation.

Conventions: a query is never in its own list (unless `include_self`); a query without any relevant candidate has no
value and is skipped in every mean.
"""

import warnings
from abc import ABC, abstractmethod
from functools import partial
from typing import Literal, NotRequired, TypedDict

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from lightning_retrieval.arguments import checked
from lightning_retrieval.distributed import to_device
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned, owned_by
from lightning_retrieval.losses.batch_loss import BatchLoss, RankedBatch
from lightning_retrieval.losses.blockwise import ComputedQueries, Formula
from lightning_retrieval.losses.score_block import ScoreBlock
from lightning_retrieval.losses.scores import GivenScores, Scores, check_score_matrix, lists_of_masks
from lightning_retrieval.ranking.lists import Lists, QueryRange, count_equal
from lightning_retrieval.ranking.relevance import Relevance, SameLabel

Reduction = Literal["mean", "sum", "none"]


class LossSettings(TypedDict):
    """The settings of `RetrievalLoss`, which every loss over ranked lists has.

    A loss takes them as `**settings: Unpack[LossSettings]`, so that editors, configs and checkpoints know them.

    Args:
        reduction: `"mean"` (the default) or `"sum"` over the queries that have a positive, or `"none"`: one value for
            each query.
        class_balanced: give every class of the batch the same total weight (default: False).
        include_self: rank the query in its own list (default: False). Use this only for comparison with other code.
    """

    reduction: NotRequired[Reduction]
    class_balanced: NotRequired[bool]
    include_self: NotRequired[bool]


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

    self_is_positive = True  # whether a query in its own list is its own positive
    graded = False  # whether relevance is a level instead of a bool
    approximates_ap = False  # whether the value is 1 - an approximation of AP, of which `APMonitor` logs the error

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

    def compute(self, batch: RankedBatch) -> Float[Tensor, "..."]:
        """The loss of a batch. For the contents of a batch and the errors, see `forward`."""
        if not isinstance(batch.lists.rule, SameLabel):
            self.check_relevance(batch.lists.rule)
        lists, levels = self._lists_and_levels(batch)
        with owned_by(self.name):
            return self._value(Scores(batch.embeddings, batch.ref_emb), lists, levels, batch.queries)

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
            check_score_matrix(scores, relevant, candidate, graded=self.graded)
            levels: tuple[int, ...] = (1,)
            if self.graded:
                levels = tuple(level for level in torch.unique(relevant).tolist() if level > 0)
            return self._value(GivenScores(scores), lists_of_masks(relevant, candidate), levels)

    @owned
    def queries_without_value(self, batch: RankedBatch) -> int:
        """Number of queries of a batch that the loss skips, because no other image in their list is relevant."""
        lists, _ = self._lists_and_levels(batch)
        positives = lists.count_positives(Scores(batch.embeddings, batch.ref_emb).given)
        return int((~self._has_value(positives)).sum())

    def _lists_and_levels(self, batch: RankedBatch) -> tuple[Lists, tuple[int, ...]]:
        """The lists of a batch as the loss reads them, and the possible levels of relevance above 0."""
        if self.graded:
            return batch.lists, tuple(range(1, batch.lists.levels + 1))
        return batch.lists.finest, (1,)

    def _value(
        self, scores: Scores, lists: Lists, levels: tuple[int, ...], queries: QueryRange | None = None
    ) -> Float[Tensor, "..."]:
        """The loss of ranked lists, reduced as `reduction` says; `queries` is as in `RankedBatch`."""
        if queries is not None and self.reduction == "none":
            raise InvalidValue("must be 'mean' or 'sum' for a range of `queries`", argument="reduction", got="'none'")
        first, *_ = scores.given.values()  # with one row for each query
        with torch.autocast(first.device.type, enabled=False):
            computed = self._computed(scores, lists, levels, queries)
            formula = self._formula(computed, queries)
            parameters = tuple(p for p in self.parameters() if p.requires_grad)
            if self.reduction == "none":
                values = computed.count * computed.values(formula, parameters)  # the weights are those of a mean
                return values.new_full((len(first),), torch.nan).index_copy(0, computed.rows, values)
            # The mean is scaled afterwards: the gradient of a black-box loss is not linear in the incoming gradient.
            mean = computed.mean(formula, parameters)
            if self.reduction == "sum":
                return computed.count * mean
            return mean

    def _computed(
        self, scores: Scores, lists: Lists, levels: tuple[int, ...], queries: QueryRange | None
    ) -> ComputedQueries:
        """The queries that have a value and are in the range. The host decides, since it has the counts."""
        positives = lists.count_positives(
            scores.given, queries, include_self=self.include_self, self_is_positive=self.self_is_positive
        )
        with_value = self._has_value(positives).nonzero()[:, 0]
        if len(with_value) == 0:
            self._warn_of_no_positive()
        first, *_ = scores.given.values()
        rows = to_device(with_value, first.device)
        in_range = slice(None)
        if queries is not None:
            bounds = torch.searchsorted(with_value, torch.tensor([queries.begin, queries.end]))
            in_range = slice(*bounds.tolist())
        counts = positives[with_value[in_range]]
        return ComputedQueries(
            scores=scores,
            masks=partial(lists.masks, include_self=self.include_self, self_is_positive=self.self_is_positive),
            rows=rows[in_range],
            counts=counts,
            elements=self.elements(counts, scores.gallery),
            weights=self._weights(lists, rows, first.dtype)[in_range],
            count=len(with_value),
            levels=levels,
        )

    def _weights(self, lists: Lists, rows: Int[Tensor, " query"], dtype: torch.dtype) -> Float[Tensor, " query"]:
        """The weight of each query with a value in the mean over all of them."""
        if not self.class_balanced:
            return torch.full_like(rows, 1 / max(1, len(rows)), dtype=dtype)
        labels = lists.columns[rows, 0]
        weights = 1 / count_equal([labels], [labels]).to(dtype)
        return weights / weights.sum()

    def _has_value(self, positives: Int[Tensor, " query"]) -> Bool[Tensor, " query"]:
        """Which queries have a value."""
        return positives > 0

    def _formula(self, computed: ComputedQueries, queries: QueryRange | None) -> Formula:
        """The formula to evaluate for each block. A subclass may first compute sums over all lists here."""
        return self.query_losses

    def _warn_of_no_positive(self) -> None:
        if not self._warned_of_no_positive:
            self._warned_of_no_positive = True
            warnings.warn(
                f"{self.name}: no row of the batch has a positive, so the loss is 0 and nothing is learned from it; "
                "put images that are relevant to each other, with different ids, into each batch (PKSampler draws "
                "several of each class).",
                stacklevel=6,
            )
