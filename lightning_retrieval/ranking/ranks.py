"""Hard ranks of the positives: what every retrieval metric is a function of, counted in one place.

The rank of a positive is the number of candidates that score at least as high, itself counted, so ties count against
the model. Scores are computed block of queries by block of queries; no list of (query, candidate) entries exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The last digits of a product depend on its shape. Blocks of a fixed number of rows (64 or more), the tail padded, give
# a query the same scores however the queries were shared out; columns padded to a multiple of all kernels' widths give
# equal embeddings equal scores, in the last columns as in the first, so that ties are ties.
_BLOCK_ROWS = (256, 128, 64)
_COLUMNS = 384
_BLOCK_SCORES = 1 << 26
_PIECE = 384 * 256  # rows of a gallery elsewhere that are brought to the device at a time
# Up to this share of candidates that can change a rank, they are picked out; beyond it, all scores are sorted.
_FEW = 1 / 16


@dataclass(frozen=True)
class PositiveRanks:
    """Ranks of the positives of a block of queries, worst positive first, rows padded to the longest.

    Attributes:
        queries: index of each row's query.
        rank: candidates scoring at least as high as the positive.
        rank_among_positives: positives scoring at least as high.
        level: how many label levels the positive shares with the query, 0 where a row is padded. Of positives that
            tie, the one that shares most comes first.
    """

    queries: Int[Tensor, " query"]
    rank: Int[Tensor, "query pos"]
    rank_among_positives: Int[Tensor, "query pos"]
    level: Int[Tensor, "query pos"]


def positive_ranks(
    queries: Float[Tensor, "query dim"],
    query_labels: Int[Tensor, "query level"],
    gallery: Float[Tensor, "gallery dim"],
    gallery_labels: Int[Tensor, "gallery level"],
    own: Int[Tensor, " query"],
    *,
    part: int = 0,
    parts: int = 1,
) -> Iterator[PositiveRanks]:
    """Count the ranks of all positives, a block of queries at a time.

    Args:
        queries: unit rows.
        query_labels: any integers, finest level first; positive is what shares the last.
        gallery: unit rows, sorted by the last level of their labels.
        gallery_labels: sorted by the last level.
        own: the query's own row in the gallery, which is not in its list, or -1.
        part: which share of the blocks to count, from 0.
        parts: number of shares; the grid of blocks does not depend on it.

    Cost:
        One block of scores and a few of its size. The time is that of the score product, and where the model is good a
        few passes over the scores, else their sort; for P positives a query it grows with log P. The labels' device
        counts; embeddings that lie elsewhere are brought there in pieces, once for each block.
    """
    size, device = len(gallery), query_labels.device
    columns = -(-size // _COLUMNS) * _COLUMNS
    rows = next((r for r in _BLOCK_ROWS if r * columns <= _BLOCK_SCORES), _BLOCK_ROWS[-1])
    coarse, query_coarse = gallery_labels[:, -1].contiguous(), query_labels[:, -1].contiguous()
    first = torch.searchsorted(coarse, query_coarse)
    last = torch.searchsorted(coarse, query_coarse, right=True)
    gallery = torch.nn.functional.pad(gallery, (0, 0, 0, columns - size))
    piece = _pieces(columns, gallery.device, device)
    scores = torch.empty(rows, columns, dtype=gallery.dtype, device=device)
    padded = torch.zeros(rows, gallery.shape[1], dtype=gallery.dtype, device=device)
    for start in range(part * rows, len(queries), parts * rows):
        index = torch.arange(start, min(start + rows, len(queries)), device=device)
        padded[: len(index)] = queries[start : start + rows]
        for begin in range(0, columns, piece):
            torch.mm(padded, gallery[begin : begin + piece].to(device).T, out=scores[:, begin : begin + piece])
        scores[:, size:] = -torch.inf
        block = scores[: len(index)]
        yield _block_ranks(block, index, first[index], last[index], own[index], query_labels, gallery_labels)


def _pieces(columns: int, place: torch.device, device: torch.device) -> int:
    """How many rows of the gallery are multiplied at a time."""
    return columns if place == device else _PIECE


def _block_ranks(
    scores: Tensor, index: Tensor, first: Tensor, last: Tensor, own: Tensor, labels: Tensor, gallery_labels: Tensor
) -> PositiveRanks:
    excluded = (own >= 0).nonzero()[:, 0]
    scores[excluded, own[excluded]] = -torch.inf
    width = int((last - first).max()) if len(index) else 0
    column = first[:, None] + torch.arange(max(width, 1), device=scores.device)  # (query, pos)
    missing = (column >= last[:, None]) | (column == own[:, None])
    column = column.clamp(max=scores.shape[1] - 1)
    positives = scores.gather(1, column).masked_fill(missing, torch.inf)
    level = torch.zeros_like(column)
    if labels.shape[1] > 1:
        level = (gallery_labels[column.clamp(max=len(gallery_labels) - 1)] == labels[index, None]).sum(2)
        level, order = level.masked_fill(missing, 0).sort(dim=1, descending=True, stable=True)
        positives = positives.gather(1, order)
    positives, order = positives.sort(dim=1, stable=True)
    real = positives < torch.inf
    level = level.gather(1, order) if labels.shape[1] > 1 else real.long()
    below = torch.searchsorted(positives, positives)  # real ones come first, so this counts real ones only
    return PositiveRanks(index, count_at_least(scores, positives), real.sum(1, keepdim=True) - below, level)


def count_at_least(scores: Float[Tensor, "query gallery"], positives: Float[Tensor, "query pos"]) -> Tensor:
    """For each of the ascending positives of a row, how many of the row's scores are at least as high.

    The scores may come out sorted.
    """
    rows, width = positives.shape
    can_matter = scores >= positives[:, :1]
    if scores.dtype != torch.float32 or int(can_matter.sum()) > _FEW * scores.numel():
        return scores.shape[1] - torch.searchsorted(_sorted(scores), positives)
    row, column = can_matter.nonzero(as_tuple=True)
    offset = torch.arange(rows, device=scores.device) << 32
    keys = _ordered(scores[row, column]) + offset[row]
    bounds = (_ordered(positives) + offset[:, None]).flatten()
    passed = torch.searchsorted(bounds, keys, right=True) - row * width  # positives at most as high
    counts = torch.bincount(passed + row * (width + 1), minlength=rows * (width + 1)).view(rows, width + 1)
    return counts[:, 1:].flip(1).cumsum(1).flip(1)


def _sorted(scores: Float[Tensor, "query gallery"]) -> Float[Tensor, "query gallery"]:
    """Ascending rows; in place on a CPU, where NumPy's vectorised sort takes a tenth of torch's time."""
    if scores.device.type != "cpu":
        return scores.sort(1).values
    scores.numpy().sort(axis=1)
    return scores


def _ordered(values: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Integers of 32 bits, widened to int64, in the order of the float32 values; -0.0 and 0.0 are one."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
