"""Query expansion and database augmentation: rows are moved towards their nearest neighbours before they are ranked.

    database         each gallery row d becomes d + sum over its k nearest d' of s^alpha d', normalised
    query            q + sum over its k nearest d of s^alpha d, normalised (Radenovic, Tolias, Chum, TPAMI 2019)

Symbols: s the cosine similarity, `alpha` the exponent, `k` the number of neighbours. As in the official code, s is not
clamped, so that with an even `alpha` a negative s has the same weight as the positive one. If `alpha` is not an
integer, the power of a negative s does not exist (NaN in the official code); its weight is 0 here. Of rows with equal
similarity, those that come first in the gallery are the nearest.

`QueryExpansion` and `DatabaseAugmentation` are the public way to use both; the functions hold their arithmetic.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_device, check_embeddings, check_integer, check_integers, check_not_negative
from lightning_retrieval.ranking.nearest_rows import nearest_rows
from lightning_retrieval.ranking.precision import ieee_products
from lightning_retrieval.ranking.sharded_rows import ShardedRows, unsharded
from lightning_retrieval.ranking.similarity import normalize

_BLOCK_ROWS = 256  # that are expanded at a time, or fewer if their neighbours are many numbers
_BLOCK_NUMBERS = 1 << 26


def expanded_queries(
    queries: ShardedRows, gallery: ShardedRows, *, alpha: float, k: int, self_index: Int[Tensor, " all"]
) -> ShardedRows:
    """Alpha query expansion of unit rows: each query plus its `k` nearest gallery rows, weighted by similarity^alpha.

    This is a collective operation if the rows are sharded. It has the same result on any number of processes.

    Args:
        queries: unit rows.
        gallery: unit rows, sharded over the same processes.
        alpha: exponent, >= 0.
        k: number of neighbours, >= 1; all rows if the gallery has fewer.
        self_index: of all queries: index of the query's own row in the gallery, which is not one of its neighbours, or
            -1. The work is done on its device.
    """
    return _expand(queries, gallery, alpha=alpha, k=k, self_index=self_index, self_score=-torch.inf)


def augmented_gallery(gallery: ShardedRows, *, alpha: float, k: int, device: torch.device) -> ShardedRows:
    """Database augmentation of unit rows: each row plus its `k` nearest other rows, weighted by similarity^alpha.

    As in the official code, the similarity of a row with itself counts as 0. So it can be one of its own neighbours if
    fewer than `k` other rows have a positive similarity; its weight is then 0, or 1 if `alpha` is 0.

    This is a collective operation if the rows are sharded. It has the same result on any number of processes.

    Args:
        gallery: unit rows.
        alpha: exponent, >= 0.
        k: number of neighbours, >= 1; all rows if the gallery has fewer.
        device: on which the work is done.
    """
    self_index = torch.arange(len(gallery), device=device)
    return _expand(gallery, gallery, alpha=alpha, k=k, self_index=self_index, self_score=0.0)


def _expand(
    queries: ShardedRows,
    gallery: ShardedRows,
    *,
    alpha: float,
    k: int,
    self_index: Int[Tensor, " all"],
    self_score: float,
) -> ShardedRows:
    """Expand block by block; `self_score` replaces the similarity of a query with its own row."""
    k = min(k, len(gallery))
    with torch.no_grad():
        nearest = nearest_rows(queries, gallery, k, self_index=self_index, self_score=self_score)
    block_rows = min(_BLOCK_ROWS, max(1, _BLOCK_NUMBERS // max(1, k * gallery.local.shape[1])))
    blocks = [local for local, _ in queries.parts(block_rows)]
    blocks += [slice(0, 0)] * (queries.most_parts(block_rows) - len(blocks))  # others fetch rows of this process
    expanded = torch.empty_like(queries.local)
    for block in blocks:
        neighbours = gallery.fetch(nearest.positions[block]).to(self_index.device)  # (query, k, dim)
        rows = queries.local[block].to(self_index.device)
        s = _similarities(nearest.scores[block], rows, neighbours)
        with ieee_products():
            summed = (_weights(s, alpha)[:, None] @ neighbours)[:, 0]  # (query, dim)
        expanded[block] = normalize(rows + summed)
    return replace(queries, local=expanded)


def _similarities(
    scores: Float[Tensor, "query k"], queries: Float[Tensor, "query dim"], neighbours: Float[Tensor, "query k dim"]
) -> Float[Tensor, "query k"]:
    """The scores of the neighbours, with the gradient of the rows if they have one.

    The scores were found without a gradient. They are computed again for it, and have the same values with it. That of
    a row with itself changes only with its length, which is 1 after the normalisation of the rows.
    """
    if not (torch.is_grad_enabled() and (queries.requires_grad or neighbours.requires_grad)):
        return scores
    with ieee_products():
        again = (neighbours @ queries[:, :, None])[:, :, 0]
    return scores + (again - again.detach())


def _weights(s: Float[Tensor, "query k"], alpha: float) -> Float[Tensor, "query k"]:
    """s^alpha, and 0 without a gradient if that does not exist."""
    exists = s > 0  # 0^alpha is 0, without an infinite gradient
    if float(alpha).is_integer():
        exists = s > -torch.inf
    return torch.where(exists, torch.where(exists, s, 1.0).pow(alpha), 0.0)


@dataclass(frozen=True)
class QueryExpansion:
    """Alpha query expansion: each query plus its `k` nearest gallery rows, weighted by similarity^alpha, normalised.

    Args:
        alpha: exponent, from 0 to 100; with 0 all neighbours have the same weight (average query expansion).
        k: number of neighbours, >= 1; all rows if the gallery has fewer.

    Raises:
        ValueError: if a number is out of its range; when called, if shapes or dtypes do not fit.
        TypeError: if `k` is not an integer; when called, if the rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval import QueryExpansion
        >>> expand = QueryExpansion(alpha=2.0, k=1)
        >>> query, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8], [-1.0, 0.0]])
        >>> expand(query, gallery)  # (1, 0) + 0.36 (0.6, 0.8), normalised
        tensor([[0.9731, 0.2305]])

    Cost:
        Memory of one block of scores or of neighbours, and 12 k bytes for each query; time of the matrix product of
        queries and gallery. Rows that require a gradient get it through their sums and weights, not through the choice
        of the neighbours; the neighbours of all queries are then kept in memory.

    Relations:
        An argument of `lightning_retrieval.callbacks.RetrievalEvaluation`, in which each process expands the queries
        that it holds. `DatabaseAugmentation` does the same with the gallery.

    Source:
        Radenovic et al., TPAMI 2019; code: naver/deep-image-retrieval, `expand_descriptors`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        _check_settings("QueryExpansion", self.alpha, self.k)

    def __call__(
        self,
        queries: Float[Tensor, "query dim"],
        gallery: Float[Tensor, "gallery dim"],
        self_index: Int[Tensor, " query"] | None = None,
    ) -> Float[Tensor, "query dim"]:
        """The expanded queries, as unit rows.

        Args:
            queries: one row per query, normalised here.
            gallery: one row per image, normalised here.
            self_index: index of the query's own row in the gallery, which is not one of its neighbours, or -1 if it
                has none; None if no query has one.
        """
        _check_rows(queries, gallery)
        if self_index is None:
            self_index = torch.full((len(queries),), -1, device=queries.device)
        _check_self_index(self_index, queries, len(gallery))
        expanded = expanded_queries(
            unsharded(normalize(queries), _BLOCK_ROWS),
            unsharded(normalize(gallery), _BLOCK_ROWS),
            alpha=self.alpha,
            k=self.k,
            self_index=self_index.long(),
        )
        return expanded.local


