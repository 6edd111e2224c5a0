"""The training loader: each rank's share of every global batch, and for each image the seed of its augmentation.

Lightning leaves a loader alone, and calls its `set_epoch`, when `loader.sampler` is a `DistributedSampler`; so ours is
one that hands out whole batches. Everything that it hands out follows from (seed, epoch, batch, position in the global
batch): not from the number of ranks or workers, nor from where a run was cut.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, DistributedSampler

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.samplers.pk import GlobalBatchSampler


class SeededIndex(int):
    """A dataset index that carries the random seed of its image's augmentation.

    It is an `int` in every respect; a dataset that knows nothing of it works unchanged. What is computed from it (as
    `Subset` and `ConcatDataset` do) is a plain `int` again.

    Args:
        value: the index.
        seed: from 0 to 2**63 - 1.

    Example:
        >>> index = SeededIndex(3, seed=11)
        >>> "abcdef"[index], index == 3, index.seed
        ('d', True, 11)

    Relations:
        `RetrievalDataLoader` makes them, `index_generator` turns one into a generator.
    """

    seed: int

    def __new__(cls, value: int, seed: int) -> "SeededIndex":
        index = super().__new__(cls, value)
        index.seed = seed
        return index

    def __reduce__(self) -> tuple[type["SeededIndex"], tuple[int, int]]:
        return SeededIndex, (int(self), self.seed)


def index_generator(index: int) -> torch.Generator | None:
    """The generator of one image's augmentation, for use in `dataset[index]`.

    Args:
        index: what `dataset[index]` was called with. A plain `int` (an evaluation loader, a call by hand) has no seed:
            the answer is None, which torch's functions take for the global generator.

    Example:
        >>> flip = torch.rand((), generator=index_generator(SeededIndex(3, seed=11))) < 0.5
        >>> bool(flip) == bool(torch.rand((), generator=index_generator(SeededIndex(8, seed=11))) < 0.5)
        True
        >>> index_generator(3) is None
        True
    """
    return torch.Generator().manual_seed(index.seed) if isinstance(index, SeededIndex) else None


class RetrievalDataLoader(DataLoader[Any]):
    """A `DataLoader` that shares each global batch out over the ranks, under the Trainer's default flags.

    Each rank gets a contiguous piece of every batch, cut as `torch.tensor_split` cuts, so that the pieces joined in
    rank order are the global batch. Rank and world size are asked of `torch.distributed` when an iteration begins.
    The dataset is asked for `SeededIndex`es.

    The workers start with the first batch and not before, so `set_epoch` is in time also after `iter(loader)`, which is
    when Lightning first calls it.

    Args:
        dataset: a map-style dataset.
        batch_sampler: yields the global batches; its epoch is set to `epoch`.
        epoch: an integer >= 0, the epoch to begin with.
        start: from 0 to the number of batches: the batch that an iteration of epoch `epoch` begins with; 0 where not
            given. All other epochs begin with batch 0. Where given, `load_state_dict` leaves the position alone.
        kwargs: all that `DataLoader` takes besides, such as `num_workers`, `persistent_workers` or `collate_fn`.

    Raises:
        TypeError: if `batch_sampler` is not a `GlobalBatchSampler`, or `epoch` or `start` not an integer.
        ValueError: if `dataset` has not an item for each label of `batch_sampler`, or `epoch` or `start` is out of its
            range; in the iteration, if a batch has fewer images than there are processes.

    Example:
        >>> from lightning_retrieval.datamodules.samplers.pk import PKSampler
        >>> sampler = PKSampler([0, 0, 1, 1, 2, 2], classes_per_batch=2, samples_per_class=2)
        >>> loader = RetrievalDataLoader(range(6), sampler)
        >>> [batch.tolist() for batch in loader] == list(sampler)
        True

    Relations:
        `len` is the number of batches of a whole epoch on every rank, also of one that begins at `start`: Lightning
        counts the batches before it in. Lightning saves and restores the position by `state_dict` and
        `load_state_dict`. They go on after the last batch handed out; a checkpoint written when a step failed needs
        that batch again, which `resume_position` knows. Evaluation uses plain `DataLoader`s.
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: GlobalBatchSampler,
        *,
        epoch: int = 0,
        start: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(batch_sampler, GlobalBatchSampler):
            raise TypeError(
                "RetrievalDataLoader: `batch_sampler` must be a GlobalBatchSampler such as PKSampler, got "
                f"{type(batch_sampler).__name__}."
            )
        if not hasattr(dataset, "__len__") or len(dataset) != batch_sampler.size:
            raise ValueError(
                f"RetrievalDataLoader: `dataset` must have an item for each of the {batch_sampler.size} labels that "
                f"the batch sampler was made with, got {len(dataset) if hasattr(dataset, '__len__') else dataset!r}."
            )
        self._share = _RankShare(batch_sampler)
        self._share.go_to(epoch, 0 if start is None else start)
        self._placed = start is not None
        super().__init__(dataset, batch_sampler=self._share, **kwargs)

    @property  # type: ignore[override]
    def sampler(self) -> DistributedSampler[Any]:
        """The batch sampler, which is a `DistributedSampler`: what Lightning asks for."""
        return self._share

    @sampler.setter
    def sampler(self, _: Any) -> None:
        """`DataLoader` sets its default here, which a loader with a batch sampler never uses."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, an integer >= 0, of the iterations that have not handed out a batch yet."""
        self._share.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._share.handed_out = self._share.first
        for batch in super().__iter__():
            self._share.handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the batch with which to go on: the one after the last that was handed out."""
        return {"epoch": self._share.batch_sampler.epoch, "start": self._share.handed_out}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where another loader's `state_dict` was taken, unless this one was made with a `start`.

        Raises:
            ValueError: if an epoch has fewer batches here.
        """
        if not self._placed:
            self._share.go_to(state_dict["epoch"], state_dict["start"])


