"""Weighted sums of losses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_finite_number, short_repr
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.ranked_batch import RankedBatch
from lightning_retrieval.losses.third_party import as_batch_loss, original_loss


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
        return self._sum({name: part(**batch.keywords()) for name, part in self.parts.items()})

    def from_scores(self, scores: Tensor, relevant: Tensor, candidate: Tensor | None = None) -> Tensor:
        """The weighted sum of a score matrix, if all terms have `from_scores`; arguments as in `RetrievalLoss`."""
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
