"""Labels and roles of the images of an evaluation set, and the positives that follow from them.

Labels with several levels have shape (rows, levels), finest level first; each label belongs to one label of the next
level. Every process has the labels of all queries and of the full gallery, so all processes derive the same blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.checks import CURE_OF_ONE_HOT, check_counts, short_repr


class Role(IntFlag):
    """The role of an image in an evaluation set.

    Roles are stored as integers in tensors and arrays: 1 query, 2 gallery, 3 both. An image without a role, 0, is junk:
    it is neither a query nor a candidate.

    Example:
        >>> from lightning_retrieval.ranking.labels import Role
        >>> Role.QUERY | Role.GALLERY == Role.BOTH
        True
        >>> int(Role.BOTH)
        3
    """

    JUNK = 0
    QUERY = 1
    GALLERY = 2
    BOTH = 3


def has_role(roles: Integer[Tensor, " row"], role: Role) -> Bool[Tensor, " row"]:
    """Whether each row has this role, alone or with the other role. `Role.BOTH` stands for any role."""
    found: Tensor = (roles & int(role)) > 0
    return found


def check_roles(owner: str, roles: Integer[Tensor, " row"]) -> None:
    """Raise unless all roles are from 0 to 3."""
    if bool(((roles < Role.JUNK) | (roles > Role.BOTH)).any()):
        raise ValueError(
            f"{owner}: `roles` must be from 0 to 3 (1 query, 2 gallery, 3 both, 0 neither), got {int(roles.min())} to "
            f"{int(roles.max())}."
        )


def check_dims(owner: str, dims: Sequence[int], *, may_be_empty: bool = False) -> tuple[int, ...]:
    """The numbers of dimensions as a tuple; raise unless they are integers >= 1 in ascending order.

    Args:
        owner: prefix of error messages.
        dims: numbers of dimensions to which embeddings are shortened.
        may_be_empty: whether `dims` may be empty.
    """
    checked = check_counts(owner, "dims", dims, may_be_empty=may_be_empty)
    if list(checked) != sorted(set(checked)):
        raise ValueError(f"{owner}: `dims` must be different numbers in ascending order, got {short_repr(dims)}.")
    return checked


def check_dims_fit(owner: str, dims: tuple[int, ...], embeddings: Float[Tensor, "batch dim"]) -> None:
    """Raise if one of `dims` is larger than the dimension of the embeddings.

    Args:
        owner: prefix of error messages.
        dims: in ascending order; may be empty.
        embeddings: one row for each item.
    """
    dim = embeddings.shape[1]
    if dims and dims[-1] > dim:
        raise ValueError(
            f"{owner}: `dims` must be at most the dimension of the embeddings, {dim}, got {dims[-1]}; give smaller "
            "`dims`, or train embeddings of more dimensions."
        )


_BLOCK_ROWS = (256, 128, 64)  # 64 or more: see `lightning_retrieval.ranking.ranked_lists`
_MAX_BLOCK_POSITIVES = 1 << 22


class Extent(NamedTuple):
    """The range of the gallery that holds the positives of a block of queries.

    Attributes:
        begin: index of the first image that is listed for any of the queries: with labels, the first that shares the
            coarsest label of a query.
        end: index after the last such image.
        width: the largest number of images that are listed for one query, at least 1, or a bound of this number.
    """

    begin: int
    end: int
    width: int


class BlockPositives(NamedTuple):
    """The images of `ListedBlock.columns`: which are positives of each query, and which are not in its list.

    Attributes:
        level: number of label levels that each image shares with the query; 0 at padding and for excluded images.
        is_excluded: whether an image is excluded from the query's list.
    """

    level: Int[Tensor, "query pos"]
    is_excluded: Bool[Tensor, "query pos"]


class ListedBlock(ABC):
    """The positives of a block of queries, and images excluded from their lists, padded to the longest row.

    Attributes:
        width: number of columns, at least 1.
    """

    width: int

    @property
    @abstractmethod
    def excludes_several(self) -> bool:
        """Whether several of these images may be excluded from one list."""

    @abstractmethod
    def columns(self) -> Int[Tensor, "query pos"]:
        """The indices of these images in the gallery; arbitrary at padding."""

    @abstractmethod
    def positives(self) -> BlockPositives:
        """What each of these images is in the list of its query."""


class PositiveLists(ABC):
    """The lists of all queries: what `positive_ranks` ranks. Images are relevant by label or by another rule."""

    query_labels: Int[Tensor, "query level"]

    @property
    @abstractmethod
    def levels(self) -> int:
        """The number of levels of relevance."""

    @property
    @abstractmethod
    def most_positives(self) -> int:
        """The largest number of images that a block lists for one query, or a bound of this number."""

    @abstractmethod
    def extents(self) -> list[Extent]:
        """The extent of the positives of each block."""

    @abstractmethod
    def of_block(self, queries: Int[Tensor, " query"], width: int) -> ListedBlock:
        """The positives of these queries, and the images excluded from their lists.

        Args:
            queries: indices of the queries of a block.
            width: the width of the block's extent.
        """

    @cached_property
    def block_rows(self) -> int:
        """Number of queries in a block. Blocks are smaller if a query has many positives."""
        for rows in _BLOCK_ROWS:
            if rows * self.most_positives <= _MAX_BLOCK_POSITIVES:
                return rows
        return _BLOCK_ROWS[-1]


@dataclass(frozen=True)
class LabelledLists(PositiveLists):
    """The labels and the cameras of all queries and of the gallery.

    Args:
        query_labels: any integers, finest level first. Candidates that share the last level are positives.
        gallery_labels: sorted by the last level.
        self_index: index of each query itself in the gallery, which is excluded from its list, or -1.
        query_cameras: the camera of each query, or None. Images with the query's finest label and camera are excluded
            from its list.
        gallery_cameras: the camera of each image of the gallery; given together with `query_cameras`.
    """

    query_labels: Int[Tensor, "query level"]
    gallery_labels: Int[Tensor, "gallery level"]
    self_index: Int[Tensor, " query"]
    query_cameras: Int[Tensor, " query"] | None = None
    gallery_cameras: Int[Tensor, " gallery"] | None = None

    @property
    def levels(self) -> int:
        return self.query_labels.shape[1]

    @cached_property
    def most_positives(self) -> int:
        """The largest number of images that share the label of one query."""
        if len(self.query_labels) == 0:
            return 0
        return int((self.last - self.first).max())

    def extents(self) -> list[Extent]:
        rows = self.block_rows
        missing = -len(self.first) % rows
        first = pad(self.first, (0, missing), value=len(self.gallery_labels)).view(-1, rows)
        last = pad(self.last, (0, missing)).view(-1, rows)
        extents = torch.stack([first.amin(1), last.amax(1), (last - first).amax(1).clamp(min=1)], 1)
        return [Extent(*extent) for extent in extents.tolist()]

    def of_block(self, queries: Int[Tensor, " query"], width: int) -> ListedBlock:
        return _LabelledBlock(self, queries, width)

    @cached_property
    def first(self) -> Int[Tensor, " query"]:
        """The index of the first image that shares the coarsest label of each query."""
        return torch.searchsorted(*self._coarsest)

    @cached_property
    def last(self) -> Int[Tensor, " query"]:
        """The index after the last image that shares the coarsest label of each query."""
        return torch.searchsorted(*self._coarsest, right=True)

    @property
    def _coarsest(self) -> tuple[Int[Tensor, " gallery"], Int[Tensor, " query"]]:
        return self.gallery_labels[:, -1].contiguous(), self.query_labels[:, -1].contiguous()


@dataclass(frozen=True)
class _LabelledBlock(ListedBlock):
    """The images that share the coarsest label of each query of a block: consecutive images of the gallery."""

    lists: LabelledLists
    queries: Int[Tensor, " query"]
    width: int

    @property
    def excludes_several(self) -> bool:
        """True if there are cameras; otherwise, only the query itself is excluded."""
        return self.lists.query_cameras is not None

    def columns(self) -> Int[Tensor, "query pos"]:
        """For each query, `width` consecutive indices from the first image on that shares its coarsest label."""
        return self.lists.first[self.queries, None] + torch.arange(self.width, device=self.queries.device)

    def positives(self) -> BlockPositives:
        lists, queries, column = self.lists, self.queries, self.columns()
        is_padding = column >= lists.last[queries, None]
        is_excluded = column == lists.self_index[queries, None]
        level = self._shared_levels(column)
        if lists.query_cameras is not None and lists.gallery_cameras is not None:
            cameras = lists.gallery_cameras[column.clamp(max=len(lists.gallery_cameras) - 1)]
            same_camera = cameras == lists.query_cameras[queries, None]
            is_excluded |= same_camera & (level == lists.levels) & ~is_padding
        return BlockPositives(level.masked_fill(is_excluded | is_padding, 0), is_excluded)

    def _shared_levels(self, column: Int[Tensor, "query pos"]) -> Int[Tensor, "query pos"]:
        """The number of label levels that each query shares with the images of its columns; meaningless at padding."""
        lists = self.lists
        if lists.levels == 1:
            return torch.ones_like(column, dtype=torch.int8)
        labels = lists.gallery_labels[column.clamp(max=len(lists.gallery_labels) - 1)]  # (query, pos, level)
        return (labels == lists.query_labels[self.queries, None]).sum(2)


def finest(labels: Int[Tensor, "row ..."]) -> Int[Tensor, " row"]:
    """The labels of the finest level; labels without levels are returned unchanged."""
    if labels.ndim == 1:
        return labels
    return labels[:, 0]


def check_nesting(owner: str, labels: Int[Tensor, "row level"]) -> None:
    """Raise an error if a label occurs with two different labels of the next coarser level."""
    if labels.shape[1] == 1:
        return
    unique = torch.unique(labels, dim=0)
    for level in range(labels.shape[1] - 1):
        pairs = torch.unique(unique[:, level : level + 2], dim=0)
        fine, coarse = pairs.unbind(1)
        repeated = fine[1:][fine[1:] == fine[:-1]]
        if len(repeated) > 0:
            cure = "; if the columns are not levels, give the rule of `relevance` that reads them"
            if bool(((unique == 0) | (unique == 1)).all()):
                cure = f"; {CURE_OF_ONE_HOT}"
            raise ValueError(
                f"{owner}: label levels must nest, each label of level {level} within one of level {level + 1}, got "
                f"label {int(repeated[0])} within {coarse[fine == repeated[0]].tolist()}{cure}."
            )
