"""The batch of all processes in a training step: its labels, its embeddings, its ranked lists and their loss.

The loss ranks the batch of all processes together. Labels and ids are gathered before the forward pass, embeddings
after it. If each process computes the loss of its own queries, the backward pass needs one more collective.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.checks import as_int64
from lightning_retrieval.distributed import gather_rows, rank, sum_over_ranks, to_device, to_host, world_size
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses.batch_loss import RankedBatch
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.random_state import step_random_state
from lightning_retrieval.ranking.lists import Lists, QueryRange
from lightning_retrieval.ranking.rows import Rows

# Types to which embeddings are rounded before they are gathered, by the argument `gather` of `RetrievalModule`.
GatherDtype = Literal["bfloat16", "float16"]
GATHER_DTYPES: dict[bool | GatherDtype, torch.dtype | None] = {
    True: None,
    False: None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalRows(Rows):
    """Labels and ids of the rows that the loss ranks: those of all processes in rank order, or of this process only.

    Args:
        labels: the labels or, with a rule of relevance, the columns that the rule reads.
        ids: the ids, or None.
        counts: number of rows of each process.
    """

    counts: Sequence[int]


class GlobalBatch:
    """The batch of a training step, which may have two sides: then the candidates are ranked for each query.

    `loss` maps the embeddings of this process to its contribution to the loss. `parts` are this process's shares of
    what is logged, and `logged` makes the logged values of their sums over the processes.

    Args:
        module: the `RetrievalModule` whose loss, memory and settings the step uses.
        rows: labels and ids of the images, or of the queries and of the candidates.
        fraction: fraction of the training steps that are done.
    """

    def __init__(self, module: Any, rows: Sequence[GlobalRows], fraction: float = 1.0) -> None:
        self.module, self.rows, self.fraction = module, rows, fraction
        self.step = module.global_step
        self.images = sum(sum(of_side.counts) for of_side in rows)  # of all processes and sides
        # Whether each process computes the loss of its local queries only, instead of the loss of all queries.
        is_shared = world_size() > 1 and module.gather is not False
        self.divides_queries = is_shared and module.loss.splits_by_query(fraction)
        self.embeddings: list[Tensor] = []  # the gathered embeddings of each side
        self.terms: dict[str, Tensor] = {}  # this process's contribution to each logged term

    def loss(self, *embeddings: Tensor) -> Tensor:
        """This process's contribution to the loss; the contributions of all processes add up to the loss.

        Args:
            embeddings: embeddings of the images, or of the queries and of the candidates, of this process.

        Raises:
            ValueError: if there is not one label for each embedding, or if the loss raises because an embedding is not
                finite. If it does not raise, `logged` does: a check before the loss would wait for the device.
        """
        self.embeddings = list(map(self._gathered, embeddings, self.rows))
        # `step_random_state` gets rank 0, so that a loss draws the same random numbers on all processes.
        random_state = step_random_state(self.module.seed, self.step, 0)
        values: dict[str, Tensor] = {}
        terms: dict[str, dict[str, Tensor]] = {}
        try:
            with random_state, torch.autocast(embeddings[0].device.type, enabled=False):
                for name, ranked in self._ranked_batches().items():
                    values[name] = self.module.loss.of_batch(ranked)
                    terms[name] = dict(self.module.loss.terms)
        except Exception:
            self._check_finite()
            raise
        value, named = self._combined(values, terms)
        scale = 1.0  # the values of all processes, times this, add up to the loss
        if not self.divides_queries:
            scale = 1 / world_size()
        self.terms = {f"train/loss/{name}": scale * term for name, term in named.items()}
        return scale * value

    def _gathered(self, embeddings: Tensor, rows: GlobalRows) -> Tensor:
        """The embeddings of all processes, of the images or of one side."""
        if len(embeddings) != rows.counts[rank()]:
            rule = "a batch must have one label for each image"
            raise InvalidValue(rule, got=f"{rows.counts[rank()]} labels for {len(embeddings)} images")
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        if self.module.gather is False:
            return embeddings
        dtype = GATHER_DTYPES[self.module.gather]
        return gather_embeddings(embeddings, rows.counts, local_queries=self.divides_queries, dtype=dtype)

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
        stored = memory.with_stored(self.embeddings[-1], rows.labels, rows.ids, detach=detach)
        references: Rows = stored
        if len(self.rows) > 1:  # without ids, as in `_ranked_batches`
            references = Rows(stored.labels)
        ranked = self._ranked(0, queries, references, stored.embeddings)
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

    def parts(self, part: Tensor) -> Float[Tensor, " part"]:
        """This process's contributions to the loss and its terms; last a 0, which is NaN if an embedding is not finite.

        Args:
            part: the return value of `loss`, without its graph.
        """
        zeros = torch.stack([(0 * of_side.detach()).sum() for of_side in self.embeddings])
        return torch.stack([value.to(part) for value in (part, *self.terms.values(), zeros.sum())])

    def logged(self, totals: Float[Tensor, " part"]) -> dict[str, Tensor]:
        """The loss, its terms, and the weights of terms that change during training, by their logged names.

        Args:
            totals: `parts`, summed over the processes, on the CPU.

        Raises:
            ValueError: if an embedding or the loss is not finite.
        """
        *values, zero = totals.unbind()
        if zero.isnan():
            self._check_finite()
            raise InvalidValue("embeddings must be finite", got=f"NaN or inf on another rank at step {self.step}")
        if not math.isfinite(values[0]):
            raise InvalidValue(f"the loss is {values[0].item()} at step {self.step}")
        logged = dict(zip(("train/loss", *self.terms), values, strict=True))
        for name, weight in self.module.loss.scheduled_weights(self.fraction).items():
            logged[f"train/weight/{name}"] = torch.tensor(weight)
        return logged

    def _check_finite(self) -> None:
        """Raise if an embedding of the batch is not finite."""
        for side, embeddings, of_side in zip(SIDES, self.embeddings, self.rows):
            finite = torch.isfinite(embeddings).all(1)
            if bool(finite.all()):
                continue
            rows = (~finite).nonzero()[:, 0]
            which = f"rows {rows[:5].tolist()}"
            if of_side.ids is not None:
                which = f"ids {of_side.ids[rows][:5].tolist()}"
            if len(self.rows) > 1:
                which += f" of the {side}"
            cure = "a lower learning rate or gradient_clip_val often helps"
            if self.step == 0:
                cure = "look at the images and at the weights of the network, which no step has changed"
            raise InvalidValue(
                "embeddings must be finite",
                got=f"NaN or inf in {len(rows)} of {len(finite)} rows at step {self.step} (seen on rank {rank()}), "
                f"the first for {which}",
                cure=cure,
            ) from None

    def remember(self) -> None:
        """Store the batch in the memory."""
        if self.module.memory is not None:
            rows = self.rows[-1]
            self.module.memory.update(self.embeddings[-1], rows.labels, rows.ids)


def gather_labels(sides: Sequence[Rows], *, gather: bool = True, equal: bool = False) -> list[GlobalRows]:
    """Gather the labels and ids of all processes, which may have different numbers of rows, for each side of a batch.

    Args:
        sides: the rows of this process.
        gather: False returns the rows of this process only, and the processes must have equally many.
        equal: whether the processes must have equally many rows, because they embed each chunk of a sharded network
            together.

    Raises:
        ValueError: on all processes, if one of them has no rows, or if they must have equally many and have not.
    """
    sides = [Rows(as_int64("labels", rows.labels), as_int64("ids", rows.ids)) for rows in sides]
    counts = [list(map(len, sides))]  # number of rows of each process and side
    if world_size() > 1:
        local = to_device(counts, sides[0].labels.device)
        counts = to_host(gather_rows(local, [1] * world_size())).tolist()
    if min(map(min, counts)) == 0:
        rule = "each process needs at least one row of each side of a batch"
        got = f"{counts} rows in rank order"
        raise InvalidValue(rule, got=got, cure="use larger batches, or fewer processes")
    if (equal or not gather) and counts != counts[:1] * world_size():
        rule = "with a sharded network or gather=False, all processes must have equally many rows"
        got = f"{counts} rows in rank order"
        raise InvalidValue(rule, got=got, cure="drop the uneven batch, or use batches that their number divides")
    gathered = []
    for rows, of_side in zip(sides, zip(*counts)):
        if gather and world_size() > 1:
            rows = _gathered_rows(rows, of_side)
        gathered.append(GlobalRows(labels=rows.labels, ids=rows.ids, counts=of_side))
    return gathered


def _gathered_rows(rows: Rows, counts: Sequence[int]) -> Rows:
    """Labels and ids of all processes, in one collective."""
    labels = rows.labels
    columns = [labels[:, None] if labels.ndim == 1 else labels]
    if rows.ids is not None:
        columns.append(rows.ids[:, None])
    gathered = gather_rows(torch.cat(columns, 1), counts)
    labels = gathered[:, 0] if labels.ndim == 1 else gathered[:, : labels.shape[1]]
    return Rows(labels, None if rows.ids is None else gathered[:, -1])


def gather_embeddings(
    embeddings: Float[Tensor, "shard dim"],
    counts: Sequence[int],
    *,
    local_queries: bool,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "batch dim"]:
    """Gather the embeddings of all processes. Their gradient flows back to the rows of each process.

    Args:
        embeddings: embeddings of this process, of the same dimension on all processes.
        counts: number of rows of each process.
        local_queries: True if each process computes the loss of its shard of the queries. The gradient of a row is then
            summed over all processes, in one collective in the backward pass. False if each process computes an equal
            fraction of the same loss. Every process then already has the gradient, and nothing is communicated.
        dtype: type to which all rows are rounded, also if there is only one process. The gradient is not rounded. None
            does not round.
    """
    if world_size() == 1 and dtype is None:
        return embeddings
    gathered: Tensor = _GatherEmbeddings.apply(embeddings, counts, local_queries, dtype)
    return gathered


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


def _named(direction: str, value: Tensor, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss of a direction and its terms, by the names under which they are logged."""
    named = {f"{direction}/{name}": term for name, term in terms.items()}
    return {direction: value.detach(), **named}
