"""Smooth-AP (Brown, Xie, Kalogeiton, Zisserman: "Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval",
ECCV 2020).

The AP of a query is the mean, over its positives i, of (rank of i among the positives) / (rank of i among all items). A
rank is 1 + the number of items j that score above i (eq. 3). Smooth-AP replaces this step function by a sigmoid
(eq. 5-6):

    rank(i) = 1 + sum over j != i of sigma((s_j - s_i) / tau),   loss = 1 - mean over queries of AP   (eq. 7)

Symbols: s `scores`, tau `tau`, S_P `relevant`, S_P + S_N `candidate`. Differences from the official code: the query is
not in its own list (the official code counts it as a positive, and so does `include_self=True`), classes may have any
sizes, and rows may come in any order.
"""

from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.arguments import Positive, checked
from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.score_block import ScoreBlock, at, soft_ranks


def smooth_ap(block: ScoreBlock, *, tau: float) -> Float[Tensor, " query"]:
    """1 - the smoothed AP of each list (equations 5-7).

    Args:
        block: ranked lists with at least one positive each.
        tau: temperature of the sigmoid, > 0.
    """
    positives = block.positives
    query, i = positives.query, positives.index  # (pos,), (pos,)
    s = (block.scores / tau).masked_fill(~block.candidate, -torch.inf)  # (query, gallery)
    s_i = at(s, query, i)  # (pos,)
    rank = soft_ranks(s, query, s_i)  # (pos,)
    rank_among_positives = soft_ranks(positives.in_columns(s_i), query, s_i)  # (pos,)
    precision = rank_among_positives / rank  # (pos,)
    return 1 - positives.mean(precision)


class SmoothAPLoss(RetrievalLoss):
    """Smooth-AP: 1 - AP with ranks counted by sigmoids of temperature tau.

    Args:
        tau: temperature of the sigmoid, > 0. With a small value, the loss follows AP closely, and only pairs of nearly
            equal scores have a gradient. With a large value, all pairs have a gradient. The paper trains with 0.01.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `tau` is not a number from 1e-12 to 1e12, or `reduction` is unknown.
        TypeError: if `tau` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], requires_grad=True)
        >>> loss = SmoothAPLoss(tau=0.01)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)  # the positive of each query comes first
        0.0
        >>> round(loss(embeddings, torch.tensor([7, 3, 7, 3])).item(), 4)  # it comes last or last but one
        0.5833

    Cost:
        Time grows with (queries) x (positives per query) x (references); memory is that of one block of queries.

    Relations:
        The loss converges to 1 - AP as tau -> 0 if no scores tie. It is not an upper bound of 1 - AP.
    """

    approximates_ap = True

    def __init__(
        self,
        tau: Positive = 0.01,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.tau = checked(self, tau=tau)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return smooth_ap(block, tau=self.tau)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery
