"""One training step: from the embeddings of a process to the sum of the gradients of all processes.

The loss ranks the batch of all processes together. Labels and ids are gathered before the forward pass, embeddings
after it. If each process computes the loss of its own queries, the backward pass needs one more collective.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_retrieval.backend import rank_zero_info
from lightning_retrieval.checks import as_int64, is_integer, short_repr
from lightning_retrieval.distributed import gather_rows, rank, sum_over_ranks, to_device, to_host, world_size
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses.batch_loss import QueryRange, RankedBatch
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.random_state import step_random_state
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.rows import Rows
from lightning_retrieval.training.chunk_size import largest_chunk_size
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.optimizers import trainable_parameters

# Types to which embeddings are rounded before they are gathered, by the argument `gather` of `RetrievalModule`.
GatherDtype = Literal["bfloat16", "float16"]
GATHER_DTYPES: dict[bool | GatherDtype, torch.dtype | None] = {
    True: None,
    False: None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalRows(Rows):
    """Labels and ids of this process's rows of a batch, or of one side of it.

    Args:
        labels: the labels or, with a rule of relevance, the columns that the rule reads.
        ids: the ids, or None.
        inputs: the inputs of the embeddings.
    """

    inputs: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalRows(Rows):
    """Labels and ids of the rows that the loss ranks, which are known before the embeddings.

    The rows are those of all processes in rank order, or of this process only.

    Args:
        labels: as for `LocalRows`.
        ids: the ids, or None.
        counts: number of rows of each process.
        input_shapes: hash of the input shape of each process; empty if there is only one process.
        hashes: the argument `hash_of_batch` of each process; empty if there is only one process.
    """

    counts: Sequence[int] = ()
    input_shapes: Sequence[int] = ()
    hashes: Sequence[int] = ()


def gather_batch(
    embeddings: Float[Tensor, "shard dim"],
    labels: Int[Tensor, "shard ..."],
    ids: Int[Tensor, " shard"] | None,
    *,
    gather: bool,
    local_queries: bool,
) -> tuple[Float[Tensor, "batch dim"], GlobalRows]:
    """Gather the batch of all processes, if nothing of it was gathered before the forward pass. It may have no rows.

    Args:
        embeddings: as for `gather_embeddings`.
        labels: label of each row.
        ids: id of each row, or None on all processes.
        gather: as for `gather_labels`.
        local_queries: as for `gather_embeddings`.

    Raises:
        ValueError: as `gather_labels`; also, on all processes, if their embeddings differ in dimension.
        TypeError: as `gather_labels`.
    """
    # The inputs of the embeddings are unknown, but this call compares the dimension in any case.
    (rows,) = gather_labels([LocalRows(labels, ids, inputs=embeddings)], gather=gather, may_be_empty=True)
    Dimensions().compare([embeddings], [rows])
    return gather_embeddings(embeddings, rows, gather=gather, local_queries=local_queries), rows


def gather_labels(
    sides: Sequence[LocalRows], *, gather: bool, may_be_empty: bool = False, hash_of_batch: int = 0
) -> list[GlobalRows]:
    """Gather the labels and ids of all processes, for each side of a batch. No embeddings are needed.

    Args:
        sides: rows of this process. The numbers of rows of the processes may differ.
        gather: False returns the rows of this process only.
        may_be_empty: whether a process may have no rows.
        hash_of_batch: a number of 64 bits, which is gathered too.

    Raises:
        ValueError: on all processes, if their batches differ in label levels or presence of ids; with `gather=False`,
            also if they differ in their number of rows; unless `may_be_empty`, also if one of them has no rows.
        TypeError: on all processes, if labels or ids are not integers on one of them.
    """
    sides = [_signed(rows) for rows in sides]
    if world_size() == 1:
        for rows in sides:
            if not _has_rows(rows.labels):
                raise InvalidType("must be a tensor of integers", argument="labels", got=_form_in_words(rows.labels))
        if not may_be_empty:
            _check_not_empty([[len(rows.labels) for rows in sides]])
        return [GlobalRows(rows.labels, rows.ids, counts=[len(rows.labels)]) for rows in sides]
    forms_of_sides = [(*_form_of(rows), hash_of_batch) for rows in sides]
    local_forms = to_device([forms_of_sides], sides[0].inputs.device)
    forms_of_processes = to_host(gather_rows(local_forms, [1] * world_size()))
    if not may_be_empty:
        _check_not_empty(forms_of_processes[:, :, 0].tolist())
    gathered = []
    for rows, forms in zip(sides, forms_of_processes.unbind(1)):
        gathered.append(_gather_side(rows, _Forms(*forms.unbind(1)), gather))
    return gathered


def _signed(rows: LocalRows) -> LocalRows:
    """The rows with labels and ids of signed types."""
    return replace(rows, labels=as_int64("labels", rows.labels), ids=as_int64("ids", rows.ids))


def gather_embeddings(
    embeddings: Float[Tensor, "shard dim"],
    rows: GlobalRows,
    *,
    gather: bool,
    local_queries: bool,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "batch dim"]:
    """Gather the embeddings of all processes. Their gradient flows back to the rows of each process.

    Args:
        embeddings: embeddings of this process, of the same dimension on all processes.
        rows: what `gather_labels` has returned for these rows.
        gather: as for `gather_labels`.
        local_queries: True if each process computes the loss of its shard of the queries. The gradient of a row is then
            summed over all processes, in one collective in the backward pass. False if each process computes an equal
            fraction of the same loss. Every process then already has the gradient, and nothing is communicated.
        dtype: type to which all rows are rounded, also if there is only one process. The gradient is not rounded. None
            does not round.
    """
    if gather and (world_size() > 1 or dtype is not None):
        embeddings = _GatherEmbeddings.apply(embeddings, rows.counts, local_queries, dtype)
    return embeddings


class _Forms(NamedTuple):
    """The properties of a batch that processes compare before they gather, with one element for each process."""

    rows: Int[Tensor, " world"]
    label_levels: Int[Tensor, " world"]  # 0 for labels of shape (rows,)
    has_ids: Int[Tensor, " world"]
    are_integers: Int[Tensor, " world"]
    input_shape: Int[Tensor, " world"]  # a hash
    hash_of_batch: Int[Tensor, " world"]


def are_integers(rows: Rows) -> bool:
    """Whether labels are integers of shape (rows,) or (rows, levels), and any ids are integers of shape (rows,)."""
    labels, ids = rows.labels, rows.ids
    if not is_integer(labels) or labels.ndim not in (1, 2):
        return False
    return ids is None or (is_integer(ids) and ids.shape == labels.shape[:1])


def _form_of(rows: LocalRows) -> tuple[int, int, bool, bool, int]:
    """The properties of this process's batch, in the order of `_Forms`, without the hash of the batch."""
    labels, ids = rows.labels, rows.ids
    label_levels = 0
    have_integers = are_integers(rows)
    if have_integers and labels.ndim == 2:
        label_levels = labels.shape[1]
    shape, number = getattr(rows.inputs, "shape", ()), 1  # what has neither raises where its type is checked
    if _has_rows(labels):
        number = len(labels)
    return number, label_levels, ids is not None, have_integers, hash(shape[1:])


