"""Running statistics of normalisation layers that see a batch in chunks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_retrieval.training.module_visits import visit_modules


class RunningStatistics:
    """Updates the running statistics of `embed`'s normalisation layers once per batch, whatever the number of chunks.

    For each chunk, layers in training mode start from a copy of their own statistics. The change they make is linear in
    the chunk's statistics, so the mean of the changes, weighted by rows, is the change that the mean of the chunks'
    statistics would have made.

    Args:
        embed: maps inputs to embeddings.
        rows: rows of the whole batch.
        watched: False does nothing to the layers, for a batch that is a single chunk.
    """

    def __init__(self, embed: Callable[[Tensor], Tensor], rows: int, *, watched: bool = True) -> None:
        self.embed, self.rows, self.watched = embed, rows, watched
        self.changes: dict[tuple[_NormBase, str], Tensor] = {}

    @contextmanager
    def collected(self, rows: int) -> Iterator[None]:
        """Let the layers run on a chunk of `rows` rows and change copies of their statistics; keep the changes."""
        originals: dict[tuple[_NormBase, str], Tensor] = {}
        with self._on_copies(originals):
            try:
                yield
            finally:
                for (layer, name), original in originals.items():
                    self._add_change(layer, name, getattr(layer, name) - original, rows / self.rows)
                    setattr(layer, name, original)

    def unchanged(self) -> AbstractContextManager[None]:
        """Let the layers run without changing their statistics: what they do to the copies is not used."""
        discarded = RunningStatistics(self.embed, self.rows, watched=self.watched)
        return discarded.collected(self.rows)

    def update(self) -> None:
        """Apply the changes of all chunks to the layers."""
        for (layer, name), change in self.changes.items():
            getattr(layer, name).add_(change)

    def _on_copies(self, originals: dict[tuple[_NormBase, str], Tensor]) -> AbstractContextManager[None]:
        """Give each layer copies of its statistics, and note the originals."""
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
        else:  # the number of batches, which grows as by one chunk, and by none if every chunk skipped the layer
            self.changes[layer, name] = before.maximum(change)
