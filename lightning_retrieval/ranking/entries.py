"""The positives of each query, and the images excluded from its list, found for a block of queries at a time.

If relevant images share labels, the positives of a query are consecutive images of a gallery that is sorted by label.
Under another rule they may be anywhere, and images that are not candidates are excluded. For `SharedTags`, the images
that have each tag are listed once, and the lists of a query's tags are merged. Any other rule is evaluated for a block
of queries and all images of the gallery. Only the positives and the excluded images of a block are kept.

Every process has the labels of all queries and of the full gallery, so all processes derive the same blocks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.ranks import true_positions
from lightning_retrieval.ranking.relevance import (
    NO_TAG,
    LabelRule,
    SameLabel,
    SharedTags,
    is_multi_hot,
    tags_of_multi_hot,
    without_repeated,
)

_BLOCK_ROWS = (256, 128, 64)  # 64 or more: see `lightning_retrieval.ranking.ranked_lists`
_MAX_BLOCK_POSITIVES = 1 << 22
_MAX_PAIRS = 1 << 22  # maximum number of pairs (query, image) for which a rule is evaluated at a time


class Extent(NamedTuple):
    """The range of the gallery that holds the positives of a block of queries.

    Attributes:
        begin: index of the first image that is listed for any of the queries: with labels, the first that shares the
            coarsest label of a query.
        end: index after the last such image.
        width: the largest number of images that are listed for one query, at least 1, or a bound of this number.
        is_shared: whether each query lists all images of this range, or none, as in a block of queries of one class.
    """

    begin: int
    end: int
    width: int
    is_shared: bool = False


class BlockPositives(NamedTuple):
    """The images of `ListedBlock.columns`: which are positives of each query, and which are not in its list.

    Attributes:
        level: number of label levels that each image shares with the query; 0 at padding and for excluded images.
        is_excluded: whether an image is excluded from the query's list.
    """

    level: Integer[Tensor, "query pos"]
    is_excluded: Bool[Tensor, "query pos"]


class ListedBlock(ABC):
    """The positives of a block of queries, and images excluded from their lists, padded to the longest row.

    Attributes:
        width: number of columns, at least 1.
        excludes_several: whether several of these images may be excluded from one list.
    """

    width: int
    excludes_several: bool

    @abstractmethod
    def columns(self) -> Int[Tensor, "query pos"]:
        """The indices of these images in the gallery; arbitrary at padding."""

    @abstractmethod
    def positives(self) -> BlockPositives:
        """What each of these images is in the list of its query."""


class Entries(ABC):
    """The positives and the excluded images of all lists: what `positive_ranks` ranks.

    Args:
        lists: the lists, with the index of each query itself.

    Raises:
        ValueError: if the lists do not have these indices.
    """

    def __init__(self, lists: Lists) -> None:
        if lists.self_index is None:
            raise InvalidValue("must have a `self_index`", "Entries", "lists", got="None")
        self.lists, self.self_index = lists, lists.self_index

    @property
    @abstractmethod
    def most(self) -> int:
        """The largest number of images that a block lists for one query, or a bound of this number."""

    @abstractmethod
    def extents(self) -> list[Extent]:
        """The extent of the positives of each block."""

    @abstractmethod
    def of_block(self, queries: Int[Tensor, " query"], width: int) -> ListedBlock:
        """The positives of these queries, and the images excluded from their lists.

        Args:
            queries: indices of the queries of a block.
            width: the width of the block's extent. If the extent is shared, the columns are those of its images.
        """

    @cached_property
    def block_rows(self) -> int:
        """Number of queries in a block. Blocks are smaller if a query has many positives."""
        for rows in _BLOCK_ROWS:
            if rows * self.most <= _MAX_BLOCK_POSITIVES:
                return rows
        return _BLOCK_ROWS[-1]


def entries_of(lists: Lists) -> Entries:
    """The positives and the excluded images of all lists, found in the way that suits the rule.

    Args:
        lists: lists with a `self_index`. If relevant images share labels, the references must be sorted by the coarsest
            label.
    """
    if lists.label_rule is not None:
        return LabelEntries(lists, lists.label_rule)
    return RuleEntries(lists)


class LabelEntries(Entries):
    """The images that share the coarsest label of each query: consecutive images of the gallery.

    Args:
        lists: the lists.
        rule: their rule.
    """

    def __init__(self, lists: Lists, rule: LabelRule) -> None:
        super().__init__(lists)
        self.rule = rule
        labels = rule.labels(lists.ref_columns)[:, -1].contiguous()
        of_queries = rule.labels(lists.columns)[:, -1].contiguous()
        self.first: Int[Tensor, " query"] = torch.searchsorted(labels, of_queries)
        self.last: Int[Tensor, " query"] = torch.searchsorted(labels, of_queries, right=True)

    @cached_property
    def most(self) -> int:
        """The largest number of images that share the label of one query."""
        if len(self.first) == 0:
            return 0
        return int((self.last - self.first).max())

    def extents(self) -> list[Extent]:
        rows = self.block_rows
        missing = -len(self.first) % rows
        first = pad(self.first, (0, missing), value=self.lists.gallery).view(-1, rows)
        highest_first = pad(self.first, (0, missing)).view(-1, rows).amax(1)
        last = pad(self.last, (0, missing)).view(-1, rows)
        begin, end, width = first.amin(1), last.amax(1), (last - first).amax(1).clamp(min=1)
        is_shared = (begin == highest_first) & (width == end - begin)
        extents = torch.stack([begin, end, width, is_shared], 1)
        return [Extent(*extent) for extent in extents.tolist()]

    def of_block(self, queries: Int[Tensor, " query"], width: int) -> ListedBlock:
        return _LabelBlock(self, queries, width, excludes_several=not isinstance(self.rule, SameLabel))


@dataclass(frozen=True)
class _LabelBlock(ListedBlock):
    """The images that share the coarsest label of each query of a block."""

    entries: LabelEntries
    queries: Int[Tensor, " query"]
    width: int
    excludes_several: bool

    def columns(self) -> Int[Tensor, "query pos"]:
        """For each query, `width` consecutive indices from the first image on that shares its coarsest label."""
        return self.entries.first[self.queries, None] + torch.arange(self.width, device=self.queries.device)

    def positives(self) -> BlockPositives:
        entries, queries = self.entries, self.queries
        lists, first = entries.lists, entries.first[queries]
        offset = torch.arange(self.width, device=queries.device)  # from the first image; columns need more memory
        is_padding = offset >= (entries.last[queries] - first)[:, None]
        is_excluded = offset == (entries.self_index[queries] - first)[:, None]
        if lists.columns.shape[1] == 1:  # the images that are not padding share the only label
            level = torch.ones_like(is_padding, dtype=torch.int8)
        else:
            images = lists.ref_columns[self.columns().clamp(max=lists.gallery - 1)]  # (query, pos, column)
            level, candidate = entries.rule.of_pairs(lists.columns[queries, None], images)
            if candidate is not None:
                is_excluded |= ~candidate & ~is_padding
        return BlockPositives(level.masked_fill_(is_excluded | is_padding, 0), is_excluded)


class RuleEntries(Entries):
    """The positives and the excluded images of lists under any rule of relevance."""

    @cached_property
    def most(self) -> int:
        """An upper bound of the number of positives and excluded images of any query."""
        if len(self._bounds) == 0:
            return 0
        return int(self._bounds.max())

    def extents(self) -> list[Extent]:
        missing = -len(self._bounds) % self.block_rows
        widths = pad(self._bounds, (0, missing)).view(-1, self.block_rows).amax(1)
        return [Extent(0, self.lists.gallery, width) for width in widths.tolist()]

    def of_block(self, queries: Int[Tensor, " query"], width: int) -> ListedBlock:
        counts, columns, positives = [], [], []
        images = self.lists.gallery
        for part in queries.split(self._queries_at_a_time):
            is_positive, candidate = self._masks(part)
            found = true_positions(is_positive | ~candidate)
            counts.append(torch.bincount(found // images, minlength=len(part)))
            columns.append((found % images).int())
            positives.append(is_positive.flatten()[found])
        return _padded(torch.cat(counts), torch.cat(columns), torch.cat(positives))

    def _masks(
        self, queries: Int[Tensor, " query"]
    ) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"]]:
        """Which images are positives of these queries, and which are candidates."""
        if self._tagged is None:
            return self.lists.masks(queries)
        relevant = self._tagged.is_relevant(queries)
        candidate = torch.ones_like(relevant)
        self.lists.exclude_self(candidate, queries)
        return relevant & candidate, candidate

    @cached_property
    def _bounds(self) -> Int[Tensor, " query"]:
        """An upper bound of the number of positives and excluded images of each query."""
        images = self.lists.gallery
        if self._tagged is None:
            return torch.full_like(self.self_index, images)
        return (self._tagged.entries + 1).clamp(max=images)  # the query itself may have no tag

    @cached_property
    def _queries_at_a_time(self) -> int:
        """The number of queries for which the rule is evaluated at a time."""
        most = self.lists.gallery
        if self._tagged is not None and len(self._tagged.entries) > 0:
            most = max(most, int(self._tagged.entries.max()))
        return max(1, _MAX_PAIRS // max(1, most))

    @cached_property
    def _tagged(self) -> "_TaggedImages | None":
        """The images that have each tag, if the rule is `SharedTags`. A subclass may define other masks."""
        if not isinstance(self.lists.rule, SharedTags) or type(self.lists.rule) is not SharedTags:
            return None
        return _TaggedImages(self.lists.columns, self.lists.ref_columns, self.lists.rule.at_least)


@dataclass(frozen=True)
class _RuleBlock(ListedBlock):
    """The positives and the excluded images of a block of queries.

    Args:
        width: number of columns.
        column: indices of the images in the gallery, -1 at padding.
        is_positive: whether each image is a positive; otherwise it is excluded.
    """

    width: int
    column: Int[Tensor, "query pos"]
    is_positive: Bool[Tensor, "query pos"]
    excludes_several: bool = True

    def columns(self) -> Int[Tensor, "query pos"]:
        return self.column.long()

    def positives(self) -> BlockPositives:
        return BlockPositives(self.is_positive.long(), ~self.is_positive & (self.column >= 0))


def _padded(
    counts: Int[Tensor, " query"], columns: Int[Tensor, " entry"], is_positive: Bool[Tensor, " entry"]
) -> _RuleBlock:
    """A block from the entries of all of its queries, of which each query has some number."""
    width = max(1, int(counts.max()))
    is_entry = torch.arange(width, device=counts.device) < counts[:, None]
    padded = columns.new_full(is_entry.shape, -1).masked_scatter(is_entry, columns)
    return _RuleBlock(width, padded, torch.zeros_like(is_entry).masked_scatter(is_entry, is_positive))


class _TaggedImages:
    """The images of a gallery that have each tag, and where those of each query's tags are.

    Args:
        query_tags: tags of the queries, filled up with -1.
        gallery_tags: tags of the images of the gallery, filled up with -1.
        at_least: number of tags that relevant images share.
    """

    def __init__(
        self, query_tags: Int[Tensor, "query tag"], gallery_tags: Int[Tensor, "gallery tag"], at_least: int
    ) -> None:
        if is_multi_hot(gallery_tags, query_tags):
            gallery_tags, query_tags = tags_of_multi_hot(gallery_tags), tags_of_multi_hot(query_tags)
        gallery_tags, query_tags = without_repeated(gallery_tags), without_repeated(query_tags)
        row, position = (gallery_tags != NO_TAG).nonzero(as_tuple=True)
        tags, order = gallery_tags[row, position].sort(stable=True)
        self._images, self._at_least = len(gallery_tags), at_least
        self._image = row[order]  # the images of the lowest tag, then those of the next, and so on
        self._first = torch.searchsorted(tags, query_tags)  # no image is listed for -1
        self._number = torch.searchsorted(tags, query_tags, right=True) - self._first
        self.entries: Int[Tensor, " query"] = self._number.sum(1)  # images of all tags of each query, some repeatedly

    def is_relevant(self, queries: Int[Tensor, " query"]) -> Bool[Tensor, "query gallery"]:
        """Whether each image shares enough tags with each of these queries."""
        number = self._number[queries].flatten()
        shift = self._first[queries].flatten() - (number.cumsum(0) - number)
        entry = torch.arange(int(number.sum()), device=queries.device) + shift.repeat_interleave(number)
        row = torch.arange(len(queries), device=queries.device).repeat_interleave(self.entries[queries])
        pairs = len(queries) * self._images
        shared = torch.bincount(row * self._images + self._image[entry], minlength=pairs)
        return (shared >= self._at_least).view(len(queries), self._images)
