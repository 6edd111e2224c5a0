"""What pictures show of an evaluation set: precision at each recall, and the scores of right and wrong candidates.

All are collective where there are several processes, as `compute` is, and come out the same for any number of them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.distributed import sum_over_ranks
from lightning_retrieval.metrics.retrieval import RetrievalMetrics
from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.ranking.ranks import PositiveRanks, positive_ranks

_QUERIES, _GALLERY = 256, 1 << 16  # of a block of scores


def mean_precision(metrics: RetrievalMetrics, steps: int = 100) -> Float[Tensor, " level"]:
    """Mean over the queries with a positive of the interpolated precision at recall 0, 1 / steps, ..., 1.

    The interpolated precision at a recall is the highest at any recall of at least as much, as TREC and PASCAL VOC have
    it. With label levels, the finest is looked at.
    """
    rows, ranking, (part, parts) = metrics.ranked()
    labels = rows.labels[:, :1].contiguous()
    values = torch.full((len(ranking.queries), steps + 1), torch.nan, dtype=torch.float64, device=labels.device)
    if len(ranking.queries) and len(ranking.gallery):
        values.zero_()
        blocks = positive_ranks(
            ranking.queries,
            labels[ranking.query_rows],
            ranking.gallery,
            labels[ranking.gallery_rows],
            ranking.own,
            part=part,
            parts=parts,
        )
        for ranks in blocks:
            values[ranks.queries] = _interpolated(ranks, steps)
    values = sum_over_ranks(values)  # each row is another rank's zero: the sum is exact
    return values[~values[:, 0].isnan()].mean(0)


def _interpolated(ranks: PositiveRanks, steps: int) -> Float[Tensor, "query level"]:
    real = ranks.level > 0
    count = real.sum(1, keepdim=True)
    precision = torch.where(real, ranks.rank_among_positives.double() / ranks.rank.clamp(min=1), 0.0)
    best = precision.cummax(1).values  # the worst positive, where recall is 1, stands first
    step = torch.arange(steps + 1, device=count.device)
    needed = ((step * count + steps - 1) // steps).clamp(min=1)  # positives at the least for this recall
    return best.gather(1, (count - needed).clamp(min=0)).masked_fill(count == 0, torch.nan)


def pair_counts(metrics: EmbeddingMetric, bins: int) -> Int[Tensor, "2 bins"]:
    """How many positive and how many negative pairs (query, candidate) score in each of equal bins from -1 to 1."""
    rows, ranking, (part, parts) = metrics.ranked()
    device = rows.ids.device
    query_ids, query_labels = rows.ids[ranking.query_rows], rows.labels[ranking.query_rows]
    ids, labels = rows.ids[ranking.gallery_rows], rows.labels[ranking.gallery_rows]
    column = torch.arange(len(ids), device=device)
    counts = torch.zeros(2 * bins, dtype=torch.int64, device=device)
    # The grid of blocks does not depend on the number of processes, and so neither do the scores' last digits.
    for start in range(part * _QUERIES, len(query_ids), parts * _QUERIES):
        block = slice(start, start + _QUERIES)
        queries = ranking.queries[block].to(device)
        for begin in range(0, len(ids), _GALLERY):
            some = slice(begin, begin + _GALLERY)
            scores = queries @ ranking.gallery[some].to(device).T
            place = scores.add_(1).mul_(bins / 2).long().clamp_(0, bins - 1)
            place += bins * ~metrics.relevant(query_ids[block], query_labels[block], ids[some], labels[some])
            others = ranking.own[block, None] != column[some]
            counts += torch.bincount(place[others], minlength=2 * bins)
    return sum_over_ranks(counts).view(2, bins)
