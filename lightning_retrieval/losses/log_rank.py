"""Log rank, a loss of this library: a smooth upper bound of -log AP.

Let N_i be the number of negatives at or above positive i, and p_i the number of positives at or above i, i included.
The precision at i is p_i / (p_i + N_i), which is at least 1 / (1 + N_i). AP is the mean of the precisions of a query's
positives, so

    -log AP = -log mean_i precision_i
           <= mean_i -log precision_i          (Jensen's inequality)
           <= mean_i log(1 + N_i)
           <= mean_i log(1 + rn_i),   rn_i = sum over negatives j of softplus((s_j - s_i) / tau) / ln 2

because softplus(x) / ln 2 is nowhere below the step: it is positive, increasing, and 1 at 0. The loss of a query is

    l = mean over its positives i of log(1 + rn_i) + lambda (1 - s_i)

Symbols: s `scores`, tau `tau`, lambda `lambda_`. With lambda = 0, the loss is the bound of -log AP; the second term
pulls every positive to its query.

A batch is a sample of the list that is searched later. If each negative of the batch stands for c of that list, rn_i
becomes c rn_i. With c = `negative_weight` > 1, the loss is a bound of -log AP as well, but not as close; with c < 1 it
is none. A positive above all negatives still pushes the closest of them away: a negative that scores less by x counts
about as much as one that scores less by x - tau log c counts with c = 1, if both differences are well above tau.

Other losses use the logarithm of a rank, too: WARP weights pairs by it (Usunier et al., ICML 2009; Weston et al., IJCAI
2011), and RaMBO's recall loss averages log(1 + N_i) (Rolinek et al., CVPR 2020). If exp replaced the softplus,
log(1 + rn_i) would be the cross entropy of positive i against the negatives. The supervised contrastive loss has such
terms (Khosla et al., NeurIPS 2020), and they also bound the logarithm of a rank (Bruch et al., ICTIR 2019). But exp
grows exponentially with the difference of scores, so the negative furthest above i takes almost the whole gradient. A
softplus grows linearly.

The gradient of log(1 + rn_i) with respect to s_i is -sum_j sigma((s_j - s_i) / tau) / (tau ln 2 (1 + rn_i)). If n
negatives are above i by d on average, and d is well above tau, this gradient is close to -1 / d, whatever n is. In
contrast, the gradient of AP falls with the square of the rank, and the gradient of a sigmoid vanishes as d grows.
Therefore Smooth-AP hardly moves a positive that is ranked far down.
"""

import math
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.arguments import NotNegative, Positive, checked
from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.score_block import ScoreBlock, at, count_above

HALVINGS = 5  # number of times that factors are multiplied in pairs; a product then has 32 factors


def log_rank(block: ScoreBlock, *, tau: float, lambda_: float, negative_weight: float) -> Float[Tensor, " query"]:
    """The mean over the positives of each list of log(1 + c rn_i) + lambda (1 - s_i), c = `negative_weight`.

    Args:
        block: ranked lists with at least one positive each.
        tau: temperature of the softplus, > 0.
        lambda_: weight of 1 - s_i, >= 0.
        negative_weight: how often each negative counts, > 0.
    """
    positives = block.positives
    query, i = positives.query, positives.index  # (pos,), (pos,)
    s_i = at(block.scores, query, i)  # (pos,)
    s_negative = (block.scores / tau).masked_fill(~block.candidate | block.relevant, -torch.inf)  # (query, gallery)
    step = softplus_step if negative_weight <= 1 else softplus_step_far_below
    rn_i = count_above(s_negative, query, s_i / tau, step) / math.log(2)  # (pos,)
    l_i = (negative_weight * rn_i).log1p() + lambda_ * (1 - s_i)  # (pos,)
    return positives.mean(l_i)


