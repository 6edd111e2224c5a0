"""Counts the ranks of all positives, on one process or on several processes that each hold a shard of the gallery.

Scores are computed for one block of queries and some columns of the gallery (a tile) at a time; the full (query,
gallery) matrix never exists. The blocks of queries are distributed over the processes in turn. A sharded gallery is
gathered block by block, in two passes. The first pass gathers only the blocks with positives of any process's queries;
the scores of the positives become thresholds. The second pass gathers all blocks, and counts the candidates that reach
each threshold. If the thresholds of all queries would take too much memory, both passes are repeated for one group of
query blocks after another. With one process, a group is one block of queries, and the whole gallery is one block.

The last digits of a matrix product depend on its shape. Three rules make scores independent of how the work is
partitioned. First, all blocks of queries have the same number of rows (64 or more), with padding in the last block, so
a query has the same scores on any number of processes. Second, the gallery is multiplied in groups of columns whose
size depends only on the device, and which begin at multiples of this size; a tile consists of one or more such groups.
Third, the last group is padded to a multiple of all kernels' widths, so equal embeddings have equal scores wherever
they are in the gallery, and ties are recognised as ties.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.distributed import size_for
from lightning_retrieval.ranking.entries import Entries, Extent, ListedImages
from lightning_retrieval.ranking.ranks import PositiveRanks, ascending, count_at_least, first_of_equal, ieee_products
from lightning_retrieval.ranking.rows import ShardedRows, float64_device

_COLUMN_MULTIPLE = 384
# Number of columns of a product. On a CPU, there are so few columns that the scores stay in the cache; on other
# devices, there are many, so that few kernels are launched.
_CPU_COLUMNS = 4 * _COLUMN_MULTIPLE
_DEVICE_COLUMNS = 64 * _COLUMN_MULTIPLE
# Ratio of the width of a tile to the number of a query's positives; it limits the number of searches per positive.
_COLUMNS_OF_A_POSITIVE = 32
_KEPT_TILES = 4  # maximum number of tiles with positives to keep instead of computing them twice
_CPU_PRODUCTS, _DEVICE_PRODUCTS = 4, 1  # minimum number of products into which a gallery block is divided
_CPU_POSITIVES = 1 << 17  # maximum number of positives for which a CPU computes metrics at a time, for its cache
# Maximum number of positives of a group on one process. Each takes 10 bytes.
_MAX_GROUP_POSITIVES = 1 << 24


class ScoreTiles:
    """Computes the scores of successive blocks of queries with a block of the gallery, tile by tile.

    If the gallery is not sharded, a block is the full gallery. Otherwise, a block consists of some tiles, with not many
    more images than a process holds.

    Args:
        gallery: unit rows. They are copied to the device tile by tile if necessary.
        rows: number of queries in a block.
        searched: number of images that are searched for a query, such as its positives. Tiles are wider if it is large.
        device: device for the scores.
    """

    def __init__(self, gallery: ShardedRows, *, rows: int, searched: int, device: torch.device) -> None:
        product = size_for(device, cpu=_CPU_COLUMNS, accelerator=_DEVICE_COLUMNS)
        tile = product * max(1, math.ceil(_COLUMNS_OF_A_POSITIVE * searched / product))
        wanted = len(gallery)
        if gallery.is_sharded:
            least = product * size_for(device, cpu=_CPU_PRODUCTS, accelerator=_DEVICE_PRODUCTS)
            of_every_process = gallery.layout.unit * gallery.shard.count  # a block contains rows of each process
            held = math.ceil(len(gallery) / gallery.shard.count)
            wanted = max(least, of_every_process, min(held, tile))
        self.block_columns = product * max(1, math.ceil(wanted / product))
        self.begin = self.end = 0  # range of the gallery block
        self._columns_of_a_product, self._columns = product, min(tile, self.block_columns)
        self._gallery = gallery
        dim, dtype = gallery.local.shape[1], gallery.local.dtype
        self._queries = torch.zeros(rows, dim, dtype=dtype, device=device)
        self._number = 0  # number of queries in the current block
        self._block = self._last_product = self._queries[:0]
        # The scores of each tile of the last `gather` or `gather_range`, by its position; empty if there are too many
        # tiles, or if the gallery block lacks some of the columns.
        self.kept: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []

    def gallery_blocks(self, begins: Sequence[int]) -> Iterator[int]:
        """Begin the gallery blocks at these positions, one after another; yields the position.

        If the gallery is sharded, this is a collective operation, and each block is fetched while the one before it is
        in use.

        Args:
            begins: multiples of `block_columns`.
        """
        ends = [min(begin + self.block_columns, len(self._gallery)) for begin in begins]
        fetches = map(self._gallery.start_range, begins, ends)
        waiting = list(islice(fetches, 1))
        for begin, end in zip(begins, ends):
            self._block = self._last_product = self._queries[:0]  # frees memory
            self.begin, self.end, self._block = begin, end, waiting.pop()()
            last = len(self._block) // self._columns_of_a_product * self._columns_of_a_product
            self._last_product = pad(self._block[last:], (0, 0, 0, -len(self._block) % _COLUMN_MULTIPLE))
            waiting += islice(fetches, 1)
            yield begin

    def start_queries(self, queries: Float[Tensor, "query dim"]) -> None:
        """Begin a block of queries: at most `rows` unit rows."""
        self._queries[: len(queries)] = queries
        self._number = len(queries)
        self.kept.clear()

    def gather(self, column: Int[Tensor, "query pos"], begin: int, end: int) -> Float[Tensor, "query pos"]:
        """The scores of each query with the images in its columns, 0 for columns outside the gallery block.

        Args:
            column: positions in the gallery.
            begin: lower bound of the columns that matter.
            end: upper bound (exclusive) of the columns that matter.
        """
        found = self._queries.new_zeros(column.shape)
        for start, scores in self._kept_tiles(begin, end):
            inside = (column >= start) & (column < min(start + self._columns, self.end))
            column_of_tile = (column - start).clamp_(0, scores.shape[1] - 1)
            found = torch.where(inside, scores.gather(1, column_of_tile), found)
        return found

    def gather_range(self, begin: int, end: int) -> Float[Tensor, "query column"]:
        """The scores of each query with the images from `begin` to `end`, 0 outside the gallery block."""
        found = self._queries.new_zeros(self._number, end - begin)
        for start, scores in self._kept_tiles(begin, end):
            first, last = max(start, begin), min(start + self._columns, self.end, end)
            found[:, first - begin : last - begin] = scores[:, first - start : last - start]
        return found

    def _kept_tiles(self, begin: int, end: int) -> Iterator[tuple[int, Float[Tensor, "query column"]]]:
        """The positions and scores of the tiles with these columns; keeps the scores if there are few tiles."""
        starts = self._starts(begin, end)
        keep = self.begin <= begin and end <= self.end and len(starts) <= _KEPT_TILES
        for number, start in enumerate(starts):
            scores = self._scores(start, number if keep else 0)
            if keep:
                self.kept[start] = scores
            yield start, scores

    def others(self, done: frozenset[int] = frozenset()) -> Iterator[tuple[int, Float[Tensor, "query column"]]]:
        """The remaining tiles of the gallery block: their positions and scores, -inf at padding.

        The scores are valid until the next tile, and may be overwritten.
        """
        for start in self._starts(self.begin, self.end):
            if start not in done:
                yield start, self._scores(start, 0)

    def _starts(self, begin: int, end: int) -> range:
        """The positions of the tiles of the gallery block that overlap the range from `begin` to `end`."""
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
            rows = self._block[begin : begin + self._columns_of_a_product]
            if len(rows) < self._columns_of_a_product:
                rows = self._last_product
            out = products[:, begin - first : begin - first + len(rows)]
            with ieee_products():
                torch.mm(self._queries, rows.to(products.device).T, out=out)
        products[:, last - first :] = -torch.inf
        return products[: self._number]


def positive_ranks(queries: ShardedRows, gallery: ShardedRows, entries: Entries) -> Iterator[PositiveRanks]:
    """Count the ranks of all positives of the queries of this process, one block of queries at a time.

    If the gallery is sharded, this is a collective operation: every process must consume all blocks.

    Args:
        queries: unit rows, in blocks of `entries.block_rows`.
        gallery: unit rows, in the order of the references of the lists; sharded over the same processes, or not at all.
        entries: the positives of all queries, and the images excluded from their lists.

    Yields:
        The ranks of some queries of a block, on the labels' device, or on the CPU if that device does not support
            float64.

    Cost:
        Memory holds a few tiles of scores and the positives of a block of queries. If the gallery is sharded, memory
        also holds a block of the gallery, and the positives of several blocks of queries. The time is that of the
        matrix product plus a few passes over the scores (if all positives rank high) or a sort of the scores
        (otherwise); it grows with the logarithm of the number of positives. Ranks are counted on the labels' device. An
        accelerator searches each score among the positives, so that the host does not wait in any block.
        Embeddings on another device are copied there tile by tile, once for each block.
    """
    if len(queries) == 0:
        return
    tiles = ScoreTiles(gallery, rows=entries.block_rows, searched=entries.most, device=entries.lists.device)
    columns = tiles.block_columns
    extents = entries.extents()
    for first, last in _groups(queries, gallery, extents, entries.block_rows):
        blocks = _blocks_of_group(queries, entries, extents, range(first, last))
        in_group = extents[first * queries.shard.count : last * queries.shard.count]
        begin = min(extent.begin for extent in in_group)
        end = max(extent.end for extent in in_group)
        with_positives = range(begin // columns * columns, end, columns)
        begins = [*with_positives, *range(0, len(gallery), columns)]
        gallery_blocks = tiles.gallery_blocks(begins)
        for _ in islice(gallery_blocks, len(with_positives)):
            for block in blocks:
                block.find_positives(tiles)
        for _ in gallery_blocks:
            for block in blocks:
                block.count(tiles)
        for block in blocks:
            yield from block.ranks()


class RankedBlock:
    """Counts the ranks of the positives of a block of queries, one gallery block after another.

    Args:
        queries: unit rows.
        index: index of each query among all queries.
        extent: range of the gallery that holds the positives.
        entries: the positives of all queries, and the images excluded from their lists.
    """

    def __init__(
        self, queries: Float[Tensor, "query dim"], index: Int[Tensor, " query"], *, extent: Extent, entries: Entries
    ) -> None:
        self._queries, self._index, self._extent = queries, index, extent
        self._levels, self._excludes_several = entries.lists.levels, entries.excludes_several
        self._listed: ListedImages | None = entries.of_block(index, extent)  # None when the positives are sorted
        self._scores = queries.new_zeros(self._listed.level.shape, device=index.device)
        self._counted: frozenset[int] = frozenset()  # positions of counted tiles
        self._positives = self._scores  # when they are sorted: scores in ascending order, inf at padding
        self._level = self._rank = index

    def find_positives(self, tiles: ScoreTiles) -> None:
        """Collect the scores of positives in a gallery block; if all are known, count the candidates in kept tiles."""
        begin, end = self._extent.begin, self._extent.end
        if self._listed is None or end <= tiles.begin or tiles.end <= begin:
            return
        tiles.start_queries(self._queries)
        if self._listed.column is None:
            self._scores += tiles.gather_range(begin, end)
        else:
            self._scores += tiles.gather(self._listed.column.long(), begin, end)
        if tiles.kept:
            self._sort_positives(self._listed)
            self._counted = frozenset(tiles.kept)
            for start, tile in tiles.kept.items():
                self._count_tile(start, tile, tiles.end)

    def count(self, tiles: ScoreTiles) -> None:
        """Count the candidates in a gallery block whose scores reach each positive."""
        if self._listed is not None:
            self._sort_positives(self._listed)
        tiles.start_queries(self._queries)
        for start, tile in tiles.others(self._counted):
            self._count_tile(start, tile, tiles.end)

    def _count_tile(self, start: int, tile: Float[Tensor, "query column"], stop: int) -> None:
        """Count the candidates of a tile: the images from `start` on. The images of a shared extent are left out.

        Args:
            start: index of the first image of the tile.
            tile: scores, -inf at padding.
            stop: end of the gallery block; the columns of later images are padding.
        """
        begin, end, width = self._extent.begin - start, self._extent.end - start, min(tile.shape[1], stop - start)
        if self._extent.is_shared and begin < width and end > 0:
            tile = torch.cat([tile[:, : max(begin, 0)], tile[:, end:width]], dim=1)
        if tile.shape[1] > 0:
            self._rank += count_at_least(tile, self._positives)

    def ranks(self) -> Iterator[PositiveRanks]:
        """The ranks, after all gallery blocks have been counted, of a few queries at a time on a CPU."""
        device = self._index.device
        positives = size_for(device, cpu=_CPU_POSITIVES, accelerator=self._rank.numel())
        rows = max(1, positives // self._positives.shape[1])
        columns = (self._index, self._positives, self._rank, self._level)
        for index, scores, rank, level in zip(*(column.split(rows) for column in columns)):
            first_tied = first_of_equal(scores)
            if self._extent.is_shared:  # only the other images have been counted
                rank = rank + ((level > 0).sum(1, keepdim=True) - first_tied).int()
            ranks = PositiveRanks(index, rank, first_tied, level.long(), self._levels)
            yield ranks.to(float64_device(device))

    def _sort_positives(self, found: ListedImages) -> None:
        scores = self._scores.masked_fill(found.level == 0, torch.inf)
        self._positives, level = _worst_first(scores, found.level, self._levels)
        self._level = level.to(torch.int8)
        excluded = self._scores.masked_fill(~found.is_excluded, -torch.inf)
        if self._extent.is_shared:  # images of the extent are not counted
            self._rank = torch.zeros_like(self._positives, dtype=torch.int32)
        elif self._excludes_several:
            self._rank = count_at_least(excluded, self._positives).int().neg_()
        else:
            self._rank = (excluded.amax(1, keepdim=True) >= self._positives).int().neg_()
        self._scores, self._listed = self._positives[:0], None  # frees memory


def _groups(
    queries: ShardedRows, gallery: ShardedRows, extents: Sequence[Extent], rows: int
) -> Iterator[tuple[int, int]]:
    """The blocks of queries that are ranked together: ranges of block numbers, equal on all processes."""
    processes = queries.shard.count
    blocks = math.ceil(len(extents) / processes)
    first, positives = 0, 0
    for number in range(blocks):
        of_each_process = extents[number * processes : (number + 1) * processes]
        most = rows * max(extent.width for extent in of_each_process)
        if number > first and (not gallery.is_sharded or positives + most > _MAX_GROUP_POSITIVES):
            yield first, number
            first, positives = number, 0
        positives += most
    yield first, blocks


def _blocks_of_group(
    queries: ShardedRows, entries: Entries, extents: Sequence[Extent], numbers: range
) -> list[RankedBlock]:
    """The query blocks of this process with these numbers. This process may lack a block with the last number."""
    blocks = []
    for local, positions in islice(queries.blocks(), numbers.start, numbers.stop):
        index = torch.arange(positions.start, positions.stop, device=entries.lists.device)
        extent = extents[positions.start // queries.layout.unit]
        blocks.append(RankedBlock(local, index, extent=extent, entries=entries))
    return blocks


def _worst_first(
    positives: Float[Tensor, "query pos"], level: Shaped[Tensor, "query pos"], levels: int
) -> tuple[Float[Tensor, "query pos"], Shaped[Tensor, "query pos"]]:
    """Sort the scores of the positives (inf at padding) in ascending order, together with their levels.

    Levels are integers, or bools if there is a single one.

    `positives` may be sorted in place.
    """
    if levels == 1:  # only the positives are below inf, so no order is needed
        positives = ascending(positives)
        return positives, (positives < torch.inf).to(level)
    # Among tied positives, the one that shares the most levels comes first.
    level, order = level.sort(dim=1, descending=True, stable=True)
    positives = positives.gather(1, order)
    positives, order = positives.sort(dim=1, stable=True)
    return positives, level.gather(1, order)
