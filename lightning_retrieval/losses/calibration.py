"""The calibration loss of ROADMAP (Ramzi et al., NeurIPS 2021, section 3.2), which makes AP decomposable.

AP depends only on the order within a list, so the scores of different lists need not be on one scale. Two hinges pull
the cosine similarity of positives above alpha and push that of negatives below beta:

    L = mean over positives of [alpha - s]_+  +  mean over negatives of [s - beta]_+

Difference from the official code: the means are taken for each query, and then over the queries. `pair_mean="nonzero"`
is the official code's mean over all pairs of the batch that violate their bound. The choice changes the weight of the
term by a factor of up to 8.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_finite_number
from lightning_retrieval.losses.base import Reduction
from lightning_retrieval.losses.pair_loss import PairLoss


def calibration_sums(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    alpha: float,
    beta: float,
    only_nonzero: bool = False,
) -> tuple[Float[Tensor, "query 2"], Float[Tensor, "query 2"]]:
    """Both hinges, of the positives and of the negatives, summed over each query's pairs, and the numbers of pairs.

    Args:
        scores: similarities, higher is nearer; the scores of non-candidates are ignored.
        relevant: the positives of each query, all of them candidates.
        candidate: the items in each query's list.
        alpha: similarity that positives should reach.
        beta: similarity that negatives should stay below.
        only_nonzero: count only the pairs that violate their bound.
    """
    negative = candidate & ~relevant
    positive_hinge = (alpha - scores).clamp(min=0) * relevant  # (query, gallery)
    negative_hinge = (scores - beta).clamp(min=0) * negative  # (query, gallery)
    sums = torch.stack([positive_hinge.sum(1), negative_hinge.sum(1)], 1)  # (query, 2)
    if only_nonzero:
        counts = torch.stack([(positive_hinge > 0).sum(1), (negative_hinge > 0).sum(1)], 1)
    else:
        counts = torch.stack([relevant.sum(1), negative.sum(1)], 1)
    return sums, counts.to(scores.dtype)


class CalibrationLoss(PairLoss):
    """Hinges on the cosine similarities of positives and of negatives.

    Args:
        alpha: similarity that positives should reach.
        beta: similarity that negatives should stay below.
        pair_mean: the pairs over which the two means are taken: those of each `"query"`, `"all"` pairs of the batch, or
            the `"nonzero"` pairs of the batch, which violate their bound.
        reduction: `"mean"` or `"sum"` over the queries that have a positive, or `"none"`: one value per query.
        class_balanced: give every class of the batch the same total weight.
        include_self: rank the query in its own list, as the official code does with a memory. Only for comparison with
            it.

    Raises:
        ValueError: if `alpha` or `beta` is not from -1e12 to 1e12, or `pair_mean` or `reduction` is unknown; if
            `reduction` or `class_balanced` needs a value per query while `pair_mean` is not `"query"`.
        TypeError: if `alpha` or `beta` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import CalibrationLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(CalibrationLoss()(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.19

    Relations:
        The second term of `ROADMAPLoss`.
    """

    def __init__(
        self,
        alpha: float = 0.9,
        beta: float = 0.6,
        *,
        pair_mean: Literal["query", "all", "nonzero"] = "query",
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        check_choice(type(self).__name__, "pair_mean", pair_mean, ("query", "all", "nonzero"))
        super().__init__(pair_mean, reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.alpha = check_finite_number(self.name, "alpha", alpha)
        self.beta = check_finite_number(self.name, "beta", beta)

    def pair_sums(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> tuple[Float[Tensor, "query 2"], Float[Tensor, "query 2"]]:
        only_nonzero = self.pair_mean == "nonzero"
        return calibration_sums(
            scores, relevant, candidate, alpha=self.alpha, beta=self.beta, only_nonzero=only_nonzero
        )

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}, {super().extra_repr()}"
