"""Batches from a few categories, as in ROADMAP and HAPPIER, so that negatives are from the positives' category.

This file also has the shuffled queues from which samplers draw items. A queue is an endless sequence of rounds; a round
holds every item of a set once, in random order.
"""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np

from lightning_retrieval.arguments import PositiveInt, Seed, Several, checked
from lightning_retrieval.datamodules.samplers.base import (
    GlobalBatchSampler,
    Integers,
    Labels,
    group_equal_values,
    integer_array,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned

_MAX_LISTED = 1_000_000  # above this number, combinations are drawn one by one instead of listed
_COMBINATION_STREAM = 1  # combinations have the seed (seed, refill, 1), and batches the seed (seed, epoch)


def shuffled_order(generator: np.random.Generator, size: int) -> Integers:
    """A random order of the numbers below `size`. Avoids `generator.permutation`, whose stream NumPy may change."""
    return np.argsort(generator.random(size), kind="stable")


def uniform_numbers(generator: np.random.Generator) -> Iterator[float]:
    """Endless random numbers in [0, 1), drawn a thousand at a time."""
    while True:
        yield from generator.random(1024).tolist()


class ShuffledQueues:
    """One endless shuffled queue for each set of items. In each round of a queue every item of the set comes once.

    The items of a set are stored in `items[begin:end]`; `position` is where the next drawn item will be stored.
    Invariant: `items[begin:position]` holds the items drawn in this round, in the order of drawing, and
    `items[position:end]` the items not yet drawn. A draw swaps a random item of the second range to `position`.

    When `position` reaches `end`, a new round begins: `position` returns to `begin`. The items that the previous round
    drew from some position `start` onwards are still stored in `items[start:end]`. They are not repeated as long as
    draws choose from `items[position:start]` only.

    Args:
        items: the items of the first set, then those of the second, and so on.
        sizes: the number of items of each set.
        random: endless numbers in [0, 1), the only source of randomness.
    """

    def __init__(self, items: Integers, sizes: Integers, random: Iterator[float]) -> None:
        ends = np.cumsum(sizes)
        # Reading one Python integer from a memory view is faster than reading one from an array.
        self.items = items.copy().data
        self.ends = ends.data
        self.begins = (ends - sizes).data
        self.positions = (ends - sizes).data
        self.random = random

    def take(self, which: int, group_size: int, groups: int = 1) -> list[int]:
        """Draw the next `groups` times `group_size` items of set `which`.

        No item is repeated within the call or within a group, unless the set has too few items; then the numbers of
        occurrences of the items differ by at most one.
        """
        items, begin, end, position = self.items, self.begins[which], self.ends[which], self.positions[which]
        taken = []
        call_start = position
        for _ in range(groups):
            group_start = position
            for _ in range(group_size):
                # After a refill, do not choose items that this call or this group took from the previous round.
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


def list_combinations(count: int, size: int) -> Integers | None:
    """All combinations of `size` of the numbers below `count`, one per row; None if there are more than a million."""
    if math.comb(count, size) > _MAX_LISTED:
        return None
    numbers = itertools.chain.from_iterable(itertools.combinations(range(count), size))
    return np.fromiter(numbers, dtype=np.int32).reshape(-1, size)


class CategorySampler(GlobalBatchSampler):
    """Batches of P classes from a few categories, the same number of classes from each, with K images per class.

    An epoch has ceil(N / (P K)) batches, where N is the number of images in classes with two images or more. Every
    combination of categories is drawn once before any combination is drawn twice, also across epochs. Within an epoch,
    every class of a category is drawn once before any class of the category is drawn twice; the same holds for the
    images of a class. A batch holds an image more than once only if the image's class has fewer images than the batch
    takes from it. The images of that class then occur equally often, up to a difference of one, in the batch and in
    each group of K. Likewise, a batch holds a class more than once only if the class's category has fewer classes than
    the batch takes from it.

    In a batch the classes of a category are adjacent, and so are the images of a class.

    Args:
        labels: one integer for each image, in the order of the dataset; any integers, any class sizes. Classes with a
            single image are skipped, because that image has no positive; one warning gives their number.
        categories: one integer for each image, the same for all images of a class.
        classes_per_batch: P, a multiple of `categories_per_batch`.
        samples_per_class: K, at least 2.
        categories_per_batch: number of categories in a batch, from 1 to the number of categories that hold a class with
            two images.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Raises:
        TypeError: if the labels, the categories or another argument are not integers.
        ValueError: if labels or categories are empty, not one-dimensional or of different lengths, or no class has two
            images; if a class has images of several categories; if a number is out of its range.

    Example:
        >>> labels, categories = [0, 0, 1, 1, 2, 2, 3, 3], [7, 7, 7, 7, 5, 5, 5, 5]
        >>> sampler = CategorySampler(
        ...     labels, categories, classes_per_batch=2, samples_per_class=2, categories_per_batch=1, seed=1
        ... )
        >>> sorted(sorted(categories[index] for index in batch) for batch in sampler)
        [[5, 5, 5, 5], [7, 7, 7, 7]]

    If there are more than a million combinations of categories, they are not listed. Instead, random combinations are
    drawn such that within an epoch every category is drawn once before any is drawn twice. A batch is drawn when it is
    needed, in about a microsecond per image.

    Relations:
        Negatives from the categories of the positives are harder than those of `PKSampler`, which draws from all
        classes. `RetrievalDataLoader` splits each batch over ranks and workers.

    Source:
        Cakir, He, Xia, Kulis and Sclaroff, Deep Metric Learning to Rank, CVPR 2019, section 4.2 (two categories).
    """

    draws_classes = True

    def __init__(
        self,
        labels: Labels,
        categories: Labels | None,
        *,
        classes_per_batch: PositiveInt,
        samples_per_class: Several,
        categories_per_batch: PositiveInt = 2,
        seed: Seed = 0,
    ) -> None:
        self.categories_per_batch = checked(self, categories_per_batch=categories_per_batch)
        self.classes_per_batch = checked(self, classes_per_batch=classes_per_batch)
        self.samples_per_class = checked(self, samples_per_class=samples_per_class)
        if classes_per_batch % categories_per_batch:
            got = f"{classes_per_batch} for {categories_per_batch}"
            raise InvalidValue("must be a multiple of `categories_per_batch`", self.name, "classes_per_batch", got=got)
        if categories is None:
            rule = "must be one integer for each image"
            raise InvalidType(rule, self.name, "categories", got="None", cure="provide them, or use PKSampler")
        super().__init__(labels, seed=seed)
        # The classes grouped by category, and the number of classes of each category.
        self.classes, starts = group_equal_values(self._category_of_each_class(categories))
        self.category_sizes: Integers = np.diff(starts, append=len(self.classes))
        self._check_category_sizes()
        self.combinations = list_combinations(len(self.category_sizes), categories_per_batch)
        small = int((self.category_sizes < self._classes_per_category).sum())
        if small:
            warnings.warn(
                f"{self.name}: {small} of {len(self.category_sizes)} categories have fewer than the "
                f"{self._classes_per_category} classes that a batch takes from a category; batches repeat their "
                "classes.",
                stacklevel=2,
            )

    @property
    def _classes_per_category(self) -> int:
        """Number of classes that a batch takes from each of its categories."""
        return self.classes_per_batch // self.categories_per_batch

    def _check_category_sizes(self) -> None:
        count = len(self.category_sizes)
        if self.categories_per_batch > count:
            rule = "must be at most the number of categories that hold a class with two images or more"
            got = f"{self.categories_per_batch} for {count} such categories"
            raise InvalidValue(rule, self.name, "categories_per_batch", got=got, cure="lower it")

    @owned
    def _category_of_each_class(self, categories: Labels) -> Integers:
        array = integer_array("categories", categories)
        if len(array) != self.dataset_size:
            rule = f"must be one integer for each of the {self.dataset_size} labels"
            raise InvalidValue(rule, argument="categories", got=len(array))
        by_class = array[self.images]
        lowest = np.minimum.reduceat(by_class, self.class_starts)
        highest = np.maximum.reduceat(by_class, self.class_starts)
        mixed = np.flatnonzero(lowest != highest)
        if len(mixed):
            first = mixed[0]
            raise InvalidValue(
                "must be the same for all images of a class",
                argument="categories",
                got=f"{lowest[first]} and {highest[first]} for class {self.class_labels[first]} ({len(mixed)} of "
                f"{len(lowest)} classes)",
            )
        return lowest

    def __len__(self) -> int:
        return math.ceil(len(self.images) / (self.classes_per_batch * self.samples_per_class))

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        random = uniform_numbers(generator)
        class_queues = ShuffledQueues(self.classes, self.category_sizes, random)
        image_queues = ShuffledQueues(self.images, self.class_sizes, random)
        for combination in itertools.islice(self._combinations(random), len(self)):
            batch: list[int] = []
            # The categories are in random order, so that rank 0 does not always get the same category.
            for position in shuffled_order(generator, len(combination)).tolist():
                classes = class_queues.take(combination[position], self._classes_per_category)
                for class_index, times in Counter(classes).items():
                    batch += image_queues.take(class_index, self.samples_per_class, times)
            yield np.array(batch)

    def _combinations(self, random: Iterator[float]) -> Iterator[list[int]]:
        """The combinations of categories in this epoch, then the combinations in the next epochs."""
        if self.combinations is None:
            return self._unlisted_combinations(random)
        return self._listed_combinations(self.combinations)

    def _unlisted_combinations(self, random: Iterator[float]) -> Iterator[list[int]]:
        count = len(self.category_sizes)
        queue = ShuffledQueues(np.arange(count), np.array([count]), random)
        while True:
            yield queue.take(0, self.categories_per_batch)

    def _listed_combinations(self, combinations: Integers) -> Iterator[list[int]]:
        """Yield combinations from a shuffled queue that all epochs share, starting where the previous epoch ended."""
        first_refill, start = divmod(self.epoch * len(self), len(combinations))
        for refill in itertools.count(first_refill):
            generator = np.random.default_rng((self.seed, refill, _COMBINATION_STREAM))
            for row in shuffled_order(generator, len(combinations))[start:]:
                yield combinations[row].tolist()
            start = 0
