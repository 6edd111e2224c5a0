"""Back-propagation of a loss of a whole batch, one chunk of the batch at a time.

A listwise loss is a function of all embeddings of the batch, but its gradient reaches the network only through the
embeddings. So the backward pass has three stages (Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", RepL4NLP 2021; Revaud et al., ICCV 2019, section 3.3):

1. embed the batch chunk by chunk without a graph, and keep the random state that each chunk started with;
2. compute the loss of all embeddings together, and the gradient of the loss with respect to the embeddings;
3. embed chunk by chunk again, with a graph and the same random numbers, and back-propagate each chunk's rows of the
   gradient of stage 2.

The last `keep_graphs` chunks are embedded only once, because they keep a graph from stage 1. Stage 3 processes the last
chunk first, then the others in order. So at most `keep_graphs` graphs exist at the same time (one graph if
`keep_graphs` is 0), and the order in which gradients are added does not depend on `keep_graphs`.

A batch may have several sides, such as queries and candidates. Stage 3 ends with the first side.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_retrieval.checks import check_integer
from lightning_retrieval.distributed import kept_rows
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.random_state import RandomState

_OWNER = "chunked_backward"
Embed = Callable[[Tensor], Tensor]
Context = Callable[[], AbstractContextManager[None]]
PullBack = Callable[[Tensor, Context], None]


def chunked_backward(
    embed: Embed,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    chunk_size: int | None = None,
    *,
    keep_graphs: int = 1,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    last_backward: Context = nullcontext,
) -> Tensor:
    """Add to `.grad` what `loss(embed(inputs)).backward()` would add, with the graphs of only a few chunks in memory.

    Args:
        embed: maps inputs (n, ...) to embeddings (n, D), each row independently. A layer that mixes the rows of its
            input (BatchNorm in train mode) sees a chunk instead of the batch. Its running statistics are updated once
            per batch: with the means and variances of the chunks, averaged over the chunks and weighted by their
            numbers of rows. The variance between the means of the chunks is ignored.
        inputs: the whole batch, rows first, without a graph.
        loss: maps the embeddings of the whole batch (B, D) to a scalar. The loss may have parameters.
        chunk_size: number of rows embedded at a time, >= 1; None embeds all rows at once.
        keep_graphs: number of chunks whose graphs are kept, >= 0; each of these chunks is embedded only once. The
            number does not affect the gradients.
        backward: back-propagates the scalar; in half precision, a function that first scales it.
        last_backward: returns a context for the backward pass of the last chunk, which completes the gradients of
            `embed`'s parameters.

    Returns:
        The value of the loss, without a graph.

    Raises:
        ValueError: if `chunk_size` < 1, `keep_graphs` < 0, the embeddings do not have one row for each input, or the
            loss is not a scalar.

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
        All chunks but the last `keep_graphs` are embedded twice. Memory holds the graphs of `keep_graphs` chunks, the
        embeddings and the loss.
    """
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, least=1, owner=_OWNER)
    check_integer("keep_graphs", keep_graphs, least=0, owner=_OWNER)
    sides = [(embed, inputs)]
    return sides_backward(sides, loss, [chunk_size], [keep_graphs], backward=backward, last_backward=[last_backward])


def sides_backward(
    sides: Sequence[tuple[Embed, Tensor]],
    loss: Callable[..., Tensor],
    chunk_sizes: Sequence[int | None],
    keep_graphs: Sequence[int],
    *,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    last_backward: Sequence[Context],
) -> Tensor:
    """`chunked_backward` for a loss of one or more sides; a network may embed several of them.

    With `keep_graphs=0` for all sides but the last, the graphs of only one side exist at a time.

    Args:
        sides: the function that embeds each side, and its inputs.
        loss: maps the embeddings of all sides to a scalar.
        chunk_sizes: as for `chunked_backward`, for each side.
        keep_graphs: as for `chunked_backward`, for each side.
        backward: back-propagates the scalar.
        last_backward: as for `chunked_backward`, for each side. The last side is back-propagated first.
    """
    embeddings: list[Tensor] = []
    pull_backs: list[PullBack] = []
    for (embed, inputs), chunk_size, kept in zip(sides, chunk_sizes, keep_graphs, strict=True):
        of_side, pull_back = _embedded(embed, inputs, chunk_size or max(len(inputs), 1), kept)
        embeddings.append(of_side)
        pull_backs.append(pull_back)
    value = loss(*embeddings)
    if value.ndim:
        got, cure = f"shape {tuple(value.shape)}", "set the reduction of the loss to 'mean' or 'sum'"
        raise InvalidValue("must return a scalar", _OWNER, "loss", got=got, cure=cure)
    if value.requires_grad:  # not a constant, such as 0 for a batch without pairs
        backward(value)
    for of_side, pull_back, context in reversed(list(zip(embeddings, pull_backs, last_backward, strict=True))):
        if of_side.requires_grad:
            gradient = of_side.grad
            if gradient is None:  # the loss ignores this side, perhaps only in this process
                gradient = torch.zeros_like(of_side)
            pull_back(gradient, context)
    return value.detach()


def _embedded(embed: Embed, inputs: Tensor, chunk_size: int, keep_graphs: int) -> tuple[Tensor, PullBack]:
    """Embed a batch chunk by chunk.

    Returns:
        The embeddings, which require a gradient unless nothing in `embed` does; and the function that back-propagates
        their gradient through the chunks, which is called once, with the context of its last backward pass.
    """
    chunks = inputs.split(chunk_size)
    first_kept = max(len(chunks) - keep_graphs, 0)
    statistics = RunningStatistics(embed, len(inputs), watched=len(chunks) > 1 or first_kept > 0)
    states, parts, graphs = [], [], {}
    for chunk in chunks[:first_kept]:
        states.append(RandomState())
        with torch.no_grad(), statistics.collected(len(chunk)):
            parts.append(kept_rows(_embed_chunk(embed, chunk)))
    if states:
        # Else autocast would reuse weights that were cast without a graph, and they would get no gradient.
        torch.clear_autocast_cache()
    for number, chunk in enumerate(chunks[first_kept:], first_kept):
        with statistics.collected(len(chunk)):
            graphs[number] = _embed_chunk(embed, chunk)
        parts.append(graphs[number].detach())
    statistics.update()
    embeddings = torch.cat(parts)
    if embeddings.ndim != 2 or len(embeddings) != len(inputs):
        rule = f"must return one row for each of the {len(inputs)} inputs"
        raise InvalidValue(rule, _OWNER, "embed", got=f"shape {tuple(embeddings.shape)}")
    is_frozen = len(graphs) > 0 and not graphs[len(chunks) - 1].requires_grad
    pull_back = functools.partial(_pull_back, embed, chunks, states, graphs, statistics)
    return embeddings.requires_grad_(not is_frozen), pull_back


def _pull_back(
    embed: Embed,
    chunks: Sequence[Tensor],
    states: Sequence[RandomState],
    graphs: dict[int, Tensor],
    statistics: "RunningStatistics",
    gradient: Tensor,
    last_backward: Context,
) -> None:
    """Back-propagate the gradient of the embeddings through the chunks: through the last one first.

    Args:
        embed: maps inputs to embeddings.
        chunks: the inputs of each chunk.
        states: the random state of each chunk that is embedded again.
        graphs: the embeddings of each chunk that has kept its graph, which are removed.
        statistics: the running statistics of `embed`, which have been updated.
        gradient: the gradient of all embeddings.
        last_backward: returns the context of the last backward pass.
    """
    gradients = gradient.split([len(chunk) for chunk in chunks])
    *others, last = range(len(chunks))
    order = [last, *others]
    with statistics.unchanged():  # includes the backward passes, which run checkpointed layers again
        for number in order:
            context = nullcontext if number != order[-1] else last_backward
            is_kept = number in graphs
            with nullcontext() if is_kept else states[number].replayed():
                part = graphs.pop(number) if is_kept else _embed_chunk(embed, chunks[number])
                with context():
                    if part.requires_grad:
                        part.backward(gradients[number].to(part.dtype))


def _embed_chunk(embed: Embed, chunk: Tensor) -> Tensor:
    """The embeddings of a chunk. A compiled network would be compiled again for inputs at another memory position."""
    if chunk.storage_offset() > 0:
        chunk = chunk.clone()
    return embed(chunk)


@contextmanager
def visit_modules(embed: Callable[[Tensor], Tensor], visit: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Call `visit` with each module of `embed`.

    If `embed` is a module or a method of a module, that module and its submodules are visited immediately. For any
    other function, the modules are unknown until they run, so a global hook visits each module right before its forward
    pass. Hooks on the modules themselves would make torch.compile recompile the modules each time.

    Args:
        embed: maps inputs to embeddings.
        visit: function that is called with a module, possibly several times with the same module.
    """
    owner = getattr(embed, "__self__", embed)
    if isinstance(owner, nn.Module):
        for module in owner.modules():
            visit(module)
        yield
        return
    hook = register_module_forward_pre_hook(lambda module, args: visit(module))
    try:
        yield
    finally:
        hook.remove()


