"""Batches of a few categories, as ROADMAP and HAPPIER are trained: the negatives are of the positives' own kind."""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.samplers.pk import GlobalBatchSampler, Labels, grouped, integer_array
from lightning_retrieval.datamodules.samplers.queues import Integers, ShuffledQueues, shuffled_order, uniform

_LISTED = 1_000_000  # combinations, beyond which they are drawn one by one
_COMBINATIONS = 1  # after (seed, refill), a stream of its own beside the batches' (seed, epoch)


class CategorySampler(GlobalBatchSampler):
    """Batches of few categories, P classes in equal shares of each, K images of each class.

    An epoch has ceil(N / (P K)) batches, N being the images that take part. All combinations of categories come round
    before any comes twice, also over epochs. Within an epoch, every class of a category comes round before any comes
    twice, and every image of a class. A batch holds an image twice only where its class has fewer than the batch takes
    of it (then its images appear equally often, but for one, in the batch and in each group of K), and a class twice
    only where its category has fewer than its share of P (likewise).

    In a batch the classes of a category stand side by side, and the images of a class.

    Args:
        labels: one integer for each image of the dataset, in its order; any integers, any class sizes. Classes with a
            single image are left out, as it has no positive; one warning says how many.
        categories: one integer for each image, the same for all images of a class.
        classes_per_batch: P, a multiple of `categories_per_batch`.
        samples_per_class: K, at least 2.
        categories_per_batch: at least 1 and at most the number of categories that hold a class with two images.
        seed: an integer >= 0, which with the epoch decides every batch.

    Raises:
        TypeError: if labels or categories are not integers, or another argument is not one.
        ValueError: if labels or categories are not one-dimensional or not equally many, or no class has two images; if
            a class has images of several categories; if a number is out of its range.

    Example:
        >>> labels, categories = [0, 0, 1, 1, 2, 2, 3, 3], [7, 7, 7, 7, 5, 5, 5, 5]
        >>> sampler = CategorySampler(
        ...     labels, categories, classes_per_batch=2, samples_per_class=2, categories_per_batch=1, seed=1
        ... )
        >>> sorted(sorted(categories[index] for index in batch) for batch in sampler)
        [[5, 5, 5, 5], [7, 7, 7, 7]]

    More than a million combinations are not listed: then each category comes round before any comes twice, within an
    epoch, in random company. A batch is drawn when it is asked for, in about a microsecond for each image.

    Relations:
        Negatives of the positives' own categories are harder than those that `PKSampler` finds among all classes.
        `RetrievalDataLoader` shares each batch out over ranks and workers.

    Source:
        Cakir, He, Xia, Kulis and Sclaroff, Deep Metric Learning to Rank, CVPR 2019, section 4.2 (two categories).
    """

    def __init__(
        self,
        labels: Labels,
        categories: Labels | None,
        *,
        classes_per_batch: int,
        samples_per_class: int,
        categories_per_batch: int = 2,
        seed: int = 0,
    ) -> None:
        self.categories_per_batch = check_integer(self.name, "categories_per_batch", categories_per_batch, 1)
        self.classes_per_batch = check_integer(self.name, "classes_per_batch", classes_per_batch, 1)
        self.samples_per_class = check_integer(self.name, "samples_per_class", samples_per_class, 2)
        if classes_per_batch % categories_per_batch:
            raise ValueError(
                f"{self.name}: `classes_per_batch` must be a multiple of `categories_per_batch`, got "
                f"{classes_per_batch} for {categories_per_batch}."
            )
        if categories is None:
            raise TypeError(
                f"{self.name}: `categories` must be one integer for each image, got None; give them, or take PKSampler."
            )
        super().__init__(labels, seed=seed)
        # The classes of each category side by side, and how many each has.
        self.classes, starts = grouped(self._category_of_each_class(categories))
        self.category_sizes: Integers = np.diff(starts, append=len(self.classes))
        count = len(starts)
        if categories_per_batch > count:
            raise ValueError(
                f"{self.name}: `categories_per_batch` must be at most the number of categories that hold a class with "
                f"two images or more, got {categories_per_batch} for {count} such categories; lower it."
            )
        self.combinations: Integers | None = None
        if math.comb(count, categories_per_batch) <= _LISTED:
            listed = itertools.chain.from_iterable(itertools.combinations(range(count), categories_per_batch))
            self.combinations = np.fromiter(listed, dtype=np.int32).reshape(-1, categories_per_batch)
        small = int((self.category_sizes < self._share).sum())
        if small:
            warnings.warn(
                f"{self.name}: fewer classes than the {self._share} that a batch takes of a category: {small} of "
                f"{count} categories; a batch holds their classes several times.",
                stacklevel=2,
            )

    @property
    def _share(self) -> int:
        """The classes that a batch takes of a category."""
        return self.classes_per_batch // self.categories_per_batch

    def _category_of_each_class(self, categories: Labels) -> Integers:
        array = integer_array(self.name, "categories", categories)
        if len(array) != self.size:
            raise ValueError(
                f"{self.name}: `categories` must be one integer for each of the {self.size} labels, got {len(array)}."
            )
        array = array[self.images]
        lowest = np.minimum.reduceat(array, self.class_starts)
        highest = np.maximum.reduceat(array, self.class_starts)
        mixed = np.flatnonzero(lowest != highest)
        if len(mixed):
            first = mixed[0]
            raise ValueError(
                f"{self.name}: `categories` must be the same for all images of a class, got {lowest[first]} and "
                f"{highest[first]} for class {self.class_labels[first]} ({len(mixed)} of {len(lowest)} classes)."
            )
        return lowest

    def __len__(self) -> int:
        return math.ceil(len(self.images) / (self.classes_per_batch * self.samples_per_class))

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        random = uniform(generator)
        classes = ShuffledQueues(self.classes, self.category_sizes, random)
        images = ShuffledQueues(self.images, self.class_sizes, random)
        for combination in itertools.islice(self._combinations(random), len(self)):
            batch: list[int] = []
            for place in shuffled_order(generator, len(combination)).tolist():  # none is always the first rank's
                category = combination[place]
                for label, times in Counter(classes.take(category, self._share)).items():
                    batch += images.take(label, self.samples_per_class, times)
            yield np.array(batch)

    def _combinations(self, random: Iterator[float]) -> Iterator[list[int]]:
        """This epoch's stretch of the queue of combinations, which is one for all epochs."""
        if self.combinations is None:
            count = len(self.category_sizes)
            categories = ShuffledQueues(np.arange(count), np.array([count]), random)
            while True:
                yield categories.take(0, self.categories_per_batch)
        refill, place = divmod(self.epoch * len(self), len(self.combinations))
        while True:
            refilled = np.random.default_rng((self.seed, refill, _COMBINATIONS))
            for number in shuffled_order(refilled, len(self.combinations))[place:]:
                yield self.combinations[number].tolist()
            refill, place = refill + 1, 0
