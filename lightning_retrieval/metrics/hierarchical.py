"""Hierarchical metrics as functions of the ranks of the positives, for labels with several levels.

Conventions (HAPPIER, Ramzi et al., ECCV 2022). An image that shares l of the L label levels with the query has level l;
it is a positive if l > 0. With r_i the rank of positive i:

    H-AP         sum over i of H-rank_i / r_i, / sum over i of rel_i, with rel_i = (l_i / L)^alpha / (number of images
                 of exactly level l_i) and H-rank_i = sum over j scoring at least as high, i itself included, of
                 min(rel_i, rel_j)
    ASI          mean over n = 1, ..., N, the number of positives, of SI(n): the size of the intersection of the first n
                 images of the list with the first n images of an ideal list, as multisets of levels, divided by n
    NDCG-levels  NDCG with gain 2^l - 1

Ties count against the model: of images that tie, those that share the fewest levels come first. The functions are like
those of `lightning_retrieval.metrics.definitions`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.metrics.definitions import discounted_sum
from lightning_retrieval.ranking.ranks import PositiveRanks


def h_ap(ranks: PositiveRanks, alpha: float) -> Float[Tensor, " query"]:
    """H-AP.

    Args:
        ranks: of the positives.
        alpha: how much more a finer level counts, > 0.
    """
    level = torch.arange(1, ranks.levels + 1, device=ranks.rank.device)
    highest = ranks.level.amax(1, keepdim=True).clamp(min=1)  # (query, 1); see `relevance_of_levels` of HAPLoss
    relevance_of_level = (level.double() / highest).clamp(max=1) ** alpha / _level_sizes(ranks).clamp(
        min=1
    )  # (query, level)
    relevance = relevance_of_level.gather(1, (ranks.level - 1).clamp(min=0))  # (query, pos)
    relevance = torch.where(ranks.is_positive, relevance, 0.0)
    h_rank = torch.zeros_like(relevance)
    for index in range(ranks.levels):
        of_this_level = ranks.level == index + 1
        smaller = torch.minimum(relevance, relevance_of_level[:, index, None])
        h_rank += of_this_level * ranks.sum_at_least(smaller)
    return (h_rank / ranks.rank.clamp(min=1)).sum(1) / relevance.sum(1)


def average_set_intersection(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """ASI."""
    length = ranks.rank.shape[1]
    n = torch.arange(1, length + 1, device=ranks.rank.device)
    level_sizes = _level_sizes(ranks)
    intersection = torch.zeros_like(ranks.rank)  # (query, n)
    finer = torch.zeros_like(ranks.count)  # number of images of finer levels, which an ideal list has first
    for level in range(ranks.levels, 0, -1):
        of_this_level = (ranks.level == level) & (ranks.position <= length)
        column = ranks.position.clamp(1, length) - 1
        in_list = torch.zeros_like(ranks.rank).scatter_add_(1, column, of_this_level.long()).cumsum(1)
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
    """The number of images of exactly each level, the coarsest level first."""
    sizes = [(ranks.level == level).sum(1) for level in range(1, ranks.levels + 1)]
    return torch.stack(sizes, 1)
