"""Collect embeddings that arrive in the order of the images, and write each shard as soon as it is complete."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.embedding_shards import ShardRows


class ShardCollector:
    """Collects the rows of one shard at a time; never more, so that memory does not grow with their number.

    Args:
        folder: where shards are written.
        missing: numbers of the shards that are written; if None, of those that are not there already.
        image_files: by the number of a shard, the digest of its image files, which is kept with it.
    """

    def __init__(
        self,
        folder: EmbeddingFolder,
        missing: Iterable[int] | None = None,
        image_files: Mapping[int, str] | None = None,
    ) -> None:
        self.folder = folder
        if missing is None:
            missing = folder.missing()
        self._missing = set(missing)
        self._image_files = image_files or {}
        self._shard: int | None = None
        self._last = -1  # position of the last row
        self._clear()

    def add(self, positions: Sequence[int], rows: ShardRows) -> None:
        """Add rows, whose positions in the list of images follow all earlier ones.

        Raises:
            ValueError: if the positions do not ascend.
        """
        for row, position in enumerate(positions):
            if position <= self._last:  # before the shard is left, and written as if it were complete
                raise ValueError(
                    f"{self.folder.owner}: images must come in the order of their ids, got {position} after "
                    f"{self._last}; use a loader that does not shuffle."
                )
            self._enter_shard_of(position)
            self._last = position
            self._ids.append(int(rows.ids[row]))
            self._rows.append(rows.embeddings[row])
            self._paths.append(rows.paths[row])
            self._labels.append(rows.labels[row])
            self._finish_if_complete()

    def add_unreadable(self, position: int, path: str, reason: str) -> None:
        """Record an image that could not be read."""
        self._enter_shard_of(position)
        self._unreadable.append((path, reason))
        self._finish_if_complete()

    def finish(self) -> None:
        """Write the last shard."""
        shard = self._shard
        if shard is not None and shard in self._missing:
            image_files = self._image_files.get(shard, "")
            self.folder.write(shard, replace(self._collected(), image_files=image_files))
            self._missing.remove(shard)
        self._shard = None
        self._clear()

    def _finish_if_complete(self) -> None:
        """Write the shard if all of its images were added."""
        shard = self._shard
        if shard is not None and len(self._rows) + len(self._unreadable) == len(self.folder.positions(shard)):
            self.finish()

    def _enter_shard_of(self, position: int) -> None:
        shard = position // self.folder.manifest.shard_size
        if shard != self._shard:
            self.finish()
            self._shard = shard

    def _collected(self) -> ShardRows:
        embeddings = np.zeros((0, self.folder.manifest.dim), np.float32)
        if self._rows:
            embeddings = np.stack(self._rows)
        ids = np.array(self._ids, dtype=np.int64)
        return ShardRows(ids, embeddings, self._paths, self._labels, self._unreadable)

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._rows: list[NDArray[np.float32]] = []
        self._paths: list[str] = []
        self._labels: list[str | None] = []
        self._unreadable: list[tuple[str, str]] = []
