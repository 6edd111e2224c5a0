"""The rows that a whitening is learned from: those of one process, or those of several that hold a part each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.distributed import (
    UNSHARDED,
    Shard,
    fetch_rows,
    gather_rows,
    rank,
    sum_over_ranks,
    together,
    world_size,
)


@dataclass(frozen=True)
class FitRows:
    """The rows of all processes, in rank order, of which this process holds its own.

    Args:
        local: the rows of this process.
        counts: number of rows of each process.
        shard: this process.
    """

    local: Float[Tensor, "local dim"]
    counts: Sequence[int]
    shard: Shard = UNSHARDED

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    def begin(self) -> int:
        """The position of the first row of this process."""
        return sum(self.counts[: self.shard.index])

    def sum(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The sum of the values that each process has. A collective operation if there are several processes."""
        if self.shard.count == 1:
            return values
        return sum_over_ranks(values)

    def holder(self, positions: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """The process that holds each of these rows."""
        ends = torch.tensor(list(accumulate(self.counts)), device=positions.device)
        return torch.searchsorted(ends, positions.contiguous(), right=True)

    def fetch(self, positions: Int[Tensor, " row"]) -> Float[Tensor, "row dim"]:
        """The rows at these positions, which may be others on each process.

        This is a collective operation if there are several processes.
        """
        if self.shard.count == 1:
            return self.local[positions]
        process = self.holder(positions)
        starts = torch.tensor([0, *accumulate(self.counts)], device=positions.device)
        return fetch_rows(self.local, process, positions - starts[process], self.shard)


def rows_of_one_process(rows: Float[Tensor, "row dim"]) -> FitRows:
    """Rows that this process has alone."""
    return FitRows(rows, [len(rows)])


def rows_of_all_processes(rows: Float[Tensor, "local dim"]) -> FitRows:
    """The rows that each process has. A collective operation if there are several processes."""
    if world_size() == 1:
        return rows_of_one_process(rows)
    counts = gather_rows(torch.tensor([len(rows)], device=rows.device), [1] * world_size()).tolist()
    return FitRows(rows, counts, Shard(rank(), world_size(), device=rows.device))


def check_on_all_processes(owner: str, check: Callable[[], None], embeddings: Tensor, labels: Tensor | None) -> None:
    """Raise the same error on all processes unless each has valid rows, and all have rows of one kind.

    This is a collective operation if there are several processes.

    Args:
        owner: prefix of error messages.
        check: raises if the rows of this process are invalid.
        embeddings: one row per image of this process.
        labels: of these images, if other processes need them.
    """

    def kinds() -> dict[str, str]:
        check()
        return {"embeddings": _kind(embeddings), "labels": _kind(labels)}

    first, *others = together(kinds)
    for process, other in enumerate(others, 1):
        for name, kind in other.items():
            if kind != first[name]:
                raise ValueError(
                    f"{owner}: `{name}` must have the same shape, apart from the number of rows, and dtype on all "
                    f"processes, got {first[name]} on process 0 and {kind} on process {process}."
                )


def _kind(values: Tensor | None) -> str:
    if values is None:
        return "None"
    sizes = ", ".join(["rows", *map(str, values.shape[1:])])
    return f"({sizes}) of {values.dtype}"
