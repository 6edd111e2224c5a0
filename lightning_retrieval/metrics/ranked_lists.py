"""`RankedLists`: what every evaluation ranks, and how images become its queries, gallery and lists."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_matrix
from lightning_retrieval.distributed import Shard
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.metrics.gathering import Images
from lightning_retrieval.ranking.entries import Entries
from lightning_retrieval.ranking.expansion import (
    DatabaseAugmentation,
    QueryExpansion,
    augmented_gallery,
    expanded_queries,
)
from lightning_retrieval.ranking.labels import Role, has_role
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.positive_ranks import positive_ranks
from lightning_retrieval.ranking.ranks import PositiveRanks, ieee_products
from lightning_retrieval.ranking.relevance import label_rule_of
from lightning_retrieval.ranking.rows import ShardedRows

_BLOCK_GALLERY = 1 << 14  # number of gallery images that are scored at a time


class ScoredPairs(NamedTuple):
    """The scores of a block of queries with a block of the gallery.

    Attributes:
        queries: positions of the queries.
        gallery: positions of the images of the gallery.
        scores: cosine similarities.
        relevant: which images are relevant candidates; with labels of several levels, those of the finest label.
        candidate: which images are in the list of the query.
    """

    queries: slice
    gallery: slice
    scores: Float[Tensor, "query gallery"]
    relevant: Bool[Tensor, "query gallery"]
    candidate: Bool[Tensor, "query gallery"]


@dataclass(frozen=True)
class RankedLists:
    """The ranked lists of an evaluation: queries and gallery, distributed over the processes, and each query's list.

    Queries and gallery are sorted by their labels, the coarsest level first, or by their ids if relevant images do not
    share labels.

    Attributes:
        queries: unit rows of the queries. `queries.all()` gathers all of them on every process.
        query_ids: dataset index of each query.
        gallery: unit rows of the gallery.
        gallery_ids: dataset index of each image of the gallery.
        self_index: for each query, the index of the query itself in the gallery, or -1 if it is not there.
        lists: which images are relevant to each query, and which are candidates.
    """

    queries: ShardedRows
    query_ids: Int[Tensor, " query"]
    gallery: ShardedRows
    gallery_ids: Int[Tensor, " gallery"]
    self_index: Int[Tensor, " query"]
    lists: Lists

    @property
    def shard(self) -> Shard:
        """The shard of this process."""
        return self.queries.shard

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no image in the gallery."""
        return len(self.query_ids) == 0 or len(self.gallery_ids) == 0

    def positive_ranks(self) -> Iterator[PositiveRanks]:
        """The ranks of the positives of this process's queries, one block of queries at a time; nothing if it is empty.

        With several processes, this is a collective operation.
        """
        if not self.is_empty:
            yield from positive_ranks(self.queries, self.gallery, Entries(self.lists))

    def score_blocks(self) -> Iterator[ScoredPairs]:
        """The scores of this process's queries with the gallery, block by block.

        With several processes, this is a collective operation.
        """
        device, lists = self.query_ids.device, self.lists.finest
        # The blocks do not depend on the number of processes, so neither do the last digits of the scores.
        for begin in range(0, len(self.gallery_ids), _BLOCK_GALLERY):
            end = min(begin + _BLOCK_GALLERY, len(self.gallery_ids))
            images = torch.arange(begin, end, device=device)
            gallery = self.gallery.range(begin, end).to(device)
            for queries, block in self.queries.blocks():
                with ieee_products():
                    scores = queries.to(device) @ gallery.T
                rows = torch.arange(block.start, block.stop, device=device)
                yield ScoredPairs(block, slice(begin, end), scores, *lists.masks(rows, images))


