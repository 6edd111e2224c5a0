"""Computes the curves of an evaluation set: precision over recall, and histograms of the scores of pairs.

Like `compute`, both computations are collective operations of the metric's processes. The results do not depend on the
number of processes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.metrics.query_gallery import RankingInput
from lightning_retrieval.metrics.retrieval import RetrievalMetrics
from lightning_retrieval.ranking.ranks import PositiveRanks, ieee_products
from lightning_retrieval.ranking.rows import float64_device

FINE_BINS = 20_000  # number of bins from -1 to 1 in which pairs are counted before they are merged for a figure
_BLOCK_GALLERY = 1 << 14  # number of gallery images that are scored at a time


def mean_precision(metrics: RetrievalMetrics, steps: int = 100) -> Float[Tensor, " step"]:
    """The mean interpolated precision at recall 0, 1 / steps, ..., 1 over the queries with a positive.

    The interpolated precision at a recall r is the highest precision at any recall of at least r, as in TREC and
    PASCAL VOC. Positives share the finest label, or are relevant by the metric's rule.

    Args:
        metrics: the metric that holds the embeddings of the set.
        steps: number of steps from recall 0 to 1.
    """
    rows, shard = metrics.gather()
    lists = metrics.ranking_input(rows.at_finest_level())
    shape = (len(lists.query_ids), steps + 1)
    values = torch.full(shape, torch.nan, dtype=torch.float64, device=float64_device(rows.ids.device))
    if not lists.is_empty:
        values.zero_()
        for ranks in lists.positive_ranks():
            values[ranks.queries] = interpolated_precision(ranks, steps)
    shard.add_up(values)  # for each query, all other processes have zeros, so the sum is exact
    return values[~values[:, 0].isnan()].mean(0)


def interpolated_precision(ranks: PositiveRanks, steps: int) -> Float[Tensor, "query step"]:
    """The interpolated precision of each query at recall 0, 1 / steps, ..., 1; NaN without a positive."""
    count = ranks.count[:, None]
    best = ranks.precision.cummax(1).values  # columns begin with the worst positive, where recall is 1
    step = torch.arange(steps + 1, device=count.device)
    needed = ((step * count + steps - 1) // steps).clamp(min=1)  # smallest number of positives with this recall
    return best.gather(1, (count - needed).clamp(min=0)).masked_fill(count == 0, torch.nan)


def pair_counts(metrics: EmbeddingMetric, bins: int) -> Int[Tensor, "2 bins"]:
    """Histograms of the scores of positive and of negative pairs (query, candidate), in equal bins of [-1, 1].

    Args:
        metrics: the metric that holds the embeddings of the set.
        bins: number of bins.
    """
    rows, shard = metrics.gather()
    lists = metrics.ranking_input(rows)
    counts = torch.zeros(2 * bins, dtype=torch.int64, device=rows.ids.device)
    for _, _, scores, is_relevant, is_candidate in score_blocks(lists):
        bin_index = scores.add_(1).mul_(bins / 2).long().clamp_(0, bins - 1)
        bin_index += bins * ~is_relevant
        counts += torch.bincount(bin_index[is_candidate], minlength=2 * bins)
    shard.add_up(counts)
    return counts.view(2, bins)


def occupied_bins(counts: Int[Tensor, "2 fine"], bins: int) -> tuple[Int[Tensor, "2 bins"], Float[Tensor, " edge"]]:
    """Merge fine bins into at most `bins` equal bins over the occupied range; return their counts and their edges.

    Args:
        counts: numbers of positive and of negative pairs in equal bins from -1 to 1.
        bins: maximum number of merged bins.
    """
    occupied = counts.sum(0).nonzero()[:, 0].tolist()
    if not occupied:
        occupied = [0]
    first = occupied[0]
    length = occupied[-1] + 1 - first
    width = -(-length // bins)  # number of fine bins in a merged bin, rounded up
    number = -(-length // width)
    positions = first + width * torch.arange(number + 1, dtype=torch.float64)
    edges = -1 + positions * (2 / counts.shape[1])
    padded = torch.nn.functional.pad(counts[:, first:], (0, width * number))
    merged = padded[:, : width * number].reshape(2, number, width).sum(2)
    return merged, edges


class ScoreBlock(NamedTuple):
    """The scores of a block of queries with a block of the gallery.

    Attributes:
        queries: positions of the queries.
        gallery: positions of the images of the gallery.
        scores: cosine similarities.
        relevant: which images are relevant candidates; with labels of several levels, those of the finest label.
        candidate: which images are in the list of the query.
    """

    queries: slice
    gallery: slice
    scores: Float[Tensor, "query gallery"]
    relevant: Bool[Tensor, "query gallery"]
    candidate: Bool[Tensor, "query gallery"]


def score_blocks(ranked: RankingInput) -> Iterator[ScoreBlock]:
    """The scores of this process's queries with the gallery, block by block.

    Args:
        ranked: queries and gallery.
    """
    device = ranked.query_ids.device
    lists = ranked.lists.finest
    # The blocks do not depend on the number of processes, so neither do the last digits of the scores.
    for begin in range(0, len(ranked.gallery_ids), _BLOCK_GALLERY):
        end = min(begin + _BLOCK_GALLERY, len(ranked.gallery_ids))
        images = torch.arange(begin, end, device=device)
        gallery = ranked.gallery_rows.range(begin, end).to(device)
        for queries, block in ranked.query_rows.blocks():
            with ieee_products():
                scores = queries.to(device) @ gallery.T
            rows = torch.arange(block.start, block.stop, device=device)
            yield ScoreBlock(block, slice(begin, end), scores, *lists.masks(rows, images))
