"""False-match rate and miss rate of a search at any similarity threshold.

A search that shows nothing below a threshold t makes two kinds of errors. Let n be the highest score of a negative in a
query's list, and p the highest score of a positive:

    false-match rate(t) = fraction of the queries with n >= t: an image of another label is shown
    miss rate(t)        = fraction of the queries with p < t: no image of the query's label is shown

These are the false-positive and the false-negative identification rate of open-set identification (ISO/IEC 19795-1).
The false-match rate is the rate for queries whose label is not in the gallery. It grows with the gallery, at most in
proportion to it, so a threshold is only valid for a similar number of images. A query without a negative does not count
in the false-match rate, and a query without a positive does not count in the miss rate. The scores are those that the
metrics rank by; ties count against the model.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.checks import check_finite, check_finite_number
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.ranking.rows import float64_device, to_float64

OWNER = "NearestScores"
_ABOVE = 1e-5  # distance of a threshold from the highest score, larger than the rounding of any search


@dataclass(frozen=True)
class NearestScores:
    """The score of the nearest negative and of the nearest positive of each query, see `nearest_scores`.

    Args:
        negatives: highest score of a negative, for each query that has one, in any order.
        positives: highest score of a positive, for each query that has one, in any order.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics.thresholds import NearestScores
        >>> scores = NearestScores(torch.tensor([0.125, 0.25, 0.5, 0.75]), torch.tensor([0.625, 0.75, 0.875]))
        >>> scores.threshold(false_match_rate=0.25)
        0.5625
        >>> scores.false_match_rates(torch.tensor([0.25, 0.5625])), scores.miss_rates(0.7)
        (tensor([0.7500, 0.2500], dtype=torch.float64), tensor(0.3333, dtype=torch.float64))
    """

    negatives: Float[Tensor, " neg"]
    positives: Float[Tensor, " pos"]

    def false_match_rates(self, thresholds: float | Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The fraction of `negatives` that reach each threshold; NaN if there are none.

        Args:
            thresholds: a number, or a tensor of any shape.

        Raises:
            ValueError: if a threshold is NaN or infinite.
            TypeError: if `thresholds` is neither.
        """
        return _rates(thresholds, self.negatives, reach=True)

    def miss_rates(self, thresholds: float | Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The fraction of `positives` that do not reach each threshold; NaN if there are none.

        Args:
            thresholds: a number, or a tensor of any shape.

        Raises:
            ValueError: if a threshold is NaN or infinite.
            TypeError: if `thresholds` is neither.
        """
        return _rates(thresholds, self.positives, reach=False)

    def threshold(self, false_match_rate: float) -> float:
        """The threshold with at most this false-match rate that misses the fewest queries.

        It is midway between two neighbouring scores, so the rounding of a score does not change the rates.

        Args:
            false_match_rate: from 0 to 1.

        Raises:
            ValueError: if `false_match_rate` is out of range, or no query has a negative.
            TypeError: if `false_match_rate` is not a number.
        """
        check_finite_number("false_match_rate", false_match_rate, least=0, most=1, owner=OWNER)
        count = len(self.negatives)
        if count == 0:
            rule = "must hold a score"
            got = "none, because no query has an image in its list that is not relevant"
            raise InvalidValue(rule, OWNER, "negatives", got=got, cure="use a set with several labels in the gallery")
        rounded = math.floor(false_match_rate * count)  # may be off by one
        allowed = max(number for number in (rounded - 1, rounded, rounded + 1) if number / count <= false_match_rate)
        if allowed == count:
            return -1.0
        negatives, positives = self.negatives.double().cpu(), self.positives.double().cpu()
        excluded = float(negatives.sort(descending=True).values[allowed])  # the highest score below the threshold
        scores = torch.cat([negatives, positives])
        above = scores[scores > excluded]
        if len(above) == 0:
            return excluded + _ABOVE
        lowest = float(above.min())
        middle = (excluded + lowest) / 2
        if middle <= excluded:  # neighbouring numbers in float64
            return lowest
        return middle


def nearest_scores(metrics: EmbeddingMetric) -> NearestScores:
    """The scores from which a similarity threshold is chosen.

    Like `compute`, this is a collective operation of the metric's processes. The result does not depend on the number
    of processes.

    Args:
        metrics: the metric that holds the embeddings of a set, such as the validation set.

    Returns:
        A `NearestScores`. Its methods `false_match_rates` and `miss_rates` take a threshold or a tensor of thresholds;
            its method `threshold` takes the wanted false-match rate.

    Raises:
        ValueError: as in `compute`.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores
        >>> metrics = RetrievalMetrics()
        >>> metrics.update(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]]), torch.tensor([5, 5, 2, 2]))
        >>> scores = nearest_scores(metrics)
        >>> scores.negatives
        tensor([0.6000, 0.6000, 0.9600, 0.9600], dtype=torch.float64)
        >>> scores.positives
        tensor([0.8000, 0.8000, 0.8000, 0.8000], dtype=torch.float64)

    Cost:
        All scores are computed once, block by block; the queries are distributed over the processes.
    """
    ranked = metrics.ranked_lists()
    device = float64_device(ranked.query_ids.device)
    highest = torch.zeros(2, len(ranked.query_ids), dtype=torch.float64, device=device)
    for _, block in ranked.queries.blocks():
        highest[:, block] = -torch.inf
    for block, _, scores, relevant, candidate in ranked.score_blocks():
        negatives = scores.masked_fill(relevant | ~candidate, -torch.inf).amax(1)
        positives = scores.masked_fill(~relevant, -torch.inf).amax(1)
        found = to_float64(torch.stack([negatives, positives]))
        highest[:, block] = torch.maximum(highest[:, block], found)
    ranked.shard.add_up(highest)  # for each query, all other processes have zeros, so the sum is exact
    found_negatives, found_positives = (row[row.isfinite()].sort().values for row in highest.cpu())
    return NearestScores(found_negatives, found_positives)


def _rates(
    thresholds: float | Float[Tensor, "..."], scores: Float[Tensor, " query"], *, reach: bool
) -> Float[Tensor, "..."]:
    """The fraction of the scores that reach each threshold, or that do not reach it."""
    if not isinstance(thresholds, Tensor):
        thresholds = torch.tensor(check_finite_number("thresholds", thresholds, owner=OWNER), dtype=torch.float64)
    check_finite("thresholds", thresholds.reshape(-1), owner=OWNER)
    below = torch.searchsorted(scores.double().cpu().sort().values, thresholds.double().cpu().contiguous()).double()
    if reach:
        below = len(scores) - below
    return below / len(scores)
