"""The calibration loss of ROADMAP (Ramzi et al., NeurIPS 2021, section 3.2), which makes AP of batches decomposable.

AP looks at the order within a list only, so lists of different batches need not agree on a scale. Two hinges pull
positives above alpha and push negatives below beta, in cosine similarity:

    L = mean over positives of [alpha - s]_+  +  mean over negatives of [s - beta]_+

Where we differ: the means are taken for each query, then over queries; `pair_mean="nonzero"` is the official code, a
mean over all violating pairs of the batch. The choice changes the weight of the term by up to 8 times.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_finite_number
from lightning_retrieval.losses.base import Reduction
from lightning_retrieval.losses.pair_loss import PairLoss


class CalibrationLoss(PairLoss):
    """Hinges on the cosine similarity of positives and of negatives.

    Args:
        alpha: similarity that positives should reach.
        beta: similarity that negatives should stay below.
        pair_mean: what the two means run over: the pairs of each `"query"`, `"all"` pairs of the batch, or the
            `"nonzero"` pairs of the batch, those that violate their bound.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list, as the official code does with a memory. For comparison only.

    Raises:
        ValueError: if `alpha` or `beta` is not finite, or a name is unknown; if queries are to have values or weights
            of their own where `pair_mean` is not `"query"`.
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
        pair_mean: Literal["query", "all", "nonzero"] = "query",
        *,
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
        """Sums of both hinges over each query's pairs, and the numbers of pairs."""
        negative = candidate & ~relevant
        below = (self.alpha - scores).clamp(min=0) * relevant
        above = (scores - self.beta).clamp(min=0) * negative
        if self.pair_mean == "nonzero":
            counts = torch.stack([(below > 0).sum(1), (above > 0).sum(1)], 1)
        else:
            counts = torch.stack([relevant.sum(1), negative.sum(1)], 1)
        return torch.stack([below.sum(1), above.sum(1)], 1), counts.to(scores.dtype)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}, {super().extra_repr()}"
