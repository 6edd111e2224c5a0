"""RaMBO (Rolinek, Musil, Paulus, Vlastelica, Michaelis, Martius: "Optimizing Rank-based Metrics with Blackbox
Differentiation", CVPR 2020).

Ranks are exact; their gradient is that of a piecewise linear interpolation (Alg. 1): with g the gradient that arrives
at the ranks of the scores s,

    backward:  - (rk(s) - rk(s + lambda g)) / lambda                                                (eq. 6)

on ranks divided by the list's length L, as in the official code, so that lambda acts alike on lists of all lengths.
A margin alpha makes ranks robust (section 4.2, eq. 15): alpha / 2 is taken from the positives' scores and added to the
others'.

    L_AP = 1 - mean over positives i of rk+(i) / rk(i)                                              (eq. 21-22)
    L_rec = mean over positives i of l(rk(i) - rk+(i)), the number of negatives above i             (eq. 16-20)

with l(x) = log(1 + x) or log(1 + log(1 + x)). Gradients flow through rk, the rank among all; rk+ among the positives is
a constant. Only the positives' ranks have a gradient, so only the positives move in s + lambda g: the order of all
others is sorted once, and both ranks of a positive are places in it.

Where we differ: the margin is not random; nothing is added to the number of positives; the recall loss counts negatives
by the list's length (the official code scales by the number of queries); a loss weight or a gradient scale does not
change the direction of the gradient, for lambda acts on the gradient of the loss's own mean; ties count against us.
"""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.checks import check_choice, check_finite, check_not_negative, check_positive, check_tensor
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.pair_loss import PairLoss

TINY = 1e-8  # added to lambda where the official code divides by it


def blackbox_rank(scores: Float[Tensor, "*lists length"], lambda_: float = 4.0) -> Float[Tensor, "*lists length"]:
    """Rank of each score in its list, 1 for the highest, differentiable by interpolation (RaMBO, Alg. 1 and eq. 6).

    Equal scores are ranked in their order in the list.

    Args:
        scores: lists along the last dimension; half precision is widened to float32, in which ranks are exact.
        lambda_: length of the interpolation, > 0, on gradients with respect to ranks divided by the list's length.

    Raises:
        ValueError: if `lambda_` is not a finite number > 0, or a score is not finite.
        TypeError: if `lambda_` is not a number, or `scores` not a floating-point tensor of at least one dimension.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import blackbox_rank
        >>> scores = torch.tensor([0.1, 0.9, 0.4], requires_grad=True)
        >>> ranks = blackbox_rank(scores, lambda_=2.0)
        >>> ranks.tolist()
        [3.0, 1.0, 2.0]
        >>> ranks[0].backward()  # raise the first score and it passes the others
        >>> scores.grad
        tensor([-0.3333,  0.1667,  0.1667])

    Cost:
        Two sorts.
    """
    check_positive("blackbox_rank", "lambda_", lambda_)
    check_tensor("blackbox_rank", "scores", scores)
    if scores.ndim == 0 or not scores.is_floating_point():
        raise TypeError(
            "blackbox_rank: `scores` must be floating point with lists along the last dimension, got "
            f"{scores.dtype} of shape {tuple(scores.shape)}."
        )
    check_finite("blackbox_rank", "scores", scores)
    ranks: Tensor = _Rank.apply(scores.to(torch.promote_types(scores.dtype, torch.float32)), lambda_)
    return ranks


class BlackboxAPLoss(RetrievalLoss):
    """1 - AP with exact ranks, differentiated by interpolation.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length. Larger values give smoother
            and less faithful gradients.
        margin: alpha, >= 0: what positives must score above all others to count as above them.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list. For comparison only.

    Raises:
        ValueError: if `lambda_` is not a finite number > 0, `margin` not one >= 0, or `reduction` is unknown.
        TypeError: if `lambda_` or `margin` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = BlackboxAPLoss(lambda_=4.0, margin=0.0)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.25

    Cost:
        One sort of each list, whatever the number of positives; memory stays that of one block.

    Relations:
        With `margin=0` its value is 1 - AP exactly. `BlackboxRecallLoss` weighs the first ranks more.
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
        self.margin = check_not_negative(self.name, "margin", margin)

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - AP of each list, equation 21."""
        query, rank, rank_among_positives = _positive_ranks(scores, relevant, candidate, self.lambda_, self.margin)
        ap = scores.new_zeros(len(scores)).index_add(0, query, rank_among_positives / rank)
        return 1 - ap / relevant.sum(1)

    def extra_repr(self) -> str:
        return f"lambda_={self.lambda_}, margin={self.margin}, {super().extra_repr()}"


