"""Hard ranks of the positives: what every retrieval metric is a function of, counted in one place.

The rank of a positive is the number of candidates that score at least as high, itself counted, so ties count against
the model. Nothing is sorted but the few positives: all other candidates are only counted, block of queries by block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# The last digits of a product depend on its shape. Blocks of a fixed number of rows (64 or more), the tail padded, give
# a query the same scores however the queries were shared out; columns padded to a multiple of all kernels' widths give
# equal embeddings equal scores, in the last columns as in the first, so that ties are ties.
_BLOCK_ROWS = (256, 128, 64)
_COLUMNS = 384
_BLOCK_SCORES = 1 << 26
# Below this share of candidates that can change a rank, they are picked out; below this number of positives, each is
# counted by a pass over the block; beyond both, candidates are sorted in among the positives.
_FEW = 1 / 16
_PASSES = 16


@dataclass(frozen=True)
class PositiveRanks:
    """Ranks of the positives of a block of queries, worst positive first, rows padded to the longest.

    Attributes:
        queries: index of each row's query.
        rank: candidates scoring at least as high as the positive.
        rank_among_positives: positives scoring at least as high.
        real: false where a row is padded.
    """

    queries: Int[Tensor, " query"]
    rank: Int[Tensor, "query pos"]
    rank_among_positives: Int[Tensor, "query pos"]
    real: Bool[Tensor, "query pos"]


def positive_ranks(
    queries: Float[Tensor, "query dim"],
    query_labels: Int[Tensor, " query"],
    gallery: Float[Tensor, "gallery dim"],
    gallery_labels: Int[Tensor, " gallery"],
    own: Int[Tensor, " query"],
    *,
    part: int = 0,
    parts: int = 1,
) -> Iterator[PositiveRanks]:
    """Count the ranks of all positives, a block of queries at a time.

    Args:
        queries: unit rows.
        query_labels: any integers.
        gallery: unit rows, sorted by label.
        gallery_labels: sorted.
        own: the query's own row in the gallery, which is not in its list, or -1.
        part: which share of the blocks to count, from 0.
        parts: number of shares; the grid of blocks does not depend on it.

    Cost:
        One block of scores and one mask of its size. The time is that of the score product plus a few passes over the
        block; for P positives a query it grows with log P.
    """
    columns = -(-len(gallery) // _COLUMNS) * _COLUMNS
    rows = next((r for r in _BLOCK_ROWS if r * columns <= _BLOCK_SCORES), _BLOCK_ROWS[-1])
    first = torch.searchsorted(gallery_labels, query_labels)
    last = torch.searchsorted(gallery_labels, query_labels, right=True)
    size = len(gallery)
    gallery = torch.nn.functional.pad(gallery, (0, 0, 0, columns - size))
    scores = gallery.new_empty(rows, columns)
    padded = gallery.new_zeros(rows, gallery.shape[1])
    for start in range(part * rows, len(queries), parts * rows):
        index = torch.arange(start, min(start + rows, len(queries)), device=queries.device)
        padded[: len(index)] = queries[start : start + rows]
        torch.mm(padded, gallery.T, out=scores)
        scores[:, size:] = -torch.inf
        yield _block_ranks(scores[: len(index)], index, first[index], last[index], own[index])


def _block_ranks(scores: Tensor, index: Tensor, first: Tensor, last: Tensor, own: Tensor) -> PositiveRanks:
    excluded = (own >= 0).nonzero()[:, 0]
    scores[excluded, own[excluded]] = -torch.inf
    width = int((last - first).max()) if len(index) else 0
    column = first[:, None] + torch.arange(max(width, 1), device=scores.device)  # (query, pos)
    positives = scores.gather(1, column.clamp(max=scores.shape[1] - 1))
    missing = (column >= last[:, None]) | (column == own[:, None])
    positives = positives.masked_fill(missing, torch.inf).sort(1).values
    real = positives < torch.inf
    below = torch.searchsorted(positives, positives)  # real ones come first, so this counts real ones only
    return PositiveRanks(index, _count_at_least(scores, positives), real.sum(1, keepdim=True) - below, real)


def _count_at_least(scores: Float[Tensor, "query gallery"], positives: Float[Tensor, "query pos"]) -> Tensor:
    """For each of the ascending positives of a row, how many of the row's scores are at least as high."""
    rows, width = positives.shape
    can_matter = scores >= positives[:, :1]
    if scores.dtype == torch.float32 and int(can_matter.sum()) <= _FEW * scores.numel():
        row, column = can_matter.nonzero(as_tuple=True)
        offset = torch.arange(rows, device=scores.device) << 32
        keys = _ordered(scores[row, column]) + offset[row]
        bounds = (_ordered(positives) + offset[:, None]).flatten()
        passed = torch.searchsorted(bounds, keys, right=True) - row * width  # positives at most as high
        bins = passed + row * (width + 1)
    elif width <= _PASSES:
        return torch.stack([(scores >= p[:, None]).sum(1, dtype=torch.int32) for p in positives.unbind(1)], 1).long()
    else:
        bins = torch.searchsorted(positives, scores, right=True, out_int32=True)
        bins += torch.arange(rows, device=scores.device, dtype=torch.int32)[:, None] * (width + 1)
    counts = torch.bincount(bins.flatten(), minlength=rows * (width + 1)).view(rows, width + 1)
    return counts[:, 1:].flip(1).cumsum(1).flip(1)


def _ordered(values: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Integers of 32 bits, widened to int64, in the order of the float32 values; -0.0 and 0.0 are one."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
