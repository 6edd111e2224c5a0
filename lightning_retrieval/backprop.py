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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
            (BatchNorm in train mode) sees a chunk where it would see the batch.
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
        >>> from lightning_retrieval.backprop import chunked_backward
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
    check_tensor("chunked_backward", "inputs", inputs)
    if len(inputs) == 0:
        raise ValueError(f"chunked_backward: `inputs` must hold at least one row, got shape {tuple(inputs.shape)}.")
    if chunk_size is not None:
        check_integer("chunked_backward", "chunk_size", chunk_size, least=1)
    chunks = inputs.split(chunk_size or len(inputs))
    states, parts = [], []
    for chunk in chunks[:-1]:
        states.append(_RandomState(inputs.device))
        with torch.no_grad():
            parts.append(embed(chunk))
    if len(chunks) > 1 and torch.is_autocast_enabled(inputs.device.type):
        torch.clear_autocast_cache()  # weights cast without a graph would be used again with one, and get no gradient
    last = embed(chunks[-1])
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
        last.backward(slices[-1])
        del last
        for chunk, state, gradient in zip(chunks, states, slices):
            with state.replayed():
                embed(chunk).backward(gradient)
    return value.detach()


class _RandomState:
    """The random state of the CPU and of one device, to be gone back to."""

    def __init__(self, device: torch.device) -> None:
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
        own = None if self.device.type == "cpu" else torch.get_device_module(self.device).get_rng_state()
        return torch.get_rng_state(), own

    def _write(self, cpu: Tensor, own: Tensor | None) -> None:
        torch.set_rng_state(cpu)
        if own is not None:
            torch.get_device_module(self.device).set_rng_state(own)
