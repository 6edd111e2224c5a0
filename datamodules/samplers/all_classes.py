"""Batches that hold every class, for training with AP over one large batch on a data set of few classes."""

import math
from collections.abc import Iterator

import numpy as np

from lightning_retrieval.arguments import Seed, Several, checked
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler, Integers, Labels
from lightning_retrieval.datamodules.samplers.category import ShuffledQueues, shuffled_order, uniform_numbers
from lightning_retrieval.invalid import InvalidValue


def largest_equal_count(sizes: Integers, total: int) -> int:
    """The largest n, at most the largest size, for which the sum of min(n, size) over all sets is at most `total`.

    Args:
        sizes: the sizes of the sets, ascending.
        total: upper limit of the sum of min(n, size); it is at most the sum of the sizes.
    """
    used_by_smaller = np.cumsum(sizes) - sizes  # sum of the sizes of all smaller sets
    remaining_sets = np.arange(len(sizes), 0, -1)
    count = (total - used_by_smaller) // remaining_sets
    contributes_part = sizes > count
    if not contributes_part.any():
        return int(sizes[-1])
    return int(count[contributes_part.argmax()])


class AllClassesSampler(GlobalBatchSampler):
    """Batches that hold every class, with as many images of each class as fit.

    An epoch has ceil(N / batch_size) batches, where N is the number of images in classes with two images or more. A
    batch takes n images from each class, or all images of a class with fewer than n; n is as large as the batch size
    allows. The positions that then remain go to a random choice of the larger classes, one position each. No batch
    holds an image twice, and within an epoch every image of a class is drawn once before any image of the class is
    drawn twice.

    In a batch the images of a class are adjacent, and the classes are in random order.

    Args:
        labels: one integer for each image, in the order of the dataset; any integers, any class sizes. Classes with a
            single image are skipped, because that image has no positive; one warning gives their number.
        batch_size: number of images in a batch, at least 2. It is at least the number of classes with two images or
            more, and at most the number of images in these classes. If it is at least twice the number of classes,
            every image has a positive.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Raises:
        TypeError: if the labels or another argument are not integers.
        ValueError: if the labels are empty or not one-dimensional, or no class has two images; if the batch size or
            the seed is out of its range.

    Example:
        >>> sampler = AllClassesSampler([7, 7, 7, -1, -1, 5, 5, 5, 5], batch_size=7)
        >>> len(sampler)
        2
        >>> [sum(index in (3, 4) for index in batch) for batch in sampler]  # all images of class -1
        [2, 2]

    A batch is drawn when it is needed, in about a microsecond per image.

    Relations:
        `PKSampler` draws P classes with K images each, for data sets whose classes do not all fit into one batch.
        `RetrievalDataLoader` splits each batch over ranks and workers.

    Source:
        Revaud, Almazan, Rezende and de Souza, Learning with Average Precision: Training Image Retrieval with a Listwise
        Loss, ICCV 2019, section 4.2. The choice of the images beyond the first of each class is an addition of this
        library.
    """

    draws_classes = True

    def __init__(self, labels: Labels, *, batch_size: Several, seed: Seed = 0) -> None:
        self.batch_size = checked(self, batch_size=batch_size)
        super().__init__(labels, seed=seed)
        classes = len(self.class_sizes)
        if batch_size < classes:
            rule = "must be at least the number of classes with two images or more"
            got = f"{batch_size} for {classes} such classes ({self.num_single_image_classes} more have a single image)"
            raise InvalidValue(rule, self.name, "batch_size", got=got, cure="raise it, or use PKSampler")
        if batch_size > len(self.images):
            rule = "must be at most the number of images of classes with two or more"
            got = f"{batch_size} for {len(self.images)} such images"
            raise InvalidValue(rule, self.name, "batch_size", got=got, cure="lower it")

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        queues = ShuffledQueues(self.images, self.class_sizes, uniform_numbers(generator))
        equal_count = largest_equal_count(self.class_sizes, self.batch_size)
        counts_of_every_batch = np.minimum(self.class_sizes, equal_count)
        remaining = self.batch_size - int(counts_of_every_batch.sum())
        for _ in range(len(self)):
            order = shuffled_order(generator, len(self.class_sizes))
            counts = counts_of_every_batch.copy()
            larger_classes = order[self.class_sizes[order] > equal_count]
            counts[larger_classes[:remaining]] += 1
            batch: list[int] = []
            for class_index, count in zip(order.tolist(), counts[order].tolist(), strict=True):
                batch += queues.take(class_index, count)
            yield np.array(batch)
