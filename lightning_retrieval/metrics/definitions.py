"""Retrieval metrics as functions of the ranks of the positives (`lightning_retrieval.ranking.ranks`).

Conventions. With r_1 <= r_2 <= ... the ranks of a query's R positives and p_i the number of positives that score at
least as high as positive i (so p_i = i without ties):

    AP           mean over i of p_i / r_i                      (all positives, divided by R)
    AP@R         sum over i with r_i <= R of p_i / r_i, / R    (Musgrave et al., ECCV 2020)
    AP@k         sum over i with r_i <= k of p_i / r_i, / min(k, R)
    R-Precision  number of i with r_i <= R, / R
    RR           1 / h, with h = 1 + (candidates not relevant that score at least as high as the best positive), the
                 rank of the first hit
    R@k          1 if h <= k, else 0
    NDCG         sum over i of 1 / log2(1 + position_i), / its largest value (Järvelin and Kekäläinen, 2002), with
                 position_i = i + (candidates not relevant that score at least as high)

Ties count against the model, as in scikit-learn. The query itself is not in its list. A query without a positive has no
value: `RetrievalMetrics` sets it to NaN, skips it in every mean and reports the number of skipped queries.

Each function takes the ranks of a block of queries and returns one float64 value per query. To add a metric, write such
a function and add one entry to `lightning_retrieval.metrics.table.metrics_table`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.ranking.ranks import PositiveRanks


def average_precision(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """AP: the mean of p_i / r_i over the positives."""
    return ranks.precision.sum(1) / ranks.count.double()


def average_precision_at_r(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """AP@R: AP in which positives with a rank above R count as 0."""
    within = ranks.rank <= ranks.count[:, None]
    return (ranks.precision * within).sum(1) / ranks.count.double()


def average_precision_at_k(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """AP@k: AP in which positives with a rank above k count as 0, divided by min(k, R)."""
    within = ranks.rank <= k
    return (ranks.precision * within).sum(1) / ranks.count.double().clamp(max=k)


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
    gain = discounted_sum(ranks.is_positive.double(), ranks.position)
    position = torch.arange(1, ranks.rank.shape[1] + 1, device=ranks.rank.device)
    ideal_list = (position <= ranks.count[:, None]).double()
    return gain / discounted_sum(ideal_list.flip(1), position.flip(0))


def discounted_sum(gains: Float[Tensor, "query pos"], position: Int[Tensor, "..."]) -> Float[Tensor, " query"]:
    """The sum of gain / log2(1 + position). Columns are in the order of descending positions.

    The terms are added from the first position to the last, so equal lists have equal sums whatever their padding.
    """
    discounted = gains / torch.log2(1.0 + position.clamp(min=1).double())
    return discounted.flip(1).cumsum(1)[:, -1]
