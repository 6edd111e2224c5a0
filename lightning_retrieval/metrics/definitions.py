"""Retrieval metrics as functions of the ranks of the positives (`lightning_retrieval.ranking.ranks`).

Conventions. Let r_1 <= r_2 <= ... be the ranks of a query's R positives, and p_i the number of positives that score at
least as high as positive i, so that p_i = i without ties. Then:

    AP           mean over i of p_i / r_i                      (all positives, divided by R)
    AP@R         sum over i with r_i <= R of p_i / r_i, / R    (Musgrave et al., ECCV 2020)
    AP@k         sum over i with r_i <= k of p_i / r_i, / min(k, R), or / hits (the number of i with r_i <= k), or / R
    R-Precision  number of i with r_i <= R, / R
    RR           1 / h, with h = 1 + (candidates not relevant that score at least as high as the best positive), the
                 rank of the first hit
    R@k          1 if h <= k, else 0
    RR@k         1 / h if h <= k, else 0
    INP          R / r_R, with r_R the rank of the hardest positive (Ye et al., TPAMI 2021; its mean is mINP)
    NDCG         sum over i of 1 / log2(1 + position_i), / its largest value (Järvelin and Kekäläinen, 2002), with
                 position_i = i + (candidates not relevant that score at least as high)
    NDCG@k       sum over i with position_i <= k of 1 / log2(1 + position_i), / its largest value
    precision@k  number of i with position_i <= k, / k
    recall@k     number of i with position_i <= k, / R

Ties count against the model, as in scikit-learn: the rank of a positive is that of the last candidate tied with it, and
`position_i` is its position if irrelevant candidates come first among tied candidates. The query itself is not in its
list. A query without a positive has no value: `RetrievalMetrics` sets it to NaN, skips it in every mean and reports the
number of skipped queries.

Labels with several levels (HAPPIER, Ramzi et al., ECCV 2022): an image that shares l of the L label levels with the
query has level l; it is a positive if l > 0. Among tied images, those that share the fewest levels come first.

    H-AP         sum over i of H-rank_i / r_i, / sum over i of rel_i, with rel_i = (l_i / L)^alpha / (number of images
                 of exactly level l_i) and H-rank_i = sum of min(rel_i, rel_j) over all positives j that score at least
                 as high as i, i included
    ASI          mean of SI(n) over n = 1, ..., N, with N the number of positives. SI(n) is the size of the intersection
                 of the first n images of the list with the first n images of an ideal list, as multisets of levels,
                 divided by n
    NDCG-levels  NDCG with gain 2^l - 1

Each function takes the ranks of a block of queries and returns one float64 value per query. To add a metric, write such
a function and add one entry to `lightning_retrieval.metrics.retrieval.metrics_table`.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.ranking.ranks import PositiveRanks

Divisor = Literal["min(k, R)", "hits", "R"]


def average_precision(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """AP: the mean of p_i / r_i over the positives."""
    return ranks.precision.sum(1) / ranks.count.double()


def average_precision_at_r(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """AP@R: AP in which positives with a rank above R count as 0."""
    within = ranks.rank <= ranks.count[:, None]
    return torch.where(within, ranks.precision, 0.0).sum(1) / ranks.count.double()


def average_precision_at_k(ranks: PositiveRanks, k: int, divisor: Divisor = "min(k, R)") -> Float[Tensor, " query"]:
    """AP@k: AP in which positives with a rank above k count as 0.

    Args:
        ranks: ranks of the positives.
        k: largest rank that counts.
        divisor: `"min(k, R)"` (Google Landmarks), with which the value is 1 if the first min(k, R) are positives;
            `"hits"`, the number of positives with a rank of at most k (torchmetrics, open-metric-learning); or `"R"`,
            the number of positives (pytorch-metric-learning, trec_eval).
    """
    within = ranks.is_positive & (ranks.rank <= k)
    divisors = {"min(k, R)": ranks.count.clamp(max=k), "hits": within.sum(1).clamp(min=1), "R": ranks.count}
    return torch.where(within, ranks.precision, 0.0).sum(1) / divisors[divisor].double()


def inverse_negative_penalty(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """INP: R divided by the rank of the hardest positive, which is the last positive of the list."""
    hardest = ranks.rank.masked_fill(~ranks.is_positive, 0).amax(1)
    return ranks.count / hardest.double()


def precision_at_k(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """precision@k: the number of positives among the first k positions, divided by k."""
    return _hits(ranks, k).sum(1).double() / k


def recall_of_positives_at_k(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """recall@k: the fraction of the positives that are among the first k positions."""
    return _hits(ranks, k).sum(1) / ranks.count.double()


def reciprocal_rank_at_k(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """RR@k: 1 / h, or 0 if the first hit is after the first k positions."""
    return torch.where(ranks.first_hit <= k, 1 / ranks.first_hit.double(), 0.0)


def ndcg_at_k(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """NDCG@k of the first k positions, with gain 1 for each positive."""
    return discounted_sum(_hits(ranks, k).double(), ranks.position) / _ideal_gain(ranks, ranks.count.clamp(max=k))


def r_precision(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """R-Precision: the fraction of positives with a rank of at most R."""
    within = ranks.is_positive & (ranks.rank <= ranks.count[:, None])
    return within.sum(1) / ranks.count.double()


def first_hit(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """h: the rank of the first hit."""
    return ranks.first_hit.double()


def reciprocal_rank(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """RR: 1 / h."""
    return 1 / ranks.first_hit.double()


def recall_at_k(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """R@k: 1 if h <= k, else 0."""
    return (ranks.first_hit <= k).double()


def ndcg(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """NDCG with gain 1 for each positive."""
    return discounted_sum(ranks.is_positive.double(), ranks.position) / _ideal_gain(ranks, ranks.count)


def discounted_sum(gains: Float[Tensor, "query pos"], position: Int[Tensor, "..."]) -> Float[Tensor, " query"]:
    """The sum of gain / log2(1 + position). Columns are in the order of descending positions.

    Terms are added from the first position to the last, so equal lists have equal sums whatever their padding.
    """
    discount = position.clamp(min=1).double().add_(1).log2_()
    return (gains / discount).flip(1).cumsum(1)[:, -1]


def _hits(ranks: PositiveRanks, k: int) -> Bool[Tensor, "query pos"]:
    """Which positives are among the first k positions."""
    return ranks.is_positive & (ranks.position <= k)


def _ideal_gain(ranks: PositiveRanks, hits: Int[Tensor, " query"]) -> Float[Tensor, " query"]:
    """The discounted gain of a list that begins with `hits` positives."""
    position = torch.arange(1, ranks.rank.shape[1] + 1, device=ranks.rank.device)
    rows = min(2, len(hits))  # accelerators add up a single row in another order than the rows of `discounted_sum`
    gain_of_hits = (1 / torch.log2(1.0 + position.double())).expand(rows, -1).cumsum(1)
    return torch.where(hits > 0, gain_of_hits[-1, hits.clamp(min=1) - 1], 0.0)


def h_ap(ranks: PositiveRanks, alpha: float) -> Float[Tensor, " query"]:
    """H-AP, as defined at the top of this file.

    Args:
        ranks: ranks of the positives.
        alpha: exponent of the relevance, > 0: larger values give finer levels more weight.
    """
    level = torch.arange(1, ranks.levels + 1, device=ranks.rank.device)
    highest = ranks.level.amax(1, keepdim=True).clamp(min=1)  # (query, 1); see `relevance_of_levels` of HAPLoss
    sizes = _level_sizes(ranks).clamp(min=1)  # (query, level)
    relevance_of_level = (level.double() / highest).clamp(max=1) ** alpha / sizes  # (query, level)
    relevance = relevance_of_level.gather(1, (ranks.level - 1).clamp(min=0))  # (query, pos)
    relevance = torch.where(ranks.is_positive, relevance, 0.0)
    h_rank = torch.zeros_like(relevance)
    for index in range(ranks.levels):
        of_this_level = ranks.level == index + 1
        smaller = torch.minimum(relevance, relevance_of_level[:, index, None])
        h_rank += of_this_level * ranks.sum_at_least(smaller)
    return (h_rank / ranks.rank.clamp(min=1)).sum(1) / relevance.sum(1)


def average_set_intersection(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """ASI: the set intersection SI(n), averaged over n."""
    length = ranks.rank.shape[1]
    n = torch.arange(1, length + 1, device=ranks.rank.device)
    level_sizes = _level_sizes(ranks)
    intersection = torch.zeros_like(ranks.rank)  # (query, n)
    finer = torch.zeros_like(ranks.count)  # number of images of finer levels, which come first in an ideal list
    for level in range(ranks.levels, 0, -1):
        of_this_level = (ranks.level == level) & (ranks.position <= length)
        column = ranks.position.clamp(1, length).long() - 1
        in_list = torch.zeros_like(ranks.rank).scatter_add_(1, column, of_this_level.int())
        in_list = in_list.cumsum(1, dtype=in_list.dtype)
        size = level_sizes[:, level - 1]
        in_ideal_list = torch.minimum((n - finer[:, None]).clamp(min=0), size[:, None])
        intersection += torch.minimum(in_list, in_ideal_list)
        finer = finer + size
    counted = n <= ranks.count[:, None]
    return torch.where(counted, intersection.double() / n, 0.0).sum(1) / ranks.count


def graded_ndcg(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """NDCG-levels: NDCG with gain 2^l - 1."""
    gains = torch.where(ranks.is_positive, 2.0**ranks.level - 1, 0.0)
    position = torch.arange(1, ranks.rank.shape[1] + 1, device=ranks.rank.device)
    ideal = discounted_sum(gains.sort(1).values, position.flip(0))
    return discounted_sum(gains, ranks.position) / ideal


def _level_sizes(ranks: PositiveRanks) -> Int[Tensor, "query level"]:
    """The number of images of exactly each level, from level 1 (only the coarsest label is shared) on."""
    sizes = [(ranks.level == level).sum(1) for level in range(1, ranks.levels + 1)]
    return torch.stack(sizes, 1)
