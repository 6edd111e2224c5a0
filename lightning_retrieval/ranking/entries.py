"""The positives of each query, and the images excluded from its list, found for a block of queries at a time.

If relevant images share labels, they are consecutive images of a gallery that is sorted by label, so sorting finds
them. Any other rule is evaluated for a block of queries and all images of the gallery: then positives and excluded
images may be anywhere. Only the positives and the excluded images of a block are kept.

Every process has the labels of all queries and of the full gallery, so all processes derive the same blocks.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.ranks import true_positions
from lightning_retrieval.ranking.relevance import LabelRule, SameLabel

_BLOCK_ROWS = (256, 128, 64)  # 64 or more: see `lightning_retrieval.ranking.positive_ranks`
_MAX_BLOCK_POSITIVES = 1 << 22
_MAX_PAIRS = 1 << 22  # maximum number of pairs (query, image) for which a rule is evaluated at a time


class Extent(NamedTuple):
    """The range of the gallery that holds the positives of a block of queries.

    Attributes:
        begin: index of the first image that may be a positive or excluded: with labels, the first that shares the
            coarsest label of a query.
        end: index after the last such image.
        width: the largest number of such images of one query, or a bound of it, at least 1.
        is_shared: whether sorting has shown that each query has all images of this range, or none, as in a block of
            queries of one class.
    """

    begin: int
    end: int
    width: int
    is_shared: bool


class ListedImages(NamedTuple):
    """The positives of each query of a block, and the images excluded from its list, padded to the longest row.

    Attributes:
        column: index of each image in the gallery, arbitrary at padding; None for all images of a shared extent.
        level: number of label levels that each image shares with the query; 0 at padding and for excluded images.
        is_excluded: whether each image is excluded from the query's list.
    """

    column: Int[Tensor, "query pos"] | None
    level: Shaped[Tensor, "query pos"]
    is_excluded: Bool[Tensor, "query pos"]


class Entries:
    """The positives and the excluded images of all lists: what `positive_ranks` ranks.

    Args:
        lists: lists with a `self_index`. If relevant images share labels, the references must be sorted by the coarsest
            label.

    Attributes:
        first: for each query, the first image that may be a positive or excluded.
        last: for each query, the index after the last such image.
        number: for each query, an upper bound of the number of such images.
        excludes_several: whether several images may be excluded from one list.
    """

    def __init__(self, lists: Lists) -> None:
        self.lists = lists
        self.self_index: Any = lists.self_index
        self.excludes_several = not isinstance(lists.label_rule, SameLabel)
        self.first = torch.zeros(len(lists.queries), dtype=torch.int64, device=lists.device)
        self.last = torch.full_like(self.first, lists.gallery)
        if lists.label_rule is not None:
            labels = lists.label_rule.labels(lists.ref_columns)[:, -1].contiguous()
            of_queries = lists.label_rule.labels(lists.columns)[:, -1].contiguous()
            self.first = torch.searchsorted(labels, of_queries)
            self.last = torch.searchsorted(labels, of_queries, right=True)
        self.number = self.last - self.first
        if lists.label_rule is None:
            at_most = lists.rule.at_most(lists.columns, lists.ref_columns)
            self.number = (at_most + 1).clamp(max=lists.gallery)  # the query itself is excluded

    @cached_property
    def most(self) -> int:
        """The largest number of images that may be positives of one query or excluded from its list."""
        if len(self.first) == 0:
            return 0
        return int(self.number.max())

    @cached_property
    def block_rows(self) -> int:
        """Number of queries in a block. Blocks are smaller if a query has many positives."""
        for rows in _BLOCK_ROWS:
            if rows * self.most <= _MAX_BLOCK_POSITIVES:
                return rows
        return _BLOCK_ROWS[-1]

    def extents(self) -> list[Extent]:
        """The extent of the positives of each block."""
        rows = self.block_rows
        missing = -len(self.first) % rows
        first = pad(self.first, (0, missing), value=self.lists.gallery).view(-1, rows)
        highest_first = pad(self.first, (0, missing)).view(-1, rows).amax(1)
        last = pad(self.last, (0, missing)).view(-1, rows)
        begin, end = first.amin(1), last.amax(1)
        width = pad(self.number, (0, missing)).view(-1, rows).amax(1).clamp(min=1)
        is_shared = (begin == highest_first) & (width == end - begin)
        is_shared &= self.lists.label_rule is not None
        extents = torch.stack([begin, end, width, is_shared], 1)
        return [Extent(*extent) for extent in extents.tolist()]

    def of_block(self, queries: Int[Tensor, " query"], extent: Extent) -> ListedImages:
        """The positives of these queries, and the images excluded from their lists.

        Args:
            queries: indices of the queries of a block.
            extent: the extent of the block.
        """
        if self.lists.label_rule is None:
            return self._by_masks(queries)
        return self._of_equal_labels(self.lists.label_rule, queries, extent)

    def _of_equal_labels(self, rule: LabelRule, queries: Int[Tensor, " query"], extent: Extent) -> ListedImages:
        """For each query, consecutive images from the first one on that shares its coarsest label."""
        lists, first = self.lists, self.first[queries, None]
        offset = torch.arange(extent.width, device=queries.device)  # from the first image; columns need more memory
        is_padding = offset >= self.last[queries, None] - first
        is_excluded = offset == self.self_index[queries, None] - first
        column = None
        if not extent.is_shared:
            column = (first + offset).int()
        level = torch.ones_like(is_padding, dtype=torch.int8)
        if lists.columns.shape[1] > 1:  # otherwise the images that are not padding share the only label
            images = lists.ref_columns[(first + offset).clamp(max=lists.gallery - 1)]  # (query, pos, column)
            level, candidate = rule.of_pairs(lists.columns[queries, None], images)
            if candidate is not None:
                is_excluded |= ~candidate & ~is_padding
        return ListedImages(column, level.masked_fill_(is_excluded | is_padding, 0), is_excluded)

    def _by_masks(self, queries: Int[Tensor, " query"]) -> ListedImages:
        """The images of the gallery that any rule calls relevant, or no candidates."""
        images = self.lists.gallery
        counts, columns, positives = [], [], []
        for part in queries.split(max(1, _MAX_PAIRS // max(1, images))):
            relevant, candidate = self.lists.masks(part)
            found = true_positions(relevant | ~candidate)
            counts.append(torch.bincount(found // images, minlength=len(part)))
            columns.append((found % images).int())
            positives.append(relevant.flatten()[found])
        count, is_positive = torch.cat(counts), torch.cat(positives)
        width = max(1, int(count.max()))
        is_image = torch.arange(width, device=count.device) < count[:, None]  # False at padding
        column = torch.zeros_like(is_image, dtype=torch.int32).masked_scatter(is_image, torch.cat(columns))
        level = torch.zeros_like(is_image).masked_scatter(is_image, is_positive)
        return ListedImages(column, level, is_image & ~level)
