"""Synchronisation of host and device, and collective operations: gather, exchange and sum rows over processes."""

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether this device computes asynchronously: the host waits only when it reads a value."""
    return device.type != "cpu"


def size_for(device: torch.device, *, cpu: int, accelerator: int) -> int:
    """How much a device computes at a time: little enough for a CPU's caches, or enough to be worth a kernel launch.

    The size depends only on the type of the device, so that a run can be reproduced on another machine.
    """
    if is_accelerator(device):
        return accelerator
    return cpu


def to_host(values: Tensor) -> Tensor:
    """A copy on the CPU, without a graph.

    The host waits until the device has computed the values, and meanwhile queues no other work. So a training step
    should call this as rarely as possible, with all required values in one tensor.
    """
    return values.detach().cpu()


def to_host_later(values: Tensor) -> Tensor:
    """A copy on the CPU that is complete when the host has next waited for the device, such as for `to_host`."""
    return values.detach().to("cpu", non_blocking=True)


def kept_rows(values: Tensor) -> Tensor:
    """A copy without a graph, for rows that are kept after the batch.

    The original may be overwritten by the next batch: by a loop that reuses its memory, or by a network that does so,
    as CUDA graphs do (`torch.compile(mode="reduce-overhead")`). And each original that is in memory shared with a
    worker of a data loader keeps a file open, so that a process that keeps some of each batch soon has too many.
    """
    return values.detach().clone()


def kept_integers(values: Tensor) -> Tensor:
    """A few integers for each row of a batch, as int64; always a copy, see `kept_rows`."""
    return values.detach().to(torch.int64, copy=True)


def to_device(numbers: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """A tensor of numbers of the host on a device, for which the host does not wait."""
    values = torch.as_tensor(numbers)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def world_size(group: Any = None) -> int:
    """Number of processes in a group (None: the default group); 1 if there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    return 1


def rank() -> int:
    """The rank of this process; 0 if there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0


@atexit.register
def close_gloo() -> None:
    """Destroy the process group of Gloo before the interpreter ends, as Lightning does with NCCL's.

    Otherwise a thread of Gloo may free a tensor when there is no interpreter any more, which aborts the process after
    all of its work is done (PyTorch issue 190489). After an error the group is left alone: to destroy it would be to
    wait for operations that the other processes may never join.
    """
    ended_by_error = hasattr(sys, "last_type")
    if ended_by_error or not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_backend() == dist.Backend.GLOO:
        dist.destroy_process_group()


def gather_rows(
    rows: Shaped[Tensor, "shard ..."], counts: Sequence[int] | None = None, group: Any = None
) -> Shaped[Tensor, "batch ..."]:
    """Gather the rows of all processes in rank order, without a gradient. Processes may have different numbers of rows.

    Args:
        rows: rows of this process.
        counts: number of rows of each process; if None, these numbers are gathered first. Required with `group`.
        group: process group; None for all processes.
    """
    if world_size() == 1:
        return rows.detach()
    if counts is None:
        local_count = torch.tensor([len(rows)], device=rows.device)
        counts = gather_rows(local_count, [1] * world_size()).tolist()
    return torch.cat(gather_parts(rows, counts, group))


def gather_into(
    gathered: Shaped[Tensor, "batch ..."],
    rows: Shaped[Tensor, "shard ..."],
    *,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather equally many rows of all processes into one tensor, by the name that this version of PyTorch has for it.

    Args:
        gathered: a contiguous tensor for the rows of all processes.
        rows: contiguous rows of this process.
        group: process group; None for all processes.
        async_op: whether to return at once, with an object to wait for.
    """
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single(gathered, rows, group=group, async_op=async_op)
    return dist.all_gather_into_tensor(gathered, rows, group=group, async_op=async_op)


def gather_parts(
    rows: Shaped[Tensor, "shard ..."], counts: Sequence[int], group: Any = None
) -> list[Shaped[Tensor, "_ ..."]]:
    """Gather the rows of all processes, as one tensor for each process, without a gradient.

    Args:
        rows: rows of this process.
        counts: number of rows of each process.
        group: process group; None for all processes.
    """
    padded = rows.detach().contiguous()
    missing = max(counts) - len(rows)
    if missing > 0:
        padded = torch.cat([padded, rows.new_zeros(missing, *rows.shape[1:])])
    gathered = padded.new_empty(len(counts) * len(padded), *padded.shape[1:])
    gather_into(gathered, padded, group=group)
    parts = gathered.unflatten(0, (len(counts), len(padded)))
    return [part[:count] for part, count in zip(parts, counts)]


