"""Collectives of the library: rows gathered in rank order, gradients summed once a step."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor


def world_size() -> int:
    """Number of processes, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process' rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_rows(rows: Shaped[Tensor, "batch ..."]) -> Shaped[Tensor, "world_batch ..."]:
    """The rows of all ranks in rank order, as many from each as it has; the gradient flows to one's own.

    The backward pass takes this rank's slice and communicates nothing: where every rank takes the same loss of all
    rows, gradients of the parameters summed over ranks are those of one process with the whole batch.
    """
    if world_size() == 1:
        return rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device))
    lengths = [int(size) for size in sizes]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    parts = [part[:length] for part, length in zip(parts, lengths)]
    parts[rank()] = rows
    return torch.cat(parts)


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each `.grad` by its sum over ranks: one collective for each dtype, whatever the number of parameters.

    A parameter that has a gradient on one rank only counts as zero on the others; one that has none anywhere keeps
    none.
    """
    if world_size() == 1:
        return
    groups: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(parameter.dtype, []).append(parameter)
    for dtype, group in groups.items():
        has = torch.tensor([p.grad is not None for p in group], dtype=dtype, device=group[0].device)
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in group] + [has])
        dist.all_reduce(flat)
        *sums, has = flat.split([p.numel() for p in group] + [len(group)])
        for parameter, total, count in zip(group, sums, has.tolist()):
            if count:
                parameter.grad = total.view_as(parameter)
