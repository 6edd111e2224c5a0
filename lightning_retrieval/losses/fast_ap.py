"""FastAP (Cakir, He, Xia, Kulis, Sclaroff: "Deep Metric Learning to Rank", CVPR 2019).

The squared distances d^2 = 2 - 2 s between unit vectors, from 0 to 4, are put into soft histograms, and AP is a sum
over the bins (eq. 14). With h_j the weight in bin j, H_j the weight up to and including it, and h+_j and H+_j those of
the positives,

    FastAP = 1 / N+ * sum over j of H+_j h+_j / H_j,   loss = 1 - mean over queries

Symbols: N+ the number of positives, `num_bins` the number of intervals between num_bins + 1 bin centres (as in the
official code). Difference from the official code: its hand-written backward pass returns N / 2 times the gradient of
the loss, where N is the number of queries with a positive, and ignores loss weights; here the gradient is that of the
loss.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_integer
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.histograms import MOST_BINS, binned_ap, soft_histograms


def fast_ap(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    num_bins: int,
) -> Float[Tensor, " query"]:
    """1 - FastAP of each list (equation 14).

    Args:
        scores: similarities, higher is nearer; the scores of non-candidates are ignored.
        relevant: the positives of each query: at least one per row, all of them candidates.
        candidate: the items in each query's list.
        num_bins: number of intervals of the squared distances from 0 to 4, >= 2.
    """
    # d^2 = 2 - 2 s falls as s rises: bins of d^2 from 0 to 4 are bins of s from 1 to -1.
    h, h_pos = soft_histograms(scores, relevant, candidate, bins=num_bins + 1, low=-1.0, high=1.0)
    return 1 - binned_ap(h, h_pos)


class FastAPLoss(RetrievalLoss):
    """1 - AP of soft histograms of the squared distances.

    Args:
        num_bins: number of intervals into which the squared distances from 0 to 4 are divided, from 2 to 65,536.
        reduction: `"mean"` or `"sum"` over the queries that have a positive, or `"none"`: one value per query.
        class_balanced: give every class of the batch the same total weight.
        include_self: rank the query in its own list. Only for comparison with other code.

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

    def __init__(
        self,
        num_bins: int = 10,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.num_bins = check_integer(self.name, "num_bins", num_bins, least=2, most=MOST_BINS)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        return fast_ap(scores, relevant, candidate, num_bins=self.num_bins)

    def extra_repr(self) -> str:
        return f"num_bins={self.num_bins}, {super().extra_repr()}"
