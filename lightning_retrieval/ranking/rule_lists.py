"""The lists that a rule of relevance defines, which are found for a block of queries at a time.

With labels, the positives of a query are consecutive images of a sorted gallery (`LabelledLists`). Under another rule
they may be anywhere, and images that are not candidates are excluded. For `SharedTags`, the images that have each tag
are listed once, and the lists of a query's tags are merged. Any other rule is evaluated for a block of queries and all
images of the gallery. Only the positives and the excluded images of a block are kept.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.ranking.labels import BlockPositives, Extent, ListedBlock, PositiveLists
from lightning_retrieval.ranking.ranks import true_positions
from lightning_retrieval.ranking.relevance import (
    NO_TAG,
    GalleryOnly,
    OtherCamera,
    Relevance,
    SharedTags,
    is_multi_hot,
    tags_of_multi_hot,
    without_repeated,
)

_MAX_PAIRS = 1 << 22  # maximum number of pairs (query, image) for which a rule is evaluated at a time


def rule_of_evaluation(relevance: Relevance | None) -> Relevance | None:
    """The rule by which metrics evaluate a module with this rule, or None if they need none.

    Metrics need no rule for `OtherCamera` and `GalleryOnly`, since they get the cameras and the roles of all images.
    """
    if type(relevance) in (OtherCamera, GalleryOnly):
        return None
    return relevance


@dataclass(frozen=True)
class RuleLists(PositiveLists):
    """The lists of all queries under a rule of relevance.

    Args:
        relevance: the rule.
        query_labels: the columns that the rule reads of each query.
        gallery_labels: the columns that the rule reads of each image of the gallery.
        self_index: index of each query itself in the gallery, which is excluded from its list, or -1.
    """

    relevance: Relevance
    query_labels: Int[Tensor, "query column"]
    gallery_labels: Int[Tensor, "gallery column"]
    self_index: Int[Tensor, " query"]

    @property
    def levels(self) -> int:
        return 1

    @cached_property
    def most_positives(self) -> int:
        """An upper bound of the number of positives and excluded images of any query."""
        if len(self._bounds) == 0:
            return 0
        return int(self._bounds.max())

    def extents(self) -> list[Extent]:
        missing = -len(self._bounds) % self.block_rows
        widths = pad(self._bounds, (0, missing)).view(-1, self.block_rows).amax(1)
        return [Extent(0, len(self.gallery_labels), width) for width in widths.tolist()]

    def of_block(self, queries: Int[Tensor, " query"], width: int) -> ListedBlock:
        counts, columns, positives = [], [], []
        images = len(self.gallery_labels)
        for part in queries.split(self._queries_at_a_time):
            is_positive, is_listed = self._masks(part)
            found = true_positions(is_listed)
            counts.append(torch.bincount(found // images, minlength=len(part)))
            columns.append((found % images).int())
            positives.append(is_positive.flatten()[found])
        return _padded(torch.cat(counts), torch.cat(columns), torch.cat(positives))

    def _masks(
        self, queries: Int[Tensor, " query"]
    ) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"]]:
        """Which images are positives of these queries, and which are positives or excluded."""
        if self._tagged is None:
            is_positive, candidate = self.relevance.lists(self.query_labels[queries], self.gallery_labels)
            is_listed = is_positive | ~candidate
        else:
            is_positive = self._tagged.is_relevant(queries)
            is_listed = is_positive.clone()
        own = self.self_index[queries]
        row = (own >= 0).nonzero()[:, 0]
        is_positive[row, own[row]] = False
        is_listed[row, own[row]] = True
        return is_positive, is_listed

    @cached_property
    def _bounds(self) -> Int[Tensor, " query"]:
        """An upper bound of the number of positives and excluded images of each query."""
        images = len(self.gallery_labels)
        if self._tagged is None:
            return torch.full_like(self.self_index, images)
        return (self._tagged.entries + 1).clamp(max=images)  # the query itself may have no tag

    @cached_property
    def _queries_at_a_time(self) -> int:
        """The number of queries for which the rule is evaluated at a time."""
        most = len(self.gallery_labels)
        if self._tagged is not None and len(self._tagged.entries) > 0:
            most = max(most, int(self._tagged.entries.max()))
        return max(1, _MAX_PAIRS // max(1, most))

    @cached_property
    def _tagged(self) -> "_TaggedImages | None":
        """The images that have each tag, if the rule is `SharedTags`. A subclass may define other masks."""
        if type(self.relevance) is not SharedTags:
            return None
        return _TaggedImages(self.query_labels, self.gallery_labels, self.relevance.at_least)


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
