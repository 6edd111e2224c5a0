"""Back-propagation of a loss of a whole batch, one chunk of the batch at a time.

A listwise loss is a function of all embeddings of the batch, but its gradient reaches the network only through the
embeddings. So the backward pass can have three stages (Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", RepL4NLP 2021; Revaud et al., ICCV 2019, section 3.3):

1. embed the batch chunk by chunk without a graph, and keep the random state that each chunk started with;
2. compute the loss of all embeddings together, and the gradient of the loss with respect to the embeddings;
3. embed chunk by chunk again, with a graph and the same random numbers, and back-propagate each chunk's rows of the
   gradient of stage 2.

The last `keep_graphs` chunks are embedded only once, because they keep a graph from stage 1. Stage 3 processes the last
chunk first, then the others in order. So at most `keep_graphs` graphs exist at the same time (one graph if
`keep_graphs` is 0), and the order in which gradients are added does not depend on `keep_graphs`. A batch that is a
single chunk with a graph needs no stages: one backward pass goes through the loss and the network.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_retrieval.checks import check_integer, check_tensor, first_line
from lightning_retrieval.compiled import is_compiled
from lightning_retrieval.distributed import kept_rows
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.random_state import RandomState

_OWNER = "chunked_backward"
_TOO_FEW_ROWS = "Expected more than 1 value per channel when training"  # of BatchNorm


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
        watched: False leaves the layers alone, for a batch that is a single chunk.
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


def chunked_backward(
    embed: Callable[[Tensor], Tensor],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    chunk_size: int | None = None,
    *,
    keep_graphs: int = 1,
    least_chunks: int = 1,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Add to `.grad` what `loss(embed(inputs)).backward()` would add, with the graphs of only a few chunks in memory.

    Args:
        embed: maps inputs (n, ...) to embeddings (n, D), each row independently. A layer that mixes the rows of its
            input (BatchNorm in train mode) sees a chunk instead of the batch. Its running statistics are updated once
            per batch: with the means and variances of the chunks, averaged over the chunks and weighted by their
            numbers of rows. The variance between the means of the chunks is ignored.
        inputs: the whole batch, rows first.
        loss: maps the embeddings of the whole batch (B, D) to a scalar. The loss may have parameters.
        chunk_size: number of rows embedded at a time, >= 1; None embeds all rows at once.
        keep_graphs: number of chunks whose graphs are kept, >= 0; each of these chunks is embedded only once. The
            number does not affect the gradients.
        least_chunks: minimum number of chunks to embed, >= 1, for networks that wait for other processes in each pass.
            For each missing chunk, the first chunk is embedded again, with a gradient of 0.
        backward: back-propagates the scalar; in half precision, a function that first scales it.
        last_backward: returns a context for the backward pass of the last chunk, which completes the gradients of
            `embed`'s parameters.

    Returns:
        The value of the loss, without a graph.

    Raises:
        ValueError: if `inputs` is empty or part of a graph, `chunk_size` or `least_chunks` < 1, `keep_graphs` < 0, the
            embeddings do not have one row for each input, or the loss is not a scalar.
        TypeError: if `inputs` is not a tensor, `chunk_size`, `keep_graphs` or `least_chunks` is not an integer, or a
            function is not callable.

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
    chunks = EmbeddedChunks(embed, inputs, chunk_size, keep_graphs=keep_graphs, least_chunks=least_chunks)
    if chunks.graph is None:
        value = back_propagate(loss(chunks.embeddings), [chunks.embeddings], backward)
        chunks.back_propagate(last_backward)
        return value
    value = loss(chunks.graph)
    with last_backward():
        return back_propagate(value, [chunks.graph], backward)


def back_propagate(value: Any, embeddings: Sequence[Tensor], backward: Callable[[Tensor], Any]) -> Tensor:
    """Back-propagate a loss to embeddings, and return its value without a graph.

    Args:
        value: the value of the loss.
        embeddings: the embeddings of each side.
        backward: as for `chunked_backward`.

    Raises:
        ValueError: if the value is not a scalar.
        TypeError: if the value is not a tensor.
    """
    check_tensor("loss's value", value, owner=_OWNER)
    if value.ndim:
        raise InvalidValue("must return a scalar", _OWNER, "loss", got=f"shape {tuple(value.shape)}")
    if not value.requires_grad:  # for example a constant 0 for a batch without pairs; the gradient is 0
        for of_side in embeddings:
            value = value + 0 * of_side.sum()
    if value.requires_grad:
        backward(value)
    result: Tensor = value.detach()
    return result


class EmbeddedChunks:
    """A batch that is embedded one chunk at a time; the first and the last stage of `chunked_backward`.

    Args:
        embed: as for `chunked_backward`, like the other arguments.
        inputs: the whole batch, rows first.
        chunk_size: number of rows embedded at a time.
        keep_graphs: number of chunks whose graphs are kept.
        least_chunks: minimum number of chunks to embed.
        trained: False embeds all chunks without a graph, for embeddings that get no gradient.

    Attributes:
        embeddings: the embeddings of the batch, without a graph. A loss leaves its gradient in their `.grad`.
        graph: the embeddings with their graph, if the batch is a single chunk that keeps its graph; otherwise None.
    """

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        inputs: Tensor,
        chunk_size: int | None = None,
        *,
        keep_graphs: int = 1,
        least_chunks: int = 1,
        trained: bool = True,
    ) -> None:
        with owned_by(_OWNER):
            check_inputs(inputs)
        check_integer("keep_graphs", keep_graphs, least=0, owner=_OWNER)
        self._embed, self._chunks = embed, _chunks_of(inputs, chunk_size, least_chunks)
        self._is_compiled = is_compiled(embed)
        first_kept = max(len(self._chunks) - keep_graphs, 0)
        if not trained:
            first_kept = len(self._chunks)
        is_plain_step = trained and len(self._chunks) == 1 and first_kept == 0
        self._statistics = RunningStatistics(embed, len(inputs), watched=not is_plain_step)

        parts = self._embed_without_graph(self._chunks[:first_kept])
        self._kept = self._embed_with_graph(self._chunks[first_kept:])
        self._statistics.update()
        self.embeddings = _joined([*parts, *self._kept], self._chunks, len(inputs)).requires_grad_(trained)
        self.graph: Tensor | None = None
        if is_plain_step and self._kept[0].requires_grad:
            self.graph = self._kept[0]

    def _embed_without_graph(self, chunks: Sequence["_Chunk"]) -> list[Tensor]:
        """The embeddings of each chunk; remembers the random state at its start."""
        parts = []
        self._states: list[RandomState] = []
        for chunk in chunks:
            self._states.append(RandomState())
            with torch.no_grad(), self._statistics.collected(chunk.rows):
                parts.append(kept_rows(self._embedded(chunk)))
        if chunks:
            # Without this call, autocast would reuse weights that were cast without a graph, and they would get no
            # gradient.
            torch.clear_autocast_cache()
        return parts

    def _embed_with_graph(self, chunks: Sequence["_Chunk"]) -> list[Tensor]:
        kept = []
        for chunk in chunks:
            with self._statistics.collected(chunk.rows):
                kept.append(self._embedded(chunk))
        return kept

    def _embedded(self, chunk: "_Chunk") -> Tensor:
        """The embeddings of a chunk. Inputs at another position in their memory would be compiled again.

        Raises:
            ValueError: if the chunk has a single row, which BatchNorm in training mode does not take.
            TypeError: if `embed` does not return a tensor.
        """
        inputs = chunk.inputs
        if self._is_compiled and inputs.storage_offset() > 0:
            inputs = inputs.clone()
        try:
            embeddings = self._embed(inputs)
        except ValueError as error:
            if _TOO_FEW_ROWS not in str(error):
                raise
            rule, cure = "must take a batch of one row", "enlarge the batch, or use fewer processes"
            if len(self._chunks) > 1:
                rule, cure = "must take a chunk of one row", "take a `chunk_size` that leaves no such chunk"
            raise InvalidValue(rule, _OWNER, "embed", got=f"the error {first_line(error)}", cure=cure) from error
        check_tensor("embed's result", embeddings, owner=_OWNER)
        return embeddings

    def back_propagate(self, last_backward: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Back-propagate the gradient of the embeddings, if there is one, through the chunks.

        The last chunk comes first, and the others follow in order. Graphs are removed when their turn comes.

        Args:
            last_backward: as for `chunked_backward`.
        """
        gradient = self.embeddings.grad
        if gradient is None:
            return
        gradients = _rows_of_chunks(self._chunks, gradient)
        last = len(self._chunks) - 1
        contexts = iter([nullcontext] * last + [last_backward])
        with self._statistics.unchanged():  # includes the backward passes, which run checkpointed layers again
            if self._kept:
                is_part_of_graph = _backward(self._kept.pop(), gradients[last], next(contexts))
            else:
                is_part_of_graph = self._embed_and_back_propagate(last, gradients[last], next(contexts))
            if not is_part_of_graph:  # the network is frozen
                return
            for number in range(min(len(self._states), last)):
                self._embed_and_back_propagate(number, gradients[number], next(contexts))
            for rows in gradients[len(self._states) : last]:
                _backward(self._kept.pop(0), rows, next(contexts))

    def _embed_and_back_propagate(
        self, number: int, gradient: Tensor, context: Callable[[], AbstractContextManager[None]]
    ) -> bool:
        """Embed a chunk again, with a graph and the same random numbers, and back-propagate it; see `_backward`."""
        with self._states[number].replayed():
            return _backward(self._embedded(self._chunks[number]), gradient, context)


