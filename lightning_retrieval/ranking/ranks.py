"""Hard ranks of the positives. Every retrieval metric is a function of them, and they are counted only here.

The rank of a positive is the number of candidates that score at least as high, itself included, so ties count against
the model. Scores are computed for one block of queries at a time; the whole (query, gallery) matrix never exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lightning_retrieval.ranking.float64 import float64_device
from lightning_retrieval.ranking.score_tiles import ScoreTiles

_BLOCK_ROWS = (256, 128, 64)  # 64 or more: see `lightning_retrieval.ranking.score_tiles`
_MAX_BLOCK_POSITIVES = 1 << 22
# If at most this fraction of the scores reaches the worst positive, only these scores are counted, else all are sorted.
_MAX_COUNTED_FRACTION = 1 / 16


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
        return self._irrelevant_before + _sum_from_here(self.is_positive)

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
        return _sum_from_here(weights).gather(1, self.first_tied)


def positive_ranks(
    queries: Float[Tensor, "query dim"],
    query_labels: Int[Tensor, "query level"],
    gallery: Float[Tensor, "gallery dim"],
    gallery_labels: Int[Tensor, "gallery level"],
    self_index: Int[Tensor, " query"],
    *,
    query_cameras: Int[Tensor, " query"] | None = None,
    gallery_cameras: Int[Tensor, " gallery"] | None = None,
    shard: int = 0,
    num_shards: int = 1,
) -> Iterator[PositiveRanks]:
    """Count the ranks of all positives, one block of queries at a time.

    Args:
        queries: unit rows.
        query_labels: any integers, finest level first. Candidates that share the last level are positives.
        gallery: unit rows, sorted by the last level of their labels.
        gallery_labels: sorted by the last level.
        self_index: index of the query itself in the gallery, where it is excluded from its list, or -1.
        query_cameras: the camera of each query. Images of the query's own finest label and camera are excluded from its
            list; none if there are no cameras.
        gallery_cameras: the camera of each image of the gallery; given together with `query_cameras`.
        shard: which shard of the blocks to count, from 0.
        num_shards: number of shards. It changes which blocks are counted here, not their boundaries.

    Yields:
        The ranks of a block, on the device that computes float64 numbers for the labels' device.

    Cost:
        Memory for a few tiles of scores, and for the positives of a block of queries. The time is that of the matrix
        product plus a few passes over the scores if all positives rank high, or a sort of the scores if they do not; it
        grows with the logarithm of the number of positives. Ranks are counted on the labels' device. Embeddings on
        another device are copied there tile by tile, once for each block.
    """
    if len(queries) == 0:
        return
    device = query_labels.device
    coarsest, query_coarsest = gallery_labels[:, -1].contiguous(), query_labels[:, -1].contiguous()
    first = torch.searchsorted(coarsest, query_coarsest)
    last = torch.searchsorted(coarsest, query_coarsest, right=True)
    most_positives = int((last - first).max())
    rows = _rows_of_a_block(most_positives)
    tiles = ScoreTiles(gallery, rows=rows, positives=most_positives, device=device)
    for start in range(shard * rows, len(queries), num_shards * rows):
        index = torch.arange(start, min(start + rows, len(queries)), device=device)
        begin, end, width = _extent(first[index], last[index])
        column = first[index, None] + torch.arange(width, device=device)  # (query, pos): images of the query's label
        is_padding = column >= last[index, None]
        is_excluded = column == self_index[index, None]
        level = _shared_levels(query_labels[index], gallery_labels, column)
        if query_cameras is not None and gallery_cameras is not None:
            same_camera = gallery_cameras[column.clamp(max=len(gallery) - 1)] == query_cameras[index, None]
            is_excluded |= same_camera & (level == query_labels.shape[1]) & ~is_padding
        is_missing = is_excluded | is_padding
        level = level.masked_fill(is_missing, 0)
        tiles.start_block(queries[start : start + rows])
        scores = tiles.gather(column, begin, end)
        positives, level = _worst_first(scores.masked_fill(is_missing, torch.inf), level, query_labels.shape[1])
        rank = -count_at_least(scores.masked_fill(~is_excluded, -torch.inf), positives)
        for tile in tiles:
            rank += count_at_least(tile, positives)
        first_tied = torch.searchsorted(positives, positives)
        ranks = PositiveRanks(index, rank, first_tied, level, query_labels.shape[1])
        yield ranks.to(float64_device(device))


def count_at_least(
    scores: Float[Tensor, "query gallery"], positives: Float[Tensor, "query pos"]
) -> Int[Tensor, "query pos"]:
    """For each of the ascending positives of a row, the number of scores of the row that are at least as high.

    The scores may be sorted in place.
    """
    if scores.dtype == torch.float32:
        reaches_worst = scores >= positives[:, :1]
        if _number_of_true(reaches_worst) <= _MAX_COUNTED_FRACTION * scores.numel():
            return _count_reaching(scores, positives, reaches_worst)
    return scores.shape[1] - torch.searchsorted(_sorted(scores), positives)


def _number_of_true(mask: Bool[Tensor, "query gallery"]) -> int:
    """How many are True. Eight bytes are added at a time, so few of them that no byte overflows."""
    words_added = 192  # at most 255, the largest number of a byte
    if mask.numel() % (8 * words_added):
        return int(mask.sum())
    words = mask.flatten().view(torch.int64).view(-1, words_added)
    sums_of_bytes = words.sum(1).view(torch.uint8)
    return int(sums_of_bytes.sum())


def _true_positions(mask: Bool[Tensor, "query gallery"]) -> Int[Tensor, " true"]:
    """Where the flattened mask is True. On a CPU NumPy finds them, in a tenth of the time of torch."""
    if mask.device.type != "cpu":
        return mask.flatten().nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _rows_of_a_block(positives: int) -> int:
    for rows in _BLOCK_ROWS:
        if rows * positives <= _MAX_BLOCK_POSITIVES:
            return rows
    return _BLOCK_ROWS[-1]


def _extent(first: Int[Tensor, " query"], last: Int[Tensor, " query"]) -> tuple[int, int, int]:
    """The first column of any query, the last one + 1, and the largest number of columns of a query, at least 1."""
    begin, end, width = torch.stack([first.min(), last.max(), (last - first).max()]).tolist()
    return begin, end, max(width, 1)


def _shared_levels(
    query_labels: Int[Tensor, "query level"],
    gallery_labels: Int[Tensor, "gallery level"],
    column: Int[Tensor, "query pos"],
) -> Int[Tensor, "query pos"]:
    """The number of label levels that each query shares with the images of its columns, which share the last one."""
    if query_labels.shape[1] == 1:
        return torch.ones_like(column)
    labels = gallery_labels[column.clamp(max=len(gallery_labels) - 1)]  # (query, pos, level)
    return (labels == query_labels[:, None]).sum(2)


def _worst_first(
    positives: Float[Tensor, "query pos"], level: Int[Tensor, "query pos"], levels: int
) -> tuple[Float[Tensor, "query pos"], Int[Tensor, "query pos"]]:
    """Sort the scores of the positives, which are inf at padding, in ascending order, and their levels with them."""
    if levels > 1:  # of positives that tie, the one that shares the most levels comes first
        level, order = level.sort(dim=1, descending=True, stable=True)
        positives = positives.gather(1, order)
    positives, order = positives.sort(dim=1, stable=True)
    return positives, level.gather(1, order)


def _count_reaching(
    scores: Float[Tensor, "query gallery"],
    positives: Float[Tensor, "query pos"],
    reaches_worst: Bool[Tensor, "query gallery"],
) -> Int[Tensor, "query pos"]:
    """`count_at_least` of the few scores that reach the worst positive of their row, in one search over all rows.

    A key is the row in its upper 32 bits and the score in its lower 32 bits, so the keys of all rows are in one order.
    """
    rows, width = positives.shape
    reaching = _true_positions(reaches_worst)
    row = reaching // scores.shape[1]
    upper_bits = torch.arange(rows, device=scores.device) << 32
    keys = _sortable_integers(scores.flatten()[reaching]) + upper_bits[row]
    bounds = (_sortable_integers(positives) + upper_bits[:, None]).flatten()
    reached = torch.searchsorted(bounds, keys, right=True) - row * width  # positives of the row at most as high
    counts = torch.bincount(reached + row * (width + 1), minlength=rows * (width + 1)).view(rows, width + 1)
    return _sum_from_here(counts[:, 1:])


def _sum_from_here(values: Shaped[Tensor, "query pos"]) -> Shaped[Tensor, "query pos"]:
    """For each column the sum of the row from this column to the last."""
    return values.flip(1).cumsum(1).flip(1)


def _sorted(scores: Float[Tensor, "query gallery"]) -> Float[Tensor, "query gallery"]:
    """The rows in ascending order. On a CPU they are sorted in place by NumPy, in a tenth of the time of torch."""
    if scores.device.type != "cpu":
        return scores.sort(1).values
    scores.numpy().sort(axis=1)
    return scores


def _sortable_integers(values: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """int64 numbers of 32 bits in the order of the float32 values; -0.0 and 0.0 become the same number."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
