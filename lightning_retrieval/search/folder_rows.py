"""The rows of a folder of embeddings, which are read from its files when they are used."""

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.packed_strings import PackedStrings


class FolderRows:
    """Stands for a tensor with all rows of a folder, of which it keeps one file in memory at a time.

    Every file is read once at the beginning, so that one that is missing or damaged raises before anything is made of
    the others.

    Args:
        folder: all shards of which are complete.

    Raises:
        ValueError: if a file is missing or damaged, is not of this folder, or an embedding in it is not finite.

    Cost:
        8 bytes for each row, its path, and the rows of one file.
    """

    def __init__(self, folder: EmbeddingFolder) -> None:
        self.folder = folder
        ends, ids, paths = [0], [np.zeros(0, np.int64)], [PackedStrings([])]
        for shard in range(len(folder)):
            rows = folder.read(shard)
            ends.append(ends[-1] + len(rows.ids))
            ids.append(rows.ids)
            paths.append(PackedStrings(rows.paths))
        self.ids: Int[Tensor, " rows"] = torch.from_numpy(np.concatenate(ids))
        self.paths = PackedStrings.join(paths)
        self.shape = (ends[-1], folder.manifest.dim)
        self._ends: NDArray[np.int64] = np.array(ends[1:])
        self._read = -1  # the shard in memory
        self._rows: Float32[Tensor, "shard dim"] = torch.empty(0, self.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, positions: slice | Int[Tensor, " selected"]) -> Float[Tensor, "selected dim"]:
        """Rows by a slice, or by positions in ascending order."""
        if isinstance(positions, slice):
            positions = torch.arange(*positions.indices(len(self)))
        selected = torch.empty(len(positions), self.shape[1])
        shards = np.searchsorted(self._ends, positions.numpy(), side="right")
        for shard in np.unique(shards).tolist():
            rows = self._shard(shard)
            begin = int(self._ends[shard]) - len(rows)
            is_here = torch.from_numpy(shards == shard)
            selected[is_here] = rows[positions[is_here] - begin]
        return selected

    def _shard(self, shard: int) -> Float[Tensor, "shard dim"]:
        if shard != self._read:
            self._rows = torch.from_numpy(self.folder.read(shard).embeddings).float()
            self._read = shard
        return self._rows
