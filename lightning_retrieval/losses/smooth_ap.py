"""Smooth-AP (Brown, Xie, Kalogeiton, Zisserman: "Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval",
ECCV 2020).

AP of a query is the mean, over its positives i, of (rank of i among the positives) / (rank of i among all). A rank is
1 + the number of items j that score above i (eq. 4); Smooth-AP replaces that step by a sigmoid (eq. 5-6):

    rank(i) = 1 + sum over j != i of sigma((s_j - s_i) / tau),   loss = 1 - mean over queries of AP   (eq. 7)

Symbols: s `scores`, tau `tau`, S_P `relevant`, S_P + S_N `candidate`. Where we differ: the query is not in its own list
(the official code counts it as a positive; `include_self=True` does as well), classes may have any sizes and rows any
order.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_positive
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.indexing import at


class SmoothAPLoss(RetrievalLoss):
    """Smooth-AP: 1 - AP with ranks counted by sigmoids of temperature tau.

    Args:
        tau: temperature of the sigmoid, > 0. Small values follow AP closely with gradients from near ties only; large
            ones give gradients from everywhere. The paper trains with 0.01.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list, as the official code does. For comparison only.

    Raises:
        ValueError: if `tau` is not a finite number > 0, or `reduction` is unknown.
        TypeError: if `tau` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], requires_grad=True)
        >>> loss = SmoothAPLoss(tau=0.01)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)  # each one's mate comes first
        0.0
        >>> round(loss(embeddings, torch.tensor([7, 3, 7, 3])).item(), 4)  # each one's mate is last or one before
        0.5833

    Cost:
        Time grows with (queries) x (positives of each) x (references); memory stays that of one block.

    Relations:
        Converges to 1 - AP as tau -> 0 where no scores tie. It is not an upper bound of 1 - AP.
    """

    def __init__(
        self,
        tau: float = 0.01,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.tau = check_positive(self.name, "tau", tau)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - AP of each list, equations 5-7."""
        query, i = relevant.nonzero(as_tuple=True)
        s = (scores / self.tau).masked_fill(~candidate, -torch.inf)
        s_i = at(s, query, i)
        # Each sum runs over all j, i itself among them with sigma(0) = 1/2.
        rank = 0.5 + s.index_select(0, query).sub_(s_i[:, None]).sigmoid_().sum(
            1
        )  # (pos, gallery) -> (pos,), in one buffer
        pair, j = relevant[query].nonzero(as_tuple=True)
        above = torch.sigmoid(at(s, query[pair], j) - s_i.index_select(0, pair))
        rank_among_positives = torch.full_like(rank, 0.5).index_add(0, pair, above)
        ap = torch.zeros_like(s[:, 0]).index_add(0, query, rank_among_positives / rank) / relevant.sum(1)
        return 1 - ap

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery

    def extra_repr(self) -> str:
        return f"tau={self.tau}, {super().extra_repr()}"
