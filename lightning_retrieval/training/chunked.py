"""Backpropagation of a loss over a whole batch, a chunk of the batch at a time.

A listwise loss is a function of all embeddings of the batch, but its gradient reaches the network only through them.
So (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021; Revaud et al.,
ICCV 2019, section 3.3):

1. embed the batch chunk by chunk without a graph, keeping the random state each chunk began with;
2. take the loss of all embeddings together, and its gradient with respect to them;
3. embed chunk by chunk again, with a graph and the same random numbers, and push each chunk's slice of that gradient
   through it.

The last chunk keeps its graph from stage 1 and is pushed through first, so it is embedded once only and never do two
chunks' graphs live at once.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_retrieval.checks import check_integer, check_tensor


def chunked_backward(
    embed: Callable[[Tensor], Tensor],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    chunk_size: int | None = None,
    *,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
) -> Tensor:
    """Accumulate in `.grad` what `loss(embed(inputs)).backward()` would, with one chunk's graph in memory at a time.

    Args:
        embed: maps inputs (n, ...) to embeddings (n, D), each row by itself. What mixes the rows of its input
            (BatchNorm in train mode) sees a chunk where it would see the batch; its running statistics are updated
            once, as by one step, with the mean over the batch's rows of the chunks' means and of the chunks' own
            variances (which leaves out how far the chunks' means lie apart).
        inputs: the whole batch, rows first.
        loss: maps the embeddings of the whole batch (B, D) to a scalar; may have parameters of its own.
        chunk_size: rows embedded at a time, >= 1; all at once where None.
        backward: how the scalar is back-propagated, where it has to be scaled for half precision.

    Returns:
        The loss value, without a graph.

    Raises:
        ValueError: if `inputs` is empty, `chunk_size` < 1, or the embeddings do not have one row for each input.

    Example:
        >>> import torch
        >>> from lightning_retrieval.training.chunked import chunked_backward
        >>> embed = torch.nn.Linear(3, 2)
        >>> x = torch.randn(5, 3)
        >>> spread = lambda y: y.var()
        >>> value = chunked_backward(embed, x, spread, chunk_size=2)
        >>> chunked = embed.weight.grad.clone()
        >>> embed.zero_grad()
        >>> spread(embed(x)).backward()
        >>> torch.allclose(embed.weight.grad, chunked)
        True

    Cost:
        All but the last chunk are embedded twice. Memory is that of one chunk's graph, the embeddings and the loss.
    """
    _check_inputs("chunked_backward", inputs)
    if chunk_size is not None:
        check_integer("chunked_backward", "chunk_size", chunk_size, least=1)
    chunks = inputs.split(chunk_size or len(inputs))
    statistics = _RunningStatistics(embed, len(inputs), watched=len(chunks) > 1)
    states, parts = [], []
    for chunk in chunks[:-1]:
        states.append(_RandomState(inputs.device))
        with torch.no_grad(), statistics.collected(len(chunk)):
            parts.append(embed(chunk))
    if len(chunks) > 1:
        torch.clear_autocast_cache()  # weights cast without a graph would be used again with one, and get no gradient
    with statistics.collected(len(chunks[-1])):
        last = embed(chunks[-1])
    statistics.update()
    check_tensor("chunked_backward", "embed's result", last)
    embeddings = torch.cat([*parts, last.detach()])
    if embeddings.ndim != 2 or len(embeddings) != len(inputs):
        raise ValueError(
            f"chunked_backward: `embed` must give one row for each of the {len(inputs)} inputs, got shape "
            f"{tuple(embeddings.shape)}."
        )
    embeddings.requires_grad_()
    value = loss(embeddings)
    check_tensor("chunked_backward", "loss's value", value)
    if value.ndim:
        raise ValueError(f"chunked_backward: `loss` must give a scalar, got shape {tuple(value.shape)}.")
    if not value.requires_grad:  # such as a constant 0 for a batch without pairs: nothing to push through
        value = value + 0 * embeddings.sum()
    backward(value)
    if embeddings.grad is not None and last.requires_grad:
        slices = embeddings.grad.to(last.dtype).split(chunk_size or len(inputs))
        with statistics.unchanged():  # around the backward passes, too: checkpointed layers run again in them
            last.backward(slices[-1])
            del last
            for chunk, state, gradient in zip(chunks, states, slices):
                with state.replayed():
                    embed(chunk).backward(gradient)
    return value.detach()


def largest_chunk_size(embed: Callable[[Tensor], Tensor], inputs: Tensor, *, reserve: int = 0) -> int:
    """The largest `chunk_size` for `chunked_backward` that the device has the memory for.

    Tries the whole batch, then half of it (rounded up), and so on. A trial embeds that many of the inputs and
    back-propagates them, twice, since a step's later chunks meet the gradients of the first. It leaves gradients, the
    random state, running statistics of normalization layers and the autocast cache as they were. Gradients that are
    there already take up memory besides the trial's: call it after `zero_grad`. Processes decide each for itself, so
    they may come to different sizes, and no layer of `embed` may wait for the others, as SyncBatchNorm does.

    Args:
        embed: maps inputs (n, ...) to embeddings (n, D).
        inputs: the whole batch, rows first, on the device whose memory counts. On a CPU, all rows "fit".
        reserve: bytes of the device that are kept free for what comes later, such as the optimizer's state and the
            loss; >= 0.

    Raises:
        ValueError: if `inputs` is empty or `reserve` < 0.
        torch.OutOfMemoryError: if not even one row fits.

    Example:
        >>> import torch
        >>> from lightning_retrieval.training.chunked import largest_chunk_size
        >>> largest_chunk_size(torch.nn.Linear(3, 2), torch.randn(5, 3))
        5
    """
    _check_inputs("largest_chunk_size", inputs)
    check_integer("largest_chunk_size", "reserve", reserve, least=0)
    size = len(inputs)
    while True:
        try:
            _rehearse(embed, inputs[:size], reserve)
            return size
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise torch.OutOfMemoryError(
                    f"largest_chunk_size: not even one input of shape {tuple(inputs.shape[1:])} fits the memory of "
                    f"{inputs.device} beside the {reserve} bytes in reserve; take smaller inputs, a smaller network "
                    "or half precision."
                ) from error
        finally:
            torch.clear_autocast_cache()
        if inputs.device.type != "cpu":  # only now: the error has held the failed trial's tensors by its traceback
            gc.collect()
            torch.get_device_module(inputs.device).empty_cache()
        size = (size + 1) // 2


def _rehearse(embed: Callable[[Tensor], Tensor], inputs: Tensor, reserve: int) -> None:
    """Take up the memory that a chunk takes up in a step, and leave no trace."""
    reserved = torch.empty(reserve, dtype=torch.uint8, device=inputs.device)
    statistics, random_state = _RunningStatistics(embed, len(inputs)), _RandomState(inputs.device)
    with _gradients_set_aside(embed) as set_aside, statistics.unchanged(), random_state.replayed(), torch.enable_grad():
        for _ in range(2):
            embeddings = embed(inputs)
            check_tensor("largest_chunk_size", "embed's result", embeddings)
            if embeddings.requires_grad:
                set_aside(_leaves(embeddings))
                embeddings.backward(torch.zeros_like(embeddings))
            del embeddings
    del reserved


@contextmanager
def _gradients_set_aside(embed: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Take away the gradients of `embed`'s parameters, and of what the function is given; put them back at the end."""
    kept: dict[Tensor, Tensor | None] = {}

    def set_aside(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in kept:
                kept[tensor], tensor.grad = tensor.grad, None

    try:
        # The graph does not show all leaves: a reentrant checkpoint hides those within.
        with _each_module(embed, lambda module: set_aside(module.parameters())):
            yield set_aside
    finally:
        for tensor, gradient in kept.items():
            tensor.grad = gradient


def _leaves(output: Tensor) -> list[Tensor]:
    """The leaves whose gradient a backward pass from `output` adds to."""
    leaves, seen, ahead = [], set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves.append(node.variable)
        ahead += [following for following, _ in node.next_functions]
    return leaves


def _check_inputs(who: str, inputs: Tensor) -> None:
    check_tensor(who, "inputs", inputs)
    if inputs.grad_fn is not None:
        raise ValueError(
            f"{who}: `inputs` must not be results of a graph, through which each chunk would go back once more; detach "
            "them, or make that part of `embed`."
        )
    if len(inputs) == 0:
        raise ValueError(f"{who}: `inputs` must hold at least one row, got shape {tuple(inputs.shape)}.")


class _RunningStatistics:
    """The running statistics of `embed`'s normalization layers, updated once, whatever number of chunks they run on.

    For each chunk, layers in training mode begin with a copy of their own statistics. What they make of it is linear in
    the chunk's statistics, so the mean over the rows of what they add is what the mean of these would have added.
    """

    def __init__(self, embed: Callable[[Tensor], Tensor], rows: int, watched: bool = True) -> None:
        self.embed, self.rows, self.watched = embed, rows, watched
        self.added = dict[tuple[_NormBase, str], Tensor]()

    @contextmanager
    def collected(self, rows: int) -> Iterator[None]:
        """Layers run on a chunk of so many rows, and change copies of their statistics."""
        own: dict[tuple[_NormBase, str], Tensor] = {}

        def lend_copies(module: nn.Module) -> None:
            if isinstance(module, _NormBase) and module.training and (module, "running_mean") not in own:
                for name, buffer in module.named_buffers(recurse=False):
                    own[module, name] = buffer
                    setattr(module, name, buffer.clone())

        with _each_module(self.embed, lend_copies) if self.watched else nullcontext():
            try:
                yield
            finally:
                for (module, name), buffer in own.items():
                    self._add(module, name, getattr(module, name) - buffer, rows / self.rows)
                    setattr(module, name, buffer)

    def unchanged(self) -> AbstractContextManager[None]:
        """Layers run without a trace: what they make of their copies is not used."""
        return _RunningStatistics(self.embed, self.rows, self.watched).collected(self.rows)

    def update(self) -> None:
        """Give the layers what was collected."""
        for (module, name), added in self.added.items():
            getattr(module, name).add_(added)

    def _add(self, module: _NormBase, name: str, added: Tensor, share: float) -> None:
        before = self.added.get((module, name), torch.zeros_like(added))
        # The number of batches, an integer, grows as by one chunk: one that did not skip the layer.
        self.added[module, name] = before + share * added if added.is_floating_point() else before.maximum(added)


@contextmanager
def _each_module(embed: Callable[[Tensor], Tensor], function: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Call `function` with each module of `embed`: now where `embed` is one or a method of one, else as they run."""
    owner = getattr(embed, "__self__", embed)
    if isinstance(owner, nn.Module):  # a hook would make torch.compile compile it again each time
        for module in owner.modules():
            function(module)
        yield
        return
    hook = register_module_forward_pre_hook(lambda module, args: function(module))
    try:
        yield
    finally:
        hook.remove()


class _RandomState:
    """The random state of the CPU and of one device, to be gone back to.

    Images on the CPU may be embedded on a GPU, which is then the current one.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.cpu, self.own = self._read()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        before = self._read()
        self._write(self.cpu, self.own)
        try:
            yield
        finally:
            self._write(*before)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        own = None if self.device.type == "cpu" else torch.get_device_module(self.device).get_rng_state(self.device)
        return torch.get_rng_state(), own

    def _write(self, cpu: Tensor, own: Tensor | None) -> None:
        torch.set_rng_state(cpu)
        if own is not None:
            torch.get_device_module(self.device).set_rng_state(own, self.device)
