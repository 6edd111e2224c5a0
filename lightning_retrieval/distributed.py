"""Collectives of the library: rows gathered in rank order, their gradients handed back, gradients summed once a step.

The loss of a step is a sum of shares, one from each process: either the loss of its own queries against all rows, or an
equal part of a loss that only knows whole batches. The gradient of a parameter is then the sum of what the processes
have, whatever the loss, and one all-reduce gives it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.checks import is_integer


def world_size() -> int:
    """Number of processes, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process' rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class GlobalBatch(NamedTuple):
    """A batch as the loss sees it: the rows of all processes in rank order, or one process' own."""

    embeddings: Float[Tensor, "batch dim"]
    labels: Int[Tensor, "batch ..."]
    ids: Int[Tensor, " batch"] | None
    counts: list[int]  # rows of each process


def gather_batch(
    who: str,
    embeddings: Float[Tensor, "share dim"],
    labels: Int[Tensor, "share ..."],
    ids: Int[Tensor, " share"] | None,
    *,
    gather: bool,
    own_queries: bool,
) -> GlobalBatch:
    """The batch of all processes, in three collectives; the gradient of its embeddings flows to one's own rows.

    Args:
        who: begins every message.
        embeddings: this process' rows; as many as it has.
        labels: of each row.
        ids: of each row, or None on all processes.
        gather: False keeps to this process' rows.
        own_queries: True where each process takes the loss of its own queries: a row's gradient then comes from all
            of them, in one exchange in the backward pass. False where each takes an equal part of one and the same
            loss: every process then has the gradient already, and nothing is communicated.

    Raises:
        ValueError: on all processes alike, if batches differ in more than their rows, or in these with `gather` False.
        TypeError: on all processes alike, if labels or ids are no integers on one of them.
    """
    counts = [len(embeddings)]
    if world_size() > 1:
        levels = labels.shape[1] if labels.ndim == 2 else 0
        fits = is_integer(labels) and labels.ndim in (1, 2)
        fits = fits and (ids is None or (is_integer(ids) and ids.shape == labels.shape[:1]))
        kind = [len(embeddings), embeddings.shape[1], levels, ids is not None, fits]
        shapes = gather_rows(torch.tensor([kind], device=embeddings.device), [1] * world_size()).tolist()
        if not min([shape.pop() for shape in shapes]):
            came = "None" if ids is None else f"{ids.dtype} {tuple(ids.shape)}"
            raise TypeError(
                f"{who}: labels must be integers of shape (rows,) or (rows, levels) and ids integers of shape (rows,), "
                f"on every process, got labels {labels.dtype} {tuple(labels.shape)} and ids {came} on rank {rank()}."
            )
        counts = [shape[0] for shape in shapes]
        kinds = [tuple(shape[1:]) for shape in shapes]
        if len(set(kinds)) > 1:
            raise ValueError(
                f"{who}: the processes' batches must be alike but for their rows, got (dimension, label levels, has "
                f"ids) {kinds} in rank order."
            )
        if not gather and len(set(counts)) > 1:
            raise ValueError(
                f"{who}: with gather=False the loss is the mean of the processes' losses, which needs batches of one "
                f"size, got {counts} rows in rank order; leave gather at True, or drop the uneven batch."
            )
    if world_size() == 1 or not gather:
        return GlobalBatch(embeddings, labels, ids, counts)
    columns = [labels.reshape(len(labels), -1), *([] if ids is None else [ids[:, None]])]
    integers = gather_rows(torch.cat([column.long() for column in columns], 1), counts)
    return GlobalBatch(
        _Gather.apply(embeddings, counts, own_queries),
        integers[:, 0] if labels.ndim == 1 else integers[:, : labels.shape[1]],
        None if ids is None else integers[:, -1],
        counts,
    )


def gather_rows(
    rows: Shaped[Tensor, "share ..."], counts: Sequence[int] | None = None, group: Any = None
) -> Shaped[Tensor, "batch ..."]:
    """The rows of all processes in rank order, as many from each as it has, without a gradient.

    Args:
        rows: of this process.
        counts: rows of each process; asked for in a collective of its own where not given.
        group: the processes, with `counts`; all where not given.
    """
    if world_size() == 1:
        return rows.detach()
    if counts is None:
        counts = gather_rows(torch.tensor([len(rows)], device=rows.device), [1] * world_size()).tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


class _Gather(torch.autograd.Function):
    """Rows of all processes; backward gives one's own the gradient of the sum of all processes' shares."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], own_queries: bool) -> Tensor:
        ctx.counts, ctx.own_queries = list(counts), own_queries
        return gather_rows(rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        counts, mine = ctx.counts, ctx.counts[rank()]
        if not ctx.own_queries:
            return len(counts) * grad.split(counts)[rank()], None, None
        parts = grad.new_empty(len(counts) * mine, grad.shape[1])
        dist.all_to_all_single(parts, grad.contiguous(), [mine] * len(counts), counts)
        return parts.view(len(counts), mine, grad.shape[1]).sum(0), None, None


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of the ranks' tensors, on every rank."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def sum_gradients(parameters: Iterable[torch.nn.Parameter], values: Float[Tensor, " value"]) -> Float[Tensor, " value"]:
    """Replace each `.grad` by its sum over ranks and return the sum of `values`: one all-reduce for each dtype.

    A parameter that has a gradient on one rank only counts as zero on the others; one that has none anywhere keeps
    none.
    """
    if world_size() == 1:
        return values
    groups: dict[torch.dtype, list[torch.nn.Parameter]] = {values.dtype: []}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(parameter.dtype, []).append(parameter)
    for dtype, group in groups.items():
        extra = values if dtype == values.dtype else values[:0].to(dtype)
        has = torch.tensor([p.grad is not None for p in group], dtype=dtype, device=values.device)
        flat = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in group] + [has, extra]
        )
        dist.all_reduce(flat)
        *sums, has, extra = flat.split([p.numel() for p in group] + [len(group), len(extra)])
        for parameter, total, count in zip(group, sums, has.tolist()):
            if count:
                parameter.grad = total.view_as(parameter)
        values = extra if dtype == values.dtype else values
    return values


def step_traffic(
    batch: int, dim: int, parameters: int, world: int, *, gather: bool = True, own_queries: bool = True, bytes_: int = 4
) -> dict[str, float]:
    """Bytes that each process sends in a training step, with collectives that send nothing twice.

    Args:
        batch: B, rows of the global batch.
        dim: D of the embeddings.
        parameters: numbers of the gradient that is summed.
        world: W, the processes.
        gather: whether lists are those of the global batch.
        own_queries: whether each process takes the loss of its own queries, and gradients of embeddings are exchanged.
        bytes_: of one number.

    Returns:
        Of the gathering, (W - 1) / W x B (D x bytes + 16), the label and the id being 8 bytes each; of the exchange of
        gradients, (W - 1) / W x B D x bytes; of the all-reduce, 2 (W - 1) / W x parameters x bytes.

    Example:
        >>> from lightning_retrieval.distributed import step_traffic
        >>> step_traffic(batch=384, dim=128, parameters=600_000, world=2)
        {'gather': 101376.0, 'exchange': 98304.0, 'all-reduce': 2400000.0}
    """
    others = (world - 1) / world
    return {
        "gather": others * batch * (dim * bytes_ + 16) * gather,
        "exchange": others * batch * dim * bytes_ * (gather and own_queries),
        "all-reduce": 2 * others * parameters * bytes_,
    }
