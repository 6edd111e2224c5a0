"""Hard ranks of the positives. Every retrieval metric is a function of them.

The rank of a positive is the number of candidates that score at least as high, itself included, so ties count against
the model. `lightning_retrieval.ranking.ranked_lists` counts them.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lightning_retrieval.ranking.counting import sum_from_here


@dataclass(frozen=True)
class PositiveRanks:
    """Ranks of the positives of a block of queries. The worst positive comes first, rows are padded to the longest.

    Attributes:
        queries: index of the query of each row.
        rank: number of candidates that score at least as high as the positive; any number at padding.
        first_tied: the first column of the row with the same score; any number at padding.
        level: number of label levels that the positive shares with the query, 0 at padding. Of positives that tie, the
            one that shares the most levels comes first.
        levels: number of levels of the labels.
    """

    queries: Int[Tensor, " query"]
    rank: Int[Tensor, "query pos"]
    first_tied: Int[Tensor, "query pos"]
    level: Int[Tensor, "query pos"]
    levels: int

    @cached_property
    def is_positive(self) -> Bool[Tensor, "query pos"]:
        """False at padding."""
        return self.level > 0

    @cached_property
    def count(self) -> Int[Tensor, " query"]:
        """Number of positives of each query."""
        return self.is_positive.sum(1)

    @cached_property
    def rank_among_positives(self) -> Int[Tensor, "query pos"]:
        """Number of positives that score at least as high as each positive; any number at padding."""
        return self.sum_at_least(self.is_positive)

    @cached_property
    def precision(self) -> Float[Tensor, "query pos"]:
        """Fraction of positives among the candidates that score at least as high as each positive, 0 at padding."""
        precision = self.rank_among_positives.double() / self.rank.clamp(min=1)
        return torch.where(self.is_positive, precision, 0.0)

    @cached_property
    def position(self) -> Int[Tensor, "query pos"]:
        """Position in the list, from 1, if ties are sorted by the number of shared levels, the fewest first."""
        return self._irrelevant_before + sum_from_here(self.is_positive)

    @cached_property
    def first_hit(self) -> Int[Tensor, " query"]:
        """Position of the first positive, if irrelevant candidates that tie with it come first."""
        irrelevant_before = torch.where(self.is_positive, self._irrelevant_before, self.rank.max())
        return 1 + irrelevant_before.amin(1)

    @cached_property
    def _irrelevant_before(self) -> Int[Tensor, "query pos"]:
        """For each positive, the number of candidates that are not positive and score at least as high."""
        return self.rank - self.rank_among_positives

    @cached_property
    def finest(self) -> "PositiveRanks":
        """The same lists if only candidates that share the finest label are positive; other columns become padding."""
        return self.at_level(0)

    def at_level(self, level: int) -> "PositiveRanks":
        """The same lists if only candidates that share the label of this level are positive; level 0 is the finest."""
        if self.levels == 1:
            return self
        shares_label = (self.level >= self.levels - level).long()
        return PositiveRanks(self.queries, self.rank, self.first_tied, shares_label, levels=1)

    def to(self, device: torch.device) -> "PositiveRanks":
        """The same ranks on this device."""
        return replace(
            self,
            queries=self.queries.to(device),
            rank=self.rank.to(device),
            first_tied=self.first_tied.to(device),
            level=self.level.to(device),
        )

    def sum_at_least(self, weights: Shaped[Tensor, "query pos"]) -> Shaped[Tensor, "query pos"]:
        """For each positive the sum of the weights of all columns that score at least as high, itself included."""
        return sum_from_here(weights).gather(1, self.first_tied)
