"""Rows of an evaluation set that stay in the batches in which they came, until some of them are needed as a tensor.

An evaluation set may fill most of a device. Its rows are sorted, merged and normalised in one copy: which rows are
chosen, and in which order, is decided on their indices. If there are several processes, each keeps the batches that it
was given, all of them know which rows are chosen, and each gets a part of those.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.distributed import UNSHARDED, Shard, exchange_rows
from lightning_retrieval.ranking.sharded_rows import Layout, ShardedRows, unsharded
from lightning_retrieval.ranking.similarity import normalize

_PART_NUMBERS = 1 << 18  # that are normalised, and sent to other processes, at a time
_LEAST_ROWS = 32  # that are normalised together: a GPU may add the squares of fewer rows in another order


@dataclass(frozen=True)
class UnitRows:
    """Rows chosen from batches of embeddings.

    Args:
        batches: those of this process; not changed and not copied.
        index: the chosen rows of the batches of all processes together, in rank order. The same on all processes.
        counts: number of rows of the batches of each process.
        shard: this process.
    """

    batches: Sequence[Float[Tensor, "_ dim"]]
    index: Int[Tensor, " row"]
    counts: Sequence[int]
    shard: Shard = UNSHARDED

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, which may be another one than that of labels and ids."""
        return self.batches[0].device

    def select(self, chosen: Shaped[Tensor, " row"]) -> "UnitRows":
        """The rows that a mask or a tensor of indices selects."""
        return replace(self, index=self.index[chosen.to(self.index.device)])

    def tensor(self) -> Float[Tensor, "row dim"]:
        """The chosen rows as unit rows, in float32 or better. A collective operation if there are several processes."""
        rows_of_process = -(-len(self.index) // self.shard.count)
        return self.sharded(unit=max(1, rows_of_process)).all()

    def sharded(self, unit: int) -> ShardedRows:
        """The chosen rows as unit rows, of which each process gets blocks of `unit` rows.

        This is a collective operation if there are several processes.
        """
        if self.shard.count == 1:
            return unsharded(self.distribute([len(self.index)]), unit)
        layout = Layout(len(self.index), unit, self.shard.count)
        return ShardedRows(self.select(layout.by_process()).distribute(layout.sizes()), layout, self.shard)

    def distribute(self, sizes: Sequence[int]) -> Float[Tensor, "local dim"]:
        """The part of the chosen rows that is for this process, as unit rows, in float32 or better.

        This is a collective operation if there are several processes. Each sends its batches part by part.

        Args:
            sizes: number of rows for each process: the first rows are for the first process, and so on.
        """
        dtype = torch.promote_types(self.batches[0].dtype, torch.float32)
        rows = torch.empty(sizes[self.shard.index], self.batches[0].shape[1], dtype=dtype, device=self.device)
        rows_of_part = max(1, _PART_NUMBERS // max(1, rows.shape[1]))
        parts = -(-max(self.counts) // rows_of_part)
        sent, received = self._sent(sizes, rows_of_part, parts), self._received(sizes, rows_of_part, parts)
        for number, part in enumerate(_parts(self.batches, rows_of_part, parts)):
            chosen = _normalized(part)[sent.of_part(number) - number * rows_of_part]
            rows[received.of_part(number)] = self._exchange(chosen, sent.counts[number], received.counts[number])
        return rows

    def _sent(self, sizes: Sequence[int], rows_of_part: int, parts: int) -> "_Transfers":
        """The rows of the batches of this process that are chosen, by part and by the process that they are for."""
        begin = sum(self.counts[: self.shard.index])
        held = ((self.index >= begin) & (self.index < begin + self.counts[self.shard.index])).nonzero()[:, 0]
        row = self.index[held] - begin
        receiver = _section(held, sizes)
        order, counts = _by_part(row, receiver, rows_of_part, parts, len(sizes))
        return _Transfers(row[order], counts)

    def _received(self, sizes: Sequence[int], rows_of_part: int, parts: int) -> "_Transfers":
        """The positions of the rows for this process in its result, by part and by the process that has them."""
        begin = sum(sizes[: self.shard.index])
        wanted = self.index[begin : begin + sizes[self.shard.index]]
        sender = _section(wanted, self.counts)
        starts = torch.tensor([0, *accumulate(self.counts)], device=wanted.device)
        return _Transfers(*_by_part(wanted - starts[sender], sender, rows_of_part, parts, len(sizes)))

    def _exchange(
        self, rows: Float[Tensor, "sent dim"], sent: Sequence[int], received: Sequence[int]
    ) -> Float[Tensor, "received dim"]:
        """Send rows to each process, and receive rows of each."""
        if self.shard.count == 1:
            return rows
        return exchange_rows(rows, sent, received, self.shard)


@dataclass(frozen=True)
class _Transfers:
    """Rows that are sent or received: those of the first part, the first process first, then those of the second, ...

    Args:
        rows: all of them.
        counts: for each part, the number of rows of each process.
    """

    rows: Int[Tensor, " row"]
    counts: Sequence[Sequence[int]]

    def of_part(self, number: int) -> Int[Tensor, " row"]:
        """The rows of a part."""
        return self.rows[self._ends[number] : self._ends[number + 1]]

    @cached_property
    def _ends(self) -> list[int]:
        """The end of each part, after a 0."""
        return [0, *accumulate(map(sum, self.counts))]


def unit_rows(batches: Sequence[Float[Tensor, "_ dim"]]) -> UnitRows:
    """All rows of these batches, which this process has alone."""
    rows = sum(len(batch) for batch in batches)
    return UnitRows(batches, torch.arange(rows, device=batches[0].device), [rows])


def _section(positions: Int[Tensor, " row"], sizes: Sequence[int]) -> Int[Tensor, " row"]:
    """The section of each position, if consecutive sections have these sizes."""
    ends = torch.tensor(list(accumulate(sizes)), device=positions.device)
    return torch.searchsorted(ends, positions, right=True)


def _by_part(
    row: Int[Tensor, " row"], process: Int[Tensor, " row"], rows_of_part: int, parts: int, processes: int
) -> tuple[Int[Tensor, " row"], list[list[int]]]:
    """The order by part, process and row, and the number of rows of each part and process."""
    key = row // rows_of_part * processes + process
    by_row = row.argsort(stable=True)
    order = by_row[key[by_row].argsort(stable=True)]
    counts = torch.bincount(key, minlength=parts * processes)
    return order, counts.view(parts, processes).tolist()


def _parts(batches: Sequence[Float[Tensor, "_ dim"]], rows: int, number: int) -> Iterator[Float[Tensor, "_ dim"]]:
    """The rows of all batches in order, cut into this number of parts of `rows` rows; the last ones may be smaller."""
    waiting: list[Tensor] = []
    missing = rows
    for batch in batches:
        while len(batch) >= missing:
            yield torch.cat([*waiting, batch[:missing]])
            number -= 1
            waiting, batch, missing = [], batch[missing:], rows
        if len(batch) > 0:
            waiting.append(batch)
            missing -= len(batch)
    waiting.append(batches[0][:0])
    for _ in range(number):
        yield torch.cat(waiting)
        waiting = [batches[0][:0]]


def _normalized(part: Float[Tensor, "row dim"]) -> Float[Tensor, "padded dim"]:
    """The rows as unit rows, and rows of zeros after them if they are few."""
    missing = max(0, _LEAST_ROWS - len(part))
    return normalize(pad(part, (0, 0, 0, missing)))
