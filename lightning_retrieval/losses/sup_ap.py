"""SupAP (Ramzi, Thome, Rambour, Audebert, Bitot: "Robust and Decomposable Average Precision for Image Retrieval",
NeurIPS 2021, section 3.1): a smooth loss that is never below 1 - AP.

As Smooth-AP, AP of a query is the mean over its positives of (rank among the positives) / (rank among all). SupAP
replaces the step that counts a negative j above the positive i by H^-(t), t = s_j - s_i, which is never below the step,
and counts positives by the true step, without gradient:

    H^-(t) = sigma(t / tau)                 t <= 0
           = start + sigma(t / tau)         0 < t <= delta
           = rho (t - delta) + offset       t > delta

With start = 1/2 it is at least 1 for every t > 0. `offset=None` makes it continuous at delta: sigma(delta / tau) +
start. The linear part goes on giving gradients where a sigmoid has none.

Where we differ: the query is not in its own list; a query without a positive is left out. The official configuration
has offset 1.44, a step down at delta; before its pull request 13 (November 2022) the official code had rho t + offset.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_finite_number, check_positive
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.indexing import at


class SupAPLoss(RetrievalLoss):
    """1 - a lower bound of AP: negatives are counted by a function above the step.

    Args:
        tau: temperature of the sigmoid, > 0.
        rho: slope for negatives that score more than `delta` above the positive, > 0.
        delta: where the slope begins, > 0.
        offset: value where the slope begins; continuous where None.
        start: added to the sigmoid above 0; an upper bound of the step from 0.5 on.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list, as the official code does. For comparison only.

    Raises:
        ValueError: if `tau`, `rho` or `delta` is not a finite number > 0, `offset` or `start` is not finite, or
            `reduction` is unknown.
        TypeError: if one of them is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import SupAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = SupAPLoss()
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.4629

    Cost:
        Time grows with (queries) x (positives of each) x (references); memory stays that of one block.

    Relations:
        `ROADMAPLoss` adds `CalibrationLoss`, which makes scores of different batches comparable.
    """

    def __init__(
        self,
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float = 0.05,
        offset: float | None = None,
        start: float = 0.5,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.tau = check_positive(self.name, "tau", tau)
        self.rho = check_positive(self.name, "rho", rho)
        self.delta = check_positive(self.name, "delta", delta)
        self.offset = None if offset is None else check_finite_number(self.name, "offset", offset)
        self.start = check_finite_number(self.name, "start", start)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - AP with negatives counted by H^-."""
        query, i = relevant.nonzero(as_tuple=True)
        s_i = at(scores, query, i)
        negatives = scores.masked_fill(~candidate | relevant, -torch.inf)
        t = negatives.index_select(0, query).sub_(s_i[:, None])  # (pos, gallery)
        negatives_above = upper_step(t, self.tau, self.rho, self.delta, self.offset, self.start).sum(1)
        pair, j = relevant[query].nonzero(as_tuple=True)
        at_least = (scores[query[pair], j] >= s_i[pair]).to(scores.dtype)  # i itself is one of them
        rank_among_positives = torch.zeros_like(s_i).index_add(0, pair, at_least)
        ap = torch.zeros_like(scores[:, 0]).index_add(
            0, query, rank_among_positives / (rank_among_positives + negatives_above)
        )
        return 1 - ap / relevant.sum(1)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery

    def extra_repr(self) -> str:
        own = f"tau={self.tau}, rho={self.rho}, delta={self.delta}, offset={self.offset}, start={self.start}"
        return f"{own}, {super().extra_repr()}"


def upper_step(
    t: Float[Tensor, "..."], tau: float, rho: float, delta: float, offset: float | None, start: float
) -> Float[Tensor, "..."]:
    """H^-: a sigmoid below 0, `start` higher up to `delta`, a line of slope `rho` beyond."""
    beyond = float(torch.sigmoid(torch.tensor(delta / tau, dtype=torch.float64))) + start if offset is None else offset
    curved = torch.sigmoid(t / tau) + start * (t > 0)
    return torch.where(t > delta, rho * (t - delta) + beyond, curved)
