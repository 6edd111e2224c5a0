"""The two sides of a module: queries and candidates, such as texts and images, which two networks may embed."""

from typing import Any, Literal, get_args

from torch import nn

from lightning_retrieval.checks import check_choice, check_positive
from lightning_retrieval.invalid import owned_by
from lightning_retrieval.plain_data.rebuild import rebuild
from lightning_retrieval.preparation.of_model import ModuleSide

Side = Literal["queries", "candidates"]
SIDES: tuple[Side, ...] = get_args(Side)
Directions = Literal["queries", "both"]


class TwoSides:
    """How the queries and candidates of a batch are ranked, if one network embeds both sides.

    Args:
        directions: what the loss of a batch with two sides ranks: `"queries"` ranks the candidates for each query;
            `"both"` also ranks the queries for each candidate, and the loss is the mean of both directions.

    Raises:
        ValueError: if `directions` is neither of them.

    Example:
        >>> import torch
        >>> from lightning_retrieval import LogRankLoss, RetrievalModule, TwoSides
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), LogRankLoss(), sides=TwoSides(directions="both"))
        >>> module.sides
        TwoSides(directions='both')

    Relations:
        `TwoNetworks` embeds queries by a network of their own. `Pairs` makes batches with two sides.
    """

    query_embedder: nn.Module | None = None
    query_lr_factor: float = 1.0
    frozen_side: Side | None = None

    def __init__(self, *, directions: Directions = "queries") -> None:
        self.directions: Directions = check_choice(
            "directions", directions, get_args(Directions), owner=type(self).__name__
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class TwoNetworks(TwoSides):
    """How queries and candidates are embedded by two networks, ranked and trained.

    The `embedder` of the module maps candidates to embeddings. Batches must be
    `{"queries": batch, "candidates": batch}`.

    Args:
        query_embedder: maps queries to embeddings (batch, D), for example a `TextEmbedder`.
        directions: as for `TwoSides`.
        query_lr_factor: learning rate of the parameters of `query_embedder` divided by that of `embedder`, > 0.
        frozen_side: side whose network is not trained: `"candidates"` trains queries for an index that exists, or texts
            for a fixed image encoder (LiT, CVPR 2022). Such a network stays in evaluation mode. None trains both,
            unless one of the networks has no parameter that requires a gradient.

    Raises:
        ValueError: if `directions` or `frozen_side` is none of its values, or the factor is out of its range.
        TypeError: if `query_embedder` is not a module.

    Example:
        >>> import torch
        >>> from lightning_retrieval import LogRankLoss, RetrievalModule, TwoNetworks
        >>> images, texts = torch.nn.Linear(8, 4), torch.nn.Linear(3, 4)
        >>> module = RetrievalModule(images, LogRankLoss(), sides=TwoNetworks(texts, frozen_side="candidates"))
        >>> module.embed_queries(torch.randn(5, 3)).shape
        torch.Size([5, 4])

    Relations:
        `TwoSides` is for one network that embeds both sides. `FrozenEmbedder` reads a network of candidates from a
        checkpoint.
    """

    def __init__(
        self,
        query_embedder: nn.Module,
        *,
        directions: Directions = "queries",
        query_lr_factor: float = 1.0,
        frozen_side: Side | None = None,
    ) -> None:
        super().__init__(directions=directions)
        with owned_by(type(self).__name__):
            self.query_embedder = rebuild("query_embedder", query_embedder, nn.Module)
            self.query_lr_factor = check_positive("query_lr_factor", query_lr_factor)
            if frozen_side is not None:
                self.frozen_side = check_choice("frozen_side", frozen_side, SIDES)


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
