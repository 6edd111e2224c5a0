"""The ranked lists of one call, one for each query: scores, relevance and candidates of a block of queries at a time.

Two sources have this interface: embeddings with labels (`EmbeddingLists`) and a score matrix with masks (`ScoreLists`).
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_finite
from lightning_retrieval.host import size_for, to_host

# Elements of the mask in which positives are counted at a time, on the CPU and on other devices.
COUNTED_ELEMENTS = 1 << 22
ACCELERATOR_COUNTED_ELEMENTS = 1 << 25


class RankedLists(ABC):
    """One ranked list for each query, computed for a block of queries at a time.

    `owner` is the prefix of error messages; `tensors` are the tensors that gradients are computed for, and `given` the
    arguments that they were computed from, by name; `gallery` is the number of references, and `levels` are the levels
    of relevance above 0 that may occur.
    """

    owner: str
    tensors: tuple[Tensor, ...]
    given: dict[str, Tensor]
    gallery: int
    levels: tuple[int, ...]

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
        """Propagate the gradient of these queries' scores to `tensors`, and add it to `gradients`.

        The rows are in ascending order. The gradient may be changed.
        """

    @abstractmethod
    def class_weights(self, valid: Bool[Tensor, " query"]) -> Float[Tensor, " query"]:
        """1 / (valid queries of the query's class), rescaled to mean 1 over the valid queries; 0 for the others."""

    def count_positives(self) -> tuple[Int[Tensor, " query"], Int[Tensor, " query"]]:
        """Number of relevant candidates of each query, on the device and on the CPU.

        This is the only time that a loss waits for the device, so this also raises if what was given is not finite.
        """
        counts = self._count_on_device()
        finite = torch.stack([values.isfinite().all() for values in self.given.values()])
        read = to_host(torch.cat([counts, finite.all()[None]]))
        if read[-1] == 0:
            for name, values in self.given.items():
                check_finite(self.owner, name, values)
        return counts, read[:-1]

    def _count_on_device(self) -> Int[Tensor, " query"]:
        rows = torch.arange(len(self.tensors[0]), device=self.device)
        elements = size_for(self.device, cpu=COUNTED_ELEMENTS, accelerator=ACCELERATOR_COUNTED_ELEMENTS)
        rows_of_a_block = elements // max(1, self.gallery)
        counts = []
        for block in rows.split(max(1, rows_of_a_block)):
            relevant = self.masks(block)[0]  # the candidates are freed at once
            counts.append((relevant > 0).sum(1))
        return torch.cat(counts)
