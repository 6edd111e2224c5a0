"""A loader of the images of some shards, made from a loader of all images."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)  # settings of a `DataLoader` that the new one has, too


class RangeBatches(Sampler[list[int]]):
    """Yields the positions of each batch.

    Args:
        ranges: positions, in the order in which they are loaded.
        batch_size: number of images of a batch; the last one of a range may have fewer.
    """

    def __init__(self, ranges: Sequence[range], batch_size: int) -> None:
        self.ranges = ranges
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(-(-len(positions) // self.batch_size) for positions in self.ranges)

    def __iter__(self) -> Iterator[list[int]]:
        for positions in self.ranges:
            for begin in range(0, len(positions), self.batch_size):
                yield list(positions[begin : begin + self.batch_size])


def is_in_order(loader: Any) -> bool:
    """Whether a loader gives all images of a data set once, in order, so that shards of them can be dealt out."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:  # a subclass that does more than to load
        return False
    batches = loader.batch_sampler
    is_plain = type(batches) is BatchSampler and not batches.drop_last
    return is_plain and type(loader.sampler) is SequentialSampler


class DealtLoader:
    """Loads the images of some ranges of positions, as another loader would load them.

    It is no `DataLoader`, because Lightning would replace the batch sampler of one.

    Args:
        loader: of all images, see `is_in_order`.
        ranges: positions of the images; no batch reaches from one range into the next.
        has_length: whether Lightning is to know the number of batches, which it does only if no process has none.
    """

    def __init__(self, loader: DataLoader[Any], ranges: Sequence[range], *, has_length: bool) -> None:
        self.dataset = loader.dataset
        self._has_length = has_length
        settings = {name: getattr(loader, name) for name in KEPT}
        batches = RangeBatches(ranges, loader.batch_size or 1)
        self._loader = DataLoader(self.dataset, batch_sampler=batches, **settings)

    def __len__(self) -> int:
        if not self._has_length:
            raise TypeError("the number of batches is not known to all processes")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """A generator, so workers start with the first batch: Lightning also calls `iter` to check the loader."""
        yield from self._loader