class RunningStatistics:
    """Updates the running statistics of `embed`'s normalisation layers once per batch, whatever the number of chunks.

    For each chunk, a layer in training mode updates a copy of its running statistics. The change of the copy is linear
    in the statistics of the chunk. Therefore the mean change over all chunks, weighted by their numbers of rows, is the
    change that the weighted mean of the chunks' statistics would cause.

    Args:
        embed: maps inputs to embeddings.
        rows: number of rows of the whole batch.
        watched: False leaves the layers alone, for a batch that is a single chunk and embedded once.
    """

    def __init__(self, embed: Callable[[Tensor], Tensor], rows: int, *, watched: bool = True) -> None:
        self.embed, self.rows, self.watched = embed, rows, watched
        self.changes: dict[tuple[_NormBase, str], Tensor] = {}

    @contextmanager
    def collected(self, rows: int) -> Iterator[None]:
        """Let layers run on a chunk of `rows` rows with copies of their statistics, and record the changes."""
        originals: dict[tuple[_NormBase, str], Tensor] = {}
        with self._on_copies(originals):
            try:
                yield
            finally:
                for (layer, name), original in originals.items():
                    self._add_change(layer, name, getattr(layer, name) - original, rows / self.rows)
                    setattr(layer, name, original)

    def unchanged(self) -> AbstractContextManager[None]:
        """Let the layers run without changing their statistics: changes of the copies are discarded."""
        discarded = RunningStatistics(self.embed, self.rows, watched=self.watched)
        return discarded.collected(self.rows)

    def update(self) -> None:
        """Apply the changes of all chunks to the layers."""
        for (layer, name), change in self.changes.items():
            # Like batch norm itself, this does not count as a change of a tensor that a graph has saved: the graph of
            # another batch, such as that of the queries, does not use the statistics.
            getattr(layer, name).data.add_(change)

    def _on_copies(self, originals: dict[tuple[_NormBase, str], Tensor]) -> AbstractContextManager[None]:
        """Replace the statistics of each layer by copies, and store the originals in `originals`."""
        if not self.watched:
            return nullcontext()

        def give_copies(module: nn.Module) -> None:
            if not isinstance(module, _NormBase) or not module.training or (module, "running_mean") in originals:
                return
            for name, buffer in module.named_buffers(recurse=False):
                originals[module, name] = buffer
                setattr(module, name, buffer.clone())

        return visit_modules(self.embed, give_copies)

    def _add_change(self, layer: _NormBase, name: str, change: Tensor, fraction: float) -> None:
        before = self.changes.get((layer, name), torch.zeros_like(change))
        if change.is_floating_point():
            self.changes[layer, name] = before + fraction * change
        else:  # the number of batches grows by 1, unless every chunk skipped the layer
            self.changes[layer, name] = before.maximum(change)
