"""Counts the ranks of all positives, on one process or on several that hold a part of the gallery each.

Scores are computed for one block of queries and one tile of the gallery at a time; the whole (query, gallery) matrix
never exists. The blocks of queries go to the processes in turn. A sharded gallery is gathered piece by piece: first the
pieces that hold positives of any process's queries, whose scores are the thresholds of their queries, then all pieces,
in which the candidates that reach each threshold are counted. If the thresholds of all queries would take too much
memory, this is done in several rounds, each for some of the blocks. With one process a round is one block, and there is
one piece, the gallery.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.ranking.counting import count_at_least
from lightning_retrieval.ranking.float64 import float64_device
from lightning_retrieval.ranking.labelled_lists import Extent, LabelledLists
from lightning_retrieval.ranking.ranks import PositiveRanks
from lightning_retrieval.ranking.score_tiles import ScoreTiles, columns_of_a_piece, columns_of_a_tile
from lightning_retrieval.ranking.sharded_rows import ShardedRows

_MAX_ROUND_POSITIVES = 1 << 24  # of the queries of a round on one process; each takes 9 bytes


def positive_ranks(queries: ShardedRows, gallery: ShardedRows, lists: LabelledLists) -> Iterator[PositiveRanks]:
    """Count the ranks of all positives of the queries of this process, one block of queries at a time.

    This is a collective operation if the gallery is sharded: every process must take all blocks.

    Args:
        queries: unit rows, in blocks of `lists.block_rows`.
        gallery: unit rows, sorted by the last level of their labels; sharded over the same processes, or not at all.
        lists: labels and cameras of all queries and of the whole gallery.

    Yields:
        The ranks of a block, on the device that computes float64 numbers for the labels' device.

    Cost:
        Memory for a few tiles of scores, for a piece of the gallery if it is sharded, and for the positives of a block
        of queries, or of several blocks if the gallery is sharded. The time is that of the matrix product plus a few
        passes over the scores if all positives rank high, or a sort of the scores if they do not; it grows with the
        logarithm of the number of positives. Ranks are counted on the labels' device. Embeddings on another device are
        copied there tile by tile, once for each block.
    """
    if len(queries) == 0:
        return
    device = lists.query_labels.device
    columns = columns_of_a_piece(gallery, lists.most_positives, device)
    tiles = ScoreTiles(
        rows=lists.block_rows,
        dim=queries.local.shape[1],
        columns=min(columns, columns_of_a_tile(device, lists.most_positives)),
        dtype=queries.local.dtype,
        device=device,
    )
    extents = lists.extents()
    for first, last in _rounds(queries, gallery, extents, lists.block_rows):
        blocks = _blocks_of_round(queries, lists, extents, range(first, last))
        in_round = extents[first * queries.shard.count : last * queries.shard.count]
        begin = min(extent.begin for extent in in_round)
        end = max(extent.end for extent in in_round)
        for start in range(begin // columns * columns, end, columns):
            tiles.take_piece(gallery, start, columns)
            for block in blocks:
                block.find_positives(tiles)
        for start in range(0, len(gallery), columns):
            tiles.take_piece(gallery, start, columns)
            for block in blocks:
                block.count(tiles)
        for block in blocks:
            yield block.ranks()


class RankedBlock:
    """A block of queries while the ranks of its positives are counted, piece by piece of the gallery.

    Args:
        queries: unit rows.
        index: of each query among all queries.
        extent: where the positives are.
        lists: labels and cameras of all queries and of the whole gallery.
    """

    def __init__(
        self, queries: Float[Tensor, "query dim"], index: Int[Tensor, " query"], *, extent: Extent, lists: LabelledLists
    ) -> None:
        self._queries, self._index, self._extent, self._lists = queries, index, extent, lists
        self._scores = queries.new_zeros(len(queries), extent.width, device=index.device)
        self._counted: frozenset[int] = frozenset()  # positions of tiles
        self._is_sorted = False  # whether the next three are there
        self._positives = self._scores  # scores in ascending order, inf at padding
        self._level = self._rank = index

    def find_positives(self, tiles: ScoreTiles) -> None:
        """Take the scores of positives in a piece; if all are there, count the candidates in their tiles."""
        begin, end, width = self._extent
        if end <= tiles.begin or tiles.end <= begin:
            return
        tiles.start_block(self._queries)
        self._scores += tiles.gather(self._lists.columns(self._index, width), begin, end)
        kept = tiles.kept()
        if kept:
            self._sort_positives()
            self._counted = frozenset(kept)
            for tile in kept.values():
                self._add(tile)

    def count(self, tiles: ScoreTiles) -> None:
        """Count the candidates in a piece whose scores reach each positive."""
        if not self._is_sorted:
            self._sort_positives()
        tiles.start_block(self._queries)
        for _, tile in tiles.others(self._counted):
            self._add(tile)

    def ranks(self) -> PositiveRanks:
        """The ranks, when all pieces are counted."""
        first_tied = torch.searchsorted(self._positives, self._positives)
        levels = self._lists.query_labels.shape[1]
        ranks = PositiveRanks(self._index, self._rank.long(), first_tied, self._level.long(), levels)
        return ranks.to(float64_device(self._index.device))

    def _sort_positives(self) -> None:
        found = self._lists.positives(self._index, self._extent.width)
        scores = self._scores.masked_fill(found.level == 0, torch.inf)
        levels = self._lists.query_labels.shape[1]
        self._positives, level = _worst_first(scores, found.level, levels)
        self._level = level.to(torch.int8)
        excluded = self._scores.masked_fill(~found.is_excluded, -torch.inf)
        self._rank = -count_at_least(excluded, self._positives).int()
        self._scores = self._positives[:0]  # frees the memory
        self._is_sorted = True

    def _add(self, tile: Float[Tensor, "query column"]) -> None:
        self._rank += count_at_least(tile, self._positives)


def _rounds(
    queries: ShardedRows, gallery: ShardedRows, extents: Sequence[Extent], rows: int
) -> Iterator[tuple[int, int]]:
    """The ranges of blocks of each process that are ranked together, the same on all processes."""
    processes = queries.shard.count
    blocks = math.ceil(len(extents) / processes)
    first, positives = 0, 0
    for number in range(blocks):
        of_each_process = extents[number * processes : (number + 1) * processes]
        most = rows * max(extent.width for extent in of_each_process)
        if number > first and (not gallery.is_sharded or positives + most > _MAX_ROUND_POSITIVES):
            yield first, number
            first, positives = number, 0
        positives += most
    yield first, blocks


def _blocks_of_round(
    queries: ShardedRows, lists: LabelledLists, extents: Sequence[Extent], numbers: range
) -> list[RankedBlock]:
    """The blocks of this process with these numbers; the last number may be a block of other processes only."""
    blocks = []
    for local, positions in islice(queries.blocks(), numbers.start, numbers.stop):
        index = torch.arange(positions.start, positions.stop, device=lists.query_labels.device)
        extent = extents[positions.start // queries.layout.unit]
        blocks.append(RankedBlock(local, index, extent=extent, lists=lists))
    return blocks


def _worst_first(
    positives: Float[Tensor, "query pos"], level: Int[Tensor, "query pos"], levels: int
) -> tuple[Float[Tensor, "query pos"], Int[Tensor, "query pos"]]:
    """Sort the scores of the positives, which are inf at padding, in ascending order, and their levels with them."""
    if levels > 1:  # of positives that tie, the one that shares the most levels comes first
        level, order = level.sort(dim=1, descending=True, stable=True)
        positives = positives.gather(1, order)
    positives, order = positives.sort(dim=1, stable=True)
    return positives, level.gather(1, order)
