"""What one call of a loss ranks, as one value that is passed along instead of seven arguments."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QueryRange:
    """The queries that one process computes of a batch that several processes share.

    Args:
        begin: index of the first query.
        end: index after the last query.
        total: sums a tensor over all processes, each of which calls it with a tensor of the same shape.
    """

    begin: int
    end: int
    total: Callable[[Tensor], Tensor]

    def among(self, queries: Bool[Tensor, " query"]) -> Bool[Tensor, " query"]:
        """Which of these queries lie in the range."""
        index = torch.arange(len(queries), device=queries.device)
        return queries & (self.begin <= index) & (index < self.end)


@dataclass(frozen=True, eq=False)
class RankedBatch:
    """The queries of one call, the references that are ranked for them, and what identifies both.

    Args:
        embeddings: one row for each query.
        labels: label of each query, or its labels of several levels, finest first.
        ref_emb: the references; None ranks the batch itself.
        ref_labels: labels of the references.
        ids: dataset index of each query; a reference with the query's id is not in the query's list.
        ref_ids: dataset index of each reference.
        queries: the queries that this process computes; None computes all of them.
    """

    embeddings: Float[Tensor, "query dim"]
    labels: Int[Tensor, "query ..."]
    ref_emb: Float[Tensor, "gallery dim"] | None = None
    ref_labels: Int[Tensor, "gallery ..."] | None = None
    ids: Int[Tensor, " query"] | None = None
    ref_ids: Int[Tensor, " gallery"] | None = None
    queries: QueryRange | None = None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a loss call with this batch: `loss(**batch.keywords())`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
