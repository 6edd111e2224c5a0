"""FastAP (Cakir, He, Xia, Kulis, Sclaroff: "Deep Metric Learning to Rank", CVPR 2019).

Distances d^2 = 2 - 2 s between unit vectors, from 0 to 4, are put into soft histograms, and AP is a sum over bins
(eq. 14): with h_j the weight in bin j, H_j the weight up to it, h+_j and H+_j those of the positives,

    FastAP = 1 / N+ * sum over j of H+_j h+_j / H_j,   loss = 1 - mean over queries

Symbols: N+ the number of positives, `num_bins` the number of intervals between num_bins + 1 bin centres (as in the
official code). Where we differ: the gradient is the gradient of this loss; the official code's hand-written one is
N / 2 times it, N the number of queries with a positive, and ignores loss weights.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_integer
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.histograms import binned_ap, soft_histograms


class FastAPLoss(RetrievalLoss):
    """1 - AP of soft histograms of the squared distances.

    Args:
        num_bins: intervals that the squared distances from 0 to 4 are cut into, >= 2.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list. For comparison only.

    Raises:
        ValueError: if `num_bins` is below 2 or `reduction` is unknown.
        TypeError: if `num_bins` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import FastAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(FastAPLoss(num_bins=10)(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.25

    Cost:
        Time and memory of a block grow with (queries) x (references), whatever the number of positives.

    Relations:
        `QuantizedAPLoss(num_bins=num_bins + 1, low=-1, high=1)` is the same function. A soft histogram does not
        converge to AP as the bins grow in number.
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
        self.num_bins = check_integer(self.name, "num_bins", num_bins, least=2)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - FastAP of each list, equation 14."""
        # Bins of growing d^2 = 2 - 2 s are bins of falling s, from 1 to -1.
        h, h_pos = soft_histograms(scores, relevant, candidate, bins=self.num_bins + 1, low=-1.0, high=1.0)
        return 1 - binned_ap(h, h_pos)

    def extra_repr(self) -> str:
        return f"num_bins={self.num_bins}, {super().extra_repr()}"
