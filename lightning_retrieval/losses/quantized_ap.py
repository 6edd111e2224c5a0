"""AP_Q (Revaud, Almazan, Rezende, de Souza: "Learning with Average Precision: Training Image Retrieval with a Listwise
Loss", ICCV 2019), and its tie-aware forms.

Scores are put into M soft bins with centres b_m = high - m Delta, Delta = (high - low) / (M - 1) (eq. 5-7); the first
and the last bin also hold the scores beyond them. With the precision P_m = H+_m / H_m (eq. 8) and the recall gained in
a bin, h+_m / N+ (eq. 10), AP_Q = sum over m of P_m h+_m / N+ (eq. 11). The loss is 1 - its mean over the queries
(eq. 12).

All items in a bin have the same rank. Tie-aware AP averages over the orders of the items in a bin: `"simplified"` (eq.
13) takes the precision in the middle of the bin, and `"full"` is the form of He, Lu and Sclaroff ("Local Descriptors
Optimized for Average Precision", CVPR 2018) as the official code implements it.

Differences from the official code: a query without a positive is skipped (there: NaN). The official defaults are 20
bins on [0, 1] or [-1, 1] and, in dirtorch, 25 bins on [0, 1], where all negative scores tie in the last bin.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.checks import SMALLEST, check_choice, check_finite_number, check_integer
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.fast_ap import MOST_BINS, binned_ap, soft_histograms
from lightning_retrieval.losses.positives import ScoreBlock

TieAware = Literal[False, "simplified", "full"]

# The official code divides by c + TINY instead of c, so that an empty bin adds 0.
TINY = 1e-8


def quantized_ap(
    lists: ScoreBlock, *, num_bins: int, low: float, high: float, tie_aware: TieAware = False
) -> Float[Tensor, " query"]:
    """1 - AP_Q of each list (equation 11), or 1 - its tie-aware form.

    Args:
        lists: ranked lists with at least one positive each.
        num_bins: M, the number of bin centres, >= 2.
        low: centre of the last bin, below `high`.
        high: centre of the first bin.
        tie_aware: False (AP_Q), `"simplified"` or `"full"`.
    """
    h, h_pos = soft_histograms(lists, bins=num_bins, low=low, high=high)
    if tie_aware == "simplified":
        return 1 - simplified_tie_aware_ap(h, h_pos)
    if tie_aware == "full":
        return 1 - tie_aware_ap(h, h_pos)
    return 1 - binned_ap(h, h_pos)


def simplified_tie_aware_ap(
    c: Float[Tensor, "query bin"], c_pos: Float[Tensor, "query bin"]
) -> Float[Tensor, " query"]:
    """Equation 13: sum over bins of c+ (C+' + (c+ + 1) / 2) / (C' + (c + 1) / 2) / N+, with C' the sum before a bin.

    Args:
        c: weight of the candidates in each bin.
        c_pos: weight of the positives in each bin, c+.
    """
    before = c.cumsum(1) - c
    before_pos = c_pos.cumsum(1) - c_pos
    precision = (2 * before_pos + c_pos + 1) / (2 * before + c + 1)
    return (c_pos * precision).sum(1) / c_pos.sum(1)


def tie_aware_ap(c: Float[Tensor, "query bin"], c_pos: Float[Tensor, "query bin"]) -> Float[Tensor, " query"]:
    """He et al.: sum of c+ (c r + (C+' + 1 - r (C' + 1)) ln((C + 1) / (C' + 1))) / c / N+, r = (c+ - 1) / (c - 1).

    Args:
        c: weight of the candidates in each bin.
        c_pos: weight of the positives in each bin, c+.
    """
    C = c.cumsum(1)
    C_pos = c_pos.cumsum(1)
    before = C - c  # C'
    before_pos = C_pos - c_pos  # C+'
    r = (c_pos - 1).clamp(min=0) / ((c - 1).clamp(min=0) + TINY)
    logarithm = torch.log((C + 1) / (before + 1))
    summed_precision = c * r + (before_pos + 1 - r * (before + 1)) * logarithm  # summed over the positions in the bin
    term = c_pos * summed_precision / (c + TINY)
    return term.sum(1) / c_pos.sum(1)


class QuantizedAPLoss(RetrievalLoss):
    """1 - AP of scores quantised into soft bins.

    Args:
        num_bins: M, the number of bin centres from `low` to `high`, from 2 to 65,536.
        low: centre of the last bin, below `high`.
        high: centre of the first bin.
        tie_aware: how items in the same bin are ranked: False gives all of them the same rank (AP_Q); `"simplified"`
            and `"full"` average AP over their possible orders.
        reduction: `"mean"` or `"sum"` over the queries that have a positive, or `"none"`: one value per query.
        class_balanced: give every class of the batch the same total weight (section 4.5 and Fig. 7 of the paper).
        include_self: rank the query in its own list. Only for comparison with other code.

    Raises:
        ValueError: if `num_bins` is out of its range, `low` is not below `high`, one of them is not finite, or
            `tie_aware` or `reduction` is unknown.
        TypeError: if `num_bins` is not an integer, or `low` or `high` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import QuantizedAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(QuantizedAPLoss(num_bins=20)(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.2705

    Cost:
        Time and memory of a block grow with (queries) x (references), independently of the number of positives.

    Relations:
        `FastAPLoss(num_bins=L)` is this loss with L + 1 bins on [-1, 1]. The full tie-aware form is not 0 for a perfect
        ranking.
    """

    def __init__(
        self,
        num_bins: int = 20,
        *,
        low: float = -1.0,
        high: float = 1.0,
        tie_aware: TieAware = False,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.num_bins = check_integer(self.name, "num_bins", num_bins, least=2, most=MOST_BINS)
        self.low = check_finite_number(self.name, "low", low)
        self.high = check_finite_number(self.name, "high", high)
        if not low < high:
            raise ValueError(f"{self.name}: `low` must be below `high`, got {low} and {high}.")
        if high - low < SMALLEST:
            raise ValueError(f"{self.name}: `low` must be at least {SMALLEST:g} below `high`, got {low} and {high}.")
        self.tie_aware: TieAware = check_choice(self.name, "tie_aware", tie_aware, (False, "simplified", "full"))

    def query_losses(self, lists: ScoreBlock) -> Float[Tensor, " query"]:
        return quantized_ap(lists, num_bins=self.num_bins, low=self.low, high=self.high, tie_aware=self.tie_aware)
