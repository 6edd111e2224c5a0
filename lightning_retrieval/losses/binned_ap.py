"""AP of soft histograms: FastAP, and AP_Q with its tie-aware forms.

FastAP (Cakir, He, Xia, Kulis, Sclaroff: "Deep Metric Learning to Rank", CVPR 2019).

The squared distances d^2 = 2 - 2 s between unit vectors, from 0 to 4, are put into soft histograms, and AP is a sum
over the bins (eq. 14). Let h_j be the weight in bin j, H_j the weight up to and including bin j, and h+_j and H+_j the
same weights of the positives only:

    FastAP = 1 / N+ * sum over j of H+_j h+_j / H_j,   loss = 1 - mean over queries

Each score divides its weight between the two bins whose centres enclose it, in proportion to the distances.

N+ is the number of positives. `num_bins` is the number of intervals between the bin centres, of which there are
num_bins + 1, as in the official code. The official code has a hand-written backward pass, which returns N / 2 times the
gradient of the loss, where N is the number of queries with a positive, and ignores loss weights. Here, the gradient is
the gradient of the loss.

AP_Q (Revaud, Almazan, Rezende, de Souza: "Learning with Average Precision: Training Image Retrieval with a Listwise
Loss", ICCV 2019), and its tie-aware forms.

Scores are put into M soft bins with centres b_m = high - m Delta, Delta = (high - low) / (M - 1) (eq. 5-7); the first
and the last bin also hold the scores beyond them. With the precision P_m = H+_m / H_m (eq. 9) and the recall gained in
a bin, h+_m / N+ (eq. 10), AP_Q = sum over m of P_m h+_m / N+ (eq. 11). The loss is 1 minus the mean of AP_Q over
the queries (eq. 12).

All items in a bin have the same rank. Tie-aware AP averages over the orders of the items in a bin: `"simplified"` (eq.
13) takes the precision in the middle of the bin, and `"full"` is the form of He, Lu and Sclaroff ("Local Descriptors
Optimized for Average Precision", CVPR 2018) as the official code implements it.

Differences from the official code: a query without a positive is skipped, whereas the official code returns NaN.
The official code has several defaults: 20 bins on [0, 1] or [-1, 1] and, in dirtorch, 25 bins on [0, 1]. On [0, 1], all
scores below 0 tie in the last bin.
"""

from typing import Annotated, Any, Literal, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.arguments import Number, checked, integers
from lightning_retrieval.checks import SMALLEST
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.score_block import ScoreBlock, at

TieAware = Literal[False, "simplified", "full"]

# The official code divides by c + TINY instead of c, so that an empty bin adds 0.
TINY = 1e-8
MOST_BINS = 1 << 16  # with at most so many bins, float32 has at least 8 bits for the position between two bins

# An item at this position on the bin axis has no weight in any bin.
OUTSIDE = -2.0


def soft_histograms(
    block: ScoreBlock, *, bins: int, low: float, high: float
) -> tuple[Float[Tensor, "query bin"], Float[Tensor, "query bin"]]:
    """The weights of the candidates and of the positives in each bin. Bin centres go from `high` down to `low`.

    A score outside [low, high] has its whole weight in the nearest bin and gets no gradient.
    """
    u = ((high - block.scores) * ((bins - 1) / (high - low))).clamp(0, bins - 1)  # position on the bin axis
    h: Tensor = _Histogram.apply(u, block.candidate, bins)

    # There are few positives, so scattering their weights is faster than a loop over the bins.
    positives = block.positives
    query, i = positives.query, positives.index  # (pos,), (pos,)
    u_i = at(u, query, i)  # (pos,)
    left = u_i.detach().floor().clamp(max=bins - 2)  # (pos,)
    weight_right = u_i - left
    left_index = query * bins + left.long()  # index into the flattened (query, bin) matrix
    h_pos = u.new_zeros(len(u) * bins)
    h_pos = h_pos.index_add(0, left_index, 1 - weight_right).index_add(0, left_index + 1, weight_right)
    return h, h_pos.view(len(u), bins)


