"""Endless shuffled queues from which items are drawn one after the other, and the random numbers for them."""

from collections.abc import Iterator

import numpy as np

from lightning_retrieval.datamodules.samplers.base import Integers


def shuffled_order(generator: np.random.Generator, size: int) -> Integers:
    """A random order of the numbers below `size`; not `generator.permutation`, whose stream NumPy may change."""
    return np.argsort(generator.random(size), kind="stable")


def uniform_numbers(generator: np.random.Generator) -> Iterator[float]:
    """Endless random numbers in [0, 1), drawn a thousand at a time."""
    while True:
        yield from generator.random(1024).tolist()


class ShuffledQueues:
    """One endless shuffled queue for each set of items. In each round of a queue every item of the set comes once.

    The items of a set are stored in `items[begin:end]`, and `position` is where the next item that is drawn will be
    stored. Invariant: `items[begin:position]` holds what this round has drawn, in the order of drawing, and
    `items[position:end]` holds what it has not drawn yet. A draw swaps a random item of the second part to `position`.

    When `position` reaches `end`, a new round begins: `position` returns to `begin`. What the previous round drew from
    some position `start` onwards is still stored in `items[start:end]`. It stays there, and is not repeated, as long as
    draws choose from `items[position:start]` only.

    Args:
        items: the items of the first set, then those of the second, and so on.
        sizes: the number of items of each set.
        random: endless numbers in [0, 1), the only source of randomness.
    """

    def __init__(self, items: Integers, sizes: Integers, random: Iterator[float]) -> None:
        ends = np.cumsum(sizes)
        # Memory views return Python integers, one at a time, faster than arrays do.
        self.items = items.copy().data
        self.ends = ends.data
        self.begins = (ends - sizes).data
        self.positions = (ends - sizes).data
        self.random = random

    def take(self, which: int, group_size: int, groups: int = 1) -> list[int]:
        """Draw the next `groups` times `group_size` items of set `which`.

        Neither these items nor those of a single group repeat an item, unless the set has fewer items; then the numbers
        of times that the items occur differ by at most one.
        """
        items, begin, end, position = self.items, self.begins[which], self.ends[which], self.positions[which]
        taken = []
        call_start = position
        for _ in range(groups):
            group_start = position
            for _ in range(group_size):
                # After a refill, do not choose what this call or this group took from the previous round.
                choose_before = end
                if position < call_start:
                    choose_before = call_start
                if position < group_start < choose_before:
                    choose_before = group_start
                chosen = position + int(next(self.random) * (choose_before - position))
                item = items[chosen]
                items[chosen] = items[position]
                items[position] = item
                taken.append(item)
                position += 1
                if position == end:
                    position = begin
        self.positions[which] = position
        return taken
