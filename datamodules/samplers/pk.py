"""Batches of P classes with K images each."""

import math
from collections.abc import Iterator

import numpy as np

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler, Integers, Labels
from lightning_retrieval.datamodules.samplers.category import shuffled_queue_table


class PKSampler(GlobalBatchSampler):
    """Batches of P classes with K images each.

    An epoch has ceil(N / (P K)) batches, where N is the number of images that take part. Within an epoch every class
    is drawn once before any class is drawn twice; within a class every image is drawn once before any image is drawn
    twice. A batch holds P different classes. It holds an image more than once only if the class has fewer than K
    images; the numbers of times that the images of this class occur then differ by at most one.

    Args:
        labels: one integer for each image, in the order of the dataset; any integers, any class sizes. Classes with a
            single image are skipped, because that image has no positive; one warning gives their number.
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
        >>> [[int(index) for index in batch] for batch in sampler] == list(sampler)
        True
        >>> sampler.set_epoch(1)  # other batches, the same on every machine, rank and restart
        >>> sorted(len(batch) for batch in sampler)
        [4, 4]

    The full epoch is drawn at its first batch. This takes about 8 bytes and a few tenths of a microsecond per image.

    Relations:
        `RetrievalDataLoader` splits each batch over ranks and workers. Losses over ranked lists need K >= 2.

    Source:
        Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017 (P and K).
    """

    draws_classes = True

    def __init__(self, labels: Labels, *, classes_per_batch: int, samples_per_class: int, seed: int = 0) -> None:
        self.classes_per_batch = check_integer(self.name, "classes_per_batch", classes_per_batch, 1)
        self.samples_per_class = check_integer(self.name, "samples_per_class", samples_per_class, 2)
        super().__init__(labels, seed=seed)
        classes = len(self.class_sizes)
        if classes_per_batch > classes:
            raise ValueError(
                f"{self.name}: `classes_per_batch` must be at most the number of classes with two images or more, got "
                f"{classes_per_batch} for {classes} such classes ({self.num_single_image_classes} more have a single "
                "image); lower it."
            )

    def __len__(self) -> int:
        return math.ceil(len(self.images) / (self.classes_per_batch * self.samples_per_class))

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        P, K, classes = self.classes_per_batch, self.samples_per_class, len(self.class_sizes)
        groups = len(self) * P
        rounds = math.ceil(groups / classes)
        all_classes = np.arange(classes, dtype=self.images.dtype)
        class_queue = shuffled_queue_table(generator, all_classes, np.array([classes]), group_size=P, length=groups)[0]
        image_queues = shuffled_queue_table(generator, self.images, self.class_sizes, group_size=K, length=rounds * K)
        image_groups = image_queues.reshape(classes, rounds, K)
        for begin in range(0, groups, P):
            # Each class occurs once in each round of the class queue. In round r it contributes its r-th group of K.
            batch_classes = class_queue[begin : begin + P]
            batch_rounds = np.arange(begin, begin + P) // classes
            yield image_groups[batch_classes, batch_rounds].reshape(P * K)
