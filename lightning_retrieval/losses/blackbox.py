"""Blackbox differentiation of ranks, the core of RaMBO (Rolinek, Musil, Paulus, Vlastelica, Michaelis, Martius:
"Optimizing Rank-based Metrics with Blackbox Differentiation", CVPR 2020).

Ranks are exact; their gradient is that of a piecewise linear interpolation (Alg. 1). With g the gradient of the loss
with respect to the ranks of the scores s,

    backward:  - (rk(s) - rk(s + lambda g)) / lambda                                                (eq. 10)

Ranks are first divided by the list's length L, as in the official code, so that lambda has the same effect on lists of
every length.

`blackbox_rank` ranks all scores of a list. The losses need only the ranks of the positives, which `interpolated_ranks`
computes at less cost: only these ranks have a gradient, so only the positives move in s + lambda g. If the queries have
few positives, each positive is compared with all negatives, before and after the move. Otherwise the scores of the
negatives are sorted once, and the rank of each positive is found by binary search.

In the losses, rk is the rank among all candidates and rk+ the rank among the positives. Gradients flow through rk; rk+
is a constant:

    L_AP  = 1 - mean over positives i of rk+(i) / rk(i)                                             (eq. 21-22)
    L_rec = mean over positives i of l(rk(i) - rk+(i)), the number of negatives above i             (eq. 16-20)

with l(x) = log(1 + x) or log(1 + log(1 + x)).

The official code has a memory of tau past batches (`BatchMemoryRecallLoss`). It appends the stored score rows to those
of the batch, as further queries; no list becomes longer, and the stored rows have no gradient. The memory has two
effects. First, the official code divides ranks by the number of rows, which is now tau + 1 times as large, so x becomes
(tau + 1) x. Second, the mean runs over tau + 1 times as many positives. If all batches have the same numbers of queries
and positives, the memory therefore changes the gradient exactly as if l((tau + 1) x) / (tau + 1) replaced l(x),
whatever the stored scores are. `batch_memory` is this tau.

Differences from the official code, for all losses that use this file: the margin is not random; nothing is added to the
number of positives; lambda acts on the gradient of the mean, so a loss weight or a gradient scale does not change the
direction of the gradient; ties count against the model; ranks are divided by the list's length (the official recall
loss divides them by the number of queries).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.arguments import NotNegativeInt, Positive, checked, numbers
from lightning_retrieval.checks import check_finite, check_float, check_positive
from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.roadmap import PairLoss
from lightning_retrieval.losses.score_block import Positives, ScoreBlock, true_indices

LARGEST_MARGIN = 100.0  # a larger margin may make different scores of positives equal in float32
TINY = 1e-8  # the official code divides by lambda + TINY
MOST_COMPARED = 16  # up to this many positives of a query, comparing each with all negatives is faster than a sort


def blackbox_rank(scores: Float[Tensor, "*lists length"], lambda_: float = 4.0) -> Float[Tensor, "*lists length"]:
    """Rank of each score in its list, 1 for the highest, differentiable by interpolation (RaMBO, Alg. 1 and eq. 10).

    Equal scores are ranked in their order in the list.

    Args:
        scores: lists along the last dimension; half precision is converted to float32, in which ranks are exact.
        lambda_: length of the interpolation, > 0, for gradients with respect to ranks divided by the list's length.

    Raises:
        ValueError: if `lambda_` is not from 1e-12 to 1e12, or a score is not finite.
        TypeError: if `lambda_` is not a number, or `scores` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import blackbox_rank
        >>> scores = torch.tensor([0.1, 0.9, 0.4], requires_grad=True)
        >>> ranks = blackbox_rank(scores, lambda_=2.0)
        >>> ranks.tolist()
        [3.0, 1.0, 2.0]
        >>> ranks[0].backward()  # if the first score rises, it overtakes the others
        >>> scores.grad
        tensor([-0.3333,  0.1667,  0.1667])

    Cost:
        Two sorts.

    Relations:
        `BlackboxAPLoss` and `BlackboxRecallLoss` use a faster form that ranks the positives only.
    """
    check_positive("lambda_", lambda_, owner="blackbox_rank")
    check_float("scores", scores, owner="blackbox_rank")
    check_finite("scores", scores, owner="blackbox_rank")
    ranks: Tensor = _Rank.apply(scores.to(torch.promote_types(scores.dtype, torch.float32)), lambda_)
    return ranks


class SortedLists(NamedTuple):
    """Ranked lists of scores that are sorted at most once, and then searched as often as needed."""

    negatives: Float[Tensor, "query gallery"]  # -inf at positives and non-candidates; ascending if sorted
    column: Int[Tensor, "query gallery"] | None  # column of each sorted entry in the score matrix; None: not sorted
    positives: Positives
    s: Float[Tensor, " pos"]  # the score of each positive
    length: Int[Tensor, " query"]  # number of candidates


def sort_lists(block: ScoreBlock, margin: float) -> SortedLists:
    """Prepare a block of lists for ranking, without a gradient. All lists are sorted if one query has many positives.

    Args:
        block: a block of ranked lists.
        margin: alpha of section 4.4 (eq. 14 and 15). alpha / 2 is subtracted from the scores of the positives and added
            to those of the negatives, which makes ranks robust.
    """
    scores, positives = block.scores.detach(), block.positives
    s = scores[positives.query, positives.index] - margin / 2  # (pos,)
    others = scores.masked_fill(~block.candidate | block.relevant, -torch.inf) + margin / 2
    length = block.candidate.sum(1, dtype=torch.int32)  # (query,); int64 takes twice the time
    if positives.most <= MOST_COMPARED:
        return SortedLists(others, None, positives, s, length)
    negatives, column = others.sort(dim=1)  # (query, gallery)
    return SortedLists(negatives, column, positives, s, length)


def interpolated_ranks(
    scores: Float[Tensor, "query gallery"], lists: SortedLists, *, lambda_: float, past: Sequence[SortedLists] = ()
) -> tuple[Int[Tensor, " pos"], Float[Tensor, " pos"], Float[Tensor, " pos"]]:
    """The query of each positive, its differentiable rank rk among candidates, and its rank rk+ among positives.

    Args:
        scores: similarities, higher is nearer, to which the gradient flows.
        lists: `sort_lists` of the same scores.
        lambda_: length of the interpolation, > 0, for gradients with respect to ranks divided by the list's length.
        past: lists of the same queries from past batches, to be appended to `lists`. Their positives are returned, too,
            but have no gradient.
    """
    query, rank, rank_among_positives = _PositiveRank.apply(scores, (lists, *past), lambda_)
    return query, rank, rank_among_positives


def joined(parts: Sequence[Positives]) -> tuple[Positives, Int[Tensor, " pos"]]:
    """Merge the positives of several lists of the same queries.

    Also return the position of each merged positive in the concatenated `parts`.
    """
    query, order = torch.cat([part.query for part in parts]).sort(stable=True)
    index = torch.cat([part.index for part in parts])[order]
    counts = torch.stack([part.counts for part in parts]).sum(0)
    return Positives(query, index, counts), order


class _Rank(torch.autograd.Function):
    """Ranks by sorting, for `blackbox_rank`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lambda_: float) -> Tensor:
        ranks = _ranks_by_sorting(scores)
        ctx.save_for_backward(scores, ranks)
        ctx.lambda_ = lambda_
        return ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, ranks = ctx.saved_tensors
        length = scores.shape[-1]
        moved_ranks = _ranks_by_sorting(scores + length * ctx.lambda_ * grad)
        return (moved_ranks - ranks) / (length * (ctx.lambda_ + TINY)), None


