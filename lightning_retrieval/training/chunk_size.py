"""Finds, by trial, the largest chunk that fits into the memory of a device."""

import gc
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_retrieval.checks import check_integer, check_tensor, short_repr
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.models.sides import SIDES, Side
from lightning_retrieval.random_state import RandomState
from lightning_retrieval.training.chunked import RunningStatistics, check_inputs, visit_modules

ChunkSize = int | Literal["auto"] | None

# cuBLAS and cuDNN allocate memory without torch's allocator, and report a failure by a status.
_ALLOCATION_FAILED = re.compile(
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED|CUDA error: out of memory"
)
# cuDNN reports this error if every algorithm for a convolution needs too large a workspace.
_NO_ALGORITHM = re.compile(r"unable to find an engine|unable to find a valid cuDNN algorithm", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation of torch, cuBLAS, cuDNN, cuSOLVER or cuSPARSE on a device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _ALLOCATION_FAILED.search(str(error)) is not None


def may_be_out_of_memory(error: BaseException) -> bool:
    """Whether an error may vanish with less memory: a failed allocation, or cuDNN found no convolution algorithm."""
    if is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and _NO_ALGORITHM.search(str(error)) is not None


def largest_chunk_size(
    embed: Callable[[Tensor], Tensor], inputs: Tensor, *, keep_graphs: int = 1, reserve: int = 0
) -> int:
    """The largest `chunk_size` for `chunked_backward` that fits into the memory of the device.

    The search first tries the whole batch as one chunk, then 2 chunks of equal size (rounded up), 4 chunks and so on,
    until the chunks fit. Between the last two numbers of chunks, it then searches for the smallest number that fits.

    A trial embeds and back-propagates the chunks whose graphs are kept. It does so twice, because gradients already
    exist when the second chunk of a step is embedded. Afterwards, the gradients, the random state and the running
    statistics of normalisation layers are restored, and the autocast cache is cleared. Call this function after
    `zero_grad`: otherwise the existing gradients take up memory in addition to the gradients of the trial.

    Each process searches for itself, so the processes may find different sizes. Therefore no layer of `embed` may wait
    for other processes, as SyncBatchNorm does.

    Failed allocations of cuBLAS and cuDNN are handled like those of torch. Any other error is raised.

    Args:
        embed: maps inputs (n, ...) to embeddings (n, D).
        inputs: the whole batch, rows first, on the device whose memory is tested. On a CPU all rows "fit".
        keep_graphs: number of chunks whose graphs are kept, >= 1, as for `chunked_backward`.
        reserve: bytes of device memory to keep free for later use, such as the optimizer's state and the loss; >= 0.

    Raises:
        ValueError: if `inputs` is empty or part of a graph, `keep_graphs` < 1 or `reserve` < 0.
        TypeError: if `embed` is not callable, `inputs` is not a tensor, or `keep_graphs` or `reserve` is not an
            integer.
        torch.OutOfMemoryError: if not even chunks of one row fit.

    Example:
        >>> import torch
        >>> from lightning_retrieval.training.chunk_size import largest_chunk_size
        >>> largest_chunk_size(torch.nn.Linear(3, 2), torch.randn(5, 3))
        5
    """
    with owned_by("largest_chunk_size"):
        check_inputs(inputs)
    keep_graphs = check_integer("keep_graphs", keep_graphs, least=1, owner="largest_chunk_size")
    reserve = check_integer("reserve", reserve, least=0, owner="largest_chunk_size")
    rows = len(inputs)
    too_few, chunks = 0, 1  # numbers of chunks
    while not _fits(embed, inputs.split(math.ceil(rows / chunks))[:keep_graphs], reserve):
        _free_memory(inputs.device)
        too_few, chunks = chunks, 2 * chunks
    size = math.ceil(rows / chunks)
    while chunks - too_few > 1:
        between = (too_few + chunks) // 2
        larger = math.ceil(rows / between)
        if larger == size or _fits(embed, inputs.split(larger)[:keep_graphs], reserve):
            chunks, size = between, larger
        else:
            _free_memory(inputs.device)
            too_few = between
    return size


def _fits(embed: Callable[[Tensor], Tensor], chunks: tuple[Tensor, ...], reserve: int) -> bool:
    """Whether the graphs of some chunks fit into memory; raise if not even chunks of one input each fit."""
    try:
        _try_chunks(embed, chunks, reserve)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        if not may_be_out_of_memory(error):
            raise
        inputs = chunks[0]
        if len(inputs) > 1:
            return False
        if not is_out_of_memory(error):
            raise
        number = "one input"
        if len(chunks) > 1:
            number = f"the graphs of {len(chunks)} chunks of one input"
        raise torch.OutOfMemoryError(
            f"largest_chunk_size: not even {number} of shape {tuple(inputs.shape[1:])} fits the memory of "
            f"{inputs.device} in addition to the {reserve} reserved bytes; use smaller inputs, a smaller network "
            "or half precision."
        ) from error
    finally:
        torch.clear_autocast_cache()
    return True


def _free_memory(device: torch.device) -> None:
    """Free the memory of a failed trial.

    The traceback of the trial's exception references the tensors, so the exception must be deleted first. After a
    failed backward pass, autograd's thread for the device holds the exception until just before its next backward pass.
    So this function runs an empty backward pass.
    """
    if device.type != "cpu":
        with torch.enable_grad():
            nothing = torch.empty(0, device=device, requires_grad=True)
            nothing.clone().backward(torch.empty_like(nothing))
        gc.collect()
        torch.get_device_module(device).empty_cache()


def _try_chunks(embed: Callable[[Tensor], Tensor], chunks: tuple[Tensor, ...], reserve: int) -> None:
    """Use as much memory as a step uses for the kept graphs of some chunks, then restore all state."""
    reserved = torch.empty(reserve, dtype=torch.uint8, device=chunks[0].device)
    statistics, random_state = RunningStatistics(embed, sum(map(len, chunks))), RandomState()
    with _gradients_restored(embed) as set_aside, statistics.unchanged(), random_state.replayed(), torch.enable_grad():
        for _ in range(2):
            kept = []
            for chunk in chunks:
                kept.append(embed(chunk))
                check_tensor("embed's result", kept[-1], owner="largest_chunk_size")
            while kept:
                embeddings = kept.pop()
                if embeddings.requires_grad:
                    set_aside(_leaves(embeddings))
                    embeddings.backward(torch.zeros_like(embeddings))
                del embeddings
    del reserved


@contextmanager
def _gradients_restored(embed: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Restore, on exit, the gradients of `embed`'s parameters and of all tensors passed to the yielded function."""
    kept: dict[Tensor, Tensor | None] = {}

    def set_aside(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in kept:
                kept[tensor], tensor.grad = tensor.grad, None

    try:
        # The graph does not contain all leaves: a reentrant checkpoint hides the leaves of its layers.
        with visit_modules(embed, lambda module: set_aside(module.parameters())):
            yield set_aside
    finally:
        for tensor, gradient in kept.items():
            tensor.grad = gradient


def _leaves(output: Tensor) -> list[Tensor]:
    """The leaves whose gradients a backward pass from `output` changes."""
    leaves, visited, waiting = [], set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            waiting.append(following)
    return leaves


def check_chunk_size(chunk_size: Any) -> ChunkSize | dict[Side, ChunkSize]:
    """Return the argument `chunk_size` of a module: a value for both sides, or a dict with a value for each side.

    Args:
        chunk_size: the argument.

    Raises:
        ValueError: if a number is < 1, or a dict does not have the two sides as keys.
        TypeError: if a value is not an integer, None or `"auto"`.
    """
    if not isinstance(chunk_size, Mapping):
        return _check_one_size("chunk_size", chunk_size)
    if chunk_size.keys() != set(SIDES):
        rule = "a dict as `chunk_size` must have the keys queries and candidates"
        raise InvalidValue(rule, got=short_repr(chunk_size))
    return {side: _check_one_size(f"chunk_size['{side}']", chunk_size[side]) for side in SIDES}


def _check_one_size(name: str, size: ChunkSize) -> ChunkSize:
    if size is None or size == "auto":
        return size
    return check_integer(name, size, least=1)
