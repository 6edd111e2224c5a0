"""Recall@k surrogate (Patel, Tolias, Matas: "Recall@k Surrogate Loss with Large Batches and Similarity Mixup", CVPR
2022).

    r_x = 1 + sum over z != x of sigma((s_z - s_x) / tau_rank)
    R_k = min(sum over positives x of sigma((k - r_x) / tau_k), k) / min(k, number of positives)
    loss = 1 - mean over k of R_k, averaged over queries

Symbols: `tau_rank` is tau_2 there, `tau_k` is tau_1. Where we differ: the query is not in its own list. In the official
code it is ranked, though not counted as a positive, so that the best positive has rank 2; `include_self=True` does so.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_integer, check_positive
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.indexing import at


class RecallAtKLoss(RetrievalLoss):
    """1 - recall@k, averaged over several k, with soft ranks and a soft threshold.

    Args:
        ks: the k, each >= 1; one beyond the number of rows ranked counts as that number.
        tau_rank: temperature of the sigmoids that count a rank, > 0.
        tau_k: temperature of the sigmoid that compares a rank with k, > 0; one number, or one for each k.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: rank the query itself too, as the official code does. For comparison only.

    Raises:
        ValueError: if `ks` is empty or holds a number below 1, a temperature is not a finite number > 0, or there are
            not as many `tau_k` as `ks`.
        TypeError: if a k is not an integer or a temperature not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import RecallAtKLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = RecallAtKLoss(ks=(1, 2), tau_k=0.1)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.5

    Cost:
        Time grows with (queries) x (positives of each) x (references); memory stays that of one block.

    Relations:
        Its ranks are those of `SmoothAPLoss`.
    """

    self_is_positive = False

    def __init__(
        self,
        ks: Sequence[int] = (1, 2, 4, 8, 16),
        tau_rank: float = 0.01,
        tau_k: float | Sequence[float] = 1.0,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        if not isinstance(ks, Sequence):
            raise TypeError(f"{self.name}: `ks` must be a sequence of integers, got {ks!r}.")
        if len(ks) == 0:
            raise ValueError(f"{self.name}: `ks` must hold at least one k, got none.")
        self.ks = tuple(check_integer(self.name, "ks", k, least=1) for k in ks)
        self.tau_rank = check_positive(self.name, "tau_rank", tau_rank)
        if not isinstance(tau_k, (int, float, str)) and isinstance(tau_k, Sequence):
            self.tau_k: float | tuple[float, ...] = tuple(check_positive(self.name, "tau_k", tau) for tau in tau_k)
            if len(self.tau_k) != len(self.ks):
                raise ValueError(
                    f"{self.name}: `tau_k` must be one number or one for each of the {len(self.ks)} ks, got "
                    f"{len(self.tau_k)}."
                )
        else:
            self.tau_k = check_positive(self.name, "tau_k", tau_k)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - mean over k of recall@k."""
        query, x = relevant.nonzero(as_tuple=True)
        s = (scores / self.tau_rank).masked_fill(~candidate, -torch.inf)
        rank = 0.5 + s.index_select(0, query).sub_(at(s, query, x)[:, None]).sigmoid_().sum(
            1
        )  # (pos, gallery) -> (pos,)
        ks = torch.tensor(self.ks, dtype=s.dtype, device=s.device).clamp(max=scores.shape[1])
        tau_k = torch.as_tensor(self.tau_k, dtype=s.dtype, device=s.device)
        within = torch.sigmoid((ks - rank[:, None]) / tau_k)  # (pos, k)
        found = s.new_zeros(len(s), len(ks)).index_add(0, query, within).minimum(ks)
        recall = found / torch.minimum(ks, relevant.sum(1, keepdim=True))
        return 1 - recall.mean(1)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery

    def extra_repr(self) -> str:
        return f"ks={self.ks}, tau_rank={self.tau_rank}, tau_k={self.tau_k}, {super().extra_repr()}"
