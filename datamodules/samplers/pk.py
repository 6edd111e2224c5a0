"""Batches of P classes with K images each, from shuffled queues of classes and of images, drawn for a whole epoch.

A queue is an endless sequence of rounds, and a round holds every item of a set once, in random order. Writing a round
into a queue is called a refill.

The caller cuts each queue into groups of `group_size` consecutive positions. A refill may fall inside a group. Such a
group must not repeat an item, unless its set has fewer items than the group has positions; then the numbers of
occurrences of the items in the group may differ by at most one.

The next refill begins in a certain group. Invariant: in this group, each item that is marked as *ahead* occurs once
more than each unmarked item. (If all items occur equally often in the group, they have the same mark.) So the next
refill only has to fill the rest of the group with unmarked items, as long as there are any.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.arguments import PositiveInt, Seed, Several, checked
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler, Integers, Labels
from lightning_retrieval.invalid import InvalidValue

# Number of items that are shuffled at a time, so that the sorted arrays fit into the CPU's cache.
_BLOCK = 1 << 16


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
        # The sizes ascend, so the queues that still need this round come first.
        unfinished = int((number * sizes < length).sum())
        for first, last in itertools.pairwise(_block_edges(ends[:unfinished])):
            block = slice(ends[first] - sizes[first], ends[last - 1])
            in_block = slice(first, last)
            _write_round(generator, number, queues[in_block], items[block], sizes[in_block], ahead[block], group_size)
    return queues


def _block_edges(ends: Integers) -> list[int]:
    """Cut the sets into blocks of about `_BLOCK` items; return the first set of each block, and the number of sets."""
    limits = np.arange(_BLOCK, ends[-1], _BLOCK)
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
    round_start = number * sizes  # position in each queue where the round starts
    rest_of_group = -round_start % group_size  # positions missing in the current group
    order = _shuffled_order(generator, set_of_item, position_in_round, ahead, rest_of_group)

    position = round_start[set_of_item] + position_in_round
    inside = position < length
    queues[set_of_item[inside], position[inside]] = items[order[inside]]

    next_round_start = round_start + sizes
    next_group_start = next_round_start // group_size * group_size
    in_next_group = position >= next_group_start[set_of_item]
    # A group that started in an earlier round now holds every item once more, so the marks do not change.
    starts_in_this_round = next_group_start >= round_start
    ahead[order] = np.where(starts_in_this_round[set_of_item], in_next_group, ahead[order])


def _shuffled_order(
    generator: np.random.Generator,
    set_of_item: Integers,
    position_in_round: Integers,
    ahead: NDArray[np.bool_],
    rest_of_group: Integers,
) -> Integers:
    """Shuffle the items of each set so that the first `rest_of_group` items are not ahead, as far as possible."""
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


def shuffled_class_batches(generator: np.random.Generator, classes: int, *, P: int, batches: int) -> list[Integers]:
    """Draw the classes of each batch from a shuffled queue of the classes 0, 1, ...

    Args:
        generator: the only source of randomness.
        classes: number of classes.
        P: number of classes in a batch.
        batches: number of batches.

    Returns:
        For each batch an array (2, P): its classes, and for each of them the number of rounds of the queue before.
    """
    queue = shuffled_queue_table(generator, np.arange(classes), np.array([classes]), group_size=P, length=batches * P)
    rounds = np.arange(batches * P) // classes  # each class occurs once in each round
    return np.split(np.stack([queue[0], rounds]), batches, axis=1)


class PKSampler(GlobalBatchSampler):
    """Batches of P classes with K images each.

    An epoch has ceil(N / (P K)) batches, where N is the number of images in classes with two images or more. Within an
    epoch, every class is drawn once before any class is drawn twice; within a class, every image is drawn once before
    any image is drawn twice. A batch holds P different classes. It holds an image more than once only if the class has
    fewer than K images; the numbers of occurrences of the images of this class then differ by at most one.

    Args:
        labels: one integer for each image, in the order of the dataset that the loader reads, which may be a `Subset`
            or a `ConcatDataset`; any integers, any class sizes. Classes with a single image are skipped, because that
            image has no positive; one warning gives their number.
        classes_per_batch: P, at least 1 and at most the number of classes with two images or more. With 1 a batch
            holds no negatives.
        samples_per_class: K, at least 2.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Raises:
        TypeError: if the labels or another argument are not integers.
        ValueError: if the labels are empty or not one-dimensional, or no class has two images; if P, K or the seed is
            out of its range.

    Example:
        >>> sampler = PKSampler([7, 7, 7, -1, -1, 5, 5, 5], classes_per_batch=2, samples_per_class=2, seed=1)
        >>> len(sampler)
        2
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(1)  # the same batches on every machine, rank and restart
        >>> second == list(sampler), second == first
        (True, False)

    The full epoch is drawn at its first batch. This takes about 8 bytes and a few tenths of a microsecond per image.

    Relations:
        `RetrievalDataLoader` splits each batch over ranks and workers. Losses over ranked lists need K >= 2.

    Source:
        Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017 (P and K).
    """

    draws_classes = True

    def __init__(
        self, labels: Labels, *, classes_per_batch: PositiveInt, samples_per_class: Several, seed: Seed = 0
    ) -> None:
        self.classes_per_batch = checked(self, classes_per_batch=classes_per_batch)
        self.samples_per_class = checked(self, samples_per_class=samples_per_class)
        super().__init__(labels, seed=seed)
        classes = len(self.class_sizes)
        if classes_per_batch > classes:
            raise InvalidValue(
                "must be at most the number of classes with two images or more",
                self.name,
                "classes_per_batch",
                got=f"{classes_per_batch} for {classes} such classes ({self.num_single_image_classes} more have a "
                "single image)",
                cure="lower it",
            )

    def __len__(self) -> int:
        return math.ceil(len(self.images) / (self.classes_per_batch * self.samples_per_class))

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        P, K, classes = self.classes_per_batch, self.samples_per_class, len(self.class_sizes)
        rounds = math.ceil(len(self) * P / classes)
        class_batches = shuffled_class_batches(generator, classes, P=P, batches=len(self))
        image_queues = shuffled_queue_table(generator, self.images, self.class_sizes, group_size=K, length=rounds * K)
        image_groups = image_queues.reshape(classes, rounds, K)
        for batch_classes, batch_rounds in class_batches:
            yield image_groups[batch_classes, batch_rounds].reshape(P * K)  # in round r, the r-th K images