def _has_rows(labels: Any) -> bool:
    return isinstance(labels, Sized) and getattr(labels, "ndim", 1) > 0


def _gather_side(rows: LocalRows, forms: _Forms, gather: bool) -> GlobalRows:
    """Gather the labels and ids of one side; raise if the processes' batches do not match."""
    labels, ids = rows.labels, rows.ids
    if not forms.are_integers.all():
        raise InvalidType(
            "labels must be integers of shape (rows,) or (rows, levels) and ids integers of shape (rows,), on "
            "every process",
            got=f"labels {_form_in_words(labels)} and ids {_form_in_words(ids)} on rank {rank()}",
        )
    kinds = list(zip(forms.label_levels.tolist(), forms.has_ids.tolist()))
    if len(set(kinds)) > 1:
        rule = "the processes' batches may differ only in their number of rows"
        raise InvalidValue(rule, got=f"(label levels, has ids) {kinds} in rank order")
    counts = forms.rows.tolist()
    if gather:
        labels, ids = _gather_labels_and_ids(labels, ids, counts)
    elif min(counts) < max(counts):
        rule = "with gather=False the loss is the mean of the processes' losses, which needs batches of equal size"
        got = f"{counts} rows in rank order"
        raise InvalidValue(rule, got=got, cure="keep gather=True, or drop the uneven batch")
    shapes, hashes = tuple(forms.input_shape.tolist()), tuple(forms.hash_of_batch.tolist())
    return GlobalRows(labels, ids, counts=counts, input_shapes=shapes, hashes=hashes)


