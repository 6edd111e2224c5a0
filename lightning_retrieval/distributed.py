"""Collectives that all packages share: rows gathered in rank order, tensors summed, gradients summed once a step.

The loss of a step is a sum with one term for each process: either the loss of its own queries against all rows, or an
equal fraction of a loss that is known for whole batches only. The gradient of a parameter is then the sum of the
processes' gradients, whatever the loss, and one all-reduce computes it.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """The rank of this process, 0 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0


def gather_rows(
    rows: Shaped[Tensor, "shard ..."], counts: Sequence[int] | None = None, group: Any = None
) -> Shaped[Tensor, "batch ..."]:
    """Gather the rows of all processes in rank order, without a gradient; their numbers of rows may differ.

    Args:
        rows: rows of this process.
        counts: number of rows of each process; if None, these numbers are gathered first. Required with `group`.
        group: process group; None for all processes.
    """
    if world_size() == 1:
        return rows.detach()
    if counts is None:
        own_count = torch.tensor([len(rows)], device=rows.device)
        counts = gather_rows(own_count, [1] * world_size()).tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of all processes' tensors, on every process."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def sum_gradients(parameters: Iterable[torch.nn.Parameter], values: Float[Tensor, " value"]) -> Float[Tensor, " value"]:
    """Replace each `.grad` by its sum over ranks and return the sum of `values`, in one all-reduce for each dtype.

    A parameter without a gradient on some ranks counts as zero there; one without a gradient on all ranks keeps none.

    Args:
        parameters: those that do not require a gradient are ignored.
        values: summed in the same all-reduce as the gradients of their dtype.
    """
    if world_size() == 1:
        return values
    groups: dict[torch.dtype, list[torch.nn.Parameter]] = {values.dtype: []}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(parameter.dtype, []).append(parameter)
    total = values
    for dtype, group in groups.items():
        if dtype == values.dtype:
            total = _sum_group(group, values)
        else:
            _sum_group(group, values[:0].to(dtype))
    return total


def _sum_group(parameters: list[torch.nn.Parameter], values: Tensor) -> Tensor:
    """Sum the gradients of parameters of the dtype of `values`, together with `values`, in one all-reduce."""
    sizes = [parameter.numel() for parameter in parameters]
    gradients, has_gradient = [], []
    for parameter in parameters:
        has_gradient.append(parameter.grad is not None)
        if parameter.grad is None:
            gradients.append(torch.zeros_like(parameter).flatten())
        else:
            gradients.append(parameter.grad.flatten())
    on_this_rank = torch.tensor(has_gradient, dtype=values.dtype, device=values.device)
    flat = torch.cat([*gradients, on_this_rank, values])
    dist.all_reduce(flat)
    sums: list[Tensor] = list(flat.split([*sizes, len(parameters), len(values)]))
    total, ranks_with_gradient = sums.pop(), sums.pop()
    for parameter, gradient, ranks in zip(parameters, sums, ranks_with_gradient.tolist()):
        if ranks > 0:
            parameter.grad = gradient.view_as(parameter)
    return total


def fork_may_deadlock(major: int, minor: int, micro: int) -> bool:
    """Whether a forked process of this Python waits forever if another thread is just registering with Python.

    That is issue 112275 of CPython. The threads of the gloo backend register after each collective operation, so a data
    loader that starts its workers soon after one may never get its first batch.
    """
    repaired = {(3, 10): 15, (3, 11): 10}
    return micro < repaired.get((major, minor), 0)


def pause_before_fork() -> None:
    """Let the threads of the process group finish what they do in Python, if there are several processes."""
    if world_size() > 1:
        time.sleep(0.05)


if fork_may_deadlock(*sys.version_info[:3]) and hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pause_before_fork)
