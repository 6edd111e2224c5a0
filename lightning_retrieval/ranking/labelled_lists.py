"""Which images of a gallery are positives of each query, and which are not in its list: decided by labels and cameras.

Every process has the labels of all queries and of the whole gallery, so all of them derive the same blocks from them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

_BLOCK_ROWS = (256, 128, 64)  # 64 or more: see `lightning_retrieval.ranking.score_tiles`
_MAX_BLOCK_POSITIVES = 1 << 22


class Extent(NamedTuple):
    """Where the positives of a block of queries are in the gallery.

    Attributes:
        begin: the first image that shares the coarsest label of any query.
        end: the last one + 1.
        width: the largest number of images that share the label of one query, at least 1.
    """

    begin: int
    end: int
    width: int


class BlockPositives(NamedTuple):
    """The images that share the coarsest label of each query of a block, padded to the longest list.

    Attributes:
        column: their indices in the gallery; any index at padding.
        level: number of label levels that they share with the query; 0 at padding, and if they are not in its list.
        is_excluded: whether an image is not in the list, although it shares the label.
    """

    column: Int[Tensor, "query pos"]
    level: Int[Tensor, "query pos"]
    is_excluded: Bool[Tensor, "query pos"]


@dataclass(frozen=True)
class LabelledLists:
    """The labels and the cameras of all queries and of the gallery.

    Args:
        query_labels: any integers, finest level first. Candidates that share the last level are positives.
        gallery_labels: sorted by the last level.
        self_index: index of the query itself in the gallery, where it is excluded from its list, or -1.
        query_cameras: the camera of each query. Images of the query's own finest label and camera are excluded from its
            list; none if there are no cameras.
        gallery_cameras: the camera of each image of the gallery; given together with `query_cameras`.
    """

    query_labels: Int[Tensor, "query level"]
    gallery_labels: Int[Tensor, "gallery level"]
    self_index: Int[Tensor, " query"]
    query_cameras: Int[Tensor, " query"] | None = None
    gallery_cameras: Int[Tensor, " gallery"] | None = None

    @cached_property
    def block_rows(self) -> int:
        """Number of queries of a block: fewer if a query has many positives."""
        for rows in _BLOCK_ROWS:
            if rows * self.most_positives <= _MAX_BLOCK_POSITIVES:
                return rows
        return _BLOCK_ROWS[-1]

    @cached_property
    def most_positives(self) -> int:
        """Number of images that share the label of a query, for the query that has most."""
        if len(self.query_labels) == 0:
            return 0
        return int((self._last - self._first).max())

    def extents(self) -> list[Extent]:
        """Where the positives of each block are."""
        rows = self.block_rows
        missing = -len(self._first) % rows
        first = pad(self._first, (0, missing), value=len(self.gallery_labels)).view(-1, rows)
        last = pad(self._last, (0, missing)).view(-1, rows)
        extents = torch.stack([first.amin(1), last.amax(1), (last - first).amax(1).clamp(min=1)], 1)
        return [Extent(*extent) for extent in extents.tolist()]

    def positives(self, queries: Int[Tensor, " query"], width: int) -> BlockPositives:
        """The positives of these queries, of which none has more than `width`."""
        column = self.columns(queries, width)
        is_padding = column >= self._last[queries, None]
        is_excluded = column == self.self_index[queries, None]
        level = self._shared_levels(queries, column)
        if self.query_cameras is not None and self.gallery_cameras is not None:
            cameras = self.gallery_cameras[column.clamp(max=len(self.gallery_cameras) - 1)]
            same_camera = cameras == self.query_cameras[queries, None]
            is_excluded |= same_camera & (level == self.query_labels.shape[1]) & ~is_padding
        return BlockPositives(column, level.masked_fill(is_excluded | is_padding, 0), is_excluded)

    def columns(self, queries: Int[Tensor, " query"], width: int) -> Int[Tensor, "query pos"]:
        """The indices of the images that share the coarsest label of each query, and of those after them."""
        return self._first[queries, None] + torch.arange(width, device=queries.device)

    def _shared_levels(
        self, queries: Int[Tensor, " query"], column: Int[Tensor, "query pos"]
    ) -> Int[Tensor, "query pos"]:
        """The number of label levels that each query shares with the images of its columns, which share the last."""
        if self.query_labels.shape[1] == 1:
            return torch.ones_like(column)
        labels = self.gallery_labels[column.clamp(max=len(self.gallery_labels) - 1)]  # (query, pos, level)
        return (labels == self.query_labels[queries, None]).sum(2)

    @cached_property
    def _first(self) -> Int[Tensor, " query"]:
        """The index of the first image that shares the coarsest label of each query."""
        return torch.searchsorted(*self._coarsest)

    @cached_property
    def _last(self) -> Int[Tensor, " query"]:
        """The index after the last image that shares the coarsest label of each query."""
        return torch.searchsorted(*self._coarsest, right=True)

    @property
    def _coarsest(self) -> tuple[Int[Tensor, " gallery"], Int[Tensor, " query"]]:
        return self.gallery_labels[:, -1].contiguous(), self.query_labels[:, -1].contiguous()
