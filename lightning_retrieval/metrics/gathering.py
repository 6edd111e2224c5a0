"""Gathers the rows of an evaluation set from all processes, and merges duplicates so that each image occurs once.

Labels, ids, roles and the like are gathered, so that every process has all of them. Embeddings may fill most of a
device, so they stay on their process, in the original batches. Which rows are chosen, and in which order, is decided
with indices alone; the rows are then sorted, merged and normalised in a single copy. All processes choose the same
rows, and each process gets a shard of the chosen rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.checks import first_of
from lightning_retrieval.distributed import UNSHARDED, Shard, as_sent, exchange_rows, gather_rows
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.ranking.labels import Role, check_nesting
from lightning_retrieval.ranking.relevance import OtherCamera, Relevance, SameLabel
from lightning_retrieval.ranking.rows import Layout, Rows, ShardedRows, normalize, unsharded

_BLOCK_NUMBERS = 1 << 18  # numbers in a block of rows; each process normalises and sends one block at a time
_COMPARED_ROWS = 1 << 16  # maximum number of repeated images that a process compares at a time
# Largest squared distance of two unit rows of one image, which is 2 (1 - cosine). Rounding errors in bfloat16, for
# batches of different shapes or on different GPUs, stay below it.
_LARGEST_ERROR = 2e-3
_LEAST_ROWS = 32  # minimum number of rows to normalise together: for fewer rows, a GPU may add squares in another order


@dataclass(frozen=True)
class UnitRows:
    """Rows chosen from batches of embeddings.

    Args:
        batches: batches of this process; neither changed nor copied.
        index: the chosen rows, as indices into the concatenated batches of all processes, in rank order; equal on
            all processes.
        counts: number of rows of each process in its batches.
        shard: the shard of this process.
    """

    batches: Sequence[Float[Tensor, "_ dim"]]
    index: Int[Tensor, " row"]
    counts: Sequence[int]
    shard: Shard = UNSHARDED

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, which may differ from that of labels and ids."""
        return self.batches[0].device

    def select(self, chosen: Shaped[Tensor, " row"]) -> "UnitRows":
        """The rows that a mask or a tensor of indices selects."""
        return replace(self, index=self.index[chosen.to(self.index.device)])

    def sharded(self, unit: int) -> ShardedRows:
        """The chosen rows as unit rows, distributed over the processes in blocks of `unit` rows.

        With several processes, this is a collective operation.
        """
        if self.shard.count == 1:
            return unsharded(self.distribute([len(self.index)]), unit)
        layout = Layout(len(self.index), unit, self.shard.count)
        return ShardedRows(self.select(layout.by_process()).distribute(layout.sizes()), layout, self.shard)

    def distribute(self, sizes: Sequence[int]) -> Float[Tensor, "local dim"]:
        """The chosen rows that this process receives, as unit rows, in float32 or better.

        With several processes, this is a collective operation, in which each process sends its batches block by block.

        Args:
            sizes: number of rows that each process receives: the first process gets the first rows, and so on.
        """
        dtype = torch.promote_types(self.batches[0].dtype, torch.float32)
        rows = torch.empty(sizes[self.shard.index], self.batches[0].shape[1], dtype=dtype, device=self.device)
        block_rows = max(1, _BLOCK_NUMBERS // max(1, rows.shape[1]))
        blocks = -(-max(self.counts) // block_rows)
        # Each chosen row has an index on the process that sends it, and another one on the process that receives it.
        sender, sent_index = _sections(self.index, self.counts)
        receiver, received_index = _sections(torch.arange(len(self.index), device=self.device), sizes)
        is_sent, is_received = sender == self.shard.index, receiver == self.shard.index
        # Between two processes, the rows of a block are in the order of their indices on the sender.
        order, sent_counts = _by_block(sent_index[is_sent], receiver[is_sent], block_rows, blocks, len(sizes))
        sent = sent_index[is_sent][order].split(list(map(sum, sent_counts)))
        order, received_counts = _by_block(sent_index[is_received], sender[is_received], block_rows, blocks, len(sizes))
        received = received_index[is_received][order].split(list(map(sum, received_counts)))
        for number, block in enumerate(_blocks(self.batches, block_rows, blocks)):
            chosen = rows[:0]
            if len(sent[number]) > 0:
                chosen = _normalized(block)[sent[number] - number * block_rows]
            if self.shard.count > 1:
                chosen = exchange_rows(chosen, sent_counts[number], received_counts[number], self.shard)
            rows[received[number]] = chosen
        return rows


def unit_rows(batches: Sequence[Float[Tensor, "_ dim"]]) -> UnitRows:
    """All rows of these batches, for a single process."""
    rows = sum(map(len, batches))
    return UnitRows(batches, torch.arange(rows, device=batches[0].device), [rows])


def _sections(positions: Int[Tensor, " row"], sizes: Sequence[int]) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
    """For consecutive sections of these sizes: the section that contains each position, and the index in it."""
    ends = torch.tensor(list(accumulate(sizes)), device=positions.device)
    starts = ends - torch.tensor(sizes, device=positions.device)
    section = torch.searchsorted(ends, positions, right=True)
    return section, positions - starts[section]


def _by_block(
    row: Int[Tensor, " row"], process: Int[Tensor, " row"], block_rows: int, blocks: int, processes: int
) -> tuple[Int[Tensor, " row"], list[list[int]]]:
    """The order of rows by block, process and row, and the number of rows of each block and process."""
    key = row // block_rows * processes + process
    by_row = row.argsort(stable=True)
    key, by_key = key[by_row].sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(blocks * processes, device=key.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    return by_row[by_key], counts.view(blocks, processes).tolist()


def _blocks(batches: Sequence[Float[Tensor, "_ dim"]], rows: int, number: int) -> Iterator[Float[Tensor, "_ dim"]]:
    """The rows of all batches in order, in `number` blocks of `rows` rows; the last blocks may be smaller."""
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


def _normalized(block: Float[Tensor, "row dim"]) -> Float[Tensor, "padded dim"]:
    """The rows as unit rows, padded by zero rows if there are few."""
    missing = max(0, _LEAST_ROWS - len(block))
    return normalize(pad(block, (0, 0, 0, missing)))


@dataclass(frozen=True, eq=False, kw_only=True)
class Images(Rows):
    """Images with their embeddings: the rows of all updates, in any order, or each image once, in the order of the ids.

    Args:
        labels: labels of shape (row, level); if there is a rule of relevance, the columns that the rule reads.
        ids: the id of each image.
        columns: the `"roles"` of the images, and any `"instances"` and `"cameras"`.
        embeddings: the embeddings.
        relevance: the rule of relevance, or None.
    """

    ids: Int[Tensor, " row"]
    embeddings: UnitRows
    relevance: Relevance | None = None

    def select(self, chosen: Shaped[Tensor, " row"]) -> "Images":
        """The rows that a mask or a tensor of indices selects."""
        return replace(super().select(chosen), embeddings=self.embeddings.select(chosen))

    def with_roles(self, roles: Int[Tensor, " row"]) -> "Images":
        """The same images with other roles."""
        return replace(self, columns={**self.columns, "roles": roles})

    def shortened(self, dim: int) -> "Images":
        """The same images with the first `dim` dimensions of each embedding. Nothing is copied."""
        batches = [batch[:, :dim] for batch in self.embeddings.batches]
        return replace(self, embeddings=replace(self.embeddings, batches=batches))

    def at_finest_level(self) -> "Images":
        """The images with only their finest labels; the same images if there is a rule, which reads all columns."""
        if self.relevance is not None:
            return self
        return replace(self, labels=self.labels[:, :1])

    @property
    def rule(self) -> Relevance:
        """The rule that says which images are relevant and which are in a list."""
        if self.relevance is not None:
            return self.relevance
        if "cameras" in self.columns:
            return OtherCamera()
        return SameLabel()

    @property
    def listed(self) -> Rows:
        """The ids of the images, and what the rule reads of them."""
        if "cameras" in self.columns:
            return Rows(torch.cat([self.labels, self.columns["cameras"][:, None]], 1), self.ids)
        return Rows(self.labels, self.ids)


class RowFormat(NamedTuple):
    """The properties that the rows of all processes must share."""

    dim: int
    dtype: str
    levels: int
    columns: tuple[str, ...]


def gather_over_processes(
    images: Images | None, error: Exception | None, settings: str, *, shard: Shard, embeddings_device: torch.device
) -> Images:
    """The rows of all processes in rank order, except that embeddings are only those of this process.

    This is a collective operation.

    Args:
        images: the rows of this process, or None if it has none.
        error: an error of this process, which is then raised on all processes; or None.
        settings: settings of the metric, which must be equal on all processes.
        shard: the shard of this process, with the group and the device of the collective operations.
        embeddings_device: device on which embeddings are kept.

    Raises:
        ValueError: on all processes, if a process has an error, no process has rows, or formats or settings differ
            between processes.
    """
    count, row_format = 0, None
    if images is not None:
        count, row_format = len(images), _format_of(images)
    if error is not None:
        error = as_sent(error)
    reports: list[Any] = [None] * shard.count
    dist.all_gather_object(reports, (count, row_format, error, settings), group=shard.group)
    counts, formats, errors, all_settings = zip(*reports)
    for rank, of_process in enumerate(errors):
        if of_process is not None:
            of_process.add_note(f"This happened on rank {rank}.")
            raise of_process
    if len(set(all_settings)) > 1:
        raise InvalidValue("the settings must be the same on all processes", got=sorted(set(all_settings)))
    row_format = _common_format(formats)
    if images is None:
        images = _no_images(row_format, shard.device, embeddings_device)
    batches = images.embeddings.batches
    every = torch.arange(sum(counts), device=batches[0].device)
    gathered = images.map(lambda column: gather_rows(column, counts, shard.group))
    return replace(gathered, embeddings=UnitRows(batches, every, counts, shard))


def merge_duplicates(collected: Images, *, compare: bool = True) -> Images:
    """Sort the rows by id, merge rows with the same id, and average the images of each instance.

    Of the rows with the same id, the first is kept, with the union of their roles. They must be equal up to rounding,
    as the rows of one image are in evaluation mode.

    With several processes, this is a collective operation.

    Args:
        collected: the rows of all updates.
        compare: whether to compare the embeddings of rows with the same id; False if this has been done.

    Raises:
        ValueError: if label levels do not nest, an id or an instance has two labels or two cameras, an instance has two
            roles, or an id has two embeddings.
    """
    if collected.relevance is None:
        check_nesting(collected.labels)
    first, roles = _first_of_each("id", collected.ids, collected)
    if compare and len(first) < len(collected):
        _check_one_image_per_id(collected, first)
    images = collected.select(first).with_roles(roles)
    instances = images.columns.get("instances")
    if instances is None:
        return images
    columns = {name: column for name, column in images.columns.items() if name != "instances"}
    images = replace(images, columns=columns)
    return _average_instances(images, instances, *_first_of_each("instance", instances, images))


def given_only_sometimes(name: str) -> InvalidValue:
    """The error for an argument that was given in only some updates."""
    return InvalidValue("must be given with every update or with none", argument=name, got="both")


def nothing_to_compute() -> InvalidValue:
    """The error for a metric without rows."""
    return InvalidValue("there is nothing to compute", cure="call update with at least one row first")


def _format_of(images: Images) -> RowFormat:
    batch = images.embeddings.batches[0]
    return RowFormat(batch.shape[1], str(batch.dtype), images.labels.shape[1], tuple(images.columns))


def _common_format(formats: Sequence[RowFormat | None]) -> RowFormat:
    """The format that all processes with rows share; raises if formats differ."""
    found = {row_format for row_format in formats if row_format is not None}
    if not found:
        raise nothing_to_compute()
    if len(found) > 1:
        raise InvalidValue("rows must have the same format on all processes", got=sorted(found))
    return found.pop()


def _no_images(row_format: RowFormat, device: torch.device | None, embeddings_device: torch.device) -> Images:
    """An empty set of rows of this format, for a process without rows."""
    dtype = getattr(torch, row_format.dtype.removeprefix("torch."))
    integers = torch.empty(0, dtype=torch.int64, device=device)
    return Images(
        labels=integers.new_empty(0, row_format.levels),
        ids=integers,
        columns=dict.fromkeys(row_format.columns, integers),
        embeddings=unit_rows([torch.empty(0, row_format.dim, dtype=dtype, device=embeddings_device)]),
    )


def _first_of_each(
    name: Literal["id", "instance"], values: Int[Tensor, " row"], rows: Rows
) -> tuple[Int[Tensor, " value"], Int[Tensor, " value"]]:
    """The first row with each value, in ascending order of values, and the union of the roles of all rows with it."""
    unique, inverse = torch.unique(values, return_inverse=True)
    positions = torch.arange(len(values), device=values.device)
    first = torch.full_like(unique, len(values)).scatter_reduce(0, inverse, positions, "amin")
    annotations, roles = {"label": rows.labels}, rows.columns["roles"]
    if "cameras" in rows.columns:
        annotations["camera"] = rows.columns["cameras"][:, None]
    if name == "instance":
        annotations["role"] = roles[:, None]
    for annotation, column in annotations.items():
        differs = (column != column[first][inverse]).any(1)
        if bool(differs.any()):
            wrong = int(values[differs.nonzero()[0, 0]])
            rule = f"must have one {annotation} each"
            got = f"{name} {wrong} with two different {annotation}s"
            raise InvalidValue(rule, argument=f"{name}s", got=got, cure=_CURE_OF_SHARED_IDS.format(name))
    union = torch.zeros_like(unique)
    for role in (Role.QUERY, Role.GALLERY):
        of_role = torch.zeros_like(unique).scatter_reduce(0, inverse, roles & int(role), "amax")
        union += of_role
    return first, union


def _check_one_image_per_id(collected: Images, first: Int[Tensor, " value"]) -> None:
    """Raise on all processes if rows with the same id differ by more than rounding, so that they are different images.

    Rows without a role are not compared. With several processes, this is a collective operation.

    Args:
        collected: the rows.
        first: index of the first row of each id, in ascending order of ids.
    """
    ids, roles = collected.ids, collected.columns["roles"]
    first_of_row = first[torch.searchsorted(ids[first], ids)]
    is_repeated = first_of_row != torch.arange(len(ids), device=ids.device)
    repeated = (is_repeated & (roles | roles[first_of_row] != Role.JUNK)).nonzero()[:, 0]
    others = first_of_row[repeated]
    squares = _squared_distances(collected.embeddings, repeated, others)
    wrong = (squares > _LARGEST_ERROR).nonzero()[:, 0]
    if len(wrong) == 0:
        return
    row, other = repeated[wrong[0]], others[wrong[0]]
    sets = [_SETS[Role(int(roles[index]))] for index in (other, row)]
    different = torch.unique(ids[repeated[wrong]])
    raise InvalidValue(
        "rows with the same id must be the same image",
        got=f"different embeddings for {len(different)} of {len(first)} ids ({first_of(different.tolist())}), such "
        f"as id {int(ids[row])} in {sets[0]} and again in {sets[1]}, with a cosine similarity of "
        f"{1 - float(squares[wrong[0]]) / 2:.3f}",
        cure=f"{_CURE_OF_SHARED_IDS.format('id')}; if they are the same images, embed them without random transforms",
    )


# The set that rows with a role are in, for messages.
_SETS = {
    Role.JUNK: "no set",
    Role.QUERY: "the queries",
    Role.GALLERY: "the gallery",
    Role.BOTH: "the images that are query and gallery",
}
_CURE_OF_SHARED_IDS = (
    "if two sets, such as queries and gallery or the parts of a ConcatDataset, both count from 0, add the length of "
    "the first to the {}s of the second"
)


def _squared_distances(
    unit: UnitRows, rows: Int[Tensor, " pair"], others: Int[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """The squared distances of pairs of unit rows, on every process. Each process computes a part of them.

    Args:
        unit: the rows of all processes.
        rows: indices of the first row of each pair.
        others: indices of the second row of each pair.
    """
    shard = unit.shard
    squares = torch.zeros(len(rows), device=rows.device)
    for pairs in torch.arange(len(rows), device=rows.device).split(_COMPARED_ROWS * shard.count):
        parts = pairs.tensor_split(shard.count)
        sizes = list(map(len, parts))
        difference = unit.select(rows[pairs]).distribute(sizes) - unit.select(others[pairs]).distribute(sizes)
        squares[parts[shard.index]] = difference.square().sum(1).to(squares)
    shard.add_up(squares)  # for each pair, all other processes have zeros, so the sum is exact
    return squares


def _average_instances(
    rows: Images, instances: Int[Tensor, " row"], first: Int[Tensor, " value"], roles: Int[Tensor, " value"]
) -> Images:
    """One row for each instance: the normalised mean of its unit rows, with the smallest of its ids.

    Args:
        rows: rows in the order of their ids.
        instances: the instance of each row.
        first: index of the first row of each instance.
        roles: the roles of each instance.
    """
    sizes = torch.unique(instances, return_counts=True)[1]
    by_instance = instances.argsort(stable=True)
    by_id = first.argsort()  # the first row of an instance has its smallest id
    averages = _sums_of_sections(rows.embeddings.select(by_instance), sizes).select(by_id)
    return replace(rows.select(first[by_id]).with_roles(roles[by_id]), embeddings=averages)


def _sums_of_sections(rows: UnitRows, sizes: Int[Tensor, " section"]) -> UnitRows:
    """The sums of consecutive sections of unit rows. Each process computes the sums of some sections."""
    shard = rows.shard
    ends = sizes.cumsum(0)
    middles = ends - (sizes + 1) // 2
    process = middles * shard.count // int(ends[-1])  # each section is summed on one process
    sections_of_process = torch.bincount(process, minlength=shard.count)
    rows_of_process = torch.zeros_like(sections_of_process).scatter_add(0, process, sizes)
    unit = rows.distribute(rows_of_process.tolist())
    counts = sections_of_process.tolist()
    local_sizes = sizes.split(counts)[shard.index].to(unit.device)
    sums = unit
    if len(local_sizes) > 0:
        sums = torch.segment_reduce(unit, "sum", lengths=local_sizes)
    return UnitRows([sums], torch.arange(len(sizes), device=unit.device), counts, shard)
