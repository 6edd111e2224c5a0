"""Batches of random images, for training that has no classes of images, such as that of a detector."""

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler, Integers


class RandomBatchSampler(GlobalBatchSampler):
    """Batches of an epoch's random order of all images; the last N % batch_size images of the order are left out.

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

    def __init__(self, num_images: int, *, batch_size: int, seed: int = 0) -> None:
        self.num_images = check_integer(self.name, "num_images", num_images, 2)
        self.batch_size = check_integer(self.name, "batch_size", batch_size, 1)
        if batch_size > num_images:
            raise ValueError(
                f"{self.name}: `batch_size` must be at most the number of images, got {batch_size} for "
                f"{num_images} images."
            )
        super().__init__(np.zeros(num_images, np.int64), seed=seed)

    def classes_of(self, batch: Sequence[int]) -> None:
        """None: the images have no classes."""

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        order = generator.permutation(self.num_images)
        for batch in range(len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]
