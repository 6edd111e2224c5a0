"""The base class of the batch samplers, which yield global batches.

The list of batches depends only on (seed, epoch), not on ranks, workers or restarts. `RetrievalDataLoader` splits each
global batch into one shard per rank, so a run has the same batches with one process as with many.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from lightning_retrieval.arguments import PositiveInt, Seed, Several, checked
from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.item_seeds import as_array
from lightning_retrieval.distributed import world_size
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.models.sides import Side

Integers = NDArray[np.signedinteger[Any]]
Labels = Tensor | NDArray[Any] | Sequence[int]


def integer_array(name: str, values: Labels) -> NDArray[Any]:
    """Convert `values` to a one-dimensional array of integers.

    Raises:
        ValueError: if the values are empty or not one-dimensional.
        TypeError: if the values are not integers.
    """
    array = as_array(name, values)
    if array.ndim != 1 or len(array) == 0:
        raise InvalidValue("must be one integer for each image", argument=name, got=f"shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidType("must be integers", argument=name, got=array.dtype)
    return array


def group_equal_values(values: NDArray[Any]) -> tuple[Integers, Integers]:
    """Sort the indices of `values` so that equal values are adjacent.

    Returns:
        The sorted indices, which ascend within each group of equal values, and the first position of each group.
    """
    order: Integers = np.argsort(values, kind="stable")
    if len(order) <= np.iinfo(np.int32).max:
        order = order.astype(np.int32)  # half the memory
    ordered = values[order]
    starts_group = np.ones(len(values), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=starts_group[1:])
    return order, np.flatnonzero(starts_group)


def slice_positions(starts: Integers, lengths: Integers, dtype: np.dtype[Any]) -> Integers:
    """Concatenate the ranges from `start` to `start + length` for all pairs of a start and a length."""
    offsets = (starts - (np.cumsum(lengths) - lengths)).astype(dtype)
    positions: Integers = np.repeat(offsets, lengths)
    positions += np.arange(len(positions), dtype=dtype)
    return positions


def group_by_class(labels: NDArray[Any]) -> tuple[Integers, NDArray[Any], Integers, int]:
    """Group the images by class. Classes with a single image are left out, and the smallest class comes first.

    Returns:
        The indices of the images, grouped by class; the label and the size of each class; and the number of all
            classes, including those with a single image.

    Raises:
        ValueError: if no class has two images.
    """
    order, starts = group_equal_values(labels)
    sizes = np.diff(starts, append=len(labels))
    kept = np.argsort(sizes, kind="stable")
    kept = kept[sizes[kept] >= 2]
    if len(kept) == 0:
        raise InvalidValue(
            "must hold a class with at least 2 images",
            argument="labels",
            got=f"{len(labels)} images of {len(sizes)} classes",
            cure="check that the labels are classes and not the numbers of the images, or use TagSampler if the "
            "images have tags",
        )
    images = order[slice_positions(starts[kept], sizes[kept], order.dtype)]
    return images, labels[order[starts[kept]]], sizes[kept], len(sizes)


class Section(NamedTuple):
    """The rows of one side in a batch.

    Attributes:
        begin: position of the first row in the batch.
        end: position after the last row.
        first_index: index of the side's first item in the data set of both sides; ids of the side count from there.
    """

    begin: int
    end: int
    first_index: int = 0


class GlobalBatchSampler(Sampler[list[int]], ABC):
    """Base class of the batch samplers: groups images by class, and yields the global batches of an epoch.

    A subclass defines the number of batches in an epoch (`__len__`) and the batches themselves (`draw`). It may read
    `images`, the dataset indices of all images in classes with two images or more, grouped by class, the smallest class
    first. It may also read `class_labels`, `class_sizes` and `class_starts`: the label, the size and the first position
    in `images` of each class.

    Args:
        labels: one integer for each image, in the order of the dataset that the loader reads, which may be a `Subset`
            or a `ConcatDataset`; any integers, any class sizes. Classes with a single image are skipped, because that
            image has no positive; one warning gives their number.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Attributes:
        epoch: the epoch of the latest iteration, or the one that `set_epoch` has set since.
        has_begun: whether an iteration of `epoch` has begun.

    Raises:
        TypeError: if the labels or the seed are not integers.
        ValueError: if the labels are empty or not one-dimensional, or no class has two images.

    Each new iteration is one epoch later than the one before, unless `set_epoch` is called, as Lightning and Fabric do.

    Relations:
        `RetrievalDataLoader` compares the labels of the batches with these labels. If they differ, the loader raises
        an error if `draws_classes` is True, else it warns. `draws_classes` is True for the samplers of this
        library that draw several images of a class. The property `sampler` returns the sampler itself, so that
        Lightning also calls `set_epoch` in one process with a plain `DataLoader(dataset, batch_sampler=...)`. With
        several processes, such a loader raises an error; use `RetrievalDataLoader`.
    """

    draws_classes: ClassVar[bool] = False
    group_name: ClassVar[str] = "classes"  # what images are grouped by, for warnings

    def __init__(self, labels: Labels, *, seed: Seed = 0) -> None:
        self.seed = checked(self, seed=seed)
        self.epoch = 0
        self.has_begun = False
        self.images: Integers
        with owned_by(self.name):
            array = integer_array("labels", labels)
            self.images, self.class_labels, self.class_sizes, num_classes = group_by_class(array)
        self.dataset_size = len(array)
        self.num_single_image_classes = num_classes - len(self.class_sizes)
        if self.num_single_image_classes:
            warnings.warn(
                f"{self.name}: skipped {self.num_single_image_classes} of {num_classes} {self.group_name} in training "
                "because they have a single image.",
                stacklevel=3,
            )

    @property
    def name(self) -> str:
        """The class name, which is the prefix of error messages."""
        return type(self).__name__

    @property
    def class_starts(self) -> Integers:
        """Position in `images` at which each class starts."""
        starts: Integers = np.cumsum(self.class_sizes) - self.class_sizes
        return starts

    def check_dataset(self, dataset: Any) -> None:
        """Raise a `ValueError` if a data set has not as many items as the sampler has labels, such as a `Subset`."""
        if len(dataset) != self.dataset_size:
            rule = f"must have one item for each of the {self.dataset_size} labels of {self.name}"
            cure = "make the sampler with the labels of this data set; for a Subset, labels[subset.indices]"
            raise InvalidValue(rule, argument="dataset", got=len(dataset), cure=cure)

    def classes_of(self, batch: Sequence[int]) -> Integers | None:
        """The class of each image of a batch, as an index of `class_labels`; None if a class is not known.

        Args:
            batch: dataset indices, as the sampler draws them.
        """
        classes: Integers = self._class_of_image[np.array(batch)]
        if (classes < 0).any():  # the subclass also draws images of other classes
            return None
        return classes

    @cached_property
    def _class_of_image(self) -> Integers:
        """The class of each image as an index of `class_labels`; -1 for the images that are skipped."""
        classes = np.full(self.dataset_size, -1, np.int32)
        classes[self.images] = np.repeat(np.arange(len(self.class_sizes), dtype=np.int32), self.class_sizes)
        return classes

    def sections(self, batch: Sequence[int]) -> dict[Side | None, Section]:
        """The rows of each side in a batch, which are split over the processes one side at a time.

        Args:
            batch: dataset indices, as the sampler draws them. A batch without sides has one section, None.
        """
        return {None: Section(0, len(batch))}

    @property
    def sampler(self) -> "GlobalBatchSampler":
        """The sampler itself, because Lightning looks for `set_epoch` here if a plain `DataLoader` has the sampler.

        Raises:
            ValueError: if there are several processes, which would all draw the same batches without a
                `RetrievalDataLoader`, which does not read this property.
        """
        processes = world_size()
        if processes > 1:
            raise InvalidValue(
                "each of several processes must get its own part of a batch",
                self.name,
                got=f"{processes} processes that would all draw the same images, because the loader is not a "
                "RetrievalDataLoader",
                cure=f"use RetrievalDataLoader(dataset, {self.name}(...)), which needs no flag of the Trainer",
            )
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, an integer >= 0, whose batches the next iteration yields."""
        self.epoch = check_integer("epoch", epoch, 0, owner=self.name)
        self.has_begun = False

    @property
    def next_epoch(self) -> int:
        """The epoch whose batches the next iteration yields."""
        return self.epoch + self.has_begun

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches in an epoch."""

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> Iterable[Integers]:
        """Draw the global batches of epoch `self.epoch`, each as a row of dataset indices.

        Use no other source of randomness than `generator`, which is newly created from (seed, epoch).
        """

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch = self.next_epoch
        self.has_begun = True
        for batch in self.draw(np.random.default_rng((self.seed, self.epoch))):
            yield batch.tolist()


class RandomBatchSampler(GlobalBatchSampler):
    """Batches from a random order of all images in each epoch; the last N % batch_size images are skipped.

    This sampler is for training without image classes, such as the training of a detector.

    Args:
        num_images: N, number of images, >= 2.
        batch_size: number of images in a global batch, from 1 to N.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if a number is out of its range.

    Example:
        >>> from lightning_retrieval.datamodules import RandomBatchSampler
        >>> sampler = RandomBatchSampler(7, batch_size=3)
        >>> [len(set(batch)) for batch in sampler]
        [3, 3]

    Relations:
        `RetrievalDataLoader` splits each batch over ranks and workers.
    """

    def __init__(self, num_images: Several, *, batch_size: PositiveInt, seed: Seed = 0) -> None:
        self.num_images = checked(self, num_images=num_images)
        self.batch_size = checked(self, batch_size=batch_size)
        if batch_size > num_images:
            rule = "must be at most the number of images"
            raise InvalidValue(rule, self.name, "batch_size", got=f"{batch_size} for {num_images} images")
        super().__init__(np.zeros(num_images, np.int64), seed=seed)

    def classes_of(self, batch: Sequence[int]) -> None:
        """Return None, because the images have no classes."""

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        order = generator.permutation(self.num_images)
        for batch in range(len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]
