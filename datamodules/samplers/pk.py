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
from lightning_retrieval.datamodules.samplers.queues import Integers, shuffled_queues

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
        array = integer_array(self.name, "labels", labels)
        order, starts = grouped(array)
        counts = np.diff(starts, append=len(array))
        kept = np.argsort(counts, kind="stable")
        kept = kept[counts[kept] >= 2]
        if len(kept) == 0:
            raise ValueError(
                f"{self.name}: `labels` must hold a class with at least 2 images, got {len(array)} images of "
                f"{len(counts)} classes; check that the labels are classes and not the images' own numbers."
            )
        self.size = len(array)  # of the data set that the labels are of
        self.single = len(counts) - len(kept)
        # The classes that take part, the smallest first: their labels, their sizes, and their images side by side.
        self.class_labels = array[order[starts[kept]]]
        self.class_sizes: Integers = counts[kept]
        shift = starts[kept] - self.class_starts  # from a class's place in `images` to that in `order`
        places = np.repeat(shift.astype(order.dtype), self.class_sizes)
        places += np.arange(len(places), dtype=order.dtype)
        self.images: Integers = order[places]
        if self.single:
            warnings.warn(
                f"{self.name}: left out of training for having a single image: {self.single} of {len(counts)} classes.",
                stacklevel=3,
            )

    @property
    def name(self) -> str:
        """The class name, with which every message begins."""
        return type(self).__name__

    @property
    def class_starts(self) -> Integers:
        """Where each class's images begin in `images`."""
        starts: Integers = np.cumsum(self.class_sizes) - self.class_sizes
        return starts

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
        """The global batches of epoch `self.epoch`, each a row of dataset indices.

        They follow from `generator`, which comes fresh from (seed, epoch), and from nothing else but these two numbers.
        """

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

    An epoch is drawn whole, at its first batch: about 8 bytes and a few tenths of a microsecond for each image.

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

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        P, K, classes = self.classes_per_batch, self.samples_per_class, len(self.class_sizes)
        groups = len(self) * P
        rounds = math.ceil(groups / classes)
        every_class = np.arange(classes, dtype=self.images.dtype)
        class_queue = shuffled_queues(generator, every_class, np.array([classes]), cut=P, length=groups)[0]
        image_queues = shuffled_queues(generator, self.images, self.class_sizes, cut=K, length=rounds * K)
        image_groups = image_queues.reshape(classes, rounds, K)
        for begin in range(0, groups, P):
            # A class comes once in each round of the class queue, so in round r it hands out its r-th group of K.
            batch = image_groups[class_queue[begin : begin + P], np.arange(begin, begin + P) // classes]
            yield batch.reshape(P * K)


def grouped(values: NDArray[Any]) -> tuple[Integers, Integers]:
    """An order in which equal values stand side by side, each value's places ascending, and where each value begins."""
    order: Integers = np.argsort(values, kind="stable")
    if len(order) <= np.iinfo(np.int32).max:
        order = order.astype(np.int32)  # half the memory
    ordered = values[order]
    new = np.ones(len(values), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return order, np.flatnonzero(new)


def integer_array(who: str, name: str, values: Labels) -> NDArray[Any]:
    """The values as a one-dimensional array of integers, refused if they are anything else."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError:
        raise ValueError(f"{who}: `{name}` must be one integer for each image, got rows of unequal length.") from None
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{who}: `{name}` must be one integer for each image, got shape {array.shape}.")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{who}: `{name}` must be integers, got {array.dtype}.")
    return array
