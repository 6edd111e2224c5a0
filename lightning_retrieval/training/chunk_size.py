"""Finds, by trial, a chunk that fits into the memory of a device: the largest of those that halving the batch gives."""

import gc
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_retrieval.backend import rank_zero_info
from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.sides import SIDES, Side
from lightning_retrieval.random_state import RandomState
from lightning_retrieval.training.chunked import RunningStatistics, visit_modules

ChunkSize = int | Literal["auto"] | None

# cuBLAS and cuDNN allocate memory without torch's allocator, and report a failure by a status.
_ALLOCATION_FAILED = re.compile(
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED|CUDA error: out of memory"
)
# cuDNN reports this error if every algorithm for a convolution needs too large a workspace.
_NO_ALGORITHM = re.compile(r"unable to find an engine|unable to find a valid cuDNN algorithm", re.IGNORECASE)


def largest_chunk_size(
    embed: Callable[[Tensor], Tensor], inputs: Tensor, *, keep_graphs: int = 1, reserve: int = 0
) -> int:
    """A `chunk_size` for `chunked_backward` that fits into the memory of the device, found by halving the batch.

    A trial embeds and back-propagates the chunks whose graphs are kept. It does so twice, because gradients already
    exist when the second chunk of a step is embedded. Afterwards, the gradients of parameters, the random state and the
    running statistics of normalisation layers are restored, and the autocast cache is cleared. Call this function after
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
        ValueError: if `keep_graphs` < 1 or `reserve` < 0.
        torch.OutOfMemoryError: if not even chunks of one row fit.

    Example:
        >>> import torch
        >>> from lightning_retrieval.training.chunk_size import largest_chunk_size
        >>> largest_chunk_size(torch.nn.Linear(3, 2), torch.randn(5, 3))
        5
    """
    keep_graphs = check_integer("keep_graphs", keep_graphs, least=1, owner="largest_chunk_size")
    reserve = check_integer("reserve", reserve, least=0, owner="largest_chunk_size")
    size = len(inputs)
    while not _fits(embed, inputs.split(size)[:keep_graphs], reserve):
        _free_memory(inputs.device)
        size = math.ceil(size / 2)
    return size


class ChunkSizeSearch:
    """Finds the chunk size of a run, and searches again for each batch that is larger than all before."""

    def __init__(self) -> None:
        self.chunk_size = 0
        self.rows = 0  # rows of the batch for which the chunk size was found

    def find(self, module: nn.Module, embed: Callable[[Tensor], Tensor], images: Tensor, keep_graphs: int) -> int:
        """A chunk size for a batch.

        Args:
            module: the module that is trained. Memory is reserved for Adam's two moments, which do not exist before
                the first step, and for the flat copy of the gradients that several processes sum.
            embed: maps images to embeddings.
            images: images of this process.
            keep_graphs: number of chunks whose graphs are kept.
        """
        if len(images) > self.rows:
            size = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
            self.chunk_size = largest_chunk_size(embed, images, keep_graphs=keep_graphs, reserve=3 * size)
            self.rows = len(images)
            rank_zero_info(
                f"{type(module).__name__}: chunks of {self.chunk_size} of {self.rows} images fit into memory."
            )
        return self.chunk_size


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
        raise torch.OutOfMemoryError(
            f"largest_chunk_size: not even {len(chunks)} x 1 input of shape {tuple(inputs.shape[1:])} fits the memory "
            f"of {inputs.device} in addition to the {reserve} reserved bytes; use smaller inputs, a smaller network "
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
    with _gradients_restored(embed), statistics.unchanged(), random_state.replayed(), torch.enable_grad():
        for _ in range(2):  # the second time, gradients exist
            kept = [embed(chunk) for chunk in chunks]
            while kept:
                embeddings = kept.pop()
                if embeddings.requires_grad:
                    embeddings.backward(torch.zeros_like(embeddings))
                del embeddings
    del reserved


@contextmanager
def _gradients_restored(embed: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Restore, on exit, the gradients of `embed`'s parameters."""
    gradients: dict[Tensor, Tensor | None] = {}

    def set_aside(module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter not in gradients:
                gradients[parameter], parameter.grad = parameter.grad, None

    try:
        with visit_modules(embed, set_aside):
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