def softplus_step(t: Float[Tensor, "pos gallery"]) -> tuple[Float[Tensor, " pos"], Float[Tensor, "pos gallery"]]:
    """softplus(t), summed over j, and its slope sigma(t).

    softplus(t) is computed as max(t, 0) - log(max(sigma(t), 1 - sigma(t))), which cannot overflow. Logarithms would
    take longer than all other operations, so 32 arguments are multiplied before a logarithm is taken. Each argument is
    from 1/2 to 1; the product of 32 arguments would be 0 in float16, but not in float32. In float32, each term has an
    error of up to 6e-8, so a softplus below 6e-8 may count as 0. The slope has no such error.
    """
    slope = t.sigmoid()
    linear_part = t.clamp_(min=0).sum(1)
    factor = torch.sub(slope, 0.5, out=t).abs_().add_(0.5)
    for _ in range(HALVINGS):
        half = factor.shape[1] // 2
        kept = factor.shape[1] - half
        factor[:, :half].mul_(factor[:, kept:])
        factor = factor[:, :kept]
    return linear_part - factor.log().sum(1), slope


def softplus_step_far_below(
    t: Float[Tensor, "pos gallery"],
) -> tuple[Float[Tensor, " pos"], Float[Tensor, "pos gallery"]]:
    """`softplus_step`, in which negatives far below count in float32 as well, since no softplus is below its slope."""
    count, slope = softplus_step(t)
    return torch.maximum(count, slope.sum(1)), slope


class LogRankLoss(RetrievalLoss):
    """Log rank: a smooth upper bound of -log AP, and a pull on every positive.

    Args:
        tau: temperature of the softplus that counts the negatives above a positive, > 0. In the study
            (examples/study/pairs.md), 0.01 had the highest mAP from random weights, and 0.03 in a head on frozen
            features.
        lambda_: weight of 1 - similarity of each positive, >= 0. With 0, the loss is the bound alone. In the study, 1
            had the highest mAP from random weights, and 3 in a head on frozen features; with 2 to 16 images of each
            class in a batch, 0, 1 and 3 were not distinguished.
        negative_weight: c, how often each negative of the batch counts in the rank of a positive, > 0. Below 1, the
            loss is no bound. In the study (examples/study/choice.md), 10 was better than 1 on photographs, and neither
            was better on the other tasks.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `tau` or `negative_weight` is not from 1e-12 to 1e12, `lambda_` is not from 0 to 1e12, or
            `reduction` is unknown.
        TypeError: if `tau`, `lambda_` or `negative_weight` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import LogRankLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], requires_grad=True)
        >>> loss = LogRankLoss(tau=0.01)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)  # the positive of each query comes first
        0.0061
        >>> round(loss(embeddings, torch.tensor([7, 3, 7, 3])).item(), 4)  # it comes last or last but one
        5.7913

    Cost:
        Time grows with (queries) x (positives per query) x (references); memory is that of one block of queries.

    Relations:
        Unlike `SmoothAPLoss`, this loss is not limited to values from 0 to 1: it has the size of the logarithm of a
        rank, and diverges as tau -> 0 if a negative is above a positive. Its gradients are much longer than the
        gradients of `SmoothAPLoss`. Train with gradient clipping (`Updates(gradient_clip_val=1.0)`); without
        clipping, results were worse. With clipping, a weight of the loss, as in `WeightedSum`, changes how much of a
        step is clipped. `BlackboxRecallLoss` is log(1 + N_i) with exact counts. Use `from_scores` with `lambda_=0`
        unless the scores are cosine similarities: a larger `lambda_` pulls the scores of positives to 1 and beyond.
    """

    def __init__(
        self,
        tau: Positive = 0.01,
        *,
        lambda_: NotNegative = 1.0,
        negative_weight: Positive = 1.0,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.tau = checked(self, tau=tau)
        self.lambda_ = checked(self, lambda_=lambda_)
        self.negative_weight = checked(self, negative_weight=negative_weight)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return log_rank(block, tau=self.tau, lambda_=self.lambda_, negative_weight=self.negative_weight)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery
