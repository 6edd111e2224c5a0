"""Query expansion and database augmentation: rows moved towards their nearest neighbours before they are ranked.

    database         each gallery row is replaced by d + sum over its k nearest d' of s^alpha d', normalised
    query            q + sum over its k nearest d of s^alpha d, normalised (Radenovic, Tolias, Chum, TPAMI 2019)

Symbols: s the cosine similarity, `alpha` the exponent, `k` the number of neighbours. As in the official code s is not
clamped, so a negative one with an even `alpha` counts as the positive one would; where `alpha` is not an integer its
power does not exist (there NaN), and it weighs 0 here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_embeddings, check_integer, check_integers, check_not_negative
from lightning_retrieval.ranking.similarity import normalize

_BLOCK_NUMBERS = 1 << 26  # of the scores, or of the neighbours, that are held at a time


def query_expansion(
    queries: Float[Tensor, "query dim"],
    gallery: Float[Tensor, "gallery dim"],
    alpha: float = 2.0,
    k: int = 10,
    own: Int[Tensor, " query"] | None = None,
) -> Float[Tensor, "query dim"]:
    """Alpha query expansion: each query joined by its `k` nearest gallery rows, weighted by similarity^alpha.

    Args:
        queries: one row a query, normalised here.
        gallery: one row an image, normalised here.
        alpha: exponent, >= 0; 0 weighs all neighbours alike (average query expansion).
        k: neighbours, >= 1; all where the gallery has fewer.
        own: the query's own row in the gallery, which is not among its neighbours, or -1; -1 for all where None.

    Returns:
        Unit rows.

    Raises:
        ValueError: if a number is out of its range, or shapes or dtypes do not fit.
        TypeError: if `k` or `own` is not integer, or rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval.ranking.expansion import query_expansion
        >>> query, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8], [-1.0, 0.0]])
        >>> query_expansion(query, gallery, alpha=2.0, k=1)  # (1, 0) + 0.36 (0.6, 0.8), normalised
        tensor([[0.9731, 0.2305]])

    Cost:
        One block of scores, or of neighbours, at a time; the time of the score product.

    Relations:
        `QueryExpansion` is the same with its settings stored, for `RetrievalEvaluation` and configuration files.

    Source:
        Radenovic et al., TPAMI 2019; code: naver/deep-image-retrieval, `expand_descriptors`.
    """
    who = "query_expansion"
    _check_expansion(who, alpha, k)
    check_embeddings(who, "queries", queries)
    check_embeddings(who, "gallery", gallery)
    if queries.shape[1] != gallery.shape[1] or queries.dtype != gallery.dtype:
        raise ValueError(
            f"{who}: `gallery` must have the dimension and dtype of `queries`, got {tuple(gallery.shape)} of "
            f"{gallery.dtype} for {tuple(queries.shape)} of {queries.dtype}."
        )
    if own is None:
        own = torch.full((len(queries),), -1, device=queries.device)
    check_integers(who, "own", own, len(queries), "queries")
    if bool(((own < -1) | (own >= len(gallery))).any()):
        raise ValueError(
            f"{who}: `own` must hold rows of the gallery, 0 to {len(gallery) - 1}, or -1, got {int(own.min())} to "
            f"{int(own.max())}."
        )
    return _expand(normalize(queries), normalize(gallery), alpha, k, own.long(), -torch.inf)


def database_augmentation(
    gallery: Float[Tensor, "gallery dim"], alpha: float = 2.0, k: int = 10
) -> Float[Tensor, "gallery dim"]:
    """Database-side augmentation: each gallery row joined by its `k` nearest others, weighted by similarity^alpha.

    As in the official code a row's similarity with itself counts as 0, so that it may be among its own neighbours where
    fewer than `k` others are similar at all; it then weighs 0 unless `alpha` is 0.

    Args:
        gallery: one row an image, normalised here.
        alpha: exponent, >= 0.
        k: neighbours, >= 1; all where there are fewer.

    Returns:
        Unit rows, each made of the gallery as it was.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer, or rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval.ranking.expansion import database_augmentation
        >>> database_augmentation(torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]), alpha=2.0, k=1)
        tensor([[ 0.9731,  0.2305],
                [ 0.7682,  0.6402],
                [-1.0000,  0.0000]])

    Cost:
        One block of scores, or of neighbours, at a time; the time of the score product, N^2 D.

    Relations:
        `DatabaseAugmentation` is the same with its settings stored. Queries are expanded with the augmented gallery;
        where they are part of it, each goes into its neighbours' rows, also when it is left out of its own list.

    Source:
        Gordo et al., IJCV 2017; code: naver/deep-image-retrieval, `expand_descriptors`.
    """
    _check_expansion("database_augmentation", alpha, k)
    check_embeddings("database_augmentation", "gallery", gallery)
    rows = normalize(gallery)
    return _expand(rows, rows, alpha, k, torch.arange(len(rows), device=rows.device), 0.0)


def _expand(
    queries: Float[Tensor, "query dim"],
    gallery: Float[Tensor, "gallery dim"],
    alpha: float,
    k: int,
    own: Int[Tensor, " query"],
    own_score: float,
) -> Float[Tensor, "query dim"]:
    k = min(k, len(gallery))
    rows = max(1, _BLOCK_NUMBERS // max(1, len(gallery), k * gallery.shape[1]))
    expanded = torch.empty_like(queries)
    for start in range(0, len(queries), rows):
        block, mine = queries[start : start + rows], own[start : start + rows]
        scores = block @ gallery.T
        has = (mine >= 0).nonzero()[:, 0]
        scores[has, mine[has]] = own_score
        nearest = scores.topk(k, dim=1)
        counts = nearest.values > -torch.inf if float(alpha).is_integer() else nearest.values >= 0
        weights = torch.where(counts, nearest.values.pow(alpha), 0.0)  # (query, k)
        expanded[start : start + rows] = normalize(block + (weights[:, None] @ gallery[nearest.indices])[:, 0])
    return expanded


def _check_expansion(who: str, alpha: float, k: int) -> None:
    check_not_negative(who, "alpha", alpha)
    check_integer(who, "k", k, least=1)


@dataclass(frozen=True)
class QueryExpansion:
    """`query_expansion` with its settings stored; called with queries, gallery and perhaps `own`.

    Args:
        alpha: exponent, >= 0.
        k: neighbours, >= 1.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.ranking.expansion import QueryExpansion
        >>> expand = QueryExpansion(alpha=3.0, k=5)
        >>> expand(torch.randn(2, 4), torch.randn(9, 4)).shape
        torch.Size([2, 4])

    Relations:
        An argument of `lightning_retrieval.callbacks.RetrievalEvaluation`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        _check_expansion("QueryExpansion", self.alpha, self.k)

    def __call__(
        self,
        queries: Float[Tensor, "query dim"],
        gallery: Float[Tensor, "gallery dim"],
        own: Int[Tensor, " query"] | None = None,
    ) -> Float[Tensor, "query dim"]:
        return query_expansion(queries, gallery, self.alpha, self.k, own)


@dataclass(frozen=True)
class DatabaseAugmentation:
    """`database_augmentation` with its settings stored; called with the gallery.

    Args:
        alpha: exponent, >= 0.
        k: neighbours, >= 1.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.ranking.expansion import DatabaseAugmentation
        >>> DatabaseAugmentation(k=5)(torch.randn(9, 4)).shape
        torch.Size([9, 4])

    Relations:
        An argument of `lightning_retrieval.callbacks.RetrievalEvaluation`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        _check_expansion("DatabaseAugmentation", self.alpha, self.k)

    def __call__(self, gallery: Float[Tensor, "gallery dim"]) -> Float[Tensor, "gallery dim"]:
        return database_augmentation(gallery, self.alpha, self.k)