def _form_in_words(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"{values.dtype} {tuple(values.shape)}"
    return short_repr(values)


def _check_not_empty(counts: Sequence[list[int]]) -> None:
    """Raise if a side has no rows in some process, because the others would wait for its embeddings.

    Args:
        counts: for each process, the number of rows of each side.
    """
    if min(map(min, counts)) > 0:
        return
    of_processes: list[Any] = [count for count, *_ in counts]
    least, rows = "row", "rows"
    if len(counts[0]) > 1:
        of_processes, least, rows = [*counts], "query and one candidate", "queries and candidates"
    rule = f"each process needs at least one {least}"
    got = f"{of_processes} {rows} in rank order"
    raise InvalidValue(rule, got=got, cure="use larger batches, or fewer processes")


class Dimensions:
    """Compares the dimension of the processes' embeddings, once for each shape of an input.

    The comparison waits for the forward pass. The processes have the same network, whose dimension depends on the shape
    of its input only. Therefore, embeddings of a shape that was compared in an earlier step are not compared again.
    """

    def __init__(self) -> None:
        self._compared: dict[tuple[int, int], int] = {}  # the dimension by side and input shape

    def compare(self, embeddings: Sequence[Tensor], sides: Sequence[GlobalRows]) -> None:
        """Raise on all processes if their embeddings differ in dimension.

        Args:
            embeddings: for each side of a batch, the embeddings of this process.
            sides: for each side, its rows in all processes.
        """
        if world_size() == 1 or all(map(self._is_compared, range(len(sides)), sides)):
            return
        local = to_device([[of_side.shape[1] for of_side in embeddings]], embeddings[0].device)
        dimensions = to_host(gather_rows(local, [1] * world_size())).tolist()
        if dimensions != dimensions[:1] * world_size():
            got = f"{dimensions} in rank order, with one number for each side of the batch"
            raise InvalidValue("the embeddings of all processes must have the same dimension", got=got)
        for number, rows in enumerate(sides):
            for shape in rows.input_shapes:
                self._compared[number, shape] = dimensions[0][number]

    def _is_compared(self, number: int, rows: GlobalRows) -> bool:
        """Whether the inputs of all processes have shapes for which the same dimension was found."""
        found = {self._compared.get((number, shape)) for shape in rows.input_shapes}
        return len(found) == 1 and None not in found


def _gather_labels_and_ids(labels: Tensor, ids: Tensor | None, counts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Labels and ids of all processes, in one collective."""
    columns = [labels.long()]
    if labels.ndim == 1:
        columns = [labels[:, None].long()]
    levels = columns[0].shape[1]
    if ids is not None:
        columns.append(ids[:, None].long())
    gathered = gather_rows(torch.cat(columns, 1), counts)
    all_labels = gathered[:, :levels]
    if labels.ndim == 1:
        all_labels = gathered[:, 0]
    if ids is None:
        return all_labels, None
    return all_labels, gathered[:, -1]


class _GatherEmbeddings(torch.autograd.Function):
    """Gathers rows of all processes; the backward pass returns the gradient of the sum of all processes' losses."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: Sequence[int], local_queries: bool, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.counts, ctx.local_queries = list(counts), local_queries
        return gather_rows(rows.to(dtype or rows.dtype), counts).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        counts, world = ctx.counts, len(ctx.counts)
        if world == 1 or not ctx.local_queries:
            return world * grad.split(counts)[rank()], None, None, None
        rows = counts[rank()]
        parts = grad.new_empty(world * rows, grad.shape[1])
        dist.all_to_all_single(parts, grad.contiguous(), [rows] * world, counts)
        return parts.view(world, rows, grad.shape[1]).sum(0), None, None, None


class ChunkSizeSearch:
    """Finds the largest chunk size of a run, and searches again for each batch that is larger than all before."""

    def __init__(self) -> None:
        self.chunk_size = 0
        self.rows = 0  # rows of the batch for which the chunk size was found

    def find(self, module: nn.Module, embed: Callable[[Tensor], Tensor], images: Tensor, keep_graphs: int) -> int:
        """The largest chunk size for a batch.

        Args:
            module: the module that is trained. Memory is reserved for Adam's two moments, which do not exist before
                the first step, and for the flat copy of the gradients that several processes sum.
            embed: maps images to embeddings.
            images: images of this process.
            keep_graphs: number of chunks whose graphs are kept.
        """
        if len(images) > self.rows:
            size = sum(parameter.numel() * parameter.element_size() for parameter in trainable_parameters(module))
            self.chunk_size = largest_chunk_size(embed, images, keep_graphs=keep_graphs, reserve=3 * size)
            self.rows = len(images)
            rank_zero_info(
                f"{type(module).__name__}: chunks of {self.chunk_size} of {self.rows} images fit into memory."
            )
        return self.chunk_size


@dataclass(eq=False)
class TrainingStep:
    """Gathers the embeddings of all processes, adds the memory, computes the loss and sums the gradients.

    `loss` maps the embeddings of this process to its contribution to the loss; the contributions of all processes add
    up to the loss. `finish` sums the contributions and the gradients.

    In a batch of two sides, the candidates are ranked for each query. Their ids are not compared with those of queries.

    Args:
        module: the `RetrievalModule` whose loss, memory and settings the step uses.
        rows: labels and ids of the images, or of the queries and of the candidates.
        fraction: fraction of the training steps that are done.
        dimensions: the comparison of dimensions of the run.
        check_rows: function that is called before the loss is computed, or None.
    """

    module: Any
    rows: Sequence[GlobalRows]
    fraction: float = 1.0
    dimensions: Dimensions = field(default_factory=Dimensions)
    check_rows: Callable[[], None] | None = None
    number: int = field(init=False)  # the global step
    # Whether each process computes the loss of its local queries only, instead of the loss of all queries.
    divides_queries: bool = field(init=False)
    embeddings: list[Tensor] = field(init=False)  # the gathered embeddings of each side
    terms: dict[str, Tensor] = field(init=False)  # this process's contribution to each logged term

    def __post_init__(self) -> None:
        self.number = self.module.global_step
        self.divides_queries = False
        if world_size() > 1 and self.module.gather is not False:
            self.divides_queries = self.module.loss.splits_by_query(self.fraction)

    def loss(self, *embeddings: Tensor) -> Tensor:
        """Compute this process's contribution to the loss from its embeddings.

        Args:
            embeddings: embeddings of the images, or of the queries and of the candidates.
        """
        self._check_counts(embeddings)
        self.dimensions.compare(embeddings, self.rows)
        self.embeddings = list(map(self._gather, embeddings, self.rows))
        if self.check_rows is not None:
            self.check_rows()
        device, loss = embeddings[0].device, self.module.loss
        # `step_random_state` gets rank 0, so that a loss draws the same random numbers on all processes.
        random_state = step_random_state(self.module.seed, self.number, 0)
        with self._explained_errors(), random_state, torch.autocast(device.type, enabled=False):
            values: dict[str, Tensor] = {}
            terms: dict[str, dict[str, Tensor]] = {}
            for name, ranked in self._ranked_batches().items():
                values[name] = loss.of_batch(ranked)
                _check_scalar(values[name])
                terms[name] = dict(loss.terms)
            value, named = self._combined(values, terms)
        scale = 1.0  # so weighted, the values of all processes add up to the loss
        if not self.divides_queries:
            scale = 1 / world_size()
        self.terms = {f"train/loss/{name}": scale * term for name, term in named.items()}
        return scale * value

    def _combined(
        self, values: Mapping[str, Tensor], terms: Mapping[str, dict[str, Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its terms by name, from the value and the terms of each of `_ranked_batches`."""
        value, named = values["batch"], terms["batch"]
        if "memory" in values:
            named = {**named, "batch": value.detach(), "memory": values["memory"].detach()}
            value = value + self.module.memory.weight * values["memory"]
        if "reverse" in values:
            named = {**_named("forward", value, named), **_named("reverse", values["reverse"], terms["reverse"])}
            value = (value + values["reverse"]) / 2
        return value, named

    def finish(self, part: Tensor, gradients: GradientSum) -> dict[str, Tensor]:
        """Sum gradients, loss and terms over the processes.

        Args:
            part: the return value of `loss`, detached from its graph.
            gradients: the sum of the gradients of the step.

        Returns:
            The loss, its terms, and the weights of terms that change during training, by the names under which they are
            logged, on the CPU.

        Raises:
            ValueError: if an embedding or the loss is not finite.
        """
        terms = {"train/loss": part, **self.terms}
        # 0 * x is NaN if x is not finite.
        zeros = torch.stack([(0 * of_side.detach()).sum() for of_side in self.embeddings])
        parts = torch.stack([term.to(part) for term in (*terms.values(), zeros.sum())])
        *totals, zero = gradients.finish(parts).unbind()
        if zero.isnan():
            self._check_finite()
            rule = "embeddings must be finite"
            raise InvalidValue(rule, got=f"NaN or inf on another rank at step {self.number}")
        if not math.isfinite(totals[0]):
            raise InvalidValue(f"the loss is {totals[0].item()} at step {self.number}")
        logged = dict(zip(terms, totals))
        for name, weight in self.module.loss.scheduled_weights(self.fraction).items():
            logged[f"train/weight/{name}"] = torch.tensor(weight)
        return logged

    def remember(self) -> None:
        """Store the batch in the memory."""
        if self.module.memory is not None:
            rows = self.rows[-1]
            self.module.memory.update(self.embeddings[-1], rows.labels, rows.ids)

    @property
    def images(self) -> int:
        """Number of rows of all processes and sides; without `gather`, processes must have batches of the same size."""
        rows = sum(map(len, self.rows))
        if self.module.gather is not False:
            return rows
        return rows * world_size()

    def _check_counts(self, embeddings: Sequence[Tensor]) -> None:
        """Raise unless this process has one label for each embedding of a side."""
        for of_side, rows in zip(embeddings, self.rows):
            labels = rows.counts[rank()]
            if labels != len(of_side):
                rule = "a batch must have one label for each image"
                raise InvalidValue(rule, got=f"{labels} labels for {len(of_side)} images")

    def _gather(self, embeddings: Tensor, rows: GlobalRows) -> Tensor:
        """The embeddings of all processes, of the images or of one side."""
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        module, dtype = self.module, GATHER_DTYPES[self.module.gather]
        return gather_embeddings(
            embeddings, rows, gather=module.gather is not False, local_queries=self.divides_queries, dtype=dtype
        )

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """If the loss raises because embeddings are not finite, raise an error with step, rank and ids instead.

        If the loss does not raise, `finish` checks the embeddings: a check before the loss would wait for the device.
        """
        try:
            yield
        except Exception:
            self._check_finite()
            raise

    def _check_finite(self) -> None:
        """Raise if an embedding of the batch is not finite."""
        for number, (embeddings, of_side) in enumerate(zip(self.embeddings, self.rows)):
            finite = torch.isfinite(embeddings).all(1)
            if bool(finite.all()):
                continue
            rows = (~finite).nonzero()[:, 0]
            which = f"rows {rows[:5].tolist()}"
            if of_side.ids is not None:
                which = f"ids {of_side.ids[rows][:5].tolist()}"
            if len(self.rows) > 1:
                which += f" of the {SIDES[number]}"
            cure = "a lower learning rate or gradient_clip_val often helps"
            if self.number == 0:
                cure = "look at the images and at the weights of the network, which no step has changed"
            raise InvalidValue(
                "embeddings must be finite",
                got=f"NaN or inf in {len(rows)} of {len(finite)} rows at step {self.number} (seen on rank "
                f"{rank()}), the first for {which}",
                cure=cure,
            ) from None

    def _ranked_batches(self) -> dict[str, RankedBatch]:
        """What the loss ranks, by name: the batch, any second term with the memory, any reverse direction."""
        queries, candidates, ref_emb = self.rows[0], self.rows[-1], None
        if len(self.rows) > 1:  # the ids of queries are no ids of candidates
            queries, candidates = replace(queries, ids=None), replace(candidates, ids=None)
            ref_emb = self.embeddings[1]
        batches = {"batch": self._ranked(0, queries, candidates, ref_emb)}
        if self.module.memory is not None:
            batches |= self._ranked_memory(queries)
        if self.module.sides.directions == "both":
            batches["reverse"] = self._ranked(1, candidates, queries, self.embeddings[0])
        return batches

    def _ranked_memory(self, queries: GlobalRows) -> dict[str, RankedBatch]:
        """The queries with the memory: as a second term, or in place of the batch; empty during the warm-up."""
        memory, rows = self.module.memory, self.rows[-1]
        # This also runs during the warm-up, so that an invalid batch raises before any state has changed.
        detach = memory.mode != "one_list"
        with_memory = memory.references(self.embeddings[-1], rows.labels, rows.ids, detach=detach)
        references = with_memory.lists.references
        if len(self.rows) > 1:
            references = Rows(references.labels)
        ranked = self._ranked(0, queries, references, with_memory.ref_emb)
        if not memory.started:
            return {}
        if memory.mode == "two_terms":
            return {"memory": ranked}
        return {"batch": ranked}

    def _ranked(self, side: int, queries: GlobalRows, references: Rows, ref_emb: Tensor | None) -> RankedBatch:
        """The batch in which the rows of a side are the queries of lists of these references."""
        local, lists = None, Lists(queries, references, self.module.relevance)
        if self.divides_queries:
            begin = sum(queries.counts[: rank()])
            local = QueryRange(begin, begin + queries.counts[rank()], sum_over_ranks)
        return RankedBatch(self.embeddings[side], lists, ref_emb, local, self.fraction)


def _named(direction: str, value: Tensor, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss of a direction and its terms, by the names under which they are logged."""
    named = {f"{direction}/{name}": term for name, term in terms.items()}
    return {direction: value.detach(), **named}


def _check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        raise InvalidValue("must return a scalar", argument="loss", got=repr(value), cure="set its reduction")
