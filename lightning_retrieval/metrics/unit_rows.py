"""Rows of an evaluation set that stay in the batches in which they came, until some of them are needed as a tensor.

An evaluation set may fill most of a device. Its rows are sorted, merged and normalised in one copy: which rows are
chosen, and in which order, is decided on their indices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lightning_retrieval.ranking.similarity import normalize

_PART_NUMBERS = 1 << 18  # that are normalised at a time


@dataclass(frozen=True)
class UnitRows:
    """Rows chosen from batches of embeddings.

    Args:
        batches: not changed and not copied.
        index: the chosen rows of all batches together.
    """

    batches: Sequence[Float[Tensor, "_ dim"]]
    index: Int[Tensor, " row"]

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, which may be another one than that of labels and ids."""
        return self.batches[0].device

    def select(self, chosen: Shaped[Tensor, " row"]) -> "UnitRows":
        """The rows that a mask or a tensor of indices selects."""
        return replace(self, index=self.index[chosen.to(self.index.device)])

    def tensor(self) -> Float[Tensor, "row dim"]:
        """The chosen rows as unit rows, in float32 or better."""
        dtype = torch.promote_types(self.batches[0].dtype, torch.float32)
        rows = torch.empty(len(self.index), self.batches[0].shape[1], dtype=dtype, device=self.device)
        sorted_index, order = self.index.to(self.device).sort()
        begin = 0
        for part in _parts(self.batches):
            first, last = torch.searchsorted(sorted_index, sorted_index.new_tensor([begin, begin + len(part)])).tolist()
            rows[order[first:last]] = normalize(part[sorted_index[first:last] - begin])
            begin += len(part)
        return rows


def unit_rows(batches: Sequence[Float[Tensor, "_ dim"]]) -> UnitRows:
    """All rows of these batches."""
    rows = sum(len(batch) for batch in batches)
    return UnitRows(batches, torch.arange(rows, device=batches[0].device))


def _parts(batches: Sequence[Float[Tensor, "_ dim"]]) -> Iterator[Float[Tensor, "_ dim"]]:
    """The rows of all batches in order, in parts that are neither large nor many."""
    most_rows = max(1, _PART_NUMBERS // batches[0].shape[1])
    waiting: list[Tensor] = []
    rows = 0
    for batch in batches:
        for part in batch.split(most_rows):
            waiting.append(part)
            rows += len(part)
            if rows >= most_rows:
                yield _joined(waiting)
                waiting, rows = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[Float[Tensor, "_ dim"]]) -> Float[Tensor, "rows dim"]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)
