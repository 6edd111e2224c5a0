"""The two sides of a module: queries and candidates, such as texts and images, which two networks may embed."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning_retrieval.preparation.of_model import ModuleSide

Side = Literal["queries", "candidates"]
SIDES: tuple[Side, ...] = get_args(Side)


def is_two_sided(batch: Any) -> bool:
    """Whether a batch is a dict of sides: `{"queries": batch, "candidates": batch}`, or one of them in evaluation."""
    return isinstance(batch, Mapping) and len(batch) > 0 and batch.keys() <= set(SIDES)


def side_of_module(module: Any, side: Side) -> ModuleSide:
    """The network of one side of a module, and how its inputs were prepared in evaluation.

    Args:
        module: a `RetrievalModule`, a `RetrievalNetwork`, or any other module, which need not have an `embedder`.
        side: the side. Queries are embedded and prepared as candidates are, unless they have their own network or were
            prepared in their own way.
    """
    embedder = getattr(module, "embedder", None)
    query_embedder = getattr(module, "query_embedder", None)
    recorded = getattr(module, "query_preparation", None)
    if side == "candidates" or (query_embedder is None and recorded is None):
        return ModuleSide(embedder, getattr(module, "preparation", None))
    if query_embedder is None:
        query_embedder = embedder
    return ModuleSide(query_embedder, recorded)
