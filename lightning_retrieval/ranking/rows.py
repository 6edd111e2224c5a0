"""Rows: what is known of images beside their embeddings, normalisation, and embeddings sharded over processes.

Embeddings are normalised only here (`normalize`).

Each process holds about the same number of rows of an evaluation set. The rows are sorted by their labels. Blocks of
consecutive rows are distributed over the processes in turn, so that a large class is divided evenly. Ranking gathers
the rows of other processes one block at a time.

Ranks are counted on the device of the labels, and metrics are computed from them in float64. Apple's GPUs (MPS) do not
support float64, so ranks and the metrics' values are copied from these GPUs to the CPU (`float64_device`). This takes
little time, because there are few ranks compared with scores.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, finfo, float32, promote_types
from torch.linalg import vector_norm

from lightning_retrieval.checks import is_traced
from lightning_retrieval.distributed import UNSHARDED, Shard, fetch_rows, gather_into, gather_parts

AnyRows = TypeVar("AnyRows", bound="Rows")

_GATHERED_ROWS = 1 << 14  # number of rows gathered at a time, if all rows are gathered


def normalize(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """L2-normalise the rows, in float32 or better.

    A row of zeros stays zero and gets a finite gradient; a row of only subnormal numbers does not change. Any other
    row is first divided by its largest absolute value, so that its squares neither overflow nor all underflow; this
    changes neither the result nor its gradient.

    Args:
        embeddings: one row for each item. Half precision is widened to float32.

    Example:
        >>> import torch
        >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e30, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000],
                [1.0000, 0.0000]])
    """
    x = embeddings.to(promote_types(embeddings.dtype, float32))
    # A trace would hold a call of Python, which no other program can run.
    if torch.is_grad_enabled() and x.requires_grad and not is_traced():
        unit: Tensor = _UnitRows.apply(x)[0]
        return unit
    return _unit_rows(x)[0]


def _unit_rows(x: Float[Tensor, "batch dim"]) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch 1"]]:
    """The rows of unit length, and what each row was divided by."""
    largest = x.detach().abs().amax(dim=1, keepdim=True)
    largest = largest.masked_fill(largest < finfo(x.dtype).tiny, 1.0)
    scaled = x / largest
    norm = vector_norm(scaled, dim=1, keepdim=True)
    norm = norm.masked_fill(norm == 0, 1.0)
    return scaled / norm, norm * largest


class _UnitRows(torch.autograd.Function):
    """`_unit_rows` with a gradient that takes fewer passes over the rows than that of each operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return _unit_rows(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        norm = output[1]
        ctx.mark_non_differentiable(norm)
        ctx.save_for_backward(*inputs, norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        x, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated again
            unit, norm = _unit_rows(x)
        else:
            unit = x / norm
        along = (grad * unit).sum(1, keepdim=True)
        gradient: Tensor = torch.addcmul(grad, unit, along, value=-1) / norm
        return gradient


def float64_device(device: torch.device) -> torch.device:
    """The device that computes float64 numbers for tensors of this device: the device itself, or the CPU."""
    if device.type == "mps":
        return torch.device("cpu")
    return device


def to_float64(values: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The values in float64, on the CPU if their device does not support float64.

    Example:
        >>> import torch
        >>> to_float64(torch.tensor([1, 2]))
        tensor([1., 2.], dtype=torch.float64)
    """
    return values.to(float64_device(values.device)).double()


@dataclass(frozen=True, eq=False)
class Rows:
    """What is known of some images beside their embeddings: columns with one row for each image.

    Args:
        labels: label of each image, or its labels of several levels, finest first. With a rule of relevance, the
            columns that the rule reads.
        ids: dataset index of each image, or None.
        columns: further integers of each image, by name.

    Example:
        >>> import torch
        >>> rows = Rows(torch.tensor([5, 5, 7]), columns={"cameras": torch.tensor([1, 2, 1])})
        >>> rows.select(torch.tensor([2, 0])).labels
        tensor([7, 5])
    """

    labels: Int[Tensor, "row ..."]
    ids: Int[Tensor, " row"] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def map(self: AnyRows, function: Callable[[Tensor], Tensor]) -> AnyRows:
        """The rows with a function applied to the labels, to any ids and to each further column."""
        ids = self.ids
        if ids is not None:
            ids = function(ids)
        columns = {name: function(column) for name, column in self.columns.items()}
        return replace(self, labels=function(self.labels), ids=ids, columns=columns)

    def select(self: AnyRows, chosen: Shaped[Tensor, " row"]) -> AnyRows:
        """The rows that a mask or a tensor of indices selects."""
        return self.map(lambda column: column[chosen])


@dataclass(frozen=True)
class Layout:
    """The assignment of rows to processes: blocks of `unit` rows go to the processes in turn.

    Args:
        rows: number of rows of all processes together.
        unit: number of rows in a block; the last block may be smaller.
        processes: number of processes.
    """

    rows: int
    unit: int
    processes: int

    def sizes(self, begin: int = 0, end: int | None = None) -> list[int]:
        """The number of rows from `begin` to `end` (by default all rows) that each process holds."""
        if end is None:
            end = self.rows
        return [self.rows_before(end, process) - self.rows_before(begin, process) for process in range(self.processes)]

    def rows_before(self, position: int, process: int) -> int:
        """The number of rows before `position` that a process holds."""
        turns, rest = divmod(position, self.unit * self.processes)
        return turns * self.unit + min(max(rest - process * self.unit, 0), self.unit)

    def holder(self, positions: Int[Tensor, " row"]) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
        """The process that holds each of these rows, and the index of the row on that process."""
        process = positions // self.unit % self.processes
        local = positions // (self.unit * self.processes) * self.unit + positions % self.unit
        return process, local

    def by_process(
        self, begin: int = 0, end: int | None = None, device: torch.device | None = None
    ) -> Int[Tensor, " row"]:
        """The positions of the rows from `begin` to `end`, grouped by process, the first process first."""
        if end is None:
            end = self.rows
        positions = torch.arange(begin, end, device=device)
        process = positions // self.unit % self.processes
        return positions[process.argsort(stable=True)]


@dataclass(frozen=True)
class ShardedRows:
    """Rows that are sharded over the processes, with the shard of this process.

    Args:
        local: the rows of this process, in order.
        layout: the assignment of rows to processes.
        shard: the shard of this process.
    """

    local: Float[Tensor, "local dim"]
    layout: Layout
    shard: Shard

    def __len__(self) -> int:
        return self.layout.rows

    @property
    def is_sharded(self) -> bool:
        """Whether there are several processes."""
        return self.shard.count > 1

    def blocks(self) -> Iterator[tuple[Float[Tensor, "block dim"], slice]]:
        """The blocks of rows of this process, each with its positions among all rows."""
        unit = self.layout.unit
        for number in range(math.ceil(len(self.local) / unit)):
            rows = self.local[number * unit : (number + 1) * unit]
            begin = (number * self.shard.count + self.shard.index) * unit
            yield rows, slice(begin, begin + len(rows))

    def split_blocks(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """The blocks of this process, split into smaller blocks of at most `rows` rows.

        Yields the range of each block among the local rows, and among all rows.
        """
        local = 0
        for _, positions in self.blocks():
            for begin in range(positions.start, positions.stop, rows):
                end = min(begin + rows, positions.stop)
                yield slice(local, local + end - begin), slice(begin, end)
                local += end - begin

    def most_split_blocks(self, rows: int) -> int:
        """The largest number of `split_blocks` of any process."""
        numbers = []
        for size in self.layout.sizes():
            blocks, rest = divmod(size, self.layout.unit)
            numbers.append(blocks * math.ceil(self.layout.unit / rows) + math.ceil(rest / rows))
        return max(numbers)

    def range(self, begin: int, end: int) -> Float[Tensor, "range dim"]:
        """The rows from `begin` to `end`. If they are sharded, this is a collective operation.

        Sharded rows are returned on the device of the collective operation, other rows on their device.
        """
        return self.start_range(begin, end)()

    def start_range(self, begin: int, end: int) -> Callable[[], Float[Tensor, "range dim"]]:
        """Begin to fetch the rows from `begin` to `end`, and return the function that waits for them.

        If the rows are sharded, this is a collective operation. Whole turns of the processes are gathered into their
        place while this process goes on.
        """
        if not self.is_sharded:
            return lambda: self.local[begin:end]
        turn, count = self.layout.unit * self.shard.count, self.shard.count
        rows = self.local.new_empty(end - begin, self.local.shape[1], device=self.shard.device)
        first, last = min(math.ceil(begin / turn) * turn, end), end // turn * turn
        works: list[Any] = []
        for start in range(first, last, turn):
            block = self.local[start // count : (start + turn) // count].to(rows.device)
            gathered = rows[start - begin : start - begin + turn]
            works.append(gather_into(gathered, block, group=self.shard.group, async_op=True))
        self._gather_into(rows[: first - begin], begin, first)
        last = max(first, last)
        self._gather_into(rows[last - begin :], last, end)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return rows

        return wait

    def _gather_into(self, rows: Float[Tensor, "range dim"], begin: int, end: int) -> None:
        """Gather the rows from `begin` to `end` into a tensor. A collective operation."""
        if len(rows) == 0:
            return
        first = self.layout.rows_before(begin, self.shard.index)
        last = self.layout.rows_before(end, self.shard.index)
        sizes = self.layout.sizes(begin, end)
        parts = gather_parts(self.local[first:last].to(rows.device), sizes, self.shard.group)
        positions = self.layout.by_process(begin, end, device=rows.device) - begin
        for of_process, chosen in zip(parts, positions.split(sizes)):
            rows[chosen] = of_process

    def select(self, positions: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen dim"]:
        """The rows at these positions, on every process. If they are sharded, this is a collective operation."""
        if not self.is_sharded:
            return self.local[positions.to(self.local.device)]
        positions = positions.cpu()
        process, local = self.layout.holder(positions)
        own = self.local[local[process == self.shard.index].to(self.local.device)].to(self.shard.device)
        sizes = torch.bincount(process, minlength=self.shard.count).tolist()
        rows = own.new_empty(len(positions), own.shape[1])
        rows[process.argsort(stable=True).to(rows.device)] = torch.cat(gather_parts(own, sizes, self.shard.group))
        return rows

    def fetch(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... dim"]:
        """The rows at these positions, which may differ between processes, on the device of the local rows.

        If the rows are sharded, this is a collective operation.
        """
        if not self.is_sharded:
            return self.local[positions.to(self.local.device)]
        wanted, inverse = positions.to(self.shard.device).unique(return_inverse=True)
        process, local = self.layout.holder(wanted)
        found = fetch_rows(self.local, process, local, self.shard)
        return found[inverse.to(found.device)]

    def all(self) -> Float[Tensor, "row dim"]:
        """All rows, on every process, on the device of the local rows.

        If the rows are sharded, this is a collective operation.
        """
        if not self.is_sharded:
            return self.local
        rows = self.local.new_empty(len(self), self.local.shape[1])
        for begin in range(0, len(self), _GATHERED_ROWS):
            end = min(begin + _GATHERED_ROWS, len(self))
            rows[begin:end] = self.range(begin, end)
        return rows

    def with_rows(self, rows: Float[Tensor, "row dim"]) -> "ShardedRows":
        """New rows in the same layout. `rows` holds the rows of all processes, and is the same on every process."""
        if not self.is_sharded:
            return ShardedRows(rows, self.layout, self.shard)
        first = sum(self.layout.sizes()[: self.shard.index])
        positions = self.layout.by_process()[first : first + len(self.local)]
        return ShardedRows(rows[positions.to(rows.device)], self.layout, self.shard)


def unsharded(rows: Float[Tensor, "row dim"], unit: int) -> ShardedRows:
    """Rows that only this process holds."""
    return ShardedRows(rows, Layout(len(rows), unit, 1), UNSHARDED)
