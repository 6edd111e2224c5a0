"""SupAP (Ramzi, Thome, Rambour, Audebert, Bitot: "Robust and Decomposable Average Precision for Image Retrieval",
NeurIPS 2021, section 3.1): a smooth loss that is never below 1 - AP.

As in Smooth-AP, the AP of a query is the mean over its positives of (rank among the positives) / (rank among all
items). SupAP replaces the step function that counts a negative j above the positive i by H^-(t), t = s_j - s_i, which
is never below the step, and counts positives by the true step, without a gradient:

    H^-(t) = sigma(t / tau)                 t <= 0
           = start + sigma(t / tau)         0 < t <= delta
           = rho (t - delta) + offset       t > delta

With start = 1/2, H^-(t) is at least 1 for every t > 0. `offset=None` makes it continuous at delta: the offset is then
sigma(delta / tau) + start. The linear part has a gradient where that of a sigmoid vanishes.

Differences from the official code: the query is not in its own list; a query without a positive is skipped. The
official configuration has offset 1.44, which is a step down at delta; before its pull request 13 (November 2022) the
official code had rho t + offset as the linear part.
"""

import functools
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_not_negative, check_positive
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.indexing import at
from lightning_retrieval.losses.positives import find_positives
from lightning_retrieval.losses.soft_counts import count_above


def sup_ap(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    tau: float,
    rho: float,
    delta: float,
    offset: float | None = None,
    start: float = 0.5,
) -> Float[Tensor, " query"]:
    """1 - a lower bound of the AP of each list, in which H^- counts the negatives.

    Args:
        scores: similarities, higher is nearer; the scores of non-candidates are ignored.
        relevant: the positives of each query: at least one per row, all of them candidates.
        candidate: the items in each query's list.
        tau: temperature of the sigmoid, > 0.
        rho: slope of H^- beyond `delta`, > 0.
        delta: the difference of scores from which H^- is linear, > 0.
        offset: value of H^- just above `delta`; if None, H^- is continuous there.
        start: added to the sigmoid above 0.
    """
    positives = find_positives(relevant)
    query, i = positives.query, positives.index  # (pos,), (pos,)
    s_i = at(scores, query, i)  # (pos,)

    s_negative = scores.masked_fill(~candidate | relevant, -torch.inf)  # (query, gallery)
    h_minus = functools.partial(count_upper, tau=tau, rho=rho, delta=delta, offset=offset, start=start)
    negatives_above = count_above(s_negative, query, s_i, h_minus)  # (pos,)

    # Each pair is a positive i and a positive j of the same query, as indices into (pos,).
    pair_i, pair_j = positives.pairs()  # (pair,), (pair,)
    at_least = s_i[pair_j] >= s_i[pair_i]  # (pair,); i itself is one of the j
    rank_among_positives = torch.zeros_like(s_i).index_add(0, pair_i, at_least.to(scores.dtype))  # (pos,)

    precision = rank_among_positives / (rank_among_positives + negatives_above)  # (pos,)
    sum_of_precisions = torch.zeros_like(scores[:, 0]).index_add(0, query, precision)  # (query,)
    return 1 - sum_of_precisions / relevant.sum(1)


def count_upper(
    t: Float[Tensor, "pos gallery"], **settings: Any
) -> tuple[Float[Tensor, " pos"], Float[Tensor, "pos gallery"]]:
    """The sum of H^-(t) over the gallery, and its slope at each t; for settings see `upper_step`."""
    value, slope = upper_step(t, **settings)
    return value.sum(1), slope


def upper_step(
    t: Float[Tensor, "..."], *, tau: float, rho: float, delta: float, offset: float | None, start: float
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """H^-(t), a sigmoid up to 0, `start` above it up to `delta`, and a line of slope `rho` beyond; and its slope.

    Conditions are written as numbers 0 and 1 into float tensors, which is much faster on a CPU than `torch.where`.
    """
    if offset is None:
        sigma_at_delta = torch.sigmoid(torch.tensor(delta / tau, dtype=torch.float64))
        offset = float(sigma_at_delta) + start
    sigma = torch.sigmoid(t / tau)
    is_linear = torch.gt(t, delta, out=torch.empty_like(t))
    slope = torch.addcmul(sigma, sigma, sigma, value=-1).div_(tau)  # of the curved part
    slope.lerp_(torch.full_like(slope[:1], rho), is_linear)

    is_above = torch.gt(t, 0, out=torch.empty_like(t))
    curved = sigma.add_(is_above, alpha=start)
    line = (t - delta).clamp_(min=0).mul_(rho).add_(offset)  # finite also where t is -inf
    return curved.lerp_(line, is_linear), slope


class SupAPLoss(RetrievalLoss):
    """1 - a lower bound of AP: negatives are counted by a function that is never below the step function.

    Args:
        tau: temperature of the sigmoid, > 0.
        rho: slope for negatives that score more than `delta` above the positive, > 0.
        delta: the difference of scores from which the function is linear, > 0.
        offset: value of the function just above `delta`, >= 0; if None, the function is continuous there.
        start: added to the sigmoid above 0, >= 0; the function is an upper bound of the step if this is at least 0.5.
        reduction: `"mean"` or `"sum"` over the queries that have a positive, or `"none"`: one value per query.
        class_balanced: give every class of the batch the same total weight.
        include_self: rank the query in its own list, as the official code does. Only for comparison with it.

    Raises:
        ValueError: if `tau`, `rho` or `delta` is not from 1e-12 to 1e12, `offset` or `start` is not from 0 to 1e12, or
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
        Time grows with (queries) x (positives per query) x (references); memory is that of one block of queries.

    Relations:
        `ROADMAPLoss` adds `CalibrationLoss`, which makes the scores of different batches comparable.
    """

    def __init__(
        self,
        tau: float = 0.01,
        *,
        rho: float = 100.0,
        delta: float = 0.05,
        offset: float | None = None,
        start: float = 0.5,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.tau = check_positive(self.name, "tau", tau)
        self.rho = check_positive(self.name, "rho", rho)
        self.delta = check_positive(self.name, "delta", delta)
        if offset is not None:
            check_not_negative(self.name, "offset", offset)
        self.offset = offset
        self.start = check_not_negative(self.name, "start", start)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        return sup_ap(
            scores,
            relevant,
            candidate,
            tau=self.tau,
            rho=self.rho,
            delta=self.delta,
            offset=self.offset,
            start=self.start,
        )

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery

    def extra_repr(self) -> str:
        settings = f"tau={self.tau}, rho={self.rho}, delta={self.delta}, offset={self.offset}, start={self.start}"
        return f"{settings}, {super().extra_repr()}"
