"""Sums of several losses (`WeightedSum`), or of one loss over several prefixes of the embeddings (`NestedLoss`).

The weights of a `WeightedSum` may change during training: a `Schedule` gives a weight as a function of the fraction of
the training steps that are done.

Nested embeddings (Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022):

    L = sum over m in M of c_m L(z_1:m)                       (equation 1)

z_1:m are the first m dimensions of an embedding, normalised again; M is `dims` and c_m are `weights`, all 1 in the
paper. The first dimensions then work as an embedding by themselves, so one model serves several dimensions.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_retrieval.arguments import checked, settings_repr
from lightning_retrieval.checks import LARGEST, SMALLEST, check_finite_number, short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.losses.batch_loss import BatchLoss, RankedBatch
from lightning_retrieval.losses.third_party import as_batch_loss, has_proxies, original_loss
from lightning_retrieval.ranking.labels import check_dims, check_dims_fit
from lightning_retrieval.ranking.rows import normalize


class NestedLoss(BatchLoss):
    """The sum of a loss over prefixes of the embeddings: their first 64, 128, 256 and 512 dimensions, by default.

    Args:
        loss: a loss of this library or another, computed for each of `dims`.
        dims: numbers of dimensions, in ascending order; the last is usually the dimension of the embeddings.
        weights: weight of each of `dims`; all 1 if None.

    Raises:
        ValueError: if `dims` is empty or does not ascend, the number of weights differs from the number of `dims`, or a
            weight is not from -1e12 to 1e12; when called, if the embeddings have fewer dimensions than the last of
            `dims`.
        TypeError: if `loss` is a loss of pytorch-metric-learning that learns proxies; if a number
            has the wrong type.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import NestedLoss, SmoothAPLoss
        >>> loss = NestedLoss(SmoothAPLoss(), dims=(1, 2))
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.4, 0.9], [0.6, 0.8]], requires_grad=True)
        >>> value = loss(embeddings, torch.tensor([7, 7, 3, 3]))
        >>> {name: round(term.item(), 2) for name, term in loss.terms.items()}
        {'1d': 0.5, '2d': 0.21}

    Cost:
        The loss is computed once for each of `dims`, one after another. The network, which takes most of a step, runs
        once.

    Relations:
        `RetrievalEvaluation(dims=...)` logs the metrics for each of `dims`. An alternative is `PCAWhitening`, which
        shortens the embeddings of a model that was trained without this loss: compare both. `terms` holds the
        unweighted value for each of `dims`, which `RetrievalModule` logs as `train/loss/64d` and so on.
    """

    def __init__(
        self, loss: nn.Module, dims: Sequence[int] = (64, 128, 256, 512), *, weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        with owned_by(type(self).__name__):
            self.dims = check_dims(dims)
            self.weights: tuple[float, ...] | None = None
            if weights is not None:
                self.weights = _checked_weights(weights, self.dims)
            self.part = as_batch_loss(loss)
            for module in self.part.modules():
                if has_proxies(module):
                    rule = "must not learn proxies, which have one dimension"
                    cure = "use a loss that compares embeddings with each other"
                    raise InvalidType(rule, argument="loss", got=type(module).__name__, cure=cure)

    @property
    def loss(self) -> nn.Module:
        """The loss as it was given."""
        return original_loss(self.part)

    def splits_by_query(self, fraction: float = 1.0) -> bool:
        """Whether the loss is a sum over queries, at a fraction of the training."""
        return self.part.splits_by_query(fraction)

    def scheduled_weights(self, fraction: float = 1.0) -> dict[str, float]:
        """The scheduled weights of the loss, by name, at a fraction of the training."""
        return self.part.scheduled_weights(fraction)

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references."""
        return self.part.terms_without_references

    def compute(self, batch: RankedBatch) -> Tensor:
        """The weighted sum over `dims`."""
        with owned_by(type(self).__name__):
            check_dims_fit(self.dims, batch.embeddings)
        # The largest of `dims` comes first: only the first call checks that embeddings are finite.
        values = [self.part.of_batch(shortened) for shortened in self._shortened(batch)]
        values.reverse()
        self.terms = {f"{dim}d": value.detach() for dim, value in zip(self.dims, values)}
        weights = self.weights or (1.0,) * len(self.dims)
        weighted = [weight * value for weight, value in zip(weights, values)]
        return torch.stack(weighted).sum(0)

    def _shortened(self, batch: RankedBatch) -> Iterator[RankedBatch]:
        """The batch with each number of dimensions, in descending order."""
        lists = batch.lists.counted_anew()
        for dim in reversed(self.dims):
            ref_emb = batch.ref_emb
            if ref_emb is not None:
                ref_emb = normalize(ref_emb[:, :dim])
            embeddings = normalize(batch.embeddings[:, :dim])
            yield replace(batch, embeddings=embeddings, ref_emb=ref_emb, lists=lists)


