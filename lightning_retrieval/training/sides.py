"""The two sides of a batch: queries and candidates, such as texts and images, which two networks may embed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_retrieval.ranking.labels import Role

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
    """One side of a module, for `RunPreparation.follow`.

    Args:
        module: any `LightningModule`.
        side: the side. The candidates' side of a `RetrievalModule` is the module itself; the queries' side too, unless
            queries have their own network or were prepared in their own way.
    """
    query_embedder = getattr(module, "query_embedder", None)
    recorded = getattr(module, "query_preparation", None)
    if side == "candidates" or (query_embedder is None and recorded is None):
        return module
    return ModuleSide(query_embedder or module.embedder, recorded)


def rows_of_side(output: dict[str, Tensor], side: Side) -> dict[str, Tensor]:
    """The output of an evaluation step for one side, with its roles, and with ids and instances of its own.

    Args:
        output: the output for the batch of the side. Images with the role 0, which are unreadable, keep it.
        side: the side.
    """
    number = SIDES.index(side)
    labels = output["labels"]
    roles = torch.full(labels.shape[:1], number + 1, device=labels.device)
    if "roles" in output:
        roles[output["roles"] == Role.JUNK] = int(Role.JUNK)
    numbered = {name: 2 * output[name] + number for name in ("ids", "instances") if name in output}
    embeddings = output["embeddings"]
    # The networks of the two sides may return different types under autocast.
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    return {**output, **numbered, "embeddings": embeddings, "roles": roles}


def joined_rows(outputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of several outputs of a step, with the entries that all of them have."""
    joined = {}
    for name in outputs[0]:
        if all(name in output for output in outputs):
            joined[name] = torch.cat([output[name] for output in outputs])
    return joined
