"""Query expansion and database augmentation: rows are moved towards their nearest neighbours before they are ranked.

    database         each gallery row d becomes d + sum over its k nearest d' of s^alpha d', normalised
    query            each query q becomes q + sum over its k nearest d of s^alpha d, normalised
                     (Radenovic, Tolias, Chum, TPAMI 2019)

Symbols: s the cosine similarity, `alpha` the exponent, `k` the number of neighbours. As in the official code, s is not
clamped, so that with an even `alpha`, s and -s have the same weight. If `alpha` is not an integer, the power of a
negative s is undefined (NaN in the official code); here, a row with a negative s then has weight 0. Of rows with equal
similarity, those that come first in the gallery are the nearest.

Scores are computed tile by tile. A tile has the same scores on any number of processes (`positive_ranks.py`), so the
result is the same for any number, to the last digit. A sharded gallery is gathered block by block, while each process
keeps the nearest rows of its queries.

`QueryExpansion` and `DatabaseAugmentation` are the public interface; the functions hold the arithmetic.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_finite_number, check_integer, check_integers, check_matrix
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.ranking.positive_ranks import ScoreTiles
from lightning_retrieval.ranking.ranks import ieee_products
from lightning_retrieval.ranking.rows import ShardedRows, normalize, unsharded

_BLOCK_ROWS = 256
_LARGEST_ALPHA = 100  # rounding makes some scores larger than 1, and their powers must stay finite
_BLOCK_NUMBERS = 1 << 26


class NearestRows(NamedTuple):
    """The nearest rows of the queries of this process, the nearest first.

    Attributes:
        scores: similarities.
        positions: positions in the gallery.
    """

    scores: Float[Tensor, "query k"]
    positions: Int[Tensor, "query k"]


def nearest_rows(
    queries: ShardedRows, gallery: ShardedRows, k: int, *, self_index: Int[Tensor, " all"], self_score: float
) -> NearestRows:
    """The `k` nearest gallery rows of each query of this process, on the device of `self_index`.

    If the gallery is sharded, this is a collective operation.

    Args:
        queries: unit rows.
        gallery: unit rows; sharded over the same processes, or not at all.
        k: number of neighbours, at most the number of gallery rows.
        self_index: for each query of all processes, the index of the query itself in the gallery, or -1.
        self_score: replaces the similarity of a query with itself.
    """
    device = self_index.device
    tiles = ScoreTiles(gallery, rows=_BLOCK_ROWS, searched=k, device=device)
    blocks = []
    for local, positions in queries.split_blocks(_BLOCK_ROWS):
        blocks.append(_NearestOfBlock(queries.local[local], self_index[positions], k=k, self_score=self_score))
    for _ in tiles.gallery_blocks(range(0, len(gallery), tiles.block_columns)):
        for block in blocks:
            block.add(tiles)
    nothing = self_index[:0, None].expand(0, k)
    scores = [gallery.local.new_empty(0, k, device=device), *(block.scores for block in blocks)]
    return NearestRows(torch.cat(scores), torch.cat([nothing, *(block.positions for block in blocks)]))


class _NearestOfBlock:
    """Finds the nearest rows of a block of queries among the gallery blocks added so far.

    Args:
        queries: unit rows.
        self_index: index of each query itself in the gallery, or -1.
        k: number of neighbours.
        self_score: replaces the similarity of a query with itself.
    """

    def __init__(
        self, queries: Float[Tensor, "query dim"], self_index: Int[Tensor, " query"], *, k: int, self_score: float
    ) -> None:
        self._queries, self._self_index, self._k, self._self_score = queries, self_index, k, self_score
        self.scores = queries.new_empty(len(queries), 0, device=self_index.device)
        self.positions = self_index.new_empty(len(queries), 0)

    def add(self, tiles: ScoreTiles) -> None:
        """Add the nearest rows of a gallery block, which must follow all blocks added before."""
        tiles.start_queries(self._queries)
        for begin, scores in tiles.others():
            inside = (self._self_index >= begin) & (self._self_index < begin + scores.shape[1])
            row = inside.nonzero()[:, 0]
            scores[row, self._self_index[row] - begin] = self._self_score
            self._merge(begin, scores)

    def _merge(self, begin: int, tile: Float[Tensor, "query column"]) -> None:
        """Merge the rows kept so far with a tile, which comes later in the gallery, and keep the `k` nearest."""
        column = highest_columns(tile, self._k)
        scores = torch.cat([self.scores, tile.gather(1, column)], 1)
        index = torch.cat([self.positions, begin + column], 1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.scores, self.positions = scores.gather(1, order), index.gather(1, order)


def highest_columns(scores: Float[Tensor, "query column"], k: int) -> Int[Tensor, "query chosen"]:
    """The columns of the `k` highest scores of each row, in ascending order; all columns if there are at most `k`.

    Of columns with equal scores, the first are chosen.
    """
    width = scores.shape[1]
    if k >= width:
        return torch.arange(width, device=scores.device).expand(len(scores), width)
    highest = scores.topk(k + 1, dim=1)  # among equal scores, `topk` chooses any columns
    chosen = highest.indices[:, :k]
    is_ambiguous = highest.values[:, k - 1] == highest.values[:, k]
    if bool(is_ambiguous.any()):
        order = scores[is_ambiguous].sort(dim=1, descending=True, stable=True).indices
        chosen[is_ambiguous] = order[:, :k]
    return chosen.sort(dim=1).values


def expanded_queries(
    queries: ShardedRows,
    gallery: ShardedRows,
    *,
    alpha: float,
    k: int,
    self_index: Int[Tensor, " all"],
    self_score: float = -torch.inf,
) -> ShardedRows:
    """Alpha query expansion of unit rows: each query plus its `k` nearest gallery rows, weighted by similarity^alpha.

    If the rows are sharded, this is a collective operation. The result does not depend on the number of processes.

    Args:
        queries: unit rows.
        gallery: unit rows, sharded over the same processes.
        alpha: exponent, >= 0.
        k: number of neighbours, >= 1; all rows if the gallery has fewer.
        self_index: for each query of all processes, the index of the query itself in the gallery, or -1. The
            computation runs on the device of this tensor.
        self_score: replaces the similarity of a query with itself; by default, a query is no neighbour of its own.
    """
    k = min(k, len(gallery))
    with torch.no_grad():
        nearest = nearest_rows(queries, gallery, k, self_index=self_index, self_score=self_score)
    block_rows = min(_BLOCK_ROWS, max(1, _BLOCK_NUMBERS // max(1, k * gallery.local.shape[1])))
    blocks = [local for local, _ in queries.split_blocks(block_rows)]
    # A process with fewer blocks than others adds empty blocks, because the others fetch rows of this process, too.
    blocks += [slice(0, 0)] * (queries.most_split_blocks(block_rows) - len(blocks))
    expanded = torch.empty_like(queries.local)
    for block in blocks:
        neighbours = gallery.fetch(nearest.positions[block]).to(self_index.device)  # (query, k, dim)
        rows = queries.local[block].to(self_index.device)
        s = _similarities(nearest.scores[block], rows, neighbours)
        with ieee_products():
            summed = (_weights(s, alpha)[:, None] @ neighbours)[:, 0]  # (query, dim)
        expanded[block] = normalize(rows + summed)
    return replace(queries, local=expanded)


def augmented_gallery(gallery: ShardedRows, *, alpha: float, k: int, device: torch.device) -> ShardedRows:
    """Database augmentation of unit rows: each row plus its `k` nearest other rows, weighted by similarity^alpha.

    As in the official code, the similarity of a row with itself counts as 0. So a row can be its own neighbour if fewer
    than `k` other rows have a positive similarity; its weight is then 0, or 1 if `alpha` is 0.

    If the rows are sharded, this is a collective operation. The result does not depend on the number of processes.

    Args:
        gallery: unit rows.
        alpha: exponent, >= 0.
        k: number of neighbours, >= 1; all rows if the gallery has fewer.
        device: device for the computation.
    """
    self_index = torch.arange(len(gallery), device=device)
    return expanded_queries(gallery, gallery, alpha=alpha, k=k, self_index=self_index, self_score=0.0)


def _similarities(
    scores: Float[Tensor, "query k"], queries: Float[Tensor, "query dim"], neighbours: Float[Tensor, "query k dim"]
) -> Float[Tensor, "query k"]:
    """The scores of the neighbours, connected to the graph of the rows if they require a gradient.

    The given scores have no gradient, so they are computed again; the values do not change. The gradient of the score
    of a row with itself vanishes in the normalisation of the rows.
    """
    if not (torch.is_grad_enabled() and (queries.requires_grad or neighbours.requires_grad)):
        return scores
    with ieee_products():
        again = (neighbours @ queries[:, :, None])[:, :, 0]
    return scores + (again - again.detach())


def _weights(s: Float[Tensor, "query k"], alpha: float) -> Float[Tensor, "query k"]:
    """s^alpha; where this power is undefined, 0 without a gradient."""
    exists = s > 0  # excludes s = 0: 0^alpha is 0, but its gradient may be infinite
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
        ValueError: if a number is out of its range; when called, if shapes or dtypes do not match.
        TypeError: if `k` is not an integer; when called, if the rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval import QueryExpansion
        >>> expand = QueryExpansion(alpha=2.0, k=1)
        >>> query, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8], [-1.0, 0.0]])
        >>> expand(query, gallery)  # (1, 0) + 0.36 (0.6, 0.8), normalised
        tensor([[0.9731, 0.2305]])

    Cost:
        Memory holds one block of scores or of neighbours, and 12 k bytes for each query. The time is that of the matrix
        product of queries and gallery. Gradients flow through the sums and the weights, not through the choice of the
        neighbours; if rows require a gradient, the neighbours of all queries are kept in memory.

    Relations:
        It is an argument of `lightning_retrieval.callbacks.RetrievalEvaluation`. Each process then expands the queries
        of its shard. `DatabaseAugmentation` does the same with the gallery.

    Source:
        Radenovic et al., TPAMI 2019; code: naver/deep-image-retrieval, `expand_descriptors`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        check_finite_number("alpha", self.alpha, least=0, most=_LARGEST_ALPHA, owner="QueryExpansion")
        check_integer("k", self.k, least=1, owner="QueryExpansion")

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
            self_index: index of each query itself in the gallery, which is excluded from its neighbours, or -1 if it is
                not there; None if no query is in the gallery.
        """
        if self_index is None:
            self_index = torch.full((len(queries),), -1, device=queries.device)
        _check_input(queries, gallery, self_index)
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
        Memory holds one block of scores or of neighbours, and 12 k bytes for each row. The time is that of the product
        of the gallery with itself, N^2 D. Gradients flow as in `QueryExpansion`; if the gallery requires a gradient,
        the neighbours of all rows are kept in memory.

    Relations:
        It is an argument of `lightning_retrieval.callbacks.RetrievalEvaluation`. Queries are expanded with the
        augmented gallery. If a query is part of the gallery, it also contributes to the rows of its neighbours,
        although it is not in its own list.

    Source:
        Gordo et al., IJCV 2017; code: naver/deep-image-retrieval, `expand_descriptors`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        check_finite_number("alpha", self.alpha, least=0, most=_LARGEST_ALPHA, owner="DatabaseAugmentation")
        check_integer("k", self.k, least=1, owner="DatabaseAugmentation")

    def __call__(self, gallery: Float[Tensor, "gallery dim"]) -> Float[Tensor, "gallery dim"]:
        """The augmented gallery as unit rows. Each row is computed from the original gallery.

        Args:
            gallery: one row per image, normalised here.
        """
        check_matrix("gallery", gallery, finite=True, owner="DatabaseAugmentation")
        rows = unsharded(normalize(gallery), _BLOCK_ROWS)
        return augmented_gallery(rows, alpha=self.alpha, k=self.k, device=gallery.device).local


def _check_input(queries: Tensor, gallery: Tensor, self_index: Tensor) -> None:
    check_matrix("queries", queries, finite=True, owner="QueryExpansion")
    check_matrix("gallery", gallery, finite=True, owner="QueryExpansion")
    if queries.shape[1] != gallery.shape[1] or queries.dtype != gallery.dtype:
        got = f"{tuple(gallery.shape)} of {gallery.dtype} for {tuple(queries.shape)} of {queries.dtype}"
        raise InvalidValue("must have the dimension and dtype of `queries`", "QueryExpansion", "gallery", got=got)
    check_integers("self_index", self_index, len(queries), "queries", owner="QueryExpansion")
    if bool(((self_index < -1) | (self_index >= len(gallery))).any()):
        rule = f"must hold indices of gallery rows, 0 to {len(gallery) - 1}, or -1"
        got = f"{int(self_index.min())} to {int(self_index.max())}"
        raise InvalidValue(rule, "QueryExpansion", "self_index", got=got)
