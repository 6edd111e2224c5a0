"""Recall@k surrogate (Patel, Tolias, Matas: "Recall@k Surrogate Loss with Large Batches and Similarity Mixup", CVPR
2022).

    r_x = 1 + sum over z != x of sigma((s_z - s_x) / tau_rank)
    R_k = min(sum over positives x of sigma((k - r_x) / tau_k), k) / min(k, number of positives)
    loss = 1 - mean over k of R_k, averaged over queries

Symbols: `tau_rank` is the paper's tau_2, `tau_k` its tau_1. Difference from the official code: the query is not in its
own list. The official code includes it, though not as a positive, so the best possible rank of a positive is 2;
`include_self=True` does the same.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.arguments import Positive, PositiveInts, checked
from lightning_retrieval.checks import check_positive
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.score_block import ScoreBlock, at, constants, soft_ranks


def recall_at_k(
    block: ScoreBlock, *, ks: Sequence[int], tau_rank: float, tau_k: float | Sequence[float]
) -> Float[Tensor, " query"]:
    """1 - the mean over k of the soft recall@k of each list.

    Args:
        block: ranked lists with at least one positive each.
        ks: the values of k, each >= 1; values above the number of columns are reduced to this number.
        tau_rank: temperature of the ranks, > 0.
        tau_k: temperature of the comparison of a rank with k, > 0; one number, or one for each k.
    """
    positives = block.positives
    query, x = positives.query, positives.index  # (pos,), (pos,)
    s = (block.scores / tau_rank).masked_fill(~block.candidate, -torch.inf)  # (query, gallery)
    r_x = soft_ranks(s, query, at(s, query, x))  # (pos,)

    k = constants(ks, s).clamp(max=s.shape[1])  # (k,)
    tau_1 = constants(tau_k, s)  # (k,), or () for one temperature
    within_k = torch.sigmoid((k - r_x[:, None]) / tau_1)  # (pos, k)
    found = s.new_zeros(len(s), len(k)).index_add(0, query, within_k).minimum(k)  # (query, k)
    possible = torch.minimum(k, positives.of_each_query[:, None])  # (query, k)
    return 1 - (found / possible).mean(1)


class RecallAtKLoss(RetrievalLoss):
    """1 - recall@k, averaged over several k, with soft ranks and a soft threshold.

    Args:
        ks: the values of k, each >= 1; values above the number of ranked rows are reduced to this number.
        tau_rank: temperature of the sigmoids whose sum is a rank, > 0.
        tau_k: temperature of the sigmoid that compares a rank with k, > 0; one number, or one for each k.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `ks` is empty or holds a number below 1, a temperature is not from 1e-12 to 1e12, or `tau_k` is a
            sequence of another length than `ks`.
        TypeError: if a k is not an integer or a temperature is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import RecallAtKLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = RecallAtKLoss(ks=(1, 2), tau_k=0.1)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.5

    Cost:
        Time grows with (queries) x (positives per query) x (references); memory is that of one block of queries.

    Relations:
        The soft ranks of this loss are those of `SmoothAPLoss`.
    """

    self_is_positive = False

    def __init__(
        self,
        ks: PositiveInts = (1, 2, 4, 8, 16),
        *,
        tau_rank: Positive = 0.01,
        tau_k: float | Sequence[float] = 1.0,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.ks = checked(self, ks=ks)
        self.tau_rank = checked(self, tau_rank=tau_rank)
        with owned_by(self.name):
            self.tau_k = _check_tau_k(tau_k, len(self.ks))

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return recall_at_k(block, ks=self.ks, tau_rank=self.tau_rank, tau_k=self.tau_k)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery


def _check_tau_k(tau_k: Any, number: int) -> float | tuple[float, ...]:
    """Return one temperature as a float, several as a tuple; raise unless there are 1 or `number` of them."""
    if not isinstance(tau_k, Sequence):
        return check_positive("tau_k", tau_k)
    temperatures = tuple(check_positive("tau_k", tau) for tau in tau_k)
    if len(temperatures) != number:
        rule = f"must be one number or one for each of the {number} ks"
        raise InvalidValue(rule, argument="tau_k", got=len(temperatures))
    return temperatures
