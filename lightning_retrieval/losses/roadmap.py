"""ROADMAP (Ramzi, Thome, Rambour, Audebert, Bitot: "Robust and Decomposable Average Precision for Image Retrieval",
NeurIPS 2021): an upper bound of 1 - AP, plus a term that makes the scores of different lists comparable.

    L = (1 - lambda) L_SupAP + lambda L_calibration

SupAP (section 3.1). As in Smooth-AP, the AP of a query is the mean over its positives of (rank among the positives) /
(rank among all items). For a negative j, SupAP replaces the step function of t = s_j - s_i by H^-(t), which is never
below the step. Positives are counted by the true step function, without a gradient:

    H^-(t) = sigma(t / tau)                 t <= 0
           = start + sigma(t / tau)         0 < t <= delta
           = rho (t - delta) + offset       t > delta

With start = 1/2, H^-(t) is at least 1 for every t > 0. `offset=None` makes H^- continuous at delta: the offset is then
sigma(delta / tau) + start. The linear part has a gradient where the gradient of a sigmoid vanishes.

Calibration (section 3.2). AP depends only on the order within a list, so the scores of different lists need not be on
one scale. Two hinges pull the cosine similarity of positives above alpha and push the cosine similarity of negatives
below beta:

    L = mean over positives of [alpha - s]_+  +  mean over negatives of [s - beta]_+

Differences from the official code: the query is not in its own list; a query without a positive is skipped. In the
official configuration, the offset is 1.44, so H^- steps down at delta. Before pull request 13 of the official
repository (November 2022), the linear part was rho t + offset.

The means of the calibration are taken over the pairs of each query, and then over the queries. The official code takes
one mean over all pairs of the batch that violate their bound (`pair_mean="nonzero"`). The choice between these means
changes the weight of the calibration by a factor of up to 8.
"""

import functools
from abc import abstractmethod
from typing import Literal, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.arguments import Fraction, NotNegative, Number, Positive, checked, settings_repr
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.blockwise import ComputedQueries, Formula, blockwise
from lightning_retrieval.losses.combined import WeightedSum
from lightning_retrieval.losses.score_block import ScoreBlock, Step, at, count_above
from lightning_retrieval.ranking.lists import QueryRange


def sup_ap(block: ScoreBlock, h_minus: Step) -> Float[Tensor, " query"]:
    """1 minus a lower bound of the AP of each list. Negatives are counted by H^-.

    Args:
        block: ranked lists with at least one positive each.
        h_minus: sums H^- over the gallery.
    """
    positives = block.positives
    query, i = positives.query, positives.index  # (pos,), (pos,)
    s_i = at(block.scores, query, i)  # (pos,)

    s_negative = block.scores.masked_fill(~block.candidate | block.relevant, -torch.inf)  # (query, gallery)
    negatives_above = count_above(s_negative, query, s_i, h_minus)  # (pos,)

    s_positive = positives.in_columns(s_i.detach())  # (query, most)
    below = torch.searchsorted(s_positive.sort(1).values, s_positive)  # (query, most)
    rank_among_positives = positives.most - below[query, positives.column]  # (pos,): items at least as high as i

    precision = rank_among_positives / (rank_among_positives + negatives_above)  # (pos,)
    return 1 - positives.mean(precision)


def count_upper(
    t: Float[Tensor, "pos gallery"], *, tau: float, rho: float, delta: float, offset: float | None, start: float
) -> tuple[Float[Tensor, " pos"], Float[Tensor, "pos gallery"]]:
    """The sum of H^-(t) over the gallery, and the slope of H^- at each t.

    H^- is a sigmoid, plus `start` above 0; above `delta` it is a line of slope `rho`. Each part is summed by itself, so
    that no tensor holds H^-. Conditions are float tensors of 0 and 1, which is much faster on a CPU than `torch.where`.
    New tensors of this size are slow, so there are only two, and `t` is overwritten.
    """
    if offset is None:
        sigma_at_delta = torch.sigmoid(torch.tensor(delta / tau, dtype=torch.float64))
        offset = float(sigma_at_delta) + start
    sigma, is_linear = torch.empty_like(t), torch.empty_like(t)
    above = torch.gt(t, 0, out=sigma).sum(1)
    linear = torch.gt(t, delta, out=is_linear).sum(1)
    torch.div(t, tau, out=sigma).sigmoid_()
    sigma.addcmul_(sigma, is_linear, value=-1)  # 0 where H^- is linear
    beyond = t.sub_(delta).clamp_(min=0).sum(1)  # 0 also where t is -inf
    count = sigma.sum(1) + start * (above - linear) + rho * beyond + offset * linear
    below = torch.sub(t.new_ones(()), sigma, out=t)
    slope = is_linear.mul_(rho).addcmul_(sigma, below, value=1 / tau)
    return count, slope


