"""HAP, hierarchical Average Precision (Ramzi, Audebert, Thome, Rambour, Bitot: "Hierarchical Average Precision Training
for Pertinent Image Retrieval" (HAPPIER), ECCV 2022).

Each item has a graded relevance rel(i):

    H-rank(i) = rel(i) + sum over j above i of min(rel(i), rel(j))
    HAP = sum over relevant i of H-rank(i) / rank(i)  /  sum over relevant i of rel(i)

An item that shares l of the L label levels with the query has rel = (l / L)^alpha / (number of items that share exactly
l). In rank(i), items that share fewer levels with the query than i are counted by SupAP's H^-, which is never below the
step function; all other items, and all items in H-rank(i), are counted by the step function, without a gradient.

As in the official code, the number of shared levels decides which items are lower than i; relevance is only a weight.
The order by levels and the order by relevance can differ: if a fine level has many items and a coarser level few, the
coarser items have the higher relevance.

Differences from the official code: the query is neither in its own list nor counted in any level; a query without a
relevant item is skipped. `hrank_slopes` is the official code's optional gradient through H-rank.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lightning_retrieval.arguments import NotNegative, Positive, checked
from lightning_retrieval.checks import check_finite_number, short_repr
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.losses.base import LossSettings
from lightning_retrieval.losses.roadmap import UpperStepLoss
from lightning_retrieval.losses.score_block import ScoreBlock, Step, at, constants, count_above


def hap(
    block: ScoreBlock, *, alpha: float, h_minus: Step, hrank_slopes: tuple[float, ...] | None = None
) -> Float[Tensor, " query"]:
    """1 minus the HAP of each list. H^- counts the items of lower levels in the ranks.

    Args:
        block: ranked lists with at least one positive each; `relevant` is the number of label levels that an item
            shares with the query.
        alpha: exponent of the relevance, > 0.
        h_minus: sums H^- over the gallery.
        hrank_slopes: (beta, gamma, leak) of `soft_step`; if None, H-rank has no gradient.
    """
    positives = block.positives
    query, i = positives.query, positives.index  # (pos,), (pos,)
    s_i, level_i = at(block.scores, query, i), block.relevant[query, i]  # (pos,), (pos,)
    lower, level_index = lower_items(block), number_of_levels_below(block, level_i)
    # `lower` has a list for each query and level: here that of i's query and level, with the items of lower levels.
    lower_above = count_above(lower, query * len(block.levels) + level_index, s_i, h_minus)  # (pos,)

    # All other counts involve relevant items only. Each pair is a relevant i and a relevant j of the same query, as
    # indices into (pos,); j can be i itself.
    pair_i, pair_j = positives.pairs()  # (pair,), (pair,)
    t = s_i.index_select(0, pair_j) - s_i.index_select(0, pair_i)  # (pair,)
    step = t.detach() >= 0  # (pair,)
    levels_above = level_i[pair_j].to(torch.int64) - level_i[pair_i].to(torch.int64)  # (pair,)
    others_above = torch.zeros_like(s_i).index_add(0, pair_i, (step & (levels_above >= 0)).to(s_i.dtype))  # (pos,)
    rank = lower_above + others_above  # (pos,)

    rel, rel_sum = relevance_of_levels(block, query, level_index, alpha)  # (query, level), (query,)
    rel_i = at(rel, query, level_index)  # (pos,)
    counted = step.to(s_i.dtype)  # (pair,)
    if hrank_slopes is not None:
        counted = torch.where(levels_above > 0, soft_step(t, hrank_slopes), counted)
    shared = torch.minimum(rel_i[pair_i], rel_i[pair_j])  # (pair,)
    h_rank = torch.zeros_like(s_i).index_add(0, pair_i, shared * counted)  # (pos,)

    sum_of_ratios = torch.zeros_like(block.scores[:, 0]).index_add(0, query, h_rank / rank)  # (query,)
    return 1 - sum_of_ratios / rel_sum


def lower_items(block: ScoreBlock) -> Float[Tensor, "list gallery"]:
    """One list for each query and level, in which only the items of lower levels are not -inf."""
    lower = []
    for level in block.levels:
        is_lower = block.candidate & (block.relevant < level)
        lower.append(block.scores.where(is_lower, -torch.inf))
    return torch.stack(lower, 1).flatten(0, 1)


def number_of_levels_below(block: ScoreBlock, level_i: Shaped[Tensor, " pos"]) -> Int[Tensor, " pos"]:
    """For each positive, the number of possible levels above 0 and below its own: the index of its level."""
    below = torch.zeros_like(level_i, dtype=torch.int64)
    for level in block.levels:
        below += level_i > level
    return below


def soft_step(t: Float[Tensor, "..."], slopes: tuple[float, ...]) -> Float[Tensor, "..."]:
    """The step function that the official code uses in H-rank: min(beta t + gamma, 1) above 0, leak t below."""
    beta, gamma, leak = slopes
    return torch.where(t > 0, (beta * t + gamma).clamp(max=1), leak * t)


def relevance_of_levels(
    block: ScoreBlock, query: Int[Tensor, " pos"], level_index: Int[Tensor, " pos"], alpha: float
) -> tuple[Float[Tensor, "query level"], Float[Tensor, " query"]]:
    """The relevance of an item of each level l, (l / H)^alpha / (number of items of exactly level l), and its sum.

    H is the highest level of the query's items. The paper uses L, the number of levels, instead. The choice cancels in
    HAP; with H, a large alpha cannot make all relevances of a query 0.

    Args:
        block: a block of ranked lists.
        query: the query of each positive.
        level_index: the index of each positive's level among `block.levels`.
        alpha: exponent of the relevance, > 0.
    """
    levels = constants([float(level) for level in block.levels], block.scores)  # (level,)
    flat = query * len(levels) + level_index  # (pos,): index into the flattened (query, level) matrix
    count = levels.new_zeros(len(block.scores) * len(levels)).index_add(0, flat, levels.new_ones(()).expand(len(flat)))
    count = count.view(len(block.scores), len(levels))  # (query, level)
    occurs = count > 0  # (query, level)
    highest = (levels * occurs).amax(1, keepdim=True).clamp(min=1)  # (query, 1)
    of_all_items = (levels / highest).clamp(max=1) ** alpha * occurs  # (query, level): summed over the items of a level
    return of_all_items / count.clamp(min=1), of_all_items.sum(1)


class HAPLoss(UpperStepLoss):
    """1 - hierarchical AP of labels with several levels.

    Labels have shape (rows, L), finest level first, and must nest. `from_scores` takes integer levels of relevance (0:
    not relevant) instead of a bool mask.

    Args:
        alpha: exponent of the relevance: larger values give finer levels more weight, > 0.
        tau: temperature of the sigmoid, > 0.
        rho: slope of H^- above `delta`, > 0. H^- is the function by which `SupAPLoss` counts negatives. Here it counts
            the items that share fewer levels with the query than the ranked item does.
        delta: the difference of scores above which H^- is linear, > 0.
        offset: value of H^- just above `delta`, >= 0; if None, H^- is continuous there.
        start: constant added to the sigmoid above 0, >= 0. H^- is an upper bound of the step function if `start` is at
            least 0.5.
        hrank_slopes: None, or (beta, gamma, leak). If given, items that share more levels with the query are counted in
            H-rank by min(beta t + gamma, 1) for t above 0 and leak t below. The official configuration HAPPIER_5_SOP
            has (25, 0.5, 10).
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `alpha`, `tau`, `rho` or `delta` is not from 1e-12 to 1e12, `offset` or `start` is not from 0 to
            1e12, a slope is not finite, or the number of slopes is not three; when called, if the label levels do not
            nest.
        TypeError: if one of these arguments is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import HAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> labels = torch.tensor([[7, 1], [7, 1], [3, 1], [4, 0]])  # three images of the coarse class 1
        >>> round(HAPLoss()(embeddings, labels).item(), 4)
        0.7373

    Cost:
        Time grows with (queries) x (relevant items per query) x (references); memory is that of one block of queries.

    Relations:
        With one label level, this loss is `SupAPLoss`.
    """

    graded = True

    def __init__(
        self,
        alpha: Positive = 1.0,
        *,
        tau: Positive = 0.01,
        rho: Positive = 100.0,
        delta: Positive = 0.05,
        offset: NotNegative | None = None,
        start: NotNegative = 0.5,
        hrank_slopes: Sequence[float] | None = None,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(tau=tau, rho=rho, delta=delta, offset=offset, start=start, **settings)
        self.alpha = checked(self, alpha=alpha)
        with owned_by(self.name):
            self.hrank_slopes = _check_slopes(hrank_slopes)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return hap(block, alpha=self.alpha, h_minus=self.h_minus, hrank_slopes=self.hrank_slopes)


def _check_slopes(slopes: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the slopes as a tuple of three finite numbers, or None."""
    if slopes is None:
        return None
    if len(slopes) != 3:
        raise InvalidValue("must be (beta, gamma, leak) or None", argument="hrank_slopes", got=short_repr(slopes))
    return tuple(check_finite_number("hrank_slopes", slope) for slope in slopes)
