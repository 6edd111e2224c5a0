"""Hard ranks of the positives. Every retrieval metric is a function of them, and they are counted only here.

The rank of a positive is the number of candidates that score at least as high, itself included, so ties count against
the model. Scores are computed for one block of queries at a time; the whole (query, gallery) matrix never exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.ranking.float64 import float64_device
from lightning_retrieval.ranking.precision import ieee_products

# The last digits of a matrix product depend on its shape. Two rules make scores independent of how the work is
# partitioned. Blocks have a fixed number of rows (64 or more) and the last one is padded, so a query has the same
# scores on any number of processes. Columns are padded to a multiple of all kernels' widths, so equal embeddings have
# equal scores wherever they are in the gallery, and ties are recognised as ties.
_BLOCK_ROWS = (256, 128, 64)
_COLUMN_MULTIPLE = 384
_MAX_BLOCK_SCORES = 1 << 26
# Rows of the gallery that are copied at a time, if it is kept on another device than the labels.
_GALLERY_CHUNK = 384 * 256
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
        Memory for one block of scores and a few tensors of its size. The time is that of the matrix product plus a few
        passes over the scores if all positives rank high, or a sort of the scores if they do not; it grows with the
        logarithm of the number of positives. Ranks are counted on the labels' device. Embeddings on another device are
        copied there in chunks, once for each block.
    """
    size, device = len(gallery), query_labels.device
    columns = -(-size // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    rows = _rows_of_a_block(columns)
    coarsest, query_coarsest = gallery_labels[:, -1].contiguous(), query_labels[:, -1].contiguous()
    first = torch.searchsorted(coarsest, query_coarsest)
    last = torch.searchsorted(coarsest, query_coarsest, right=True)
    padded_gallery = pad(gallery, (0, 0, 0, columns - size))
    padded_queries = torch.zeros(rows, gallery.shape[1], dtype=gallery.dtype, device=device)
    buffer = torch.empty(rows, columns, dtype=gallery.dtype, device=device)
    for start in range(shard * rows, len(queries), num_shards * rows):
        index = torch.arange(start, min(start + rows, len(queries)), device=device)
        padded_queries[: len(index)] = queries[start : start + rows]
        _multiply(padded_queries, padded_gallery, buffer)
        scores = buffer[: len(index)]
        scores[:, size:] = -torch.inf
        _exclude_self(scores, self_index[index])
        column, missing = _positive_columns(first[index], last[index], self_index[index], columns)
        level = _shared_levels(query_labels[index], gallery_labels, column).masked_fill(missing, 0)
        if query_cameras is not None and gallery_cameras is not None:
            same_camera = gallery_cameras[column.clamp(max=size - 1)] == query_cameras[index, None]
            is_excluded = same_camera & (level == query_labels.shape[1])
            _exclude(scores, column, is_excluded)
            missing |= is_excluded
            level = level.masked_fill(is_excluded, 0)
        positives = scores.gather(1, column).masked_fill(missing, torch.inf)
        ranks = _block_ranks(scores, positives, level, index, query_labels.shape[1])
        yield ranks.to(float64_device(device))


def count_at_least(
    scores: Float[Tensor, "query gallery"], positives: Float[Tensor, "query pos"]
) -> Int[Tensor, "query pos"]:
    """For each of the ascending positives of a row, the number of scores of the row that are at least as high.

    The scores may be sorted in place.
    """
    if scores.dtype == torch.float32:
        reaches_worst = scores >= positives[:, :1]
        if int(reaches_worst.sum()) <= _MAX_COUNTED_FRACTION * scores.numel():
            return _count_reaching(scores, positives, reaches_worst)
    return scores.shape[1] - torch.searchsorted(_sorted(scores), positives)


def _rows_of_a_block(columns: int) -> int:
    for rows in _BLOCK_ROWS:
        if rows * columns <= _MAX_BLOCK_SCORES:
            return rows
    return _BLOCK_ROWS[-1]


def _multiply(
    queries: Float[Tensor, "query dim"], gallery: Float[Tensor, "gallery dim"], out: Float[Tensor, "query gallery"]
) -> None:
    """Write the scores to `out`, in chunks of the gallery if it has to be copied to the device first."""
    chunk = _rows_of_a_chunk(gallery, out.device)
    for begin in range(0, len(gallery), chunk):
        end = begin + chunk
        part = gallery[begin:end].to(out.device)
        with ieee_products():
            torch.mm(queries, part.T, out=out[:, begin:end])


def _rows_of_a_chunk(gallery: Float[Tensor, "gallery dim"], device: torch.device) -> int:
    if gallery.device == device:
        return len(gallery)
    return _GALLERY_CHUNK


def _exclude_self(scores: Float[Tensor, "query gallery"], self_index: Int[Tensor, " query"]) -> None:
    """Set the score of each query with itself to -inf."""
    in_gallery = (self_index >= 0).nonzero()[:, 0]
    scores[in_gallery, self_index[in_gallery]] = -torch.inf


def _exclude(
    scores: Float[Tensor, "query gallery"], column: Int[Tensor, "query pos"], is_excluded: Bool[Tensor, "query pos"]
) -> None:
    """Set the scores of the excluded columns to -inf."""
    row, index = is_excluded.nonzero(as_tuple=True)
    scores[row, column[row, index]] = -torch.inf


def _positive_columns(
    first: Int[Tensor, " query"], last: Int[Tensor, " query"], self_index: Int[Tensor, " query"], columns: int
) -> tuple[Int[Tensor, "query pos"], Bool[Tensor, "query pos"]]:
    """The gallery columns of the positives, and which of them are padding or the query itself."""
    width = max(int((last - first).max()), 1)
    column = first[:, None] + torch.arange(width, device=first.device)  # (query, pos)
    missing = (column >= last[:, None]) | (column == self_index[:, None])
    return column.clamp(max=columns - 1), missing


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


def _block_ranks(
    scores: Float[Tensor, "query gallery"],
    positives: Float[Tensor, "query pos"],
    level: Int[Tensor, "query pos"],
    queries: Int[Tensor, " query"],
    levels: int,
) -> PositiveRanks:
    """Sort the positives by their scores, which are inf at padding, and count their ranks."""
    if levels > 1:  # of positives that tie, the one that shares the most levels comes first
        level, order = level.sort(dim=1, descending=True, stable=True)
        positives = positives.gather(1, order)
    positives, order = positives.sort(dim=1, stable=True)
    level = level.gather(1, order)
    first_tied = torch.searchsorted(positives, positives)
    return PositiveRanks(queries, count_at_least(scores, positives), first_tied, level, levels)


def _count_reaching(
    scores: Float[Tensor, "query gallery"],
    positives: Float[Tensor, "query pos"],
    reaches_worst: Bool[Tensor, "query gallery"],
) -> Int[Tensor, "query pos"]:
    """`count_at_least` of the few scores that reach the worst positive of their row, in one search over all rows.

    A key is the row in its upper 32 bits and the score in its lower 32 bits, so the keys of all rows are in one order.
    """
    rows, width = positives.shape
    row, column = reaches_worst.nonzero(as_tuple=True)
    upper_bits = torch.arange(rows, device=scores.device) << 32
    keys = _sortable_integers(scores[row, column]) + upper_bits[row]
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