def _checked_weights(weights: Sequence[float], dims: tuple[int, ...]) -> tuple[float, ...]:
    if len(weights) != len(dims):
        rule = f"must hold one weight for each of the {len(dims)} dims"
        raise InvalidValue(rule, argument="weights", got=short_repr(weights))
    return tuple(check_finite_number("weights", weight) for weight in weights)


class Schedule:
    """A weight that depends on the fraction of the training steps that are done.

    Args:
        points: pairs of a fraction, from 0 to 1 and in ascending order, and the weight at this fraction. The weight
            before the first point is that of the first, and after the last point that of the last.
        between: the weight between two points: `"steps"`, that of the earlier one; `"linear"`, which changes by the
            same number in each step; or `"geometric"`, which changes by the same factor; all weights must then be > 0.

    Raises:
        ValueError: if there is no point, a fraction is not from 0 to 1 or does not ascend, a weight is not from -1e12
            to 1e12, or not > 0 with `"geometric"`, or `between` is unknown.
        TypeError: if a fraction or a weight is not a number.

    Example:
        >>> from lightning_retrieval.losses import Schedule
        >>> at_first, later = Schedule([(0, 1), (0.2, 0)]), Schedule([(0, 0), (0.2, 1)])
        >>> [(at_first(fraction), later(fraction)) for fraction in (0.0, 0.2, 1.0)]
        [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]
        >>> falling = Schedule([(0, 1), (0.5, 0.01)], between="geometric")
        >>> [round(falling(fraction), 4) for fraction in (0.0, 0.25, 1.0)]
        [1.0, 0.1, 0.01]

    Relations:
        `WeightedSum` has the example of a training.
    """

    def __init__(
        self, points: Sequence[tuple[float, float]], between: Literal["steps", "linear", "geometric"] = "steps"
    ) -> None:
        with owned_by("Schedule"):
            self.between = checked(self, between=between)
            least = SMALLEST if between == "geometric" else -LARGEST
            checked_points = []
            for fraction, weight in points:
                fraction = check_finite_number("points", fraction, least=0, most=1)
                weight = check_finite_number("points", weight, least=least)
                checked_points.append((float(fraction), float(weight)))
            self.points = tuple(checked_points)
            fractions = [fraction for fraction, _ in self.points]
            if not fractions or fractions != sorted(set(fractions)):
                raise InvalidValue("must have fractions in ascending order", argument="points", got=short_repr(points))

    def __call__(self, fraction: float) -> float:
        """The weight at a fraction of the training, from 0 (the first step) to 1."""
        number = bisect.bisect_right([of_point for of_point, _ in self.points], fraction)
        begin, first = self.points[max(number - 1, 0)]
        end, last = self.points[min(number, len(self.points) - 1)]
        if self.between == "steps" or begin == end:
            return first
        progress = (fraction - begin) / (end - begin)
        if self.between == "geometric":
            return float(first ** (1 - progress) * last**progress)
        return (1 - progress) * first + progress * last

    def __repr__(self) -> str:
        return f"Schedule({settings_repr(self)})"


