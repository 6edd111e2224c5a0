"""The batch of all processes together, in which the loss ranks: three collectives, and one in the backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.checks import is_integer
from lightning_retrieval.distributed import gather_rows, rank, world_size


class GlobalBatch(NamedTuple):
    """A batch as the loss sees it: the rows of all processes in rank order, or those of one process."""

    embeddings: Float[Tensor, "batch dim"]
    labels: Int[Tensor, "batch ..."]
    ids: Int[Tensor, " batch"] | None
    counts: list[int]  # rows of each process


def gather_batch(
    owner: str,
    embeddings: Float[Tensor, "shard dim"],
    labels: Int[Tensor, "shard ..."],
    ids: Int[Tensor, " shard"] | None,
    *,
    gather: bool,
    own_queries: bool,
) -> GlobalBatch:
    """The batch of all processes; the gradient of its embeddings flows back to the rows of each process.

    Args:
        owner: prefix of error messages.
        embeddings: this process's rows; processes may have unequal numbers of rows.
        labels: of each row.
        ids: of each row, or None on all processes.
        gather: False returns the rows of this process only.
        own_queries: True if each process computes the loss of its own queries: the gradient of a row then comes from
            all processes, in one exchange in the backward pass. False if each computes an equal fraction of the same
            loss: every process then has the gradient already, and nothing is communicated.

    Raises:
        ValueError: on all processes, if batches differ in anything but their number of rows or, with `gather=False`, in
            their number of rows.
        TypeError: on all processes, if labels or ids are not integers on one of them.
    """
    if world_size() == 1:
        return GlobalBatch(embeddings, labels, ids, [len(embeddings)])
    counts = _agreed_counts(owner, embeddings, labels, ids)
    if not gather:
        if len(set(counts)) > 1:
            raise ValueError(
                f"{owner}: with gather=False the loss is the mean of the processes' losses, which needs batches of "
                f"equal size, got {counts} rows in rank order; keep gather=True, or drop the uneven batch."
            )
        return GlobalBatch(embeddings, labels, ids, counts)
    all_labels, all_ids = _gather_labels_and_ids(labels, ids, counts)
    all_embeddings = _GatherEmbeddings.apply(embeddings, counts, own_queries)
    return GlobalBatch(all_embeddings, all_labels, all_ids, counts)


class _Form(NamedTuple):
    """What the processes exchange about their batches before they gather them."""

    rows: int
    dimension: int
    label_levels: int  # 0 for labels of shape (rows,)
    has_ids: int
    are_integers: int


def _form_of(embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> _Form:
    label_levels = 0
    if labels.ndim == 2:
        label_levels = labels.shape[1]
    are_integers = is_integer(labels) and labels.ndim in (1, 2)
    if ids is not None:
        are_integers = are_integers and is_integer(ids) and ids.shape == labels.shape[:1]
    return _Form(len(embeddings), embeddings.shape[1], label_levels, ids is not None, are_integers)


def _agreed_counts(owner: str, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> list[int]:
    """Rows of each process, after a check that their batches differ in nothing else."""
    own_form = torch.tensor([_form_of(embeddings, labels, ids)], device=embeddings.device)
    forms = [_Form(*form) for form in gather_rows(own_form, [1] * world_size()).tolist()]
    if not all(form.are_integers for form in forms):
        came = "None"
        if ids is not None:
            came = f"{ids.dtype} {tuple(ids.shape)}"
        raise TypeError(
            f"{owner}: labels must be integers of shape (rows,) or (rows, levels) and ids integers of shape (rows,), "
            f"on every process, got labels {labels.dtype} {tuple(labels.shape)} and ids {came} on rank {rank()}."
        )
    kinds = [(form.dimension, form.label_levels, form.has_ids) for form in forms]
    if len(set(kinds)) > 1:
        raise ValueError(
            f"{owner}: the processes' batches may differ only in their number of rows, got (dimension, label levels, "
            f"has ids) {kinds} in rank order."
        )
    return [form.rows for form in forms]


def _gather_labels_and_ids(labels: Tensor, ids: Tensor | None, counts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Labels and ids of all processes, in one collective."""
    columns = [labels.reshape(len(labels), -1).long()]
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
    """The rows of all processes; the backward pass returns the gradient of the sum of all processes' losses."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], own_queries: bool) -> Tensor:
        ctx.counts, ctx.own_queries = list(counts), own_queries
        return gather_rows(rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        counts, world = ctx.counts, len(ctx.counts)
        if not ctx.own_queries:
            return world * grad.split(counts)[rank()], None, None
        own_rows = counts[rank()]
        parts = grad.new_empty(world * own_rows, grad.shape[1])
        dist.all_to_all_single(parts, grad.contiguous(), [own_rows] * world, counts)
        return parts.view(world, own_rows, grad.shape[1]).sum(0), None, None
