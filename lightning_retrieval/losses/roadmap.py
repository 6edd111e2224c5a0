"""ROADMAP (Ramzi, Thome, Rambour, Audebert, Bitot: "Robust and Decomposable Average Precision for Image Retrieval",
NeurIPS 2021):

    L = (1 - lambda) L_SupAP + lambda L_calibration
"""

from typing import Any

from torch import nn

from lightning_retrieval.checks import check_bool, check_choice, check_finite_number, check_instance
from lightning_retrieval.losses.base import Reduction
from lightning_retrieval.losses.calibration import CalibrationLoss
from lightning_retrieval.losses.sup_ap import SupAPLoss
from lightning_retrieval.losses.weighted_sum import WeightedSum

_DEFAULTS = {"reduction": "mean", "class_balanced": False, "include_self": False}


class ROADMAPLoss(WeightedSum):
    """(1 - lambda) SupAP + lambda calibration.

    Args:
        lambda_: weight of the calibration, from 0 to 1.
        sup_ap: the first term; `SupAPLoss` with the settings below if None.
        calibration: the second term; `CalibrationLoss` with the settings below if None.
        reduction: `"mean"` over the queries that have a positive, their `"sum"`, or `"none"` (one value per query).
        class_balanced: give each class of the batch the same weight.
        include_self: count the query in its own list. For comparison only.

    Raises:
        ValueError: if `lambda_` is not from 0 to 1, or a setting is given although both terms are given.
        TypeError: if `lambda_` is not a number, a term is not a module, or a flag is not a bool.

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
        check_finite_number("ROADMAPLoss", "lambda_", lambda_, least=0, most=1)
        for name, term in (("sup_ap", sup_ap), ("calibration", calibration)):
            if term is not None:
                check_instance("ROADMAPLoss", name, term, nn.Module)
        check_choice("ROADMAPLoss", "reduction", reduction, ("mean", "sum", "none"))
        check_bool("ROADMAPLoss", "class_balanced", class_balanced)
        check_bool("ROADMAPLoss", "include_self", include_self)
        settings: dict[str, Any] = {
            "reduction": reduction,
            "class_balanced": class_balanced,
            "include_self": include_self,
        }
        both_given = sup_ap is not None and calibration is not None
        if both_given and settings != _DEFAULTS:
            raise ValueError(
                "ROADMAPLoss: if both terms are given, the settings must be given to them and not here, got "
                f"{settings}; pass them to `sup_ap` and `calibration`."
            )
        given = {"sup_ap": sup_ap is not None, "calibration": calibration is not None}
        if sup_ap is None:
            sup_ap = SupAPLoss(**settings)
        if calibration is None:
            calibration = CalibrationLoss(**settings)
        super().__init__({"sup_ap": (1 - lambda_, sup_ap), "calibration": (lambda_, calibration)})
        self.lambda_ = lambda_
        self._given = given
        self.reduction, self.class_balanced, self.include_self = reduction, class_balanced, include_self

    @property
    def sup_ap(self) -> nn.Module | None:
        """The argument `sup_ap` of the constructor; None if the default term is used."""
        return self._argument("sup_ap")

    @property
    def calibration(self) -> nn.Module | None:
        """The argument `calibration` of the constructor; None if the default term is used."""
        return self._argument("calibration")

    @classmethod
    def official(cls) -> WeightedSum:
        """SupAP + calibration with the official settings: the query in its own list, offset 1.44, means over the
        violating pairs, both weights 1."""
        sup_ap = SupAPLoss(offset=1.44, include_self=True)
        return WeightedSum({"sup_ap": (1.0, sup_ap), "calibration": (1.0, CalibrationLoss(pair_mean="nonzero"))})

    def extra_repr(self) -> str:
        settings = (
            f"reduction={self.reduction!r}, class_balanced={self.class_balanced}, include_self={self.include_self}"
        )
        return f"lambda_={self.lambda_}, {settings}"

    def _argument(self, name: str) -> nn.Module | None:
        if self._given[name]:
            return self.parts[name]
        return None
