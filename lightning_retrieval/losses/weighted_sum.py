"""Sums of losses, and ROADMAP, which is one.

ROADMAP (Ramzi et al., NeurIPS 2021): (1 - lambda) L_SupAP + lambda L_calibration.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_finite_number
from lightning_retrieval.losses.base import QueryShare, Reduction, RetrievalLoss
from lightning_retrieval.losses.calibration import CalibrationLoss
from lightning_retrieval.losses.sup_ap import SupAPLoss
from lightning_retrieval.losses.third_party import call_foreign, takes_references


class WeightedSum(nn.Module):
    """A sum of losses, each with its weight and its name.

    Args:
        losses: name, weight and loss of each term: `{"ap": (1.0, SmoothAPLoss()), "calibration": (0.5, ...)}`. This
            library's losses get all arguments; others embeddings, labels and the references, where they can rank them.

    Raises:
        ValueError: if there is no term, or a weight is not finite.
        TypeError: if a loss is not a module or a weight not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import CalibrationLoss, SmoothAPLoss, WeightedSum
        >>> loss = WeightedSum({"ap": (1.0, SmoothAPLoss()), "calibration": (0.5, CalibrationLoss())})
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> value = loss(embeddings, torch.tensor([7, 7, 3, 3]))
        >>> {name: round(term.item(), 4) for name, term in loss.terms.items()}
        {'ap': 0.25, 'calibration': 0.19}

    Relations:
        `terms` holds the unweighted values of the last call, which `RetrievalModule` logs as `train/loss/<name>`.
    """

    def __init__(self, losses: Mapping[str, tuple[float, nn.Module]]) -> None:
        super().__init__()
        if not losses:
            raise ValueError(f"{type(self).__name__}: `losses` must hold at least one term, got {losses!r}.")
        for name, term in losses.items():
            if not (isinstance(term, (tuple, list)) and len(term) == 2 and isinstance(term[1], nn.Module)):
                raise TypeError(
                    f"{type(self).__name__}: `losses` must map a name to (weight, loss), got {term!r} for {name!r}."
                )
            check_finite_number(type(self).__name__, f"losses[{name!r}]", term[0])
        self.weights = {name: weight for name, (weight, _) in losses.items()}
        self.parts = nn.ModuleDict({name: loss for name, (_, loss) in losses.items()})
        self.terms: dict[str, Tensor] = {}

    @property
    def losses(self) -> dict[str, tuple[float, nn.Module]]:
        """The terms as they were given."""
        return {name: (self.weights[name], loss) for name, loss in self.parts.items()}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
        queries: QueryShare | None = None,
    ) -> Tensor:
        """The weighted sum; arguments as in `RetrievalLoss`."""
        arguments = (embeddings, labels, ref_emb, ref_labels, ids, ref_ids, queries)
        return self._sum(lambda loss: call_loss(loss, *arguments))

    def from_scores(self, scores: Tensor, relevant: Tensor, candidate: Tensor | None = None) -> Tensor:
        """The same from a score matrix, where all terms have `from_scores`."""
        return self._sum(lambda loss: loss.from_scores(scores, relevant, candidate))

    def extra_repr(self) -> str:
        return f"weights={self.weights}"

    def _sum(self, call: Any) -> Tensor:
        values = {name: call(loss) for name, loss in self.parts.items()}
        self.terms = {name: value.detach() for name, value in values.items()}
        return torch.stack([self.weights[name] * value for name, value in values.items()]).sum(0)


_DEFAULTS = {"reduction": "mean", "class_balanced": False, "include_self": False}


class ROADMAPLoss(WeightedSum):
    """(1 - lambda) SupAP + lambda calibration.

    Args:
        lambda_: weight of the calibration, from 0 to 1.
        sup_ap: the first term; `SupAPLoss` with the settings below where None.
        calibration: the second; `CalibrationLoss` with the settings below where None.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class of the batch weighs the same.
        include_self: count the query in its own list. For comparison only.

    Raises:
        ValueError: if `lambda_` is not from 0 to 1, or a setting is given beside both terms.
        TypeError: if `lambda_` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import ROADMAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> round(ROADMAPLoss(lambda_=0.5)(embeddings, torch.tensor([7, 7, 3, 3])).item(), 4)
        0.3265

    Relations:
        `ROADMAPLoss.official()` is what the official configuration computes.
    """

    def __init__(
        self,
        lambda_: float = 0.5,
        sup_ap: SupAPLoss | None = None,
        calibration: CalibrationLoss | None = None,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        if not 0 <= check_finite_number("ROADMAPLoss", "lambda_", lambda_) <= 1:
            raise ValueError(f"ROADMAPLoss: `lambda_` must be from 0 to 1, got {lambda_}.")
        settings: dict[str, Any] = {
            "reduction": reduction,
            "class_balanced": class_balanced,
            "include_self": include_self,
        }
        if sup_ap is not None and calibration is not None and settings != _DEFAULTS:
            raise ValueError(
                f"ROADMAPLoss: settings belong to the terms where both are given, got {settings}; give them to "
                "`sup_ap` and `calibration`."
            )
        terms = {
            "sup_ap": (1 - lambda_, SupAPLoss(**settings) if sup_ap is None else sup_ap),
            "calibration": (lambda_, CalibrationLoss(**settings) if calibration is None else calibration),
        }
        super().__init__(terms)
        self.lambda_ = lambda_
        self.reduction, self.class_balanced, self.include_self = reduction, class_balanced, include_self
        self._given = {"sup_ap": sup_ap is not None, "calibration": calibration is not None}

    @property
    def sup_ap(self) -> nn.Module | None:
        """The argument as it was given."""
        return self.parts["sup_ap"] if self._given["sup_ap"] else None

    @property
    def calibration(self) -> nn.Module | None:
        """The argument as it was given."""
        return self.parts["calibration"] if self._given["calibration"] else None

    @classmethod
    def official(cls) -> WeightedSum:
        """SupAP + calibration with the official code's settings: the query in its own list, offset 1.44, means over the
        violating pairs, both weights 1."""
        sup_ap = SupAPLoss(offset=1.44, include_self=True)
        return WeightedSum({"sup_ap": (1.0, sup_ap), "calibration": (1.0, CalibrationLoss(pair_mean="nonzero"))})


def call_loss(
    loss: nn.Module,
    embeddings: Tensor,
    labels: Tensor,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    ids: Tensor | None = None,
    ref_ids: Tensor | None = None,
    queries: QueryShare | None = None,
) -> Any:
    """Call any loss, of this library or another, with as much of this as it takes.

    Raises:
        TypeError: if another library's loss cannot do what is asked of it.
    """
    if isinstance(loss, (RetrievalLoss, WeightedSum)):
        return loss(embeddings, labels, ref_emb, ref_labels, ids=ids, ref_ids=ref_ids, queries=queries)
    if queries is not None:
        raise TypeError(
            f"{type(loss).__name__} has no shares of queries that add up to its value, being of another library; "
            "leave out `queries`."
        )
    return call_foreign(loss, embeddings, labels, ref_emb, ref_labels, ids, ref_ids)


def is_ours(loss: nn.Module) -> bool:
    """Whether a loss, with all its terms, is a sum over queries that processes can share."""
    if isinstance(loss, WeightedSum):
        return all(is_ours(part) for part in loss.parts.values())
    return isinstance(loss, RetrievalLoss)


def without_references(loss: nn.Module) -> list[str]:
    """Names of the terms of a loss that cannot rank references."""
    if isinstance(loss, WeightedSum):
        return [name for part in loss.parts.values() for name in without_references(part)]
    return [] if isinstance(loss, RetrievalLoss) or takes_references(loss) else [type(loss).__name__]
