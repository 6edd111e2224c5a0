"""The shard of each global batch that one rank loads.

Lightning leaves a data loader unchanged, and calls `set_epoch`, if `loader.sampler` is a `DistributedSampler`.
Therefore the class here is a `DistributedSampler`, one that yields whole batches.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.item_seeds import SeededIndex, augmentation_seeds
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler
from lightning_retrieval.distributed import rank, world_size


def shard_bounds(size: int, shard: int, shards: int) -> tuple[int, int]:
    """Begin and end of one of `shards` contiguous shards of `size` rows, as `torch.tensor_split` cuts them."""
    smaller, num_larger = divmod(size, shards)
    begin = shard * smaller + min(shard, num_larger)
    end = (shard + 1) * smaller + min(shard + 1, num_larger)
    return begin, end


class RankBatchSampler(DistributedSampler[list[SeededIndex]]):
    """Yields this rank's shard of each global batch; used by `RetrievalDataLoader`.

    Args:
        batch_sampler: the sampler of the global batches.
        epoch: the epoch to start with, an integer >= 0.
        start: index of the first batch of that epoch.

    Raises:
        TypeError: if `epoch` or `start` is not an integer.
        ValueError: if `epoch` or `start` is out of its range.
    """

    def __init__(self, batch_sampler: GlobalBatchSampler, *, epoch: int, start: int) -> None:
        # The base class's __init__ is not called: it stores rank and world size, but the process group may come later.
        self.batch_sampler = batch_sampler
        self.first_drawn: list[int] = []  # the first global batch of the last iteration that has begun
        self.set_position(epoch, start)

    def set_position(self, epoch: int, start: int) -> None:
        """Let iterations of `epoch` begin at batch `start`."""
        epoch = check_integer("RetrievalDataLoader", "epoch", epoch, 0)
        start = check_integer("RetrievalDataLoader", "start", start, 0)
        if start > len(self):
            raise ValueError(
                f"RetrievalDataLoader: `start` must be at most the number of batches of an epoch, got {start} for "
                f"{len(self)} batches; resume with the labels and the sampler that the position was saved with."
            )
        self.batch_sampler.set_epoch(epoch)
        self.start_epoch = epoch
        self.start = start
        self.next_batch = start  # the batch after the last one that the loader has returned

    @property
    def first_batch(self) -> int:
        """Index of the first batch of an iteration of the current epoch: 0, or `start` in the resumed epoch."""
        if self.batch_sampler.epoch == self.start_epoch:
            return self.start
        return 0

    @property
    def sampler(self) -> "RankBatchSampler":
        """The sampler itself, because Lightning also looks for `set_epoch` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        seed, epoch = self.batch_sampler.seed, self.batch_sampler.epoch
        world = world_size()
        this_rank = rank()
        first = self.first_batch
        for number, batch in itertools.islice(enumerate(self.batch_sampler), first, None):
            if len(batch) < world:
                raise ValueError(
                    f"RetrievalDataLoader: a batch must have an image for each process, got {len(batch)} images for "
                    f"{world} processes; enlarge the batch or use fewer processes."
                )
            if number == first:
                self.first_drawn = batch
            begin, end = shard_bounds(len(batch), this_rank, world)
            seeds = augmentation_seeds(seed, epoch, number, np.arange(begin, end)).tolist()
            yield [SeededIndex(index, item_seed) for index, item_seed in zip(batch[begin:end], seeds, strict=True)]
