"""The ranked lists of one call, one for each query: scores, relevance and candidates of a block of queries at a time.

Two sources have this interface: embeddings with labels (`EmbeddingLists`) and a score matrix with masks (`ScoreLists`).
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

COUNTED_ELEMENTS = 1 << 22  # elements of the mask in which positives are counted at a time


class RankedLists(ABC):
    """One ranked list for each query, computed for a block of queries at a time.

    `tensors` are the tensors that gradients are computed for; `gallery` is the number of references.
    """

    tensors: tuple[Tensor, ...]
    gallery: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @abstractmethod
    def scores(self, rows: Int[Tensor, " query"]) -> Float[Tensor, "query gallery"]:
        """The scores of these queries in a new tensor without a graph."""

    @abstractmethod
    def masks(self, rows: Int[Tensor, " query"]) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"]]:
        """Which references are relevant candidates of these queries, and which are candidates."""

    @abstractmethod
    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        """Propagate the gradient of these queries' scores to `tensors`, and add it to `gradients`."""

    @abstractmethod
    def class_weights(self, valid: Bool[Tensor, " query"]) -> Float[Tensor, " query"]:
        """1 / (valid queries of the query's class), rescaled to mean 1 over the valid queries; 0 for the others."""

    def count_positives(self) -> Int[Tensor, " query"]:
        """Number of relevant candidates of each query."""
        rows = torch.arange(len(self.tensors[0]), device=self.device)
        rows_of_a_block = COUNTED_ELEMENTS // max(1, self.gallery)
        counts = []
        for block in rows.split(max(1, rows_of_a_block)):
            relevant = self.masks(block)[0]  # the candidates are freed at once
            counts.append((relevant > 0).sum(1))
        return torch.cat(counts)