def _ranks_by_sorting(scores: Float[Tensor, "*lists length"]) -> Float[Tensor, "*lists length"]:
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype, device=scores.device)
    return torch.empty_like(scores).scatter_(-1, order, ranks.expand_as(scores))


class _PositiveRank(torch.autograd.Function):
    """Ranks of each positive among all candidates and among the positives; in backward only the positives move."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, lists: tuple[SortedLists, ...], lambda_: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        positives, by_query = joined([part.positives for part in lists])
        s = torch.cat([part.s for part in lists])[by_query]  # (pos,)
        rank_among_positives = _count_positives_at_least(positives, s)
        rank = _count_negatives_at_least(lists, positives, s) + rank_among_positives
        length = torch.stack([part.length for part in lists]).sum(0).clamp(min=1)  # (query,): 1 for an empty list
        # `lambda_` is for ranks divided by the list's length; these ranks are not divided.
        scale = length.to(scores.dtype) * lambda_  # (query,)
        ctx.save_for_backward(by_query, s, rank, scale)
        ctx.lists, ctx.positives, ctx.lambda_ = lists, positives, lambda_
        rank_among_positives = rank_among_positives.to(scores.dtype)
        ctx.mark_non_differentiable(positives.query, rank_among_positives)
        return positives.query, rank.to(scores.dtype), rank_among_positives

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        by_query, s, rank, scale = ctx.saved_tensors
        lists: tuple[SortedLists, ...] = ctx.lists
        positives: Positives = ctx.positives
        moved = s + scale[positives.query] * grad  # (pos,)
        gradient = _rank_changes_of_negatives(lists[0], positives, s, moved)
        # Only the positives of the present batch, which come first within a query, have a gradient.
        present = lists[0].positives
        (here,) = true_indices(by_query < len(present.query), len(present.query))
        moved_rank = _count_positives_at_least(positives, moved)[here]
        moved_rank += _count_negatives_at_least(lists, present, moved[here])
        gradient[present.query, present.index] = (moved_rank - rank[here]).to(gradient.dtype)
        divisor = scale[:, None] * (1 + TINY / ctx.lambda_)  # (query, 1): length * (lambda + TINY)
        return gradient.div_(divisor), None, None


def _rank_changes_of_negatives(
    lists: SortedLists, positives: Positives, s: Float[Tensor, " pos"], moved: Float[Tensor, " pos"]
) -> Float[Tensor, "query gallery"]:
    """The increase of the rank of each negative if the positives move from `s` to `moved`.

    The rank increases by one for each positive that moves from below the negative's score to at least this score, and
    decreases by one for each positive that moves below it. In a sorted list this adds 1 to all ranks from the position
    of `s` on, and subtracts 1 from all ranks from the position of `moved` on.
    """
    negatives = lists.negatives
    if lists.column is None:
        return _rank_changes_by_comparison(negatives, positives, s, moved)
    gallery = negatives.shape[1]
    change = negatives.new_zeros(len(negatives), gallery + 1)
    for values, sign in ((s, 1.0), (moved, -1.0)):
        position = gallery - _count_at_least(negatives, positives, values, strictly=True)
        change.index_put_((positives.query, position), torch.full_like(values, sign), accumulate=True)
    return torch.empty_like(negatives).scatter_(1, lists.column, change.cumsum_(1)[:, :-1])


def _rank_changes_by_comparison(
    negatives: Float[Tensor, "query gallery"],
    positives: Positives,
    s: Float[Tensor, " pos"],
    moved: Float[Tensor, " pos"],
) -> Float[Tensor, "query gallery"]:
    change, reached = torch.zeros_like(negatives), torch.empty_like(negatives)
    before = positives.in_columns(s, 0.0)  # (query, column); padding cancels out
    after = positives.in_columns(moved, 0.0)
    for old, new in zip(before.unbind(1), after.unbind(1)):
        change += torch.le(negatives, new[:, None], out=reached)
        change -= torch.le(negatives, old[:, None], out=reached)
    return change


def _count_negatives_at_least(
    lists: Sequence[SortedLists], positives: Positives, values: Float[Tensor, " pos"]
) -> Int[Tensor, " pos"]:
    """For each value, the number of negatives of its query, over all lists, that are at least as large."""
    count = torch.zeros_like(positives.query)
    for part in lists:
        if part.column is None:
            count += _count_by_comparison(part.negatives, positives, values)
        else:
            count += _count_at_least(part.negatives, positives, values)
    return count


def _count_by_comparison(
    negatives: Float[Tensor, "query gallery"], positives: Positives, values: Float[Tensor, " pos"]
) -> Int[Tensor, " pos"]:
    """For each value, the number of negatives of its query that are at least as large."""
    rows = positives.in_columns(values, 0.0)  # (query, column)
    counts, at_least = torch.zeros_like(rows), torch.empty_like(negatives)
    for number, value in enumerate(rows.unbind(1)):
        counts[:, number] = torch.ge(negatives, value[:, None], out=at_least).sum(1)
    return counts[positives.query, positives.column].to(torch.int64)


def _count_at_least(
    ascending: Float[Tensor, "query gallery"],
    positives: Positives,
    values: Float[Tensor, " pos"],
    *,
    strictly: bool = False,
) -> Int[Tensor, " pos"]:
    """For each value, the number of entries of its query's sorted row that are at least as large.

    If `strictly`, only larger entries are counted.
    """
    # searchsorted searches row by row, so the values need one row per query.
    rows = positives.in_columns(values, 0.0)
    below = torch.searchsorted(ascending, rows, right=strictly)
    return ascending.shape[1] - below[positives.query, positives.column]


def _count_positives_at_least(positives: Positives, values: Float[Tensor, " pos"]) -> Int[Tensor, " pos"]:
    """For each positive, the number of positives of its query, itself included, that score at least as high."""
    ascending = positives.in_columns(values).sort(dim=1)[0]
    return _count_at_least(ascending, positives, values)


def blackbox_ap(block: ScoreBlock, *, lambda_: float, margin: float) -> Float[Tensor, " query"]:
    """1 - AP of each list (eq. 21 and 22).

    Args:
        block: ranked lists with at least one positive each.
        lambda_: length of the interpolation, > 0.
        margin: alpha, >= 0.
    """
    _, rank, rank_among_positives = interpolated_ranks(block.scores, sort_lists(block, margin), lambda_=lambda_)
    precision = rank_among_positives / rank  # (pos,)
    return 1 - block.positives.mean(precision)


class BlackboxAPLoss(RetrievalLoss):
    """1 - AP with exact ranks, differentiated by interpolation.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length. Larger values give smoother
            and less faithful gradients.
        margin: alpha, from 0 to 100: a positive is ranked above a negative only if it scores more than alpha higher.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `lambda_` is not a number from 1e-12 to 1e12, `margin` is not a number from 0 to 100, or
            `reduction` is unknown.
        TypeError: if `lambda_` or `margin` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = BlackboxAPLoss(lambda_=4.0, margin=0.0)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.25

    Cost:
        If a query of a block has more than 16 positives, each list of the block is sorted once; otherwise each positive
        is compared with all negatives a few times. Memory is that of one block of queries.

    Relations:
        With `margin=0`, the value of this loss is exactly 1 - AP. `BlackboxRecallLoss` gives more weight to the first
        ranks.
    """

    approximates_ap = True

    def __init__(
        self,
        lambda_: Positive = 4.0,
        margin: Annotated[float, numbers(0, LARGEST_MARGIN)] = 0.02,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.lambda_ = checked(self, lambda_=lambda_)
        self.margin = checked(self, margin=margin)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return blackbox_ap(block, lambda_=self.lambda_, margin=self.margin)


Weighting = Literal["log", "loglog"]


def blackbox_recall_sums(
    block: ScoreBlock, *, lambda_: float, margin: float, weighting: Weighting = "log", batch_memory: int = 0
) -> tuple[Float[Tensor, "query 1"], Float[Tensor, "query 1"]]:
    """For each query, the sum of l(number of negatives above) over its positives, and their number (eq. 16-20).

    Args:
        block: a block of ranked lists.
        lambda_: length of the interpolation, > 0.
        margin: alpha, >= 0.
        weighting: l: `"log"` or `"loglog"`.
        batch_memory: tau, >= 0: l((tau + 1) x) / (tau + 1) replaces l(x).
    """
    query, rank, rank_among_positives = interpolated_ranks(block.scores, sort_lists(block, margin), lambda_=lambda_)
    negatives_above = rank - rank_among_positives  # (pos,)
    batches = batch_memory + 1.0
    value = torch.log1p(batches * negatives_above)
    if weighting == "loglog":
        value = torch.log1p(value)
    value = value / batches
    total = torch.zeros_like(block.scores[:, 0]).index_add(0, query, value)  # (query,)
    return total[:, None], block.positives.of_each_query[:, None].to(total.dtype)


class BlackboxRecallLoss(PairLoss):
    """Mean over positives of a slowly growing function of the number of negatives above them, with exact ranks.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length. The default is that of
            ROADMAP's code for RaMBO, since the paper's value for retrieval is in its supplement; 0.8 was better on both
            data sets of examples/study/losses.md.
        margin: alpha, from 0 to 100: a positive is ranked above a negative only if it scores more than alpha higher.
        weighting: l of the paper: `"log"`, log(1 + x), or `"loglog"`, log(1 + log(1 + x)).
        batch_memory: tau, >= 0: l((tau + 1) x) / (tau + 1) replaces l(x). Nothing is stored: the effect on
            the gradient is that of the official code's memory once it holds the scores of tau past batches.
        pair_mean: `"query"`, the mean over a query's positives, then over queries (the paper, section 5.1), or `"all"`,
            the mean over the positives of all queries together (the official code).
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `lambda_` is not from 1e-12 to 1e12, `margin` is not from 0 to 100, `batch_memory` is negative,
            or `weighting`, `pair_mean` or `reduction` is unknown; if `pair_mean` is not `"query"`, but `reduction` or
            `class_balanced` needs a value per query.
        TypeError: if `lambda_` or `margin` is not a number, or `batch_memory` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxRecallLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = BlackboxRecallLoss(margin=0.0)
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)  # two of four queries have one negative above
        0.3466

    Cost:
        If a query of a block has more than 16 positives, each list of the block is sorted once; otherwise each positive
        is compared with all negatives a few times. Memory is that of one block of queries.

    Relations:
        `BlackboxAPLoss` optimises AP itself. Unlike `batch_memory`, `CrossBatchMemory` extends the lists by past
        embeddings.
    """

    def __init__(
        self,
        lambda_: Positive = 4.0,
        margin: Annotated[float, numbers(0, LARGEST_MARGIN)] = 0.02,
        *,
        weighting: Weighting = "log",
        batch_memory: NotNegativeInt = 0,
        pair_mean: Literal["query", "all"] = "query",
        **settings: Unpack[LossSettings],
    ) -> None:
        checked(self, pair_mean=pair_mean)
        super().__init__(pair_mean, **settings)
        self.lambda_ = checked(self, lambda_=lambda_)
        self.margin = checked(self, margin=margin)
        self.weighting = checked(self, weighting=weighting)
        self.batch_memory = checked(self, batch_memory=batch_memory)

    def pair_sums(self, block: ScoreBlock) -> tuple[Float[Tensor, "query 1"], Float[Tensor, "query 1"]]:
        return blackbox_recall_sums(
            block, lambda_=self.lambda_, margin=self.margin, weighting=self.weighting, batch_memory=self.batch_memory
        )
