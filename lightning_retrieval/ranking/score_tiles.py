"""Scores of queries with a gallery, of one block of queries and one tile of the gallery at a time.

The last digits of a matrix product depend on its shape. Three rules make scores independent of how the work is
partitioned. A block has a fixed number of rows (64 or more) and the last one is padded, so a query has the same scores
on any number of processes. Tiles begin at multiples of their size, which depends on the device and the sizes of the
problem only. The columns of a tile are padded to a multiple of all kernels' widths, so equal embeddings have equal
scores wherever they are in the gallery, and ties are recognised as ties.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.host import size_for
from lightning_retrieval.ranking.precision import ieee_products

_COLUMN_MULTIPLE = 384
# Columns of a tile: on a CPU its scores stay in the cache, on other devices few kernels are launched.
_CPU_COLUMNS = 4 * _COLUMN_MULTIPLE
_DEVICE_COLUMNS = 64 * _COLUMN_MULTIPLE
# A tile is so many times wider than the list of a query's positives, so that few tiles are searched for each of them.
_COLUMNS_OF_A_POSITIVE = 32
_KEPT_TILES = 4  # that hold positives; they are not computed twice


class ScoreTiles:
    """The scores of one block of queries after another with a gallery, tile by tile.

    Args:
        gallery: unit rows, on any device; tiles are copied to `device` if it is another one.
        rows: number of queries in a block.
        positives: number of positives of the query that has most.
        device: where scores are computed.
    """

    def __init__(
        self, gallery: Float[Tensor, "gallery dim"], *, rows: int, positives: int, device: torch.device
    ) -> None:
        self._gallery = gallery
        self._columns = _columns_of_a_tile(device, positives)
        last = len(gallery) // self._columns * self._columns
        self._last_tile = pad(gallery[last:], (0, 0, 0, -len(gallery) % _COLUMN_MULTIPLE))
        self._queries = torch.zeros(rows, gallery.shape[1], dtype=gallery.dtype, device=device)
        self._number = 0  # of queries in this block
        self._kept: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []

    def start_block(self, queries: Float[Tensor, "query dim"]) -> None:
        """Begin the block of these queries, unit rows, at most `rows` of them."""
        self._queries[: len(queries)] = queries
        self._number = len(queries)
        self._kept.clear()

    def gather(self, column: Int[Tensor, "query pos"], begin: int, end: int) -> Float[Tensor, "query pos"]:
        """The scores of each query with the images in its columns, all of them from `begin` to `end` or not used."""
        starts = range(begin // self._columns * self._columns, end, self._columns)
        found = self._queries.new_zeros(column.shape)
        keep = len(starts) <= _KEPT_TILES
        for number, start in enumerate(starts):
            scores = self._scores(start, number if keep else 0)
            if keep:
                self._kept[start] = scores
            inside = (column >= start) & (column < start + self._columns)
            column_of_tile = (column - start).clamp(0, scores.shape[1] - 1)
            found = torch.where(inside, scores.gather(1, column_of_tile), found)
        return found

    def __iter__(self) -> Iterator[Float[Tensor, "query column"]]:
        """The scores of all tiles in any order, -inf at padding. A tile may be changed, and is valid until the next."""
        kept = set(self._kept)
        while self._kept:
            yield self._kept.popitem()[1]
        for start in range(0, len(self._gallery), self._columns):
            if start not in kept:
                yield self._scores(start, 0)

    def _scores(self, start: int, buffer: int) -> Float[Tensor, "query column"]:
        """The scores of the tile that begins at this image, in one of the buffers."""
        tile = self._gallery[start : start + self._columns]
        images = len(tile)
        if images < self._columns:
            tile = self._last_tile
        if buffer == len(self._buffers):
            self._buffers.append(self._queries.new_empty(len(self._queries) * self._columns))
        products = self._buffers[buffer][: len(self._queries) * len(tile)].view(len(self._queries), len(tile))
        with ieee_products():
            torch.mm(self._queries, tile.to(products.device).T, out=products)
        products[:, images:] = -torch.inf
        return products[: self._number]


def _columns_of_a_tile(device: torch.device, positives: int) -> int:
    least = size_for(device, cpu=_CPU_COLUMNS, accelerator=_DEVICE_COLUMNS)
    wanted = _COLUMNS_OF_A_POSITIVE * positives
    multiple = math.ceil(wanted / least)
    return least * max(1, multiple)
