"""Batches of P tags with K images each, where an image may have several tags."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.arguments import PositiveInt, Seed, Several, checked
from lightning_retrieval.datamodules.item_seeds import as_array
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler, Integers
from lightning_retrieval.datamodules.samplers.category import ShuffledQueues, uniform_numbers
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.ranking.relevance import NO_TAG, is_multi_hot, tags_of_multi_hot

Tags = Tensor | NDArray[Any] | Sequence[Sequence[int]]


class TagQueues(ShuffledQueues):
    """The shuffled queues of the images of each tag. An image may be in several queues."""

    def take_new(self, which: int, count: int, batch: dict[int, None]) -> None:
        """Add up to `count` images of a tag to a batch: as many as there are that the batch does not hold yet.

        Images that the batch holds already stay in the round, unless the round has no others. Then the next round
        begins.

        Args:
            which: the tag.
            count: number of images to add.
            batch: the images of the batch, in order.
        """
        items, begin, end, position = self.items, self.begins[which], self.ends[which], self.positions[which]
        size = len(batch) + count
        for _ in ("this round", "next round"):
            stop = end  # the images from `stop` on are in the batch
            while position < stop and len(batch) < size:
                chosen = position + int(next(self.random) * (stop - position))
                image = items[chosen]
                if image in batch:
                    stop -= 1
                    items[chosen], items[stop] = items[stop], image
                    continue
                items[chosen], items[position] = items[position], image
                batch[image] = None
                position += 1
            if len(batch) == size:
                break
            position = begin
        self.positions[which] = position


class TagSampler(GlobalBatchSampler):
    """Batches of P K different images: P tags with K images each.

    A batch takes one tag after another until it has P K images. A tag contributes K images that the batch does not hold
    yet; if there are fewer, it contributes these, and the batch takes images of more than P tags. Within an epoch,
    every tag is taken once before any tag is taken twice, so frequent tags are taken as often as rare ones. Of the
    images of a tag that other tags have not added to the batch, every image is drawn once before any is drawn twice.
    An epoch has ceil(N / (P K)) batches, where N is the number of images with a tag that another image has, too.

    In a batch, the images that a tag contributes are adjacent.

    Args:
        tags: (images, T) integers >= 0, in the order of the dataset; -1 fills rows with fewer than T tags. Multi-hot
            labels are accepted as for `SharedTags`. Tags with a single image are skipped, because that image has no
            positive; one warning gives their number.
        tags_per_batch: P, at least 1 and at most the number of tags with two images or more.
        samples_per_tag: K, at least 2. There must be P K images with such tags.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Raises:
        TypeError: if the tags or another argument are not integers, or there are no tags.
        ValueError: if the tags are empty or not two-dimensional, a tag is below -1, or no tag has two images; if P, K
            or the seed is out of its range.

    Example:
        >>> red, blue, dress, shirt = range(4)
        >>> tags = [[red, dress], [red, shirt], [blue, dress], [blue, shirt], [red, -1]]
        >>> sampler = TagSampler(tags, tags_per_batch=2, samples_per_tag=2)
        >>> [len(set(batch)) for batch in sampler]
        [4, 4]

    A batch is drawn when it is needed, in about a microsecond per image.

    Relations:
        `SharedTags` is the rule of relevance for these batches. `PKSampler` draws from classes. `RetrievalDataLoader`
        splits each batch over ranks and workers; it does not compare the labels of the data set with the tags.
    """

    group_name = "tags"

    def __init__(
        self, tags: Tags | None, *, tags_per_batch: PositiveInt, samples_per_tag: Several, seed: Seed = 0
    ) -> None:
        self.tags_per_batch = checked(self, tags_per_batch=tags_per_batch)
        self.samples_per_tag = checked(self, samples_per_tag=samples_per_tag)
        with owned_by(self.name):
            table = _tag_table(tags)
        image, tag = _pairs(table)
        if np.unique(tag, return_counts=True)[1].max(initial=0) < 2:
            rule = "must hold a tag of at least 2 images"
            raise InvalidValue(rule, self.name, "tags", got=f"{len(table)} images without one")
        super().__init__(tag, seed=seed)
        self.dataset_size = len(table)
        self.images = image[self.images].astype(self.images.dtype)
        has_tag = np.zeros(len(table), dtype=bool)
        has_tag[self.images] = True
        self.num_images = int(has_tag.sum())
        self._check_sizes()

    def _check_sizes(self) -> None:
        tags = len(self.class_sizes)
        if self.tags_per_batch > tags:
            raise InvalidValue(
                "must be at most the number of tags with two images or more",
                self.name,
                "tags_per_batch",
                got=f"{self.tags_per_batch} for {tags} such tags ({self.num_single_image_classes} more have a "
                "single image)",
                cure="lower it",
            )
        if self._batch_size > self.num_images:
            rule = "times `samples_per_tag` must be at most the number of images with such tags"
            got = f"{self.tags_per_batch} * {self.samples_per_tag} for {self.num_images} images"
            raise InvalidValue(rule, self.name, "tags_per_batch", got=got, cure="lower one")

    @property
    def _batch_size(self) -> int:
        return self.tags_per_batch * self.samples_per_tag

    def classes_of(self, batch: Any) -> None:
        """Return None, because an image may have several tags."""

    def __len__(self) -> int:
        return math.ceil(self.num_images / self._batch_size)

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        random, tags = uniform_numbers(generator), len(self.class_sizes)
        tag_queue = ShuffledQueues(np.arange(tags), np.array([tags]), random)
        image_queues = TagQueues(self.images, self.class_sizes, random)
        for _ in range(len(self)):
            batch: dict[int, None] = {}
            for tag in tag_queue.take(0, self.tags_per_batch):
                image_queues.take_new(tag, self.samples_per_tag, batch)
            while len(batch) < self._batch_size:
                (tag,) = tag_queue.take(0, 1)
                image_queues.take_new(tag, min(self.samples_per_tag, self._batch_size - len(batch)), batch)
            yield np.array(list(batch))


def _tag_table(tags: Tags | None) -> NDArray[Any]:
    """Convert tags to an array (images, T); raise if that is not possible."""
    if tags is None:
        rule = "must be integers of shape (images, tags)"
        raise InvalidType(rule, argument="tags", got="None", cure="provide them, or use PKSampler")
    table = as_array("tags", tags)
    if table.ndim != 2 or table.size == 0:
        raise InvalidValue("must have the shape (images, tags)", argument="tags", got=table.shape)
    if table.dtype.kind not in "biu":
        raise InvalidType("must be integers", argument="tags", got=table.dtype)
    if table.min() < NO_TAG:
        raise InvalidValue(f"must be integers >= 0, or {NO_TAG} for no tag", argument="tags", got=table.min())
    numbers = torch.from_numpy(table.astype(np.int64))
    if table.dtype == bool or is_multi_hot(numbers):
        return tags_of_multi_hot(numbers).numpy()
    return table


def _pairs(table: NDArray[Any]) -> tuple[Integers, Integers]:
    """Return the image and the tag of each different pair of an image and its tag, in the order of the images."""
    rows = np.sort(table, axis=1)
    is_tag = rows != NO_TAG
    is_tag[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    image, column = np.nonzero(is_tag)
    return image, rows[image, column]