@dataclass(frozen=True)
class DatabaseAugmentation:
    """Database augmentation: each gallery row plus its `k` nearest others, weighted by similarity^alpha, normalised.

    Args:
        alpha: exponent, from 0 to 100; with 0 all neighbours have the same weight.
        k: number of neighbours, >= 1; all rows if the gallery has fewer.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer; when called, if the rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval import DatabaseAugmentation
        >>> augment = DatabaseAugmentation(alpha=2.0, k=1)
        >>> augment(torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]))
        tensor([[ 0.9731,  0.2305],
                [ 0.7682,  0.6402],
                [-1.0000,  0.0000]])

    Cost:
        Memory of one block of scores or of neighbours, and 12 k bytes for each row; time of the product of the gallery
        with itself, N^2 D. A gallery that requires a gradient gets it as in `QueryExpansion`, which keeps the
        neighbours of all rows in memory.

    Relations:
        An argument of `lightning_retrieval.callbacks.RetrievalEvaluation`. Queries are expanded with the augmented
        gallery. If a query is part of the gallery, it also contributes to the rows of its neighbours, although it is
        not in its own list.

    Source:
        Gordo et al., IJCV 2017; code: naver/deep-image-retrieval, `expand_descriptors`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        _check_settings("DatabaseAugmentation", self.alpha, self.k)

    def __call__(self, gallery: Float[Tensor, "gallery dim"]) -> Float[Tensor, "gallery dim"]:
        """The augmented gallery as unit rows. Each row is computed from the original gallery.

        Args:
            gallery: one row per image, normalised here.
        """
        check_embeddings("DatabaseAugmentation", "gallery", gallery)
        rows = unsharded(normalize(gallery), _BLOCK_ROWS)
        return augmented_gallery(rows, alpha=self.alpha, k=self.k, device=gallery.device).local


def _check_settings(owner: str, alpha: float, k: int) -> None:
    check_not_negative(owner, "alpha", alpha, most=100)  # rounding makes some scores larger than 1
    check_integer(owner, "k", k, least=1)


def _check_rows(queries: Tensor, gallery: Tensor) -> None:
    check_embeddings("QueryExpansion", "queries", queries)
    check_device("QueryExpansion", "gallery", gallery, queries.device, "queries")
    check_embeddings("QueryExpansion", "gallery", gallery)
    if queries.shape[1] != gallery.shape[1] or queries.dtype != gallery.dtype:
        raise ValueError(
            f"QueryExpansion: `gallery` must have the dimension and dtype of `queries`, got {tuple(gallery.shape)} of "
            f"{gallery.dtype} for {tuple(queries.shape)} of {queries.dtype}."
        )


def _check_self_index(self_index: Tensor, queries: Tensor, gallery: int) -> None:
    check_integers("QueryExpansion", "self_index", self_index, len(queries), "queries", device=queries.device)
    if bool(((self_index < -1) | (self_index >= gallery)).any()):
        raise ValueError(
            f"QueryExpansion: `self_index` must hold indices of gallery rows, 0 to {gallery - 1}, or -1, got "
            f"{int(self_index.min())} to {int(self_index.max())}."
        )