class UpperStepLoss(RetrievalLoss):
    """Base of the losses that count the items above a positive by H^-; for the settings, see `SupAPLoss`."""

    def __init__(
        self,
        *,
        tau: Positive,
        rho: Positive,
        delta: Positive,
        offset: NotNegative | None,
        start: NotNegative,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(**settings)
        self.tau = checked(self, tau=tau)
        self.rho = checked(self, rho=rho)
        self.delta = checked(self, delta=delta)
        self.offset = checked(self, offset=offset)
        self.start = checked(self, start=start)

    @property
    def h_minus(self) -> Step:
        """H^- with these settings, summed over the gallery."""
        return functools.partial(
            count_upper, tau=self.tau, rho=self.rho, delta=self.delta, offset=self.offset, start=self.start
        )

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery


class SupAPLoss(UpperStepLoss):
    """1 minus a lower bound of AP: negatives are counted by a function that is never below the step function.

    Args:
        tau: temperature of the sigmoid, > 0.
        rho: slope for negatives that score more than `delta` above the positive, > 0.
        delta: the difference of scores above which the function is linear, > 0.
        offset: value of the function just above `delta`, >= 0; if None, the function is continuous there.
        start: constant added to the sigmoid above 0, >= 0. The function is an upper bound of the step function if
            `start` is at least 0.5.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `tau`, `rho` or `delta` is not from 1e-12 to 1e12, `offset` or `start` is not from 0 to 1e12, or
            `reduction` is unknown.
        TypeError: if one of these arguments is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import SupAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> loss = SupAPLoss()
        >>> round(loss(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.4629

    Cost:
        Time grows with (queries) x (positives per query) x (references); memory is that of one block of queries.

    Relations:
        `ROADMAPLoss` adds `CalibrationLoss`, which makes the scores of different batches comparable.
    """

    approximates_ap = True

    def __init__(
        self,
        tau: Positive = 0.01,
        *,
        rho: Positive = 100.0,
        delta: Positive = 0.05,
        offset: NotNegative | None = None,
        start: NotNegative = 0.5,
        **settings: Unpack[LossSettings],
    ) -> None:
        super().__init__(tau=tau, rho=rho, delta=delta, offset=offset, start=start, **settings)

    def query_losses(self, block: ScoreBlock) -> Float[Tensor, " query"]:
        return sup_ap(block, self.h_minus)


class PairLoss(RetrievalLoss):
    """Base of losses that are means over pairs of a query and a reference.

    Args:
        pair_mean: `"query"` takes the mean over the pairs of each query, then the mean over the queries. Any other
            name, which a subclass defines, takes one mean over the pairs of all queries, including the queries without
            a positive.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`. Unless `pair_mean` is
            `"query"`, `reduction` must be `"mean"` and `class_balanced` False.

    Raises:
        ValueError: if `pair_mean` is not `"query"`, but `reduction` or `class_balanced` needs a value per query.
    """

    def __init__(self, pair_mean: str, **settings: Unpack[LossSettings]) -> None:
        super().__init__(**settings)
        self.pair_mean = pair_mean
        if pair_mean != "query" and (self.reduction != "mean" or self.class_balanced):
            rule = f"{pair_mean!r} is a mean over the pairs of all queries, which gives no value per query"
            got = f"reduction={self.reduction!r}, class_balanced={self.class_balanced}"
            raise InvalidValue(rule, self.name, "pair_mean", got=got, cure="set pair_mean='query'")

    @abstractmethod
    def pair_sums(self, block: ScoreBlock) -> tuple[Float[Tensor, "query term"], Float[Tensor, "query term"]]:
        """For each query and term, the sum of the term over the query's pairs, and the number of these pairs.

        The loss is the sum of the means of all terms.
        """

    def query_losses(
        self, block: ScoreBlock, pairs_per_query: Float[Tensor, " term"] | None = None
    ) -> Float[Tensor, " query"]:
        """The value of each query: its own means, or its contribution to the means over the pairs of all queries.

        Args:
            block: a block of ranked lists.
            pairs_per_query: divisor of each sum: the number of pairs of all queries, divided by the number of queries.
                If None, each sum is divided by the query's number of pairs.
        """
        sums, counts = self.pair_sums(block)
        if pairs_per_query is None:
            return (sums / counts.clamp(min=1)).sum(1)
        return (sums / pairs_per_query).sum(1)

    def _has_value(self, positives: Int[Tensor, " query"]) -> Bool[Tensor, " query"]:
        if self.pair_mean == "query":
            return positives > 0
        return torch.ones_like(positives, dtype=torch.bool)

    def _formula(self, computed: ComputedQueries, queries: QueryRange | None) -> Formula:
        if self.pair_mean == "query":
            return self.query_losses
        total = self._count_pairs(computed)
        if queries is not None:
            total = queries.total(total)
        pairs_per_query = total.clamp(min=1) / computed.count
        return functools.partial(self.query_losses, pairs_per_query=pairs_per_query)

    @torch.no_grad()
    def _count_pairs(self, computed: ComputedQueries) -> Float[Tensor, " term"]:
        """Number of pairs of each term over the computed queries; 0 for each term if there is none."""

        def pairs(block: ScoreBlock) -> Tensor:
            return self.pair_sums(block)[1]

        if len(computed.rows) > 0:
            counts, _ = blockwise(pairs, computed)
        else:  # without a query, `blockwise` cannot know the number of terms
            counts = pairs(computed.block(slice(0, 0), computed.scores.of(computed.rows)))
        return counts.sum(0)


def calibration_sums(
    block: ScoreBlock, *, alpha: float, beta: float, only_nonzero: bool = False
) -> tuple[Float[Tensor, "query 2"], Float[Tensor, "query 2"]]:
    """For each query, the sums of the hinges of its positives and of its negatives, and the numbers of these pairs.

    Args:
        block: a block of ranked lists.
        alpha: similarity that positives should reach.
        beta: similarity that negatives should stay below.
        only_nonzero: count only the pairs that violate their bound.
    """
    negative = block.candidate & ~block.relevant
    positive_hinge = (alpha - block.scores).clamp(min=0) * block.relevant  # (query, gallery)
    negative_hinge = (block.scores - beta).clamp(min=0) * negative  # (query, gallery)
    sums = torch.stack([positive_hinge.sum(1), negative_hinge.sum(1)], 1)  # (query, 2)
    if only_nonzero:
        counts = torch.stack([(positive_hinge > 0).sum(1), (negative_hinge > 0).sum(1)], 1)
    else:
        counts = torch.stack([block.relevant.sum(1), negative.sum(1)], 1)
    return sums, counts.to(sums.dtype)


class CalibrationLoss(PairLoss):
    """Hinges on the cosine similarities of positives and of negatives.

    Args:
        alpha: similarity that positives should reach.
        beta: similarity that negatives should stay below.
        pair_mean: the pairs that the two means run over: `"query"`, the pairs of each query; `"all"`, all pairs of the
            batch; `"nonzero"`, the pairs of the batch that violate their bound.
        settings: `reduction`, `class_balanced` and `include_self`, as in `RetrievalLoss`.

    Raises:
        ValueError: if `alpha` or `beta` is not from -1e12 to 1e12, or `pair_mean` or `reduction` is unknown; if
            `pair_mean` is not `"query"`, but `reduction` or `class_balanced` needs a value per query.
        TypeError: if `alpha` or `beta` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import CalibrationLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(CalibrationLoss()(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.19

    Relations:
        This loss is the second term of `ROADMAPLoss`.
    """

    def __init__(
        self,
        alpha: Number = 0.9,
        beta: Number = 0.6,
        *,
        pair_mean: Literal["query", "all", "nonzero"] = "query",
        **settings: Unpack[LossSettings],
    ) -> None:
        checked(self, pair_mean=pair_mean)
        super().__init__(pair_mean, **settings)
        self.alpha = checked(self, alpha=alpha)
        self.beta = checked(self, beta=beta)

    def pair_sums(self, block: ScoreBlock) -> tuple[Float[Tensor, "query 2"], Float[Tensor, "query 2"]]:
        only_nonzero = self.pair_mean == "nonzero"
        return calibration_sums(block, alpha=self.alpha, beta=self.beta, only_nonzero=only_nonzero)


class ROADMAPLoss(WeightedSum):
    """(1 - lambda) SupAP + lambda calibration.

    Args:
        lambda_: weight of the calibration, from 0 to 1.
        settings: `reduction`, `class_balanced` and `include_self` of both terms, as in `RetrievalLoss`.

    Raises:
        ValueError: if `lambda_` is not from 0 to 1, or `reduction` is unknown.
        TypeError: if `lambda_` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import ROADMAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(ROADMAPLoss(lambda_=0.5)(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.3265

    Relations:
        A `WeightedSum` of `SupAPLoss` and `CalibrationLoss` has other settings of the terms, such as
        `ROADMAPLoss.official()`, which has those of the official configuration.
    """

    def __init__(self, lambda_: Fraction = 0.5, **settings: Unpack[LossSettings]) -> None:
        lambda_ = checked(self, lambda_=lambda_)
        with reported_as("ROADMAPLoss"):
            sup_ap, calibration = SupAPLoss(**settings), CalibrationLoss(**settings)
        super().__init__({"sup_ap": (1 - lambda_, sup_ap), "calibration": (lambda_, calibration)})
        self.lambda_ = lambda_
        self.reduction, self.class_balanced = sup_ap.reduction, sup_ap.class_balanced
        self.include_self = sup_ap.include_self

    @classmethod
    def official(cls) -> WeightedSum:
        """SupAP + calibration with the official settings.

        The query is in its own list, the offset is 1.44, both weights are 1, and the means of the calibration run over
        the pairs that violate their bound.
        """
        sup_ap = SupAPLoss(offset=1.44, include_self=True)
        return WeightedSum({"sup_ap": (1.0, sup_ap), "calibration": (1.0, CalibrationLoss(pair_mean="nonzero"))})

    def extra_repr(self) -> str:
        return settings_repr(self)
