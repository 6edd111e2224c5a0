"""Scores of queries with a gallery, of one block of queries and one tile of the gallery at a time.

The last digits of a matrix product depend on its shape. Three rules make scores independent of how the work is
partitioned. A block has a fixed number of rows (64 or more) and the last one is padded, so a query has the same scores
on any number of processes. The gallery is multiplied in groups of columns that begin at multiples of their size, which
depends on the device only; a tile, whose scores are counted together, is one or more such groups. The columns of the
last group are padded to a multiple of all kernels' widths, so equal embeddings have equal scores wherever they are in
the gallery, and ties are recognised as ties.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.host import size_for
from lightning_retrieval.ranking.precision import ieee_products
from lightning_retrieval.ranking.sharded_rows import ShardedRows

_COLUMN_MULTIPLE = 384
# Columns of a product: on a CPU its scores stay in the cache, on other devices few kernels are launched.
_CPU_COLUMNS = 4 * _COLUMN_MULTIPLE
_DEVICE_COLUMNS = 64 * _COLUMN_MULTIPLE
# A tile is so many times wider than the list of a query's positives, so that few tiles are searched for each of them.
_COLUMNS_OF_A_POSITIVE = 32
_KEPT_TILES = 4  # that hold positives; they are not computed twice
_CPU_PRODUCTS, _DEVICE_PRODUCTS = 8, 1  # that the columns of a piece are divided into, at least


class ScoreTiles:
    """The scores of one block of queries after another with a piece of the gallery, tile by tile.

    Args:
        rows: number of queries in a block.
        dim: of the embeddings.
        columns: of a tile, a multiple of `columns_of_a_product`.
        dtype: of the embeddings.
        device: where scores are computed. Queries and gallery are copied there if they are on another one.
    """

    def __init__(self, *, rows: int, dim: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.begin = self.end = 0  # of the piece
        self._columns = columns
        self._columns_of_a_product = columns_of_a_product(device)
        self._queries = torch.zeros(rows, dim, dtype=dtype, device=device)
        self._number = 0  # of queries in this block
        self._piece = self._last_part = self._queries[:0]
        self._kept: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []

    def start_piece(self, piece: Float[Tensor, "piece dim"], begin: int) -> None:
        """Begin a piece of the gallery.

        Args:
            piece: unit rows.
            begin: position of the piece in the gallery, a multiple of `columns_of_a_product`.
        """
        self._piece = piece
        self.begin, self.end = begin, begin + len(piece)
        last = len(piece) // self._columns_of_a_product * self._columns_of_a_product
        self._last_part = pad(piece[last:], (0, 0, 0, -len(piece) % _COLUMN_MULTIPLE))

    def take_piece(self, gallery: ShardedRows, begin: int, columns: int) -> None:
        """Begin the piece of this many rows of a gallery, unless it is the current one.

        This is a collective operation if the gallery is sharded.
        """
        end = min(begin + columns, len(gallery))
        if (self.begin, self.end) != (begin, end):
            self.start_piece(gallery.range(begin, end), begin)

    def start_block(self, queries: Float[Tensor, "query dim"]) -> None:
        """Begin the block of these queries, unit rows, at most `rows` of them."""
        self._queries[: len(queries)] = queries
        self._number = len(queries)
        self._kept.clear()

    def gather(self, column: Int[Tensor, "query pos"], begin: int, end: int) -> Float[Tensor, "query pos"]:
        """The scores of each query with the images in its columns, 0 for columns outside of the piece.

        Args:
            column: positions in the gallery.
            begin: no column is before it, unless it is not used.
            end: no column is at or after it, unless it is not used.
        """
        starts = self._starts(begin, end)
        found = self._queries.new_zeros(column.shape)
        keep = self.begin <= begin and end <= self.end and len(starts) <= _KEPT_TILES
        for number, start in enumerate(starts):
            scores = self._scores(start, number if keep else 0)
            if keep:
                self._kept[start] = scores
            inside = (column >= start) & (column < min(start + self._columns, self.end))
            column_of_tile = (column - start).clamp(0, scores.shape[1] - 1)
            found = torch.where(inside, scores.gather(1, column_of_tile), found)
        return found

    def kept(self) -> dict[int, Float[Tensor, "query column"]]:
        """The tiles that `gather` has computed, if they hold all of its columns and are few, by their positions."""
        return self._kept

    def others(self, done: frozenset[int] = frozenset()) -> Iterator[tuple[int, Float[Tensor, "query column"]]]:
        """The positions of the tiles of the piece that are not done, and their scores, -inf at padding.

        The scores are valid until the next tile, and may be changed.
        """
        for start in self._starts(self.begin, self.end):
            if start not in done:
                yield start, self._scores(start, 0)

    def _starts(self, begin: int, end: int) -> range:
        """The positions of the tiles of the piece that have images from `begin` to `end`."""
        first = self.begin + max(begin - self.begin, 0) // self._columns * self._columns
        return range(first, min(end, self.end), self._columns)

    def _scores(self, start: int, buffer: int) -> Float[Tensor, "query column"]:
        """The scores of the tile that begins at this image, in one of the buffers."""
        first, last = start - self.begin, min(start + self._columns, self.end) - self.begin
        width = math.ceil((last - first) / _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
        if buffer == len(self._buffers):
            self._buffers.append(self._queries.new_empty(len(self._queries) * self._columns))
        products = self._buffers[buffer][: len(self._queries) * width].view(len(self._queries), width)
        for begin in range(first, last, self._columns_of_a_product):
            part = self._piece[begin : begin + self._columns_of_a_product]
            if len(part) < self._columns_of_a_product:
                part = self._last_part
            out = products[:, begin - first : begin - first + len(part)]
            with ieee_products():
                torch.mm(self._queries, part.to(products.device).T, out=out)
        products[:, last - first :] = -torch.inf
        return products[: self._number]


def columns_of_a_product(device: torch.device) -> int:
    """How many images of the gallery are multiplied at a time."""
    return size_for(device, cpu=_CPU_COLUMNS, accelerator=_DEVICE_COLUMNS)


def columns_of_a_tile(device: torch.device, positives: int) -> int:
    """How many images have their scores counted together, if a query has this number of positives."""
    multiple = math.ceil(_COLUMNS_OF_A_POSITIVE * positives / columns_of_a_product(device))
    return columns_of_a_product(device) * max(1, multiple)


def columns_of_a_piece(gallery: ShardedRows, positives: int, device: torch.device) -> int:
    """Number of images of a piece of the gallery, a multiple of `columns_of_a_product`.

    It is the whole gallery if that is not sharded; else some tiles, but not many more than each process holds.
    """
    unit = columns_of_a_product(device)
    if not gallery.is_sharded:
        return max(1, math.ceil(len(gallery) / unit)) * unit
    least = unit * size_for(device, cpu=_CPU_PRODUCTS, accelerator=_DEVICE_PRODUCTS)
    of_every_process = gallery.layout.unit * gallery.shard.count  # a piece has a block of each process
    held = math.ceil(len(gallery) / gallery.shard.count)
    wanted = max(least, of_every_process, min(held, columns_of_a_tile(device, positives)))
    return math.ceil(wanted / unit) * unit
