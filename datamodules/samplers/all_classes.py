"""Batches that hold every class, as Average Precision over one large batch is trained on few classes."""

import math
from collections.abc import Iterator

import numpy as np

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.samplers.pk import GlobalBatchSampler, Labels
from lightning_retrieval.datamodules.samplers.queues import Integers, ShuffledQueues, shuffled_order, uniform


class AllClassesSampler(GlobalBatchSampler):
    """Batches that hold every class, and as many images of each as fit.

    An epoch has ceil(N / batch_size) batches, N being the images that take part. A batch gives all classes equally many
    of its images: a class that has fewer gives all of its own, the others share what it leaves, and what cannot be
    shared equally goes to a random choice of them, one image to each. No batch holds an image twice, and within an
    epoch every image of a class comes round before any comes twice.

    In a batch the images of a class stand side by side, the classes in random order.

    Args:
        labels: one integer for each image of the dataset, in its order; any integers, any class sizes. Classes with a
            single image are left out, as it has no positive; one warning says how many.
        batch_size: the images of a batch, at least 2: at least as many as there are classes with two images or more,
            and at most as many as these have images. With twice the number of classes every image has a positive.
        seed: an integer >= 0, which with the epoch decides every batch.

    Raises:
        TypeError: if the labels are not integers, or another argument is not one.
        ValueError: if the labels are not one-dimensional, are none, or no class has two images; if the batch size or
            the seed is out of its range.

    Example:
        >>> sampler = AllClassesSampler([7, 7, 7, -1, -1, 5, 5, 5, 5], batch_size=7)
        >>> len(sampler)
        2
        >>> [sum(index in (3, 4) for index in batch) for batch in sampler]  # all that class -1 has
        [2, 2]

    A batch is drawn when it is asked for, in about a microsecond for each image.

    Relations:
        `PKSampler` takes some of the classes, K images of each, where they are too many for one batch.
        `RetrievalDataLoader` shares each batch out over ranks and workers.

    Source:
        Revaud, Almazan, Rezende and de Souza, Learning with Average Precision: Training Image Retrieval with a Listwise
        Loss, ICCV 2019, section 4.2. How the images beyond the first of each class are chosen is ours.
    """

    def __init__(self, labels: Labels, *, batch_size: int, seed: int = 0) -> None:
        self.batch_size = check_integer(self.name, "batch_size", batch_size, 2)
        super().__init__(labels, seed=seed)
        classes = len(self.class_sizes)
        if batch_size < classes:
            raise ValueError(
                f"{self.name}: `batch_size` must be at least the number of classes with two images or more, got "
                f"{batch_size} for {classes} such classes ({self.single} more have a single image); raise it, or take "
                "PKSampler."
            )
        if batch_size > len(self.images):
            raise ValueError(
                f"{self.name}: `batch_size` must be at most the number of images of classes with two or more, got "
                f"{batch_size} for {len(self.images)} such images; lower it."
            )

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        queues = ShuffledQueues(self.images, self.class_sizes, uniform(generator))
        level = equal_share(self.class_sizes, self.batch_size)
        every_batch = np.minimum(self.class_sizes, level)
        left = self.batch_size - int(every_batch.sum())
        for _ in range(len(self)):
            order = shuffled_order(generator, len(self.class_sizes))
            count = every_batch.copy()
            count[order[self.class_sizes[order] > level][:left]] += 1
            batch: list[int] = []
            for label, images in zip(order.tolist(), count[order].tolist(), strict=True):
                batch += queues.take(label, images)
            yield np.array(batch)


def equal_share(sizes: Integers, total: int) -> int:
    """The largest number that each of the sets can give, or all that it has, without giving more than `total`.

    Args:
        sizes: of the sets, ascending.
        total: at most the sum of the sizes.
    """
    before = np.cumsum(sizes) - sizes
    # What is left for each of the others when the sets before one have given all they have.
    share = (total - before) // np.arange(len(sizes), 0, -1)
    gives_part = sizes > share
    return int(share[gives_part.argmax()] if gives_part.any() else sizes[-1])
