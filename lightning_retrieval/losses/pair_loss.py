"""The base class of losses that are means over pairs of a query and a reference."""

import functools
from abc import abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_string
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.blockwise import Block
from lightning_retrieval.losses.positives import MaskFacts
from lightning_retrieval.losses.ranked_batch import QueryRange
from lightning_retrieval.losses.ranked_lists import RankedLists


class PairLoss(RetrievalLoss):
    """Base of losses that are means over pairs of a query and a reference.

    Args:
        pair_mean: what a mean runs over: `"query"`, the pairs of each query, followed by a mean over queries; any other
            name, the pairs of all queries together, including those without a positive. A subclass defines the names.
        reduction: as in `RetrievalLoss`; only `"mean"` unless `pair_mean` is `"query"`.
        class_balanced: as in `RetrievalLoss`; only False unless `pair_mean` is `"query"`.
        include_self: as in `RetrievalLoss`.

    Raises:
        TypeError: if `pair_mean` is not a string.
        ValueError: if queries are to have values or weights of their own and `pair_mean` is not `"query"`.
    """

    def __init__(self, pair_mean: str, *, reduction: Reduction, class_balanced: bool, include_self: bool) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.pair_mean = check_string(self.name, "pair_mean", pair_mean)
        if pair_mean != "query" and (reduction != "mean" or class_balanced):
            raise ValueError(
                f"{self.name}: `pair_mean` {pair_mean!r} is a mean over the pairs of all queries, in which a query has "
                f"neither value nor weight of its own, got reduction={reduction!r}, class_balanced={class_balanced}; "
                "set pair_mean='query'."
            )

    @abstractmethod
    def pair_sums(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> tuple[Float[Tensor, "query term"], Float[Tensor, "query term"]]:
        """For each query and term the sum over its pairs and the number of pairs; the loss adds the terms' means.

        Args:
            scores: similarities, higher is nearer; those of references that are not candidates are meaningless.
            relevant: the positives, all of them candidates.
            candidate: which references are in the query's list.
        """

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
        pairs_per_query: Float[Tensor, " term"] | None = None,
    ) -> Float[Tensor, " query"]:
        """The means of each query, or its part of the means over the pairs of all queries.

        Args:
            scores: similarities, higher is nearer; those of references that are not candidates are meaningless.
            relevant: the positives, all of them candidates.
            candidate: which references are in the query's list.
            pairs_per_query: number of pairs of all queries together, divided by the number of queries; None divides by
                the query's own number of pairs.
        """
        sums, counts = self.pair_sums(scores, relevant, candidate)
        if pairs_per_query is None:
            return (sums / counts.clamp(min=1)).sum(1)
        return (sums / pairs_per_query).sum(1)

    def extra_repr(self) -> str:
        return f"pair_mean={self.pair_mean!r}, {super().extra_repr()}"

    def _has_value(self, positives: Int[Tensor, " query"]) -> Bool[Tensor, " query"]:
        if self.pair_mean == "query":
            return positives > 0
        return torch.ones_like(positives, dtype=torch.bool)

    def _formula(
        self, lists: RankedLists, blocks: tuple[Block, ...], queries: QueryRange | None
    ) -> Callable[..., Tensor]:
        if self.pair_mean == "query":
            return self.query_losses
        total = self._count_pairs(lists, blocks)
        if queries is not None:
            total = queries.total(total)
        pairs_per_query = total.clamp(min=1) / len(lists.tensors[0])
        return functools.partial(self.query_losses, pairs_per_query=pairs_per_query)

    @torch.no_grad()
    def _count_pairs(self, lists: RankedLists, blocks: tuple[Block, ...]) -> Float[Tensor, " term"]:
        """Number of pairs of each term over all blocks; one 0 for each term if this process computes no query."""
        if not blocks:
            nothing = torch.arange(0)
            blocks = (Block(nothing.to(lists.device), MaskFacts(nothing, lists.levels)),)
        counts = []
        for block in blocks:
            relevant, candidate = block.masks(lists)
            _, pairs = self.pair_sums(lists.scores(block.rows), relevant, candidate)
            counts.append(pairs.sum(0))
        return torch.stack(counts).sum(0)