def resume_position(trainer: pl.Trainer) -> dict[str, int]:
    """Where the trainer's run goes on: `epoch` and `start` for a loader made in `train_dataloader()`.

    It is exact for every checkpoint of Lightning, also for one written because a step failed, whose batch comes again.

    Args:
        trainer: one that is fitting, its checkpoint (if any) restored, as it is in `train_dataloader()`.

    Example:
        >>> resume_position(pl.Trainer(logger=False, enable_checkpointing=False))
        {'epoch': 0, 'start': 0}

    Relations:
        `RetrievalDataLoader(dataset, sampler, **resume_position(self.trainer))`.
    """
    epochs = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    # Between epochs the batches still counted are those of the epoch before.
    return {"epoch": trainer.current_epoch, "start": batches.processed if epochs.ready > epochs.completed else 0}


class _RankShare(DistributedSampler[list[SeededIndex]]):
    """This rank's share of each global batch, behind `RetrievalDataLoader`."""

    def __init__(self, batch_sampler: GlobalBatchSampler) -> None:
        # Not the base's __init__: it fixes rank and world size, which a process group that comes later would change.
        self.batch_sampler = batch_sampler

    def go_to(self, epoch: int, start: int) -> None:
        """Let iterations of `epoch` begin at batch `start`."""
        check_integer("RetrievalDataLoader", "epoch", epoch, 0)
        check_integer("RetrievalDataLoader", "start", start, 0)
        if start > len(self):
            raise ValueError(
                f"RetrievalDataLoader: `start` must be at most the number of batches of an epoch, got {start} for "
                f"{len(self)} batches; resume with the labels and the sampler that the position was saved with."
            )
        self.batch_sampler.set_epoch(epoch)
        self.start_epoch, self.start = epoch, start
        self.handed_out = start

    @property
    def first(self) -> int:
        """The batch that an iteration of the current epoch begins with."""
        return self.start if self.batch_sampler.epoch == self.start_epoch else 0

    @property
    def sampler(self) -> "_RankShare":
        """Itself: the other place where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        seed, epoch = self.batch_sampler.seed, self.batch_sampler.epoch
        grouped = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        for number, batch in itertools.islice(enumerate(self.batch_sampler), self.first, None):
            if len(batch) < world:
                raise ValueError(
                    f"RetrievalDataLoader: a batch must have an image for each process, got {len(batch)} images for "
                    f"{world} processes; enlarge the batch or use fewer processes."
                )
            short, longer = divmod(len(batch), world)
            begin, end = (r * short + min(r, longer) for r in (rank, rank + 1))
            seeds = augmentation_seeds(seed, epoch, number, np.arange(begin, end))
            yield [SeededIndex(index, value) for index, value in zip(batch[begin:end], seeds.tolist(), strict=True)]


def augmentation_seeds(seed: int, epoch: int, batch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """A hash from 0 to 2**63 - 1 of (seed, epoch, batch, position) for each position in the global batch.

    Source:
        Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (SplitMix64).
    """
    state = np.zeros(len(positions), dtype=np.uint64)
    for part in (seed % 2**64, epoch, batch, positions):
        state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)  # wraps around
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    halved: NDArray[np.uint64] = state >> np.uint64(1)
    return halved.astype(np.int64)