class BlackboxRecallLoss(PairLoss):
    """Mean over positives of a slowly growing function of the number of negatives above them, with exact ranks.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length.
        margin: alpha, >= 0: what positives must score above all others to count as above them.
        weighting: l of the paper: `"log"`, log(1 + x), or `"loglog"`, log(1 + log(1 + x)).
        pair_mean: `"query"`, the mean over a query's positives, then over queries (the paper, section 5.1), or `"all"`,
            over the positives of all queries together (the official code).
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list. For comparison only.

    Raises:
        ValueError: if `lambda_` is not a finite number > 0, `margin` not one >= 0, or a name is unknown; if queries are
            to have values or weights of their own where `pair_mean` is not `"query"`.
        TypeError: if `lambda_` or `margin` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxRecallLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = BlackboxRecallLoss(margin=0.0)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)  # two queries of four with one negative above
        0.3466

    Cost:
        One sort of each list, whatever the number of positives; memory stays that of one block.

    Relations:
        `BlackboxAPLoss` optimises AP itself.
    """

    def __init__(
        self,
        lambda_: float = 4.0,
        margin: float = 0.02,
        weighting: Literal["log", "loglog"] = "log",
        pair_mean: Literal["query", "all"] = "query",
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        check_choice("BlackboxRecallLoss", "pair_mean", pair_mean, ("query", "all"))
        super().__init__(pair_mean, reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.lambda_ = check_positive(self.name, "lambda_", lambda_)
        self.margin = check_not_negative(self.name, "margin", margin)
        self.weighting = check_choice(self.name, "weighting", weighting, ("log", "loglog"))

    def pair_sums(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Bool[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> tuple[Float[Tensor, "query 1"], Float[Tensor, "query 1"]]:
        """Sum of l(negatives above) over each query's positives, and their number, equations 16-20."""
        query, rank, rank_among_positives = _positive_ranks(scores, relevant, candidate, self.lambda_, self.margin)
        value = torch.log1p(rank - rank_among_positives)
        value = torch.log1p(value) if self.weighting == "loglog" else value
        total = scores.new_zeros(len(scores)).index_add(0, query, value)
        return total[:, None], relevant.sum(1, keepdim=True).to(scores.dtype)

    def extra_repr(self) -> str:
        own = f"lambda_={self.lambda_}, margin={self.margin}, weighting={self.weighting!r}"
        return f"{own}, {super().extra_repr()}"


def _positive_ranks(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    lambda_: float,
    margin: float,
) -> tuple[Int[Tensor, " pos"], Float[Tensor, " pos"], Float[Tensor, " pos"]]:
    """For each positive its query, its differentiable rank among the candidates and its rank among the positives."""
    query = relevant.nonzero()[:, 0]
    shifted = scores - margin * (relevant.to(scores.dtype) - 0.5)
    rank, rank_among_positives = _PositiveRank.apply(shifted, relevant, candidate, lambda_)
    return query, rank, rank_among_positives


class _PositiveRank(torch.autograd.Function):
    """Ranks of each positive among all candidates and among the positives; in backward only the positives move."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, relevant: Tensor, candidate: Tensor, lambda_: float) -> tuple[Tensor, Tensor]:
        query, i = relevant.nonzero(as_tuple=True)
        s = scores[query, i]
        negatives, order = scores.masked_fill(~candidate | relevant, -torch.inf).sort(dim=1)
        rank_among_positives = _at_least_among_positives(query, s)
        rank = _at_least_in_lists(negatives, query, s) + rank_among_positives
        ctx.save_for_backward(negatives, order, query, i, s, rank, candidate.sum(1, dtype=scores.dtype) * lambda_)
        rank_among_positives = rank_among_positives.to(scores.dtype)
        ctx.mark_non_differentiable(rank_among_positives)
        ctx.lambda_ = lambda_
        return rank.to(scores.dtype), rank_among_positives

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        negatives, order, query, i, s, rank, scale = ctx.saved_tensors  # scale: lambda on ranks divided by the length
        moved = s + scale[query] * grad
        moved_rank = _at_least_in_lists(negatives, query, moved) + _at_least_among_positives(query, moved)
        # A negative falls by one rank behind each positive that rises to its score or above, and rises by one where one
        # falls below it: +1 from the place of s in the sorted list, -1 from that of moved.
        change = negatives.new_zeros(len(negatives), negatives.shape[1] + 1)
        for values, by in ((s, 1.0), (moved, -1.0)):
            place = negatives.shape[1] - _at_least_in_lists(negatives, query, values, or_above=False)
            change.index_put_((query, place), change.new_tensor(by), accumulate=True)
        gradient = torch.empty_like(negatives).scatter_(1, order, change.cumsum_(1)[:, :-1])
        gradient[query, i] = (moved_rank - rank).to(gradient.dtype)
        return gradient.div_(scale[:, None] * (1 + TINY / ctx.lambda_)), None, None, None


def _at_least_in_lists(
    ordered: Float[Tensor, "query gallery"],
    query: Int[Tensor, " pos"],
    values: Float[Tensor, " pos"],
    or_above: bool = True,
) -> Int[Tensor, " pos"]:
    """How many of its query's list, sorted upwards, score at least as high as each value (or only higher)."""
    column = torch.arange(len(query), device=query.device) - torch.searchsorted(query, query)  # place in its row
    table = ordered.new_zeros(len(ordered), int(column.max()) + 1 if len(column) else 0)
    table[query, column] = values
    below = torch.searchsorted(ordered, table, right=not or_above)
    return ordered.shape[1] - below[query, column]


def _at_least_among_positives(query: Int[Tensor, " pos"], values: Float[Tensor, " pos"]) -> Int[Tensor, " pos"]:
    """How many positives of the same query, itself among them, score at least as high."""
    places = torch.unique(values, return_inverse=True)[1]
    key = query * len(values) + places  # ordered by query, then by value
    ordered = key.sort()[0]
    return torch.searchsorted(ordered, (query + 1) * len(values)) - torch.searchsorted(ordered, key)


class _Rank(torch.autograd.Function):
    """Ranks by sorting, for `blackbox_rank`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lambda_: float) -> Tensor:
        ranks = _ranks(scores)
        ctx.save_for_backward(scores, ranks)
        ctx.lambda_ = lambda_
        return ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, ranks = ctx.saved_tensors
        length = scores.shape[-1]
        return (_ranks(scores + length * ctx.lambda_ * grad) - ranks) / (length * (ctx.lambda_ + TINY)), None


def _ranks(scores: Tensor) -> Tensor:
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype, device=scores.device)
    return torch.empty_like(scores).scatter_(-1, order, places.expand_as(scores))