@dataclass(frozen=True)
class Shard:
    """The shard of this process in some work that several processes share.

    Args:
        index: index of this process, from 0.
        count: number of processes that share the work.
        group: process group of these processes; None for all processes.
        device: device of tensors that are sent to other processes; None if there is only one process.
    """

    index: int = 0
    count: int = 1
    group: Any = None
    device: torch.device | None = None

    def add_up(self, values: Tensor) -> None:
        """Replace values in place by their sum over all processes that share the work. A collective operation."""
        if self.count > 1:
            dist.all_reduce(values, group=self.group)


UNSHARDED = Shard()


def exchange_rows(
    rows: Shaped[Tensor, "sent ..."], sent: Sequence[int], received: Sequence[int], shard: Shard
) -> Shaped[Tensor, "received ..."]:
    """Send rows to each process, and receive rows from each, on the device of `rows`. A collective operation.

    Args:
        rows: the rows to send, in the order of the receiving processes.
        sent: number of rows to send to each process.
        received: number of rows to receive from each process.
        shard: the shard of this process.
    """
    result = torch.empty(sum(received), *rows.shape[1:], dtype=rows.dtype, device=shard.device)
    dist.all_to_all_single(result, rows.to(shard.device), list(received), list(sent), group=shard.group)
    return result.to(rows.device)


def fetch_rows(
    rows: Shaped[Tensor, "local ..."], process: Int[Tensor, " wanted"], index: Int[Tensor, " wanted"], shard: Shard
) -> Shaped[Tensor, "wanted ..."]:
    """Fetch rows from any processes, on the device of `rows`. A collective operation.

    Each process may fetch different rows, and any number of them.

    Args:
        rows: rows of this process, which other processes may fetch.
        process: for each wanted row, the process that holds it.
        index: for each wanted row, its index among the rows of that process.
        shard: the shard of this process.
    """
    by_process = process.argsort(stable=True)
    wanted = torch.bincount(process, minlength=shard.count)
    received = wanted.tolist()
    sent = exchange_rows(wanted, [1] * shard.count, [1] * shard.count, shard).tolist()
    index_of_sent = exchange_rows(index[by_process], received, sent, shard)
    found = exchange_rows(rows[index_of_sent.to(rows.device)], sent, received, shard)
    result = torch.empty_like(found)
    result[by_process.to(rows.device)] = found
    return result


def gather_objects(value: Any) -> list[Any]:
    """Gather a picklable value of each process, in rank order; for small data, such as file names."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def together(work: Callable[[], Any]) -> list[Any]:
    """Call a function on each process, and return all results in rank order; if it fails on one process, all raise.

    Args:
        work: function that is called on each process before the processes wait for each other.

    Raises:
        Exception: on all processes, the exception of the first process on which the function failed.
        RuntimeError: with the type and message of that exception, if pickle cannot copy the exception faithfully.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as found:  # of any type, because the other processes wait for this one
        error = as_sent(found)
    results = gather_objects((value, error))
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]


def as_sent(error: Exception) -> Exception:
    """The exception, or a RuntimeError with its type and message if pickle fails or changes the message."""
    if world_size() == 1:
        return error
    try:
        copied = pickle.loads(pickle.dumps(error))
        if str(copied) == str(error):
            return error
    except Exception:  # of any type: the exception's own methods may fail
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes, on every process."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def pause_before_fork() -> None:
    """If there are several processes, give the threads of the process group time to register with Python."""
    if world_size() > 1:
        time.sleep(0.05)


# A child may wait forever if one of these versions of Python forks while another thread registers with Python (issue
# 112275 of CPython). The threads of the gloo backend register after each collective operation. So a data loader that
# starts its workers soon after a collective operation may never get its first batch.
FORK_MAY_DEADLOCK = sys.version_info < (3, 11, 10)
if FORK_MAY_DEADLOCK and hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pause_before_fork)