class WeightedSum(BatchLoss):
    """A sum of losses, each with a name and a weight, which may change during training.

    Args:
        losses: name, weight and loss of each term: `{"ap": (1.0, SmoothAPLoss()), "calibration": (0.5, ...)}`. Losses
            of this library get all arguments; third-party losses get embeddings, labels and, if they can rank them, the
            references. A weight is a number or a `Schedule`. A term of weight 0 is not computed.

    Raises:
        ValueError: if there is no term, a weight is not from -1e12 to 1e12, or all weights are 0 at a fraction of the
            training.
        TypeError: if a term is not a pair, or its weight is neither a number nor a schedule.
        KeyError: if a name is none that a submodule may have.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import CalibrationLoss, SmoothAPLoss, WeightedSum
        >>> loss = WeightedSum({"ap": (1.0, SmoothAPLoss()), "calibration": (0.5, CalibrationLoss())})
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> value = loss(embeddings, torch.tensor([7, 7, 3, 3]))
        >>> {name: round(term.item(), 4) for name, term in loss.terms.items()}
        {'ap': 0.25, 'calibration': 0.19}

        Train the first 20 % of the steps with a loss of pairs, and the others with log rank:

        >>> from pytorch_metric_learning.losses import MultiSimilarityLoss
        >>> from lightning_retrieval.losses import LogRankLoss, Schedule
        >>> at_first, later = Schedule([(0, 1), (0.2, 0)]), Schedule([(0, 0), (0.2, 1)])
        >>> loss = WeightedSum({"pairs": (at_first, MultiSimilarityLoss()), "ap": (later, LogRankLoss())})
        >>> loss.weights_at(0.1)
        {'pairs': 1.0, 'ap': 0.0}

    Relations:
        `terms` holds the unweighted values of the latest call, which `RetrievalModule` logs as `train/loss/<name>`. It
        logs weights that change as `train/weight/<name>`. `RetrievalModule` computes the fraction of the training from
        `max_epochs` and `max_steps` of the Trainer; it never decreases, so a finished run that is resumed with
        more epochs remains in its last phase. A training loop of your own calls
        `loss.of_batch(ranked_batch(embeddings, labels, fraction=step / steps))`. All other calls, and `from_scores`,
        use the weights with which the training ends.
    """

    def __init__(self, losses: Mapping[str, tuple[float | Schedule, nn.Module]]) -> None:
        super().__init__()
        with owned_by(type(self).__name__):
            if not losses:
                raise InvalidValue("must hold at least one term", argument="losses", got=short_repr(losses))
            self.weights: dict[str, float | Schedule] = {}
            self.parts = nn.ModuleDict()
            given: Mapping[str, Any] = losses
            for name, term in given.items():
                if not (isinstance(term, (tuple, list)) and len(term) == 2):
                    rule = "must map a name to (weight, loss)"
                    raise InvalidType(rule, argument="losses", got=f"{short_repr(term)} for {short_repr(name)}")
                weight, loss = term
                if not isinstance(weight, Schedule):
                    weight = check_finite_number(f"losses[{name!r}]", weight)
                self.weights[name] = weight
                self.parts[name] = as_batch_loss(loss)
            self._check_weights()

    @property
    def losses(self) -> dict[str, tuple[float | Schedule, nn.Module]]:
        """The terms as they were given."""
        return {name: (self.weights[name], original_loss(part)) for name, part in self.parts.items()}

    def weights_at(self, fraction: float) -> dict[str, float]:
        """The weight of each term at a fraction of the training, from 0 (the first step) to 1."""
        check_finite_number("fraction", fraction, least=0, most=1, owner=type(self).__name__)
        values: dict[str, float] = {}
        for name, weight in self.weights.items():
            if isinstance(weight, Schedule):
                weight = weight(fraction)
            values[name] = weight
        return values

    def scheduled_weights(self, fraction: float = 1.0) -> dict[str, float]:
        """The scheduled weights, by name, at a fraction of the training; those of an inner sum as `outer/inner`."""
        found: dict[str, float] = {}
        for name, part in self._parts():
            weight = self.weights[name]
            if isinstance(weight, Schedule):
                found[name] = weight(fraction)
            for inner, value in part.scheduled_weights(fraction).items():
                found[f"{name}/{inner}"] = value
        return found

    def splits_by_query(self, fraction: float = 1.0) -> bool:
        """Whether every term whose weight is not 0 at a fraction of the training is a sum over queries."""
        return all(part.splits_by_query(fraction) for _, part in self._computed(self.weights_at(fraction)))

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references."""
        names: list[str] = []
        for _, part in self._parts():
            names += part.terms_without_references
        return names

    def compute(self, batch: RankedBatch) -> Tensor:
        """The weighted sum."""
        weights = self.weights_at(batch.fraction)
        values = {name: part.of_batch(batch) for name, part in self._computed(weights)}
        return self._sum(values, weights)

    def from_scores(self, scores: Tensor, relevant: Tensor, candidate: Tensor | None = None) -> Tensor:
        """The weighted sum for a score matrix, with the arguments of `RetrievalLoss`; all terms need `from_scores`."""
        weights, values = self.weights_at(1.0), {}
        for name, part in self._computed(weights):
            loss: Any = part
            values[name] = loss.from_scores(scores, relevant, candidate)
        return self._sum(values, weights)

    def extra_repr(self) -> str:
        return f"weights={self.weights}"

    def _parts(self) -> Iterator[tuple[str, BatchLoss]]:
        """Name and loss of each term."""
        parts: Any = self.parts.items()
        yield from parts

    def _computed(self, weights: Mapping[str, float]) -> Iterator[tuple[str, BatchLoss]]:
        """Name and loss of each term whose weight is not 0."""
        for name, part in self._parts():
            if weights[name] != 0:
                yield name, part

    def _sum(self, values: dict[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        self.terms = {name: value.detach() for name, value in values.items()}
        weighted = [weights[name] * value for name, value in values.items()]
        return torch.stack(weighted).sum(0)

    def _check_weights(self) -> None:
        """Raise if all weights are 0 at the first step, or at a point of a schedule."""
        fractions = {0.0}
        for weight in self.weights.values():
            if isinstance(weight, Schedule):
                fractions.update(fraction for fraction, _ in weight.points)
        for fraction in sorted(fractions):
            if not any(self.weights_at(fraction).values()):
                rule = "must have a weight other than 0 at each step"
                got = f"{short_repr(self.weights)}, which are all 0 at the fraction {fraction:g} of the training"
                raise InvalidValue(rule, argument="losses", got=got, cure="let one weight start where another ends")
