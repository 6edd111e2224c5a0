"""RaMBO's AP loss (Rolinek et al.: "Optimizing Rank-based Metrics with Blackbox Differentiation", CVPR 2020).

    L_AP = 1 - mean over positives i of rk+(i) / rk(i)                                              (eq. 21-22)

Gradients flow through rk, the rank among all candidates; rk+, the rank among the positives, is a constant. How ranks
get a gradient, what the margin does, and where we differ from the official code: see `blackbox.py`.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_not_negative, check_positive
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.blackbox import LARGEST_MARGIN, positive_ranks, sort_lists


def blackbox_ap(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    lambda_: float,
    margin: float,
) -> Float[Tensor, " query"]:
    """1 - AP of each list (equation 21).

    Args:
        scores: similarities, higher is nearer; the scores of non-candidates are ignored.
        relevant: the positives of each query: at least one per row, all of them candidates.
        candidate: the items in each query's list.
        lambda_: length of the interpolation, > 0.
        margin: alpha, >= 0.
    """
    lists = sort_lists(scores, relevant, candidate, margin)
    query, rank, rank_among_positives = positive_ranks(scores, lists, lambda_=lambda_)
    precision = rank_among_positives / rank  # (pos,)
    sum_of_precisions = scores.new_zeros(len(scores)).index_add(0, query, precision)  # (query,)
    return 1 - sum_of_precisions / relevant.sum(1)


class BlackboxAPLoss(RetrievalLoss):
    """1 - AP with exact ranks, differentiated by interpolation.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length. Larger values give smoother
            and less faithful gradients.
        margin: alpha, from 0 to 100: a positive counts as above the others only if it scores this much higher.
        reduction: `"mean"` or `"sum"` over the queries that have a positive, or `"none"`: one value per query.
        class_balanced: give every class of the batch the same total weight.
        include_self: rank the query in its own list. Only for comparison with other code.

    Raises:
        ValueError: if `lambda_` is not a number from 1e-12 to 1e12, `margin` is not one from 0 to 100, or `reduction`
            is unknown.
        TypeError: if `lambda_` or `margin` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = BlackboxAPLoss(lambda_=4.0, margin=0.0)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.25

    Cost:
        One sort of each list, or a few comparisons for each positive if no query of a block has more than 16; memory is
        that of one block of queries.

    Relations:
        With `margin=0` its value is exactly 1 - AP. `BlackboxRecallLoss` gives more weight to the first ranks.
    """

    def __init__(
        self,
        lambda_: float = 4.0,
        margin: float = 0.02,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.lambda_ = check_positive(self.name, "lambda_", lambda_)
        self.margin = check_not_negative(self.name, "margin", margin, most=LARGEST_MARGIN)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        return blackbox_ap(scores, relevant, candidate, lambda_=self.lambda_, margin=self.margin)

    def extra_repr(self) -> str:
        return f"lambda_={self.lambda_}, margin={self.margin}, {super().extra_repr()}"