class _Chunk(NamedTuple):
    """Inputs that are embedded together; only the first `rows` of them count."""

    inputs: Tensor
    rows: int


def _chunks_of(inputs: Tensor, chunk_size: int | None, least_chunks: int) -> list[_Chunk]:
    """The chunks of a batch. Missing chunks come first, and repeat the first chunk."""
    check_integer("least_chunks", least_chunks, least=1, owner=_OWNER)
    if chunk_size is None:
        chunk_size = len(inputs)
    rows = inputs.split(check_integer("chunk_size", chunk_size, least=1, owner=_OWNER))
    repeated = least_chunks - len(rows)
    return [_Chunk(rows[0], 0)] * repeated + [_Chunk(part, len(part)) for part in rows]


def _rows_of_chunks(chunks: Sequence[_Chunk], gradient: Tensor) -> list[Tensor]:
    """Each chunk's rows of the gradient, which are 0 for a chunk that does not count."""
    rows = list(gradient.split([chunk.rows for chunk in chunks]))
    for number, chunk in enumerate(chunks):
        if chunk.rows == 0:
            rows[number] = gradient.new_zeros(len(chunk.inputs), gradient.shape[1])
    return rows


def check_inputs(inputs: Tensor) -> None:
    """Raise unless `inputs` holds at least one row and is not part of a graph."""
    check_tensor("inputs", inputs)
    if inputs.grad_fn is not None:
        rule = "must not be part of a graph, because each chunk would back-propagate through it again"
        raise InvalidValue(rule, argument="inputs", cure="detach them, or make that graph part of `embed`")
    if inputs.ndim == 0 or len(inputs) == 0:
        raise InvalidValue("must hold at least one row", argument="inputs", got=f"shape {tuple(inputs.shape)}")


def _backward(embeddings: Tensor, gradient: Tensor, context: Callable[[], AbstractContextManager[None]]) -> bool:
    """Back-propagate a chunk; returns False if nothing of the chunk requires a gradient."""
    if not embeddings.requires_grad:
        return False
    with context():
        embeddings.backward(gradient.to(embeddings.dtype))
    return True


def _joined(parts: list[Tensor], chunks: Sequence[_Chunk], rows: int) -> Tensor:
    """The embeddings of the whole batch, without a graph and without the chunks that do not count."""
    embeddings, *others = [part.detach() for part, chunk in zip(parts, chunks) if chunk.rows > 0]
    if others:
        embeddings = torch.cat([embeddings, *others])
    if embeddings.ndim != 2 or len(embeddings) != rows:
        rule = f"must return one row for each of the {rows} inputs"
        raise InvalidValue(rule, _OWNER, "embed", got=f"shape {tuple(embeddings.shape)}")
    return embeddings
