"""Collect embeddings that arrive in the order of their ids, and write each shard as soon as it is complete."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.embedding_shards import ShardRows


class ShardCollector:
    """Collects the rows of one shard at a time; never more, so that memory does not grow with their number.

    Args:
        folder: where shards are written. A shard that is there already is not written again.
    """

    def __init__(self, folder: EmbeddingFolder) -> None:
        self.folder = folder
        self._missing = set(folder.missing())
        self._shard: int | None = None
        self._clear()

    def add(
        self,
        ids: Sequence[int],
        embeddings: Float[Tensor, "rows dim"],
        paths: Sequence[str],
        labels: Sequence[str | None],
    ) -> None:
        """Add rows, whose ids follow all earlier ones.

        Raises:
            ValueError: if the ids do not ascend.
        """
        rows = embeddings.detach().float().cpu()
        for row, position in enumerate(ids):
            self._enter_shard_of(position)
            if self._ids and position <= self._ids[-1]:
                raise ValueError(
                    f"{self.folder.owner}: images must come in the order of their ids, got {position} after "
                    f"{self._ids[-1]}; use a loader that does not shuffle."
                )
            self._ids.append(position)
            self._rows.append(rows[row])
            self._paths.append(paths[row])
            self._labels.append(labels[row])

    def add_unreadable(self, position: int, path: str, reason: str) -> None:
        """Record an image that could not be read."""
        self._enter_shard_of(position)
        self._unreadable.append((path, reason))

    def finish(self) -> None:
        """Write the last shard."""
        shard = self._shard
        if shard is not None and shard in self._missing:
            self.folder.write(shard, self._collected())
            self._missing.remove(shard)
        self._shard = None
        self._clear()

    def _enter_shard_of(self, position: int) -> None:
        shard = position // self.folder.manifest.shard_size
        if shard != self._shard:
            self.finish()
            self._shard = shard

    def _collected(self) -> ShardRows:
        embeddings = torch.zeros(0, self.folder.manifest.dim)
        if self._rows:
            embeddings = torch.stack(self._rows)
        ids = np.array(self._ids, dtype=np.int64)
        return ShardRows(ids, embeddings.numpy(), self._paths, self._labels, self._unreadable)

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._rows: list[Tensor] = []
        self._paths: list[str] = []
        self._labels: list[str | None] = []
        self._unreadable: list[tuple[str, str]] = []
