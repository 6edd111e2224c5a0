"""Endless shuffled queues, refilled when all their items have come round: what the batch samplers draw from.

`shuffled_queues` draws the beginning of all queues at once, `ShuffledQueues` hands out what is asked for.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.signedinteger[Any]]

# How many items are shuffled at a time: what the sort works on stays in the processor's cache.
_PIECE = 1 << 16


def shuffled_queues(
    generator: np.random.Generator, items: Integers, sizes: Integers, *, cut: int, length: int
) -> Integers:
    """One endless shuffled queue for each set of items, refilled when all have come round; its first `length` places.

    The queue will be cut into groups of `cut`. A group that runs over a refill repeats no item, unless its set has
    fewer than `cut`; then its items appear equally often in it, but for one.

    Args:
        generator: the one source of randomness.
        items: the items of the first set, then those of the second, and so on.
        sizes: how many items each set has, ascending, so that the sets still to be refilled are the first ones.
        cut: size of the groups.
        length: how many places of each queue are wanted.
    """
    ends = np.cumsum(sizes)
    queues = np.empty((len(sizes), length), dtype=items.dtype)
    open_group = np.zeros(len(items), dtype=bool)  # is the item already in the group that the refill cuts?
    for refill in range(math.ceil(length / sizes[0])):
        wanting = int((refill * sizes < length).sum())  # how many sets are to be refilled
        # A few sets after the other, which takes less memory and time, and the same random numbers, as all at once.
        full = np.searchsorted(ends[:wanting], np.arange(_PIECE, ends[wanting - 1], _PIECE), side="right")
        edges = sorted({0, *full.tolist(), wanting})
        for first, last in itertools.pairwise(edges):
            part = slice(ends[first] - sizes[first], ends[last - 1])
            _refill(generator, refill, queues[first:last], items[part], sizes[first:last], open_group[part], cut)
    return queues


def _refill(
    generator: np.random.Generator,
    refill: int,
    queues: Integers,
    items: Integers,
    sizes: Integers,
    open_group: NDArray[np.bool_],
    cut: int,
) -> None:
    """Write round `refill` of these sets into their queues, and into `open_group` what the next one has to know."""
    length = queues.shape[1]
    own = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(items)) - (np.cumsum(sizes) - sizes)[own]
    begin = refill * sizes  # where this round begins in the queues
    order = _shuffled(generator, own, place, open_group, -begin % cut)
    position = begin[own] + place
    wanted = position < length
    queues[own[wanted], position[wanted]] = items[order[wanted]]
    group = (begin + sizes) // cut * cut  # where the group begins that the next refill cuts
    # A group that began before this round (a set smaller than `cut`) keeps the marks of the round it began in.
    open_group[order] = np.where((group >= begin)[own], position >= group[own], open_group[order])


def _shuffled(
    generator: np.random.Generator, own: Integers, place: Integers, last: NDArray[np.bool_], head: Integers
) -> Integers:
    """Order that shuffles within each set; its first `head` places go to items not marked `last`, if there are any."""
    random = generator.integers(1 << 32, size=len(own))
    if head.any():
        chosen = np.empty(len(own), dtype=bool)
        chosen[_sorted(own, last, random)] = place < head[own]
        return _sorted(own, ~chosen, random)
    return _sorted(own, np.zeros(len(own), dtype=bool), random)


def _sorted(own: Integers, last: NDArray[np.bool_], random: Integers) -> Integers:
    return np.argsort(((2 * own + last) << 32) | random, kind="stable")


class ShuffledQueues:
    """One endless shuffled queue for each set of items, refilled when all have come round, and shuffled as it is asked.

    Args:
        items: the items of the first set, then those of the second, and so on.
        sizes: how many items each set has.
        random: endless numbers in [0, 1), the one source of randomness.
    """

    def __init__(self, items: Integers, sizes: Integers, random: Iterator[float]) -> None:
        ends = np.cumsum(sizes)
        # Views of memory, which give Python's integers, one at a time, faster than arrays do.
        self.items = items.copy().data
        self.ends = ends.data
        self.begins = (ends - sizes).data
        self.places = (ends - sizes).data  # of each set: where its next item is put
        self.random = random

    def take(self, which: int, cut: int, groups: int = 1) -> list[int]:
        """The next `groups` times `cut` items of set `which`.

        They repeat no item, unless the set has fewer; then its items appear equally often, but for one. The same holds
        for each group of `cut`.
        """
        items, begin, end, place = self.items, self.begins[which], self.ends[which], self.places[which]
        taken = []
        run = place
        for _ in range(groups):
            group = place
            for _ in range(cut):
                # What came in this round stands before `place`, and the rest is free. After a refill, what the run and
                # the group took of the round before still stands behind their first places: it waits.
                free = min(run if place < run else end, group if place < group else end)
                chosen = place + int(next(self.random) * (free - place))
                item = items[chosen]
                items[chosen] = items[place]
                items[place] = item
                taken.append(item)
                place = place + 1 if place + 1 < end else begin
        self.places[which] = place
        return taken


def shuffled_order(generator: np.random.Generator, size: int) -> Integers:
    """A random order of the numbers below `size`; not `generator.permutation`, whose stream NumPy may change."""
    return np.argsort(generator.random(size), kind="stable")


def uniform(generator: np.random.Generator) -> Iterator[float]:
    """Endless random numbers in [0, 1), drawn a thousand at a time."""
    while True:
        yield from generator.random(1024).tolist()
