"""RaMBO's recall loss (Rolinek et al.: "Optimizing Rank-based Metrics with Blackbox Differentiation", CVPR 2020).

    L_rec = mean over positives i of l(rk(i) - rk+(i)), the number of negatives above i             (eq. 16-20)

with l(x) = log(1 + x) or log(1 + log(1 + x)). Gradients flow through rk, the rank among all candidates; rk+, the rank
among the positives, is a constant. How ranks get a gradient, what the margin does, and where we differ from the
official code: see `blackbox.py`. Another difference: ranks are divided by the list's length, in the official code's
recall loss by the number of queries.

The official code's memory of tau past batches (`BatchMemoryRecallLoss`) joins the rows of their scores to those of the
batch, as further queries. No list becomes longer, and the stored rows have no gradient. But as ranks are divided by the
number of rows there, tau + 1 times that of the batch, x becomes (tau + 1) x; and the mean is over tau + 1 times as many
positives. So if all batches have the same numbers of queries and positives, its gradient is that of the weighting

    l((tau + 1) x) / (tau + 1)

without a memory, whatever the stored scores are. `batch_memory` is this tau.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_integer, check_not_negative, check_positive
from lightning_retrieval.losses.base import Reduction
from lightning_retrieval.losses.blackbox import LARGEST_MARGIN, positive_ranks, sort_lists
from lightning_retrieval.losses.pair_loss import PairLoss

Weighting = Literal["log", "loglog"]


def blackbox_recall_sums(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    lambda_: float,
    margin: float,
    weighting: Weighting = "log",
    batch_memory: int = 0,
) -> tuple[Float[Tensor, "query 1"], Float[Tensor, "query 1"]]:
    """The sum of l(negatives above) over each query's positives, and the number of positives (equations 16-20).

    Args:
        scores: similarities, higher is nearer; the scores of non-candidates are ignored.
        relevant: the positives of each query, all of them candidates.
        candidate: the items in each query's list.
        lambda_: length of the interpolation, > 0.
        margin: alpha, >= 0.
        weighting: l: `"log"` or `"loglog"`.
        batch_memory: tau, >= 0: l((tau + 1) x) / (tau + 1) takes the place of l(x).
    """
    lists = sort_lists(scores, relevant, candidate, margin)
    query, rank, rank_among_positives = positive_ranks(scores, lists, lambda_=lambda_)
    negatives_above = rank - rank_among_positives  # (pos,)
    batches = batch_memory + 1.0
    value = torch.log1p(batches * negatives_above)
    if weighting == "loglog":
        value = torch.log1p(value)
    value = value / batches
    total = scores.new_zeros(len(scores)).index_add(0, query, value)  # (query,)
    return total[:, None], relevant.sum(1, keepdim=True).to(scores.dtype)


class BlackboxRecallLoss(PairLoss):
    """Mean over positives of a slowly growing function of the number of negatives above them, with exact ranks.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length. The default is that of the
            paper; 0.8 was better on both data sets of docs/study/losses.md.
        margin: alpha, from 0 to 100: a positive counts as above the others only if it scores this much higher.
        weighting: l of the paper: `"log"`, log(1 + x), or `"loglog"`, log(1 + log(1 + x)).
        batch_memory: tau, >= 0: l((tau + 1) x) / (tau + 1) takes the place of l(x). Nothing is stored: this is the
            effect on the gradient of the official code's memory of the scores of tau past batches, once it is full.
        pair_mean: `"query"`, the mean over a query's positives, then over queries (the paper, section 5.1), or `"all"`,
            the mean over the positives of all queries together (the official code).
        reduction: `"mean"` or `"sum"` over the queries that have a positive, or `"none"`: one value per query.
        class_balanced: give every class of the batch the same total weight.
        include_self: rank the query in its own list. Only for comparison with other code.

    Raises:
        ValueError: if `lambda_` is not from 1e-12 to 1e12, `margin` is not from 0 to 100, `batch_memory` is
            negative, or `weighting`, `pair_mean` or `reduction` is unknown; if `reduction` or `class_balanced` needs a
            value per query while `pair_mean` is not `"query"`.
        TypeError: if `lambda_` or `margin` is not a number, or `batch_memory` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxRecallLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = BlackboxRecallLoss(margin=0.0)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)  # two of four queries have one negative above
        0.3466

    Cost:
        One sort of each list, or a few comparisons for each positive if no query of a block has more than 16; memory is
        that of one block of queries.

    Relations:
        `BlackboxAPLoss` optimises AP itself. `CrossBatchMemory` does make lists longer, by past embeddings.
    """

    def __init__(
        self,
        lambda_: float = 4.0,
        margin: float = 0.02,
        *,
        weighting: Weighting = "log",
        batch_memory: int = 0,
        pair_mean: Literal["query", "all"] = "query",
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        check_choice(type(self).__name__, "pair_mean", pair_mean, ("query", "all"))
        super().__init__(pair_mean, reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.lambda_ = check_positive(self.name, "lambda_", lambda_)
        self.margin = check_not_negative(self.name, "margin", margin, most=LARGEST_MARGIN)
        self.weighting: Weighting = check_choice(self.name, "weighting", weighting, ("log", "loglog"))
        self.batch_memory = check_integer(self.name, "batch_memory", batch_memory, least=0)

    def pair_sums(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> tuple[Float[Tensor, "query 1"], Float[Tensor, "query 1"]]:
        return blackbox_recall_sums(
            scores,
            relevant,
            candidate,
            lambda_=self.lambda_,
            margin=self.margin,
            weighting=self.weighting,
            batch_memory=self.batch_memory,
        )

    def extra_repr(self) -> str:
        settings = f"lambda_={self.lambda_}, margin={self.margin}, weighting={self.weighting!r}"
        return f"{settings}, batch_memory={self.batch_memory}, {super().extra_repr()}"