def elements_of_positions(positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
    """The size of the int64 positions on the bin axis, for each query, in float32 elements. See `RetrievalLoss`."""
    return torch.full_like(positives, 2 * gallery)


def binned_ap(h: Float[Tensor, "query bin"], h_pos: Float[Tensor, "query bin"]) -> Float[Tensor, " query"]:
    """AP from the histograms of all candidates and of the positives."""
    H = h.cumsum(1)
    H_pos = h_pos.cumsum(1)
    precision = H_pos / H.where(H > 0, 1)  # where H is 0, so is H_pos
    return (precision * h_pos).sum(1) / h_pos.sum(1)


class _Histogram(torch.autograd.Function):
    """The histogram of positions on the bin axis. A loop over the bins is faster than scattering a whole block."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, mask: Tensor, bins: int) -> Tensor:
        ctx.save_for_backward(u, mask)
        u = u.masked_fill(~mask, OUTSIDE)
        h = u.new_empty(len(u), bins)
        buffer = torch.empty_like(u)
        one = u.new_ones(())
        for m in range(bins):
            # max(1 - |u - m|, 0), in one buffer
            distance = torch.sub(u, m, out=buffer).abs_()
            weight = torch.sub(one, distance, out=buffer).clamp_(min=0)
            h[:, m] = weight.sum(1)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        u, mask = ctx.saved_tensors
        left = u.floor().clamp_(max=grad.shape[1] - 2).long()
        # As u grows, weight moves from the left bin to the right one.
        slope = (grad[:, 1:] - grad[:, :-1]).gather(1, left)
        return slope.mul_(mask), None, None


def fast_ap(block: ScoreBlock, *, num_bins: int) -> Float[Tensor, " query"]:
    """1 - FastAP of each list (equation 14).

    Args:
        block: ranked lists with at least one positive each.
        num_bins: number of intervals of the squared distances from 0 to 4, >= 2.
    """
    # d^2 = 2 - 2 s falls as s rises: bins of d^2 from 0 to 4 are bins of s from 1 to -1.
    h, h_pos = soft_histograms(block, bins=num_bins + 1, low=-1.0, high=1.0)
    return 1 - binned_ap(h, h_pos)


class FastAPLoss(RetrievalLoss):
    """1 - AP of soft histograms of the squared distances.

    Args:
        num_bins: number of intervals into which the squared distances from 0 to 4 are divided, from 2 to 65,536.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `num_bins` is out of its range or `reduction` is unknown.
        TypeError: if `num_bins` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import FastAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(FastAPLoss(num_bins=10)(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.25

    Cost:
        Time and memory of a block grow with (queries) x (references), independently of the number of positives.

    Relations:
        `QuantizedAPLoss(num_bins=num_bins + 1, low=-1, high=1)` is the same function. The AP of a soft histogram does
        not converge to AP as the number of bins grows.
    """

    approximates_ap = True

    def __init__(
        self,
        num_bins: Annotated[int, integers(2, MOST_BINS)] = 10,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.num_bins = checked(self, num_bins=num_bins)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return elements_of_positions(positives, gallery)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return fast_ap(block, num_bins=self.num_bins)


def quantized_ap(
    block: ScoreBlock, *, num_bins: int, low: float, high: float, tie_aware: TieAware = False
) -> Float[Tensor, " query"]:
    """1 minus the AP_Q of each list (equation 11), or 1 minus a tie-aware form of AP_Q.

    Args:
        block: ranked lists with at least one positive each.
        num_bins: M, the number of bin centres, >= 2.
        low: centre of the last bin, below `high`.
        high: centre of the first bin.
        tie_aware: False (AP_Q), `"simplified"` or `"full"`.
    """
    h, h_pos = soft_histograms(block, bins=num_bins, low=low, high=high)
    if tie_aware == "simplified":
        return 1 - simplified_tie_aware_ap(h, h_pos)
    if tie_aware == "full":
        return 1 - tie_aware_ap(h, h_pos)
    return 1 - binned_ap(h, h_pos)


def simplified_tie_aware_ap(
    c: Float[Tensor, "query bin"], c_pos: Float[Tensor, "query bin"]
) -> Float[Tensor, " query"]:
    """The simplified tie-aware AP (equation 13).

    It is the sum over bins of c+ (C+' + (c+ + 1) / 2) / (C' + (c + 1) / 2) / N+, where C' and C+' are the sums of c and
    c+ over the bins before.

    Args:
        c: weight of the candidates in each bin.
        c_pos: weight of the positives in each bin, c+.
    """
    before = c.cumsum(1) - c
    before_pos = c_pos.cumsum(1) - c_pos
    precision = (2 * before_pos + c_pos + 1) / (2 * before + c + 1)
    return (c_pos * precision).sum(1) / c_pos.sum(1)


def tie_aware_ap(c: Float[Tensor, "query bin"], c_pos: Float[Tensor, "query bin"]) -> Float[Tensor, " query"]:
    """The full tie-aware AP of He et al.

    It is the sum over bins of c+ (c r + (C+' + 1 - r (C' + 1)) ln((C + 1) / (C' + 1))) / c / N+, where
    r = (c+ - 1) / (c - 1), C is the sum of c up to and including the bin, and C' and C+' are the sums of c and c+ over
    the bins before.

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
            and `"full"` average AP over the possible orders of these items.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

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

    approximates_ap = True

    def __init__(
        self,
        num_bins: Annotated[int, integers(2, MOST_BINS)] = 20,
        *,
        low: Number = -1.0,
        high: Number = 1.0,
        tie_aware: TieAware = False,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.num_bins = checked(self, num_bins=num_bins)
        self.low = checked(self, low=low)
        self.high = checked(self, high=high)
        if not low < high:
            raise InvalidValue("must be below `high`", self.name, "low", got=f"{low} and {high}")
        if high - low < SMALLEST:
            raise InvalidValue(f"must be at least {SMALLEST:g} below `high`", self.name, "low", got=f"{low} and {high}")
        self.tie_aware = checked(self, tie_aware=tie_aware)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return elements_of_positions(positives, gallery)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return quantized_ap(block, num_bins=self.num_bins, low=self.low, high=self.high, tie_aware=self.tie_aware)
