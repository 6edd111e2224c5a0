"""Sums of several losses (`WeightedSum`), or of one loss over several prefixes of the embeddings (`NestedLoss`).

Nested embeddings (Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022):

    L = sum over m in M of c_m L(z_1:m)                       (equation 1)

z_1:m are the first m dimensions of an embedding, normalised again; M is `dims` and c_m are `weights`, all 1 in the
paper. The first dimensions then work as an embedding by themselves, so one model serves several dimensions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_finite_number, check_instance, check_sequence, short_repr
from lightning_retrieval.losses.batch_loss import BatchLoss, RankedBatch, SharedReads
from lightning_retrieval.losses.lists import check_batch
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
        TypeError: if `loss` is not a module, or is a loss of pytorch-metric-learning that learns proxies; if a number
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
        owner = type(self).__name__
        check_instance(owner, "loss", loss, nn.Module)
        self.dims = check_dims(owner, dims)
        self.weights: tuple[float, ...] | None = None
        if weights is not None:
            self.weights = _checked_weights(owner, weights, self.dims)
        self.part = as_batch_loss(loss)
        for module in self.part.modules():
            if has_proxies(module):
                raise TypeError(
                    f"{owner}: `loss` must not learn proxies, which have one dimension, got "
                    f"{type(module).__name__}; use a loss that compares embeddings with each other."
                )

    @property
    def loss(self) -> nn.Module:
        """The loss as it was given."""
        return original_loss(self.part)

    @property
    def splits_by_query(self) -> bool:
        """Whether the loss is a sum over queries."""
        return self.part.splits_by_query

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references."""
        return self.part.terms_without_references

    def of_batch(self, batch: RankedBatch) -> Tensor:
        """The weighted sum over `dims`."""
        check_batch(type(self.loss).__name__, batch)
        check_dims_fit(type(self).__name__, self.dims, batch.embeddings)
        # The largest of `dims` comes first: only the first call checks, in a shared read, that embeddings are finite.
        values = [self.part.of_batch(shortened) for shortened in self._shortened(batch)]
        values.reverse()
        self.terms = {f"{dim}d": value.detach() for dim, value in zip(self.dims, values)}
        weights = self.weights or (1.0,) * len(self.dims)
        weighted = [weight * value for weight, value in zip(weights, values)]
        return torch.stack(weighted).sum(0)

    def from_scores(self, scores: Tensor, relevant: Tensor, candidate: Tensor | None = None) -> Tensor:
        """Raise a TypeError, because a score matrix has no embeddings to shorten."""
        raise TypeError(
            f"{type(self).__name__}: a nested loss cannot be computed from a score matrix, which has no dimensions; "
            "call it with embeddings and labels."
        )

    def _shortened(self, batch: RankedBatch) -> Iterator[RankedBatch]:
        """The batch with each number of dimensions, in descending order."""
        shared = SharedReads()
        for dim in reversed(self.dims):
            ref_emb = batch.ref_emb
            if ref_emb is not None:
                ref_emb = normalize(ref_emb[:, :dim])
            embeddings = normalize(batch.embeddings[:, :dim])
            yield replace(batch, embeddings=embeddings, ref_emb=ref_emb, shared=shared)


def _checked_weights(owner: str, weights: Sequence[float], dims: tuple[int, ...]) -> tuple[float, ...]:
    check_sequence(owner, "weights", weights)
    if len(weights) != len(dims):
        raise ValueError(
            f"{owner}: `weights` must hold one weight for each of the {len(dims)} dims, got {short_repr(weights)}."
        )
    return tuple(check_finite_number(owner, "weights", weight) for weight in weights)


class WeightedSum(BatchLoss):
    """A sum of losses, each with a weight and a name.

    Args:
        losses: name, weight and loss of each term: `{"ap": (1.0, SmoothAPLoss()), "calibration": (0.5, ...)}`. Losses
            of this library get all arguments; third-party losses get embeddings, labels and, if they can rank them, the
            references.

    Raises:
        ValueError: if there is no term, a weight is not from -1e12 to 1e12, or a name is empty or has a dot.
        TypeError: if `losses` is not a mapping, a loss is not a module or a weight not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import CalibrationLoss, SmoothAPLoss, WeightedSum
        >>> loss = WeightedSum({"ap": (1.0, SmoothAPLoss()), "calibration": (0.5, CalibrationLoss())})
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> value = loss(embeddings, torch.tensor([7, 7, 3, 3]))
        >>> {name: round(term.item(), 4) for name, term in loss.terms.items()}
        {'ap': 0.25, 'calibration': 0.19}

    Relations:
        `terms` holds the unweighted values of the latest call, which `RetrievalModule` logs as `train/loss/<name>`.
    """

    def __init__(self, losses: Mapping[str, tuple[float, nn.Module]]) -> None:
        super().__init__()
        owner = type(self).__name__
        if not isinstance(losses, Mapping):
            raise TypeError(
                f"{owner}: `losses` must map a name to (weight, loss), got {type(losses).__name__}; pass "
                '{"ap": (1.0, SmoothAPLoss()), ...}.'
            )
        if not losses:
            raise ValueError(f"{owner}: `losses` must hold at least one term, got {short_repr(losses)}.")
        self.weights: dict[str, float] = {}
        self.parts = nn.ModuleDict()
        for name, term in losses.items():
            _check_term(owner, name, term)
            weight, loss = term
            self.weights[name] = check_finite_number(owner, f"losses[{name!r}]", weight)
            self.parts[name] = as_batch_loss(loss)

    @property
    def losses(self) -> dict[str, tuple[float, nn.Module]]:
        """The terms as they were given."""
        return {name: (self.weights[name], original_loss(part)) for name, part in self.parts.items()}

    @property
    def splits_by_query(self) -> bool:
        """Whether every term is a sum over queries."""
        return all(part.splits_by_query for part in self.parts.values())

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references."""
        names: list[str] = []
        for part in self.parts.values():
            names += part.terms_without_references  # type: ignore[arg-type]
        return names

    def of_batch(self, batch: RankedBatch) -> Tensor:
        """The weighted sum."""
        values: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            loss: Any = part
            values[name] = loss.of_batch(batch)
        return self._sum(values)

    def from_scores(self, scores: Tensor, relevant: Tensor, candidate: Tensor | None = None) -> Tensor:
        """The weighted sum for a score matrix, with the arguments of `RetrievalLoss`; all terms need `from_scores`."""
        values: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            loss: Any = part
            values[name] = loss.from_scores(scores, relevant, candidate)
        return self._sum(values)

    def extra_repr(self) -> str:
        return f"weights={self.weights}"

    def _sum(self, values: dict[str, Tensor]) -> Tensor:
        self.terms = {name: value.detach() for name, value in values.items()}
        weighted = [self.weights[name] * value for name, value in values.items()]
        return torch.stack(weighted).sum(0)


def _check_term(owner: str, name: str, term: Any) -> None:
    if not isinstance(name, str) or name == "" or "." in name:
        raise ValueError(
            f"{owner}: `losses` must have names that are not empty and have no dot, got {short_repr(name)}."
        )
    if not (isinstance(term, (tuple, list)) and len(term) == 2 and isinstance(term[1], nn.Module)):
        raise TypeError(
            f"{owner}: `losses` must map a name to (weight, loss), got {short_repr(term)} for {short_repr(name)}."
        )
