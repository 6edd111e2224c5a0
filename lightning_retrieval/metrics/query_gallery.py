"""Queries and gallery of an evaluation set, as they are ranked."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_matrix
from lightning_retrieval.metrics.gathering import Rows, Shard
from lightning_retrieval.ranking.ranks import PositiveRanks, positive_ranks
from lightning_retrieval.ranking.roles import Role, has_role


class QueryGallery(NamedTuple):
    """Queries and gallery after post-processing, both sorted by their labels, the coarsest level first.

    Attributes:
        queries: unit rows.
        query_ids: dataset index of each query.
        query_labels: finest level first.
        gallery: unit rows.
        gallery_ids: dataset index of each image of the gallery.
        gallery_labels: finest level first.
        self_index: index of each query itself in the gallery, or -1 if it is not there.
        query_cameras: the camera of each query, or None.
        gallery_cameras: the camera of each image of the gallery, or None.
    """

    queries: Float[Tensor, "query dim"]
    query_ids: Int[Tensor, " query"]
    query_labels: Int[Tensor, "query level"]
    gallery: Float[Tensor, "gallery dim"]
    gallery_ids: Int[Tensor, " gallery"]
    gallery_labels: Int[Tensor, "gallery level"]
    self_index: Int[Tensor, " query"]
    query_cameras: Int[Tensor, " query"] | None = None
    gallery_cameras: Int[Tensor, " gallery"] | None = None

    def positive_ranks(self, shard: Shard) -> Iterator[PositiveRanks]:
        """The ranks of the positives of the queries of a shard, one block of queries at a time."""
        return positive_ranks(
            self.queries,
            self.query_labels,
            self.gallery,
            self.gallery_labels,
            self.self_index,
            query_cameras=self.query_cameras,
            gallery_cameras=self.gallery_cameras,
            shard=shard.index,
            num_shards=shard.count,
        )


def query_gallery(
    rows: Rows,
    query_expansion: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    database_augmentation: Callable[[Tensor], Tensor] | None = None,
    *,
    owner: str = "query_gallery",
) -> QueryGallery:
    """Split rows by their roles, sort both parts by label, and post-process the gallery and then the queries.

    Args:
        rows: the images of an evaluation set.
        query_expansion: from (queries, gallery, self_index) to new queries; none if None.
        database_augmentation: from a gallery to a new one, applied first; none if None.
        owner: prefix of error messages.
    """
    order = _order_by_label(rows.labels)
    query_rows = order[has_role(rows.roles[order], Role.QUERY)]
    gallery_rows = order[has_role(rows.roles[order], Role.GALLERY)]
    if torch.equal(query_rows, gallery_rows):
        query_rows = gallery_rows
    column_of_row = torch.full_like(order, -1)
    column_of_row[gallery_rows] = torch.arange(len(gallery_rows), device=order.device)
    self_index = column_of_row[query_rows]
    device = rows.embeddings.device
    queries = gallery = rows.embeddings.select(gallery_rows).tensor()
    if query_rows is not gallery_rows:
        queries = rows.embeddings.select(query_rows).tensor()
    if len(queries) > 0 and len(gallery) > 0:
        if database_augmentation is not None:
            augmented = database_augmentation(gallery)
            gallery = _checked(owner, "database_augmentation's result", augmented, gallery)
        if query_expansion is not None:
            expanded = query_expansion(queries, gallery, self_index.to(device))
            queries = _checked(owner, "query_expansion's result", expanded, queries)
    lists = QueryGallery(
        queries=queries,
        query_ids=rows.ids[query_rows],
        query_labels=rows.labels[query_rows],
        gallery=gallery,
        gallery_ids=rows.ids[gallery_rows],
        gallery_labels=rows.labels[gallery_rows],
        self_index=self_index,
    )
    if rows.cameras is None:
        return lists
    return lists._replace(query_cameras=rows.cameras[query_rows], gallery_cameras=rows.cameras[gallery_rows])


def _checked(owner: str, name: str, result: Any, rows: Float[Tensor, "row dim"]) -> Float[Tensor, "row dim"]:
    """Return what post-processing made of rows; raise unless it has their shape, dtype and device."""
    check_matrix(owner, name, result)
    if result.shape != rows.shape or result.dtype != rows.dtype or result.device != rows.device:
        raise ValueError(
            f"{owner}: `{name}` must have the shape, dtype and device of the rows, {tuple(rows.shape)}, {rows.dtype} "
            f"and {rows.device}, got {tuple(result.shape)}, {result.dtype} and {result.device}."
        )
    checked: Tensor = result
    return checked


def _order_by_label(labels: Int[Tensor, "row level"]) -> Int[Tensor, " row"]:
    """The rows sorted by the coarsest level, rows of one coarse label by the next finer one, and so on."""
    order = torch.arange(len(labels), device=labels.device)
    for level in range(labels.shape[1]):
        order = order[labels[order, level].argsort(stable=True)]
    return order
