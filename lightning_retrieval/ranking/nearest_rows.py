"""The k nearest rows of a gallery for each query, on one process or on several that hold a part of both.

Scores are computed tile by tile, and a tile has the same scores on any number of processes (see
`lightning_retrieval.ranking.score_tiles`). Of rows with equal scores, those with the smallest indices are chosen, in
this order. So the result is the same for any number of processes, to the last digit. A sharded gallery is gathered
piece by piece, while each process keeps the nearest rows of its own queries.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.ranking.score_tiles import ScoreTiles, columns_of_a_piece, columns_of_a_tile
from lightning_retrieval.ranking.sharded_rows import ShardedRows

_BLOCK_ROWS = 256


class NearestRows(NamedTuple):
    """The nearest rows of the queries of this process, the nearest first.

    Attributes:
        scores: similarities.
        positions: in the gallery.
    """

    scores: Float[Tensor, "query k"]
    positions: Int[Tensor, "query k"]


def nearest_rows(
    queries: ShardedRows, gallery: ShardedRows, k: int, *, self_index: Int[Tensor, " all"], self_score: float
) -> NearestRows:
    """The `k` nearest gallery rows of each query of this process, on the device of `self_index`.

    This is a collective operation if the gallery is sharded.

    Args:
        queries: unit rows.
        gallery: unit rows; sharded over the same processes, or not at all.
        k: number of neighbours, at most that of the rows of the gallery.
        self_index: of all queries: index of the query's own row in the gallery, or -1.
        self_score: replaces the similarity of a query with its own row.
    """
    device = self_index.device
    columns = columns_of_a_piece(gallery, k, device)
    tiles = ScoreTiles(
        rows=_BLOCK_ROWS,
        dim=gallery.local.shape[1],
        columns=min(columns, columns_of_a_tile(device, k)),
        dtype=gallery.local.dtype,
        device=device,
    )
    blocks = []
    for local, positions in queries.parts(_BLOCK_ROWS):
        blocks.append(_NearestOfBlock(queries.local[local], self_index[positions], k=k, self_score=self_score))
    for begin in range(0, len(gallery), columns):
        tiles.take_piece(gallery, begin, columns)
        for block in blocks:
            block.add(tiles)
    nothing = self_index[:0, None].expand(0, k)
    scores = [gallery.local.new_empty(0, k, device=device), *(block.scores for block in blocks)]
    return NearestRows(torch.cat(scores), torch.cat([nothing, *(block.positions for block in blocks)]))


class _NearestOfBlock:
    """The nearest rows of a block of queries among the pieces of the gallery that were added.

    Args:
        queries: unit rows.
        self_index: index of the query's own row in the gallery, or -1.
        k: number of neighbours.
        self_score: replaces the similarity of a query with its own row.
    """

    def __init__(
        self, queries: Float[Tensor, "query dim"], self_index: Int[Tensor, " query"], *, k: int, self_score: float
    ) -> None:
        self._queries, self._self_index, self._k, self._self_score = queries, self_index, k, self_score
        self.scores = queries.new_empty(len(queries), 0, device=self_index.device)
        self.positions = self_index.new_empty(len(queries), 0)

    def add(self, tiles: ScoreTiles) -> None:
        """Take the nearest rows of the piece, which comes after all earlier ones."""
        tiles.start_block(self._queries)
        for begin, scores in tiles.others():
            inside = (self._self_index >= begin) & (self._self_index < begin + scores.shape[1])
            row = inside.nonzero()[:, 0]
            scores[row, self._self_index[row] - begin] = self._self_score
            self._merge(begin, scores)

    def _merge(self, begin: int, tile: Float[Tensor, "query column"]) -> None:
        """Keep the `k` nearest of the rows so far and those of a tile. All columns of the tile come after them."""
        column = highest_columns(tile, self._k)
        scores = torch.cat([self.scores, tile.gather(1, column)], 1)
        index = torch.cat([self.positions, begin + column], 1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.scores, self.positions = scores.gather(1, order), index.gather(1, order)


def highest_columns(scores: Float[Tensor, "query column"], k: int) -> Int[Tensor, "query chosen"]:
    """The columns of the `k` highest scores of each row, or of all, in ascending order; of equal scores the first."""
    width = scores.shape[1]
    if k >= width:
        return torch.arange(width, device=scores.device).expand(len(scores), width)
    highest = scores.topk(k + 1, dim=1)  # of equal scores, any
    chosen = highest.indices[:, :k]
    is_ambiguous = highest.values[:, k - 1] == highest.values[:, k]
    if bool(is_ambiguous.any()):
        order = scores[is_ambiguous].sort(dim=1, descending=True, stable=True).indices
        chosen[is_ambiguous] = order[:, :k]
    return chosen.sort(dim=1).values
