"""Computes the curves of an evaluation set: precision over recall, and histograms of the scores of pairs.

Like `compute`, both computations are collective operations of the metric's processes. The results do not depend on the
number of processes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.metrics.retrieval import RetrievalMetrics
from lightning_retrieval.ranking.ranks import PositiveRanks
from lightning_retrieval.ranking.rows import float64_device

FINE_BINS = 20_000  # number of bins from -1 to 1 in which pairs are counted before they are merged for a figure


def mean_precision(metrics: RetrievalMetrics, steps: int = 100) -> Float[Tensor, " step"]:
    """The mean interpolated precision at recall 0, 1 / steps, ..., 1 over the queries with a positive.

    The interpolated precision at a recall r is the highest precision at any recall of at least r, as in TREC and
    PASCAL VOC. Positives share the finest label, or are relevant by the metric's rule.

    Args:
        metrics: the metric that holds the embeddings of the set.
        steps: number of steps from recall 0 to 1.
    """
    ranked = metrics.ranked_lists(metrics.gather().at_finest_level())
    shape = (len(ranked.query_ids), steps + 1)
    values = torch.zeros(shape, dtype=torch.float64, device=float64_device(ranked.query_ids.device))
    if ranked.is_empty:
        values.fill_(torch.nan)
    for ranks in ranked.positive_ranks():
        values[ranks.queries] = interpolated_precision(ranks, steps)
    ranked.shard.add_up(values)  # for each query, all other processes have zeros, so the sum is exact
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
    ranked = metrics.ranked_lists()
    counts = torch.zeros(2 * bins, dtype=torch.int64, device=ranked.query_ids.device)
    for pairs in ranked.score_blocks():
        bin_index = pairs.scores.add_(1).mul_(bins / 2).long().clamp_(0, bins - 1)
        bin_index += bins * ~pairs.relevant
        counts += torch.bincount(bin_index[pairs.candidate], minlength=2 * bins)
    ranked.shard.add_up(counts)
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
