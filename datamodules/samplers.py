"""Batch samplers that yield the global batch: the list of batches is a function of (seed, epoch) and nothing else.

No sampler here knows of ranks, workers or restarts. `RetrievalDataLoader` cuts each global batch into the ranks'
shares, so that a run has the same batches on one process and on many.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from lightning_retrieval.checks import check_integer

Integers = NDArray[np.int64]
Labels = Tensor | NDArray[Any] | Sequence[int]


class GlobalBatchSampler(Sampler[list[int]], ABC):
    """Base of the batch samplers: labels grouped by class, a seed, an epoch, and batches that follow from those two.

    A subclass says how many batches an epoch has (`__len__`) and which (`draw`).

    Args:
        labels: one integer for each image of the dataset, in its order; any integers, any class sizes. Classes with a
            single image are left out, as it has no positive; one warning says how many.
        seed: an integer >= 0, which with the epoch decides every batch.

    Raises:
        TypeError: if the labels are not integers, or the seed is not one.
        ValueError: if the labels are not one-dimensional, are none, or no class has two images.

    Relations:
        `.sampler` is the sampler itself, so Lightning's `set_epoch` also arrives through a plain
        `DataLoader(dataset, batch_sampler=...)` in one process. On several use `RetrievalDataLoader`.
    """

    def __init__(self, labels: Labels, *, seed: int = 0) -> None:
        self.seed = check_integer(self.name, "seed", seed, 0)
        self.epoch = 0
        array = _label_array(self.name, labels)
        found, class_of, counts = np.unique(array, return_inverse=True, return_counts=True)
        kept = np.argsort(counts, kind="stable")
        kept = kept[counts[kept] >= 2]
        if len(kept) == 0:
            raise ValueError(
                f"{self.name}: `labels` must hold a class with at least 2 images, got {len(array)} images of "
                f"{len(found)} classes; check that the labels are classes and not the images' own numbers."
            )
        self.size = len(array)  # of the data set that the labels are of
        self.single = len(found) - len(kept)
        # The classes that take part, the smallest first: their labels, their sizes, and their images side by side.
        self.class_labels = found[kept]
        self.class_sizes: Integers = counts[kept].astype(np.int64)
        place = np.full(len(found), len(kept))
        place[kept] = np.arange(len(kept))
        order = np.argsort(place[class_of], kind="stable")
        self.images: Integers = order[: self.class_sizes.sum()].astype(np.int64)
        if self.single:
            warnings.warn(
                f"{self.name}: left out of training for having a single image: {self.single} of {len(found)} classes.",
                stacklevel=3,
            )

    @property
    def name(self) -> str:
        """The class name, with which every message begins."""
        return type(self).__name__

    @property
    def sampler(self) -> "GlobalBatchSampler":
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, an integer >= 0, whose batches the next iteration yields."""
        self.epoch = check_integer(self.name, "epoch", epoch, 0)

    @abstractmethod
    def __len__(self) -> int:
        """How many batches an epoch has."""

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> Iterable[Integers]:
        """The global batches of one epoch, drawn with `generator` alone, each a row of dataset indices."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.draw(np.random.default_rng((self.seed, self.epoch))):
            yield batch.tolist()


class PKSampler(GlobalBatchSampler):
    """Batches of P classes with K images each.

    An epoch has ceil(N / (P K)) batches, N being the images that take part. Within it every class comes round before
    any comes twice, and within a class every image before any comes twice. A batch holds P different classes, and an
    image twice only where its class has fewer than K (then its images appear equally often, but for one).

    Args:
        labels: one integer for each image of the dataset, in its order; any integers, any class sizes. Classes with a
            single image are left out, as it has no positive; one warning says how many.
        classes_per_batch: P, at least 1 and at most the number of classes with two images or more. With 1 a batch
            holds no negatives.
        samples_per_class: K, at least 2.
        seed: an integer >= 0, which with the epoch decides every batch.

    Raises:
        TypeError: if the labels are not integers, or another argument is not one.
        ValueError: if the labels are not one-dimensional, are none, or no class has two images; if P, K or the seed is
            out of its range.

    Example:
        >>> sampler = PKSampler([7, 7, 7, -1, -1, 5, 5, 5], classes_per_batch=2, samples_per_class=2, seed=1)
        >>> len(sampler)
        2
        >>> [[int(index) for index in batch] for batch in sampler] == list(sampler)
        True
        >>> sampler.set_epoch(1)  # other batches, the same on every machine, rank and restart
        >>> sorted(len(batch) for batch in sampler)
        [4, 4]

    An epoch is drawn whole, at its first batch: 8 bytes for each image, a second for a few million images.

    Relations:
        `RetrievalDataLoader` shares each batch out over ranks and workers. Losses over ranked lists need K >= 2.

    Source:
        Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017 (P and K).
    """

    def __init__(self, labels: Labels, *, classes_per_batch: int, samples_per_class: int, seed: int = 0) -> None:
        self.classes_per_batch = check_integer(self.name, "classes_per_batch", classes_per_batch, 1)
        self.samples_per_class = check_integer(self.name, "samples_per_class", samples_per_class, 2)
        super().__init__(labels, seed=seed)
        classes = len(self.class_sizes)
        if classes_per_batch > classes:
            raise ValueError(
                f"{self.name}: `classes_per_batch` must be at most the number of classes with two images or more, got "
                f"{classes_per_batch} for {classes} such classes ({self.single} more have a single image); lower it."
            )

    def __len__(self) -> int:
        return math.ceil(len(self.images) / (self.classes_per_batch * self.samples_per_class))

    def draw(self, generator: np.random.Generator) -> Integers:
        P, K, classes = self.classes_per_batch, self.samples_per_class, len(self.class_sizes)
        groups = len(self) * P
        rounds = math.ceil(groups / classes)
        every_class = np.arange(classes)
        class_queue = shuffled_queues(generator, every_class, np.array([classes]), cut=P, length=groups)[0]
        image_queues = shuffled_queues(generator, self.images, self.class_sizes, cut=K, length=rounds * K)
        # A class comes once in each round of the class queue, so in round r it hands out its r-th group of K.
        drawn: Integers = image_queues.reshape(classes, rounds, K)[class_queue, np.arange(groups) // classes]
        return drawn.reshape(len(self), P * K)


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
    starts = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(items)) - starts[owner]
    queues = np.empty((len(sizes), length), dtype=np.int64)
    open_group = np.zeros(len(items), dtype=bool)  # is the item already in the group that the refill cuts?
    for refill in range(math.ceil(length / sizes[0])):
        size = sizes[: int((refill * sizes < length).sum())]  # of the sets to be refilled
        begin = refill * size  # where this round begins in their queues
        m = int(size.sum())
        own, at = owner[:m], place[:m]
        order = _shuffled(generator, own, at, open_group[:m], -begin % cut)
        position = begin[own] + at
        wanted = position < length
        queues[own[wanted], position[wanted]] = items[order[wanted]]
        group = (begin + size) // cut * cut  # where the group begins that the next refill cuts
        # A group that began before this round (a set smaller than `cut`) keeps the marks of the round it began in.
        open_group[order] = np.where((group >= begin)[own], position >= group[own], open_group[order])
    return queues


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


def _label_array(who: str, labels: Labels) -> NDArray[Any]:
    """The labels as a one-dimensional array of integers, refused if they are anything else."""
    try:
        array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError:
        raise ValueError(f"{who}: `labels` must be one integer for each image, got rows of unequal length.") from None
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{who}: `labels` must be one integer for each image, got shape {array.shape}.")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{who}: `labels` must be integers, got {array.dtype}.")
    return array
