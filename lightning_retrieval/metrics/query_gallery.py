"""Queries and gallery of an evaluation set: how they are split, sorted and post-processed for ranking."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_matrix
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
from lightning_retrieval.ranking.ranks import PositiveRanks
from lightning_retrieval.ranking.relevance import label_rule_of
from lightning_retrieval.ranking.rows import ShardedRows


@dataclass(frozen=True)
class RankingInput:
    """What a metric ranks: the rows of queries and gallery, and the list of each query.

    Queries and gallery are sorted by their labels, the coarsest level first, or by their ids if relevant images do not
    share labels.

    Attributes:
        query_rows: unit rows of the queries, distributed over the processes.
        query_ids: dataset index of each query.
        gallery_rows: unit rows of the gallery, distributed over the processes.
        gallery_ids: dataset index of each image of the gallery.
        self_index: for each query, the index of the query itself in the gallery, or -1 if it is not there.
        lists: the list of each query: which images are relevant, and which are candidates.
    """

    query_rows: ShardedRows
    query_ids: Int[Tensor, " query"]
    gallery_rows: ShardedRows
    gallery_ids: Int[Tensor, " gallery"]
    self_index: Int[Tensor, " query"]
    lists: Lists

    @property
    def queries(self) -> Float[Tensor, "query dim"]:
        """Unit rows of all queries.

        With several processes, this is a collective operation that needs memory for all rows.
        """
        return self.query_rows.all()

    @property
    def gallery(self) -> Float[Tensor, "gallery dim"]:
        """Unit rows of the gallery.

        With several processes, this is a collective operation that needs memory for all rows.
        """
        return self.gallery_rows.all()

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no image in the gallery."""
        return len(self.query_rows) == 0 or len(self.gallery_rows) == 0

    def positive_ranks(self) -> Iterator[PositiveRanks]:
        """The ranks of the positives of this process's queries, one block of queries at a time.

        With several processes, this is a collective operation.
        """
        return positive_ranks(self.query_rows, self.gallery_rows, Entries(self.lists))


def query_gallery(images: Images, *, unit: int | None = None) -> RankingInput:
    """Split images into queries and gallery, and sort both by label if relevant images share labels.

    Args:
        images: the images of an evaluation set.
        unit: number of rows in a block; blocks are distributed over the processes. None for the number of rows
            that `positive_ranks` needs.
    """
    rule, rows = images.rule, images.listed
    order = torch.arange(len(rows), device=images.ids.device)
    label_rule = label_rule_of(rule)
    if label_rule is not None:
        order = _order_by_label(label_rule.labels(rows.labels))
    roles = images.columns["roles"][order]
    query_rows = order[has_role(roles, Role.QUERY)]
    gallery_rows = order[has_role(roles, Role.GALLERY)]
    if torch.equal(query_rows, gallery_rows):
        query_rows = gallery_rows
    column_of_row = torch.full_like(order, -1)
    column_of_row[gallery_rows] = torch.arange(len(gallery_rows), device=order.device)
    self_index = column_of_row[query_rows]
    lists = Lists(rows.select(query_rows), rows.select(gallery_rows), rule, self_index=self_index)
    if unit is None:
        unit = Entries(lists).block_rows
    queries = gallery = images.embeddings.select(gallery_rows).sharded(unit)
    if query_rows is not gallery_rows:
        queries = images.embeddings.select(query_rows).sharded(unit)
    return RankingInput(
        query_rows=queries,
        query_ids=images.ids[query_rows],
        gallery_rows=gallery,
        gallery_ids=images.ids[gallery_rows],
        self_index=self_index,
        lists=lists,
    )


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
    lists: RankingInput,
    query_expansion: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    database_augmentation: Callable[[Tensor], Tensor] | None,
) -> RankingInput:
    """Apply post-processing. With classes of this library, each process handles its shard, otherwise all rows.

    Args:
        lists: queries and gallery, which may be empty.
        query_expansion: maps (queries, gallery, self_index) to new queries; None for no expansion.
        database_augmentation: maps a gallery to a new gallery, before the expansion; None for no augmentation.
    """
    if lists.is_empty or (query_expansion is None and database_augmentation is None):
        return lists
    # The types must be equal, because a subclass may compute something else.
    is_own_augmentation = database_augmentation is None or type(database_augmentation) is DatabaseAugmentation
    if is_own_augmentation and (query_expansion is None or type(query_expansion) is QueryExpansion):
        return _expanded_in_shards(lists, query_expansion, database_augmentation)
    queries, gallery = lists.queries, lists.gallery
    if database_augmentation is not None:
        augmented = database_augmentation(gallery)
        gallery = _checked("database_augmentation", augmented, gallery)
    if query_expansion is not None:
        expanded = query_expansion(queries, gallery, lists.self_index.to(gallery.device))
        queries = _checked("query_expansion", expanded, queries)
    return replace(
        lists, query_rows=lists.query_rows.with_rows(queries), gallery_rows=lists.gallery_rows.with_rows(gallery)
    )


def _expanded_in_shards(lists: RankingInput, expansion: Any, augmentation: Any) -> RankingInput:
    """Apply post-processing of this library: each process expands the rows of its shard."""
    queries, gallery = lists.query_rows, lists.gallery_rows
    if isinstance(augmentation, DatabaseAugmentation):
        device = lists.self_index.device
        gallery = augmented_gallery(gallery, alpha=augmentation.alpha, k=augmentation.k, device=device)
    if isinstance(expansion, QueryExpansion):
        queries = expanded_queries(queries, gallery, alpha=expansion.alpha, k=expansion.k, self_index=lists.self_index)
    return replace(lists, query_rows=queries, gallery_rows=gallery)


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
