"""The first positions of many endless shuffled queues, drawn at once as one table with a row for each queue.

There is one queue for each set of items. A queue is a sequence of rounds; a round holds every item of the set once, in
random order. Writing a round into the queue is called a refill.

The caller cuts each queue into groups of `group_size` consecutive positions. Refills and group boundaries need not
coincide, so a refill may fall inside a group. Such a group must not repeat an item, unless its set has fewer items than
the group has positions; then the numbers of times that the items occur in the group may differ by at most one.

Invariant: after each refill, an item is marked as *ahead* if it occurs once more than the unmarked items in the group
into which the next refill falls. (If all items occur equally often there, they have the same mark.) So the next refill
only has to fill the rest of that group with items that are not ahead, as long as there are any.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.samplers.base import Integers

# Number of items that are shuffled at a time, so that the arrays being sorted fit into the processor's cache.
_CHUNK = 1 << 16


def shuffled_queue_table(
    generator: np.random.Generator, items: Integers, sizes: Integers, *, group_size: int, length: int
) -> Integers:
    """Draw one shuffled queue for each set of items and return the first `length` positions of each.

    Args:
        generator: the only source of randomness.
        items: the items of the first set, then those of the second, and so on.
        sizes: the number of items of each set, ascending.
        group_size: number of positions in a group.
        length: number of positions of each queue.

    Returns:
        A table of shape (sets, length).
    """
    ends = np.cumsum(sizes)
    queues = np.empty((len(sizes), length), dtype=items.dtype)
    ahead = np.zeros(len(items), dtype=bool)
    for number in range(math.ceil(length / sizes[0])):
        # The sizes ascend, so the queues that still need this round are the first ones.
        unfinished = int((number * sizes < length).sum())
        for first, last in itertools.pairwise(_chunk_edges(ends[:unfinished])):
            part = slice(ends[first] - sizes[first], ends[last - 1])
            _write_round(generator, number, queues[first:last], items[part], sizes[first:last], ahead[part], group_size)
    return queues


def _chunk_edges(ends: Integers) -> list[int]:
    """Cut consecutive sets into chunks of about `_CHUNK` items; the result does not depend on how they are cut."""
    limits = np.arange(_CHUNK, ends[-1], _CHUNK)
    edges = np.searchsorted(ends, limits, side="right").tolist()
    return sorted({0, *edges, len(ends)})


def _write_round(
    generator: np.random.Generator,
    number: int,
    queues: Integers,
    items: Integers,
    sizes: Integers,
    ahead: NDArray[np.bool_],
    group_size: int,
) -> None:
    """Write round `number` of these sets into their queues, and restore the invariant of `ahead`."""
    length = queues.shape[1]
    set_of_item = np.repeat(np.arange(len(sizes)), sizes)
    first_item = np.cumsum(sizes) - sizes
    position_in_round = np.arange(len(items)) - first_item[set_of_item]
    round_start = number * sizes  # position in the queue, of each set
    rest_of_group = -round_start % group_size  # positions that the group is short of
    order = _shuffled_order(generator, set_of_item, position_in_round, ahead, rest_of_group)

    position = round_start[set_of_item] + position_in_round
    inside = position < length
    queues[set_of_item[inside], position[inside]] = items[order[inside]]

    next_round_start = round_start + sizes
    next_group_start = next_round_start // group_size * group_size
    in_next_group = position >= next_group_start[set_of_item]
    # If that group started in an earlier round, it now holds every item once more: the marks stay as they are.
    starts_in_this_round = next_group_start >= round_start
    ahead[order] = np.where(starts_in_this_round[set_of_item], in_next_group, ahead[order])


def _shuffled_order(
    generator: np.random.Generator,
    set_of_item: Integers,
    position_in_round: Integers,
    ahead: NDArray[np.bool_],
    rest_of_group: Integers,
) -> Integers:
    """Shuffle the items within each set; the first `rest_of_group` positions get items that are not ahead, if any."""
    random = generator.integers(1 << 32, size=len(set_of_item))
    if not rest_of_group.any():
        return _sort_within_sets(set_of_item, np.zeros(len(set_of_item), dtype=bool), random)
    not_ahead_first = _sort_within_sets(set_of_item, ahead, random)
    fills_group = np.empty(len(set_of_item), dtype=bool)
    fills_group[not_ahead_first] = position_in_round < rest_of_group[set_of_item]
    return _sort_within_sets(set_of_item, ~fills_group, random)


def _sort_within_sets(set_of_item: Integers, last: NDArray[np.bool_], random: Integers) -> Integers:
    """Sort by set, then unmarked items before those marked as `last`, then by the random number."""
    return np.argsort(((2 * set_of_item + last) << 32) | random, kind="stable")