def queries_and_gallery(images: Images) -> RankedLists:
    """Split images by their roles, and sort queries and gallery by label if relevant images share labels.

    Args:
        images: the images of an evaluation set, each once.
    """
    rule, rows = images.rule, images.listed
    order = torch.arange(len(rows), device=images.ids.device)
    label_rule = label_rule_of(rule)
    if label_rule is not None:
        order = _order_by_label(label_rule.labels(rows.labels))
    roles = images.columns["roles"][order]
    query_rows = order[has_role(roles, Role.QUERY)]
    gallery_rows = order[has_role(roles, Role.GALLERY)]
    column_of_row = torch.full_like(order, -1)
    column_of_row[gallery_rows] = torch.arange(len(gallery_rows), device=order.device)
    self_index = column_of_row[query_rows]
    lists = Lists(rows.select(query_rows), rows.select(gallery_rows), rule, self_index=self_index)
    unit = Entries(lists).block_rows
    queries = gallery = images.embeddings.select(gallery_rows).sharded(unit)
    if not torch.equal(query_rows, gallery_rows):
        queries = images.embeddings.select(query_rows).sharded(unit)
    return RankedLists(queries, images.ids[query_rows], gallery, images.ids[gallery_rows], self_index, lists)


def post_processing(query_expansion: Any, database_augmentation: Any) -> str:
    """The post-processing as text, which is compared between processes.

    The text includes settings only for classes of this library.
    """
    shown = []
    for given in (query_expansion, database_augmentation):
        if isinstance(given, QueryExpansion | DatabaseAugmentation):
            shown.append(repr(given))
        else:
            shown.append(type(given).__name__)
    return f"query_expansion: {shown[0]}, database_augmentation: {shown[1]}"


def post_processed(
    ranked: RankedLists,
    query_expansion: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    database_augmentation: Callable[[Tensor], Tensor] | None,
) -> RankedLists:
    """Apply post-processing. With classes of this library, each process handles its shard, otherwise all rows.

    Args:
        ranked: queries and gallery, which may be empty.
        query_expansion: maps (queries, gallery, self_index) to new queries; None for no expansion.
        database_augmentation: maps a gallery to a new gallery, before the expansion; None for no augmentation.
    """
    if ranked.is_empty or (query_expansion is None and database_augmentation is None):
        return ranked
    queries, gallery, self_index = ranked.queries, ranked.gallery, ranked.self_index
    # The types must be equal, because a subclass may compute something else.
    if type(database_augmentation) is DatabaseAugmentation:
        alpha, k = database_augmentation.alpha, database_augmentation.k
        gallery = augmented_gallery(gallery, alpha=alpha, k=k, device=self_index.device)
    elif database_augmentation is not None:
        rows = gallery.all()
        gallery = gallery.with_rows(_checked("database_augmentation", database_augmentation(rows), rows))
    if type(query_expansion) is QueryExpansion:
        alpha, k = query_expansion.alpha, query_expansion.k
        queries = expanded_queries(queries, gallery, alpha=alpha, k=k, self_index=self_index)
    elif query_expansion is not None:
        rows, of_gallery = queries.all(), gallery.all()
        expanded = query_expansion(rows, of_gallery, self_index.to(of_gallery.device))
        queries = queries.with_rows(_checked("query_expansion", expanded, rows))
    return replace(ranked, queries=queries, gallery=gallery)


def _checked(name: str, result: Any, rows: Float[Tensor, "row dim"]) -> Float[Tensor, "row dim"]:
    """Return the result of post-processing; raise unless it has the shape, dtype and device of the rows."""
    check_matrix(f"{name}'s result", result)
    if result.shape != rows.shape or result.dtype != rows.dtype or result.device != rows.device:
        raise InvalidValue(
            f"`{name}'s result` must have the shape, dtype and device of the rows, {tuple(rows.shape)}, "
            f"{rows.dtype} and {rows.device}",
            got=f"{tuple(result.shape)}, {result.dtype} and {result.device}",
        )
    checked: Tensor = result
    return checked


def _order_by_label(labels: Int[Tensor, "row level"]) -> Int[Tensor, " row"]:
    """The order of rows by the coarsest label, then by the next finer label, and so on."""
    order = torch.arange(len(labels), device=labels.device)
    for level in range(labels.shape[1]):
        order = order[labels[order, level].argsort(stable=True)]
    return order
