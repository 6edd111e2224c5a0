"""The two sides of a batch: queries and candidates, such as texts and images, which two networks may embed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

Side = Literal["queries", "candidates"]
Directions = Literal["queries", "both"]
SIDES: tuple[Side, ...] = get_args(Side)


def is_two_sided(batch: Any) -> bool:
    """Whether a batch is a dict of sides: `{"queries": batch, "candidates": batch}`, or one of them in evaluation."""
    return isinstance(batch, Mapping) and len(batch) > 0 and batch.keys() <= set(SIDES)


@dataclass(frozen=True)
class ModuleSide:
    """What a data module needs to know of one side of a `RetrievalModule`.

    Args:
        embedder: the network of this side.
        preparation: the transform of this side's earlier evaluation, as plain data, or None.
    """

    embedder: nn.Module
    preparation: dict[str, Any] | None


def side_of_module(module: Any, side: Side) -> Any:
    """One side of a module, for `RunPreparation.follow`; the module itself if both sides share a network.

    Args:
        module: any `LightningModule`.
        side: the side. The candidates' side of a `RetrievalModule` is the module itself.
    """
    query_embedder = getattr(module, "query_embedder", None)
    if side == "candidates" or query_embedder is None:
        return module
    return ModuleSide(query_embedder, getattr(module, "query_preparation", None))
