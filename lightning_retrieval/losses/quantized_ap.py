"""AP_Q (Revaud, Almazan, Rezende, de Souza: "Learning with Average Precision: Training Image Retrieval with a Listwise
Loss", ICCV 2019), and its tie-aware forms.

Scores are put into M soft bins with centres b_m = high - m Delta, Delta = (high - low) / (M - 1) (eq. 5-7); the first
and the last hold also what lies beyond. With precision P_m = H+_m / H_m (eq. 8) and the recall gained in a bin
h+_m / N+ (eq. 10), AP_Q = sum over m of P_m h+_m / N+ (eq. 11) and the loss is 1 - its mean over queries (eq. 12).

A bin holds items of equal rank. Tie-aware AP averages over their orders: `"simplified"` (eq. 13) takes the precision in
the middle of the bin, `"full"` is that of He, Lu and Sclaroff ("Local Descriptors Optimized for Average Precision",
CVPR 2018) as the official code has it.

Where we differ: a query without a positive is left out (official: NaN). The official defaults are 20 bins on [0, 1] or
[-1, 1] and, in dirtorch, 25 on [0, 1], where all negative scores tie in the last bin.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_finite_number, check_integer
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.histograms import binned_ap, soft_histograms


class QuantizedAPLoss(RetrievalLoss):
    """1 - AP of scores quantised into soft bins.

    Args:
        num_bins: M, the number of bin centres from `low` to `high`, >= 2.
        low: centre of the last bin, below `high`.
        high: centre of the first bin.
        tie_aware: average over the orders of the items in a bin: False (AP_Q), `"simplified"` or `"full"`.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same (section 4.5 and Fig. 7 of the paper).
        include_self: count the query in its own list. For comparison only.

    Raises:
        ValueError: if `num_bins` is below 2, `low` not below `high`, one of them not finite, or `tie_aware` or
            `reduction` unknown.
        TypeError: if `num_bins` is not an integer, or `low` or `high` not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import QuantizedAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(QuantizedAPLoss(num_bins=20)(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.2705

    Cost:
        Time and memory of a block grow with (queries) x (references), whatever the number of positives.

    Relations:
        `FastAPLoss(num_bins=L)` is this with L + 1 bins on [-1, 1]. The full tie-aware form is not 0 for a perfect
        ranking.
    """

    def __init__(
        self,
        num_bins: int = 20,
        low: float = -1.0,
        high: float = 1.0,
        tie_aware: Literal[False, "simplified", "full"] = False,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.num_bins = check_integer(self.name, "num_bins", num_bins, least=2)
        self.low = check_finite_number(self.name, "low", low)
        self.high = check_finite_number(self.name, "high", high)
        if not low < high:
            raise ValueError(f"{self.name}: `low` must be below `high`, got {low} and {high}.")
        self.tie_aware = check_choice(self.name, "tie_aware", tie_aware, (False, "simplified", "full"))

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - AP_Q of each list, equation 11, or its tie-aware form."""
        h, h_pos = soft_histograms(scores, relevant, candidate, bins=self.num_bins, low=self.low, high=self.high)
        ap = {False: binned_ap, "simplified": _simplified_tie_aware_ap, "full": _tie_aware_ap}[self.tie_aware]
        return 1 - ap(h, h_pos)

    def extra_repr(self) -> str:
        own = f"num_bins={self.num_bins}, low={self.low}, high={self.high}, tie_aware={self.tie_aware!r}"
        return f"{own}, {super().extra_repr()}"


def _simplified_tie_aware_ap(c: Float[Tensor, "query bin"], c_pos: Float[Tensor, "query bin"]) -> Tensor:
    """Equation 13: sum of c+ (C+_before + C+ + 1) / (C_before + C + 1) / N+."""
    before, before_pos = c.cumsum(1) - c, c_pos.cumsum(1) - c_pos
    precision = (2 * before_pos + c_pos + 1) / (2 * before + c + 1)
    return (c_pos * precision).sum(1) / c_pos.sum(1)


def _tie_aware_ap(c: Float[Tensor, "query bin"], c_pos: Float[Tensor, "query bin"]) -> Tensor:
    """He et al.: sum of c+ (c r + (C+' + 1 - r (C' + 1)) ln((C + 1) / (C' + 1))) / c / N+, r = (c+ - 1) / (c - 1)."""
    C, C_pos = c.cumsum(1), c_pos.cumsum(1)
    before, before_pos = C - c, C_pos - c_pos
    tiny = 1e-8  # as in the official code; an empty bin counts nothing
    r = (c_pos - 1).clamp(min=0) / ((c - 1).clamp(min=0) + tiny)
    logarithm = torch.log((C + 1) / (before + 1))
    term = c_pos * (c * r + (before_pos + 1 - r * (before + 1)) * logarithm) / (c + tiny)
    return term.sum(1) / c_pos.sum(1)
