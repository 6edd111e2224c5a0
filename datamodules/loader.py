"""The data loader for training, which gives each rank its shard of each global batch.

If `loader.sampler` is a `DistributedSampler`, Lightning leaves a data loader unchanged and calls `set_epoch`. Therefore
the batch sampler here is a `DistributedSampler` that yields batches.
"""

import itertools
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from lightning_retrieval.backend import pl
from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.image_set import check_image_sizes
from lightning_retrieval.datamodules.item_seeds import SeededIndex, augmentation_seeds
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler, Integers, Section
from lightning_retrieval.distributed import rank, world_size
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.models.sides import Side


def shard_bounds(size: int, shard: int, shards: int) -> tuple[int, int]:
    """Return begin and end of a shard, if `size` rows are split into `shards` shards as by `torch.tensor_split`."""
    smaller, num_larger = divmod(size, shards)
    begin = shard * smaller + min(shard, num_larger)
    end = (shard + 1) * smaller + min(shard + 1, num_larger)
    return begin, end


def shard_positions(sections: Iterable[Section], shard: int, shards: int) -> Integers:
    """The positions of a shard in a global batch: its part of each section, split as by `torch.tensor_split`."""
    parts = []
    for section in sections:
        begin, end = shard_bounds(section.end - section.begin, shard, shards)
        parts.append(np.arange(section.begin + begin, section.begin + end))
    return np.concatenate(parts)


class RankBatchSampler(DistributedSampler[list[SeededIndex]]):
    """Yields this rank's shard of each global batch; used by `RetrievalDataLoader`.

    Args:
        batch_sampler: the sampler of the global batches.
        epoch: the epoch to start with, an integer >= 0.
        start: index of the first batch to yield in that epoch.

    Raises:
        TypeError: if `epoch` or `start` is not an integer.
        ValueError: if `epoch` or `start` is out of its range.
    """

    def __init__(self, batch_sampler: GlobalBatchSampler, *, epoch: int, start: int) -> None:
        # `__init__` of the base class is not called, because it would store rank and world size before the process
        # group exists.
        self.batch_sampler = batch_sampler
        self.drawn: dict[int, list[int]] = {}  # the global batches, by index, that the loader has not yet returned
        self.global_batch: list[int] = []  # the global batch that the loader returned last
        self.set_position(epoch, start)

    def set_position(self, epoch: int, start: int) -> None:
        """Make iterations of `epoch` begin at batch `start`; after its last batch, the next epoch follows."""
        epoch = check_integer("epoch", epoch, 0, owner="RetrievalDataLoader")
        start = check_integer("start", start, 0, owner="RetrievalDataLoader")
        if start > len(self):
            rule = "must be at most the number of batches of an epoch"
            cure = "resume with the labels and the sampler that the position was saved with"
            raise InvalidValue(rule, "RetrievalDataLoader", "start", got=f"{start} for {len(self)} batches", cure=cure)
        self.batch_sampler.set_epoch(epoch)
        self.batch_sampler.has_begun = start == len(self)
        self.start_epoch = epoch
        self.start = start
        self.next_batch = start  # index of the batch after the last batch that the loader has returned

    def mark_returned(self) -> None:
        """Record that the loader returns its next batch."""
        self.global_batch = self.drawn.pop(self.next_batch, [])
        self.next_batch += 1

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
        self.next_batch = self.first_batch

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        self.set_epoch(self.batch_sampler.next_epoch)
        seed, epoch = self.batch_sampler.seed, self.batch_sampler.epoch
        world = world_size()
        this_rank = rank()
        first = self.first_batch
        self.drawn = {}
        for number, batch in itertools.islice(enumerate(self.batch_sampler), first, None):
            sections = self.batch_sampler.sections(batch)
            _check_rows(sections, world)
            self.drawn[number] = batch
            positions = shard_positions(sections.values(), this_rank, world)
            seeds = augmentation_seeds(seed, epoch, number, positions).tolist()
            yield [
                SeededIndex(batch[position], item_seed)
                for position, item_seed in zip(positions.tolist(), seeds, strict=True)
            ]


def _check_rows(sections: Mapping[Side | None, Section], processes: int) -> None:
    """Raise unless each section of a batch has a row for each process."""
    for side, section in sections.items():
        rows = section.end - section.begin
        if rows < processes:
            what = "images"
            if side is not None:
                what = side
            rule = "a batch must have an image for each process"
            got = f"{rows} {what} for {processes} processes"
            raise InvalidValue(rule, "RetrievalDataLoader", got=got, cure="enlarge the batch or use fewer processes")


def resume_position(trainer: pl.Trainer) -> dict[str, int]:
    """Return the position at which the trainer's run continues: `epoch` and `start` of a `RetrievalDataLoader`.

    The position is exact for every checkpoint of Lightning. If the checkpoint was written because a step failed, the
    batch of that step is repeated. `RetrievalDataModule` calls this function. If you create the loader in another
    `train_dataloader` hook, call this function there.

    Args:
        trainer: a trainer that is fitting and has restored its checkpoint (if any), as in the hook
            `train_dataloader()`.

    Example:
        >>> resume_position(pl.Trainer(logger=False, enable_checkpointing=False))
        {'epoch': 0, 'start': 0}

    Relations:
        Pass the position to the loader: `RetrievalDataLoader(dataset, sampler, **resume_position(self.trainer))`.
    """
    epochs = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    between_epochs = epochs.ready <= epochs.completed
    if between_epochs:  # the progress still counts the batches of the previous epoch
        return {"epoch": trainer.current_epoch, "start": 0}
    return {"epoch": trainer.current_epoch, "start": batches.processed}


def training_loader(
    trainer: pl.Trainer | None, dataset: Any, sampler: GlobalBatchSampler, **settings: Any
) -> "RetrievalDataLoader":
    """Create the loader of a data module's training batches; it begins at the batch where the trainer's run continues.

    Args:
        trainer: the trainer of the data module; None outside of a run.
        dataset: a map-style dataset.
        sampler: the sampler of the global batches.
        settings: other arguments of `DataLoader`.
    """
    position: dict[str, int] = {}
    if trainer is not None:
        position = resume_position(trainer)
    return RetrievalDataLoader(dataset, sampler, **position, **settings)


def evaluation_loader(dataset: Any, batch_size: int, **settings: Any) -> DataLoader[Any]:
    """Create a loader of a data module's evaluation batches, in the order of the dataset.

    Args:
        dataset: a map-style dataset.
        batch_size: number of items of a batch.
        settings: other arguments of `DataLoader`.
    """
    check_found_by_workers(dataset, settings)
    return DataLoader(dataset, batch_size=batch_size, **settings)


class _OfSession(pickle.Pickler):
    """Finds the classes and functions that an object refers to and that were defined in the running session."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda _: False)
        self.found: list[str] = []

    def reducer_override(self, value: Any) -> Any:
        """Record what is pickled by its name; data of tensors are left out."""
        if isinstance(value, Tensor):
            return int, ()
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            self.found.append(value.__qualname__)
            return int, ()
        return NotImplemented


def check_found_by_workers(dataset: Any, settings: Mapping[str, Any]) -> None:
    """Raise if workers would not find what was defined in a notebook, since they do not have its cells.

    Workers that are forked have all that the process has. Python forks on Linux before 3.14.

    Args:
        dataset: the dataset of a loader.
        settings: arguments of `DataLoader`.

    Raises:
        ValueError: if the dataset, its transform or another function was defined in a notebook.
    """
    workers, context = settings.get("num_workers", 0), settings.get("multiprocessing_context")
    if context is not None and not isinstance(context, str):
        context = context.get_start_method()
    method = context or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if workers == 0 or method == "fork" or hasattr(sys.modules["__main__"], "__file__"):
        return
    with open(os.devnull, "wb") as nowhere:
        pickler = _OfSession(nowhere)
        pickler.dump((dataset, settings.get("collate_fn"), settings.get("worker_init_fn")))
    if pickler.found:
        got = f"{workers} with {pickler.found[0]}, which was defined in a notebook, where they do not find it"
        cure = "move it into a file that the notebook imports, or set num_workers=0"
        raise InvalidValue("must be 0", argument="num_workers", got=got, cure=cure)


def loader_settings(
    num_workers: int, *, pin_memory: bool | None, persistent_workers: bool | None = None, collate_fn: Any
) -> dict[str, Any]:
    """The common arguments of a data module's loaders for training and for evaluation.

    Args:
        num_workers: number of processes that load images.
        pin_memory: whether batches are copied to page-locked memory; if None, only if there is a GPU.
        persistent_workers: whether workers stay alive between epochs; None means True if there are workers.
        collate_fn: function that makes a batch of a list of items; None for `collate_images`.
    """
    if collate_fn is None:
        collate_fn = collate_images
    if pin_memory is None:
        pin_memory = torch.cuda.is_available()
    if persistent_workers is None:
        persistent_workers = num_workers > 0
    return {
        "num_workers": num_workers,
        "persistent_workers": persistent_workers,
        "pin_memory": pin_memory,
        "collate_fn": collate_fn,
    }


@owned_by("RetrievalDataLoader")
def collate_images(items: Any) -> Any:
    """Check that all images have the same size, then make a batch with `default_collate`.

    Args:
        items: items of a dataset.

    Raises:
        ValueError: if the images differ in size.
    """
    cure = "let the transform crop or resize them to one size, or give a `collate_fn` that pads them"
    check_image_sizes(items, cure)
    return default_collate(items)


class RetrievalDataLoader(DataLoader[Any]):
    """A `DataLoader` that splits each global batch over the ranks. It works with the Trainer's default flags.

    Each rank gets a contiguous shard of each batch, split as by `torch.tensor_split`, so the shards concatenated in
    rank order are the global batch. Rank and world size are read from `torch.distributed` when an iteration begins. The
    indices passed to the dataset carry a seed, see `item_generator`.

    Each new iteration is one epoch later than the one before, unless `set_epoch` is called. The workers do not start
    before the first batch is requested. So `set_epoch` takes effect even after `iter(loader)`, when Lightning first
    calls `set_epoch`.

    Args:
        dataset: a map-style dataset.
        batch_sampler: the sampler of the global batches; its epoch is set to `epoch`.
        epoch: an integer >= 0, the epoch to begin with.
        start: index of the batch with which epoch `epoch` begins, from 0 to the number of batches; None means 0. All
            other epochs begin with batch 0. If `start` is not None, `load_state_dict` does not change the position.
        kwargs: other arguments of `DataLoader`: `num_workers`, `collate_fn`, `pin_memory`, `timeout`,
            `worker_init_fn`, `multiprocessing_context`, `generator`, `prefetch_factor`, `persistent_workers`,
            `pin_memory_device`. `in_order` must be True, because the position of a resumed run counts the batches.

    Raises:
        TypeError: if `batch_sampler` is not a `GlobalBatchSampler`, or `epoch` or `start` is not an integer.
        ValueError: if `dataset` does not have one item for each label of `batch_sampler`, `epoch` or `start` is out of
            its range, `in_order` is False, or workers that are not forked would not find what was defined in a
            notebook; during the iteration, if a batch has fewer images than there are processes or, without
            `collate_fn`, images of different sizes.

    Example:
        >>> from lightning_retrieval.datamodules import PKSampler
        >>> sampler = PKSampler([0, 0, 1, 1, 2, 2], classes_per_batch=2, samples_per_class=2)
        >>> loader = RetrievalDataLoader(range(6), sampler)
        >>> first, second = ([batch.tolist() for batch in loader] for epoch in range(2))
        >>> sampler.set_epoch(1)
        >>> second == list(sampler), second == first
        (True, False)

    Relations:
        `len` is the number of batches of a full epoch on each rank, even if the epoch begins at `start`, because
        Lightning also counts the batches before `start`. Lightning saves and restores the position with `state_dict`
        and `load_state_dict`, which continue after the last batch that the loader returned. If a checkpoint was written
        because a step failed, the batch of that step must be repeated; `resume_position` does this. For evaluation, use
        a plain `DataLoader`.
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
            raise InvalidType(
                "must be a GlobalBatchSampler such as PKSampler",
                "RetrievalDataLoader",
                "batch_sampler",
                got=type(batch_sampler).__name__,
            )
        with owned_by("RetrievalDataLoader"):
            batch_sampler.check_dataset(dataset)
            check_found_by_workers(dataset, kwargs)
        if not kwargs.get("in_order", True):
            raise InvalidValue(
                "must be True, because batches in another order are lost or repeated when a run is resumed",
                "RetrievalDataLoader",
                "in_order",
                got=kwargs["in_order"],
                cure="leave it out",
            )
        self._fixed_start = start is not None
        self._rank_sampler = RankBatchSampler(batch_sampler, epoch=epoch, start=0 if start is None else start)
        if kwargs.get("collate_fn") is None:
            kwargs["collate_fn"] = collate_images
        super().__init__(dataset, batch_sampler=self._rank_sampler, **kwargs)

    @property  # type: ignore[override]
    def sampler(self) -> DistributedSampler[Any]:
        """The batch sampler, which is the `DistributedSampler` that Lightning looks for."""
        return self._rank_sampler

    @sampler.setter
    def sampler(self, _: Any) -> None:
        """Ignore the default that `DataLoader` sets here; a loader with a batch sampler never uses it."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, an integer >= 0, for all iterations that have not yet returned a batch."""
        self._rank_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self._rank_sampler.mark_returned()
            yield batch

    def check_batch(
        self, labels: Tensor | None, ids: Tensor | None, *, side: Side | None = None, is_first: bool = True
    ) -> None:
        """Compare the batch that was returned last with the images that the sampler drew.

        `RetrievalModule` calls this method.

        Args:
            labels: labels of the global batch, of shape (batch,) or (batch, levels), or None.
            ids: ids of the global batch, of shape (batch,), or None.
            side: the side of the batch that the labels and ids are of; None for a batch without sides.
            is_first: whether the labels must group the images as the classes of the sampler do. If False, it is enough
                that the classes have different labels, so that a data set may replace images that it cannot read.

        Raises:
            ValueError: if several images have the same id, or the sampler was made with other labels. Other labels only
                cause a warning, in the first batch, if the sampler's `draws_classes` is False.
        """
        sampler, drawn = self._rank_sampler.batch_sampler, self._rank_sampler.global_batch
        section = sampler.sections(drawn).get(side)
        if section is None or not drawn:  # a `collate_fn` of the user may have made or removed the sides
            return
        drawn = drawn[section.begin : section.end]
        if ids is not None and (is_first or _has_second_label(ids, labels)):
            _check_ids(sampler, [index - section.first_index for index in drawn], ids.tolist())
        if ids is not None:
            ids = ids + section.first_index
        if labels is None or not (is_first or sampler.draws_classes):
            return
        agree = _are_same_groups if is_first else _are_separate
        problem = _difference_of_labels(sampler, drawn, labels.reshape(len(labels), -1), ids, agree)
        if problem is None:
            return
        if sampler.draws_classes:
            raise ValueError(problem)
        if rank() == 0:
            warnings.warn(problem, stacklevel=2)

    def state_dict(self) -> dict[str, int]:
        """The position at which to continue: the epoch, and the batch after the last returned batch."""
        return {"epoch": self._rank_sampler.batch_sampler.epoch, "start": self._rank_sampler.next_batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the position in a loader's `state_dict`, unless this loader was created with a `start`.

        Raises:
            ValueError: if the position is after the end of an epoch of this loader.
        """
        if not self._fixed_start:
            self._rank_sampler.set_position(state_dict["epoch"], state_dict["start"])


def _has_second_label(ids: Tensor, labels: Tensor | None) -> bool:
    """Whether an id has two labels. An image that replaces one that cannot be read has its own id and label again."""
    different = len(set(ids.tolist()))
    if labels is None or different == len(ids):
        return False
    rows = zip(ids.tolist(), map(tuple, labels.reshape(len(ids), -1).tolist()), strict=True)
    return len(set(rows)) > different


def _check_ids(sampler: GlobalBatchSampler, drawn: Sequence[int], ids: Sequence[int]) -> None:
    """Raise if different images have the same id. An image that was drawn several times may repeat its id.

    Args:
        sampler: the sampler of the global batches.
        drawn: dataset indices of the global batch that was drawn.
        ids: ids of the batch that was loaded, in which unreadable images may be missing.
    """
    images, different = len(set(drawn)), len(set(ids))
    if different < images - max(0, len(drawn) - len(ids)):
        got = f"{different} different `ids` for {images} images that {sampler.name} drew for a batch"
        cure = "let the data set return the index of each image as its id, or no ids"
        raise InvalidValue("each image must have an id of its own", "RetrievalDataLoader", got=got, cure=cure)


def _difference_of_labels(
    sampler: GlobalBatchSampler,
    drawn: Sequence[int],
    labels: Tensor,
    ids: Tensor | None,
    agree: Callable[[list[int], list[int]], bool],
) -> str | None:
    """Return an error message if the labels of a batch contradict the classes of the sampler, else None.

    Only the grouping of the images counts, not the values of the labels.

    Args:
        sampler: the sampler of the global batches.
        drawn: dataset indices of the global batch that was drawn.
        labels: labels of the loaded batch, (batch, levels). It is enough if the labels of one level group the images
            like the classes of the sampler.
        ids: ids of the loaded batch, or None. If the ids are dataset indices, they identify the rows of a batch that
            was reordered. If the ids are indices of another list of the same images, they are not used.
        agree: whether the classes and the labels of the rows agree.
    """
    if len(labels) != len(drawn):  # images could not be read, or there are several rows per image
        return None
    orders = [list(drawn)]
    if ids is not None and sorted(ids.tolist()) == sorted(drawn):
        orders.append(ids.tolist())
    for images in orders:
        classes = sampler.classes_of(images)
        if classes is None or any(agree(classes.tolist(), level) for level in labels.T.tolist()):
            return None
    groups = len(labels[:, 0].unique())
    return (
        "RetrievalDataLoader: `batch_sampler` must be made with the labels of the data set, got a batch of "
        f"{groups} classes, which group its {len(drawn)} images otherwise than the classes that {sampler.name} drew; "
        "give it the labels that the data set returns, which must not be the same for classes of joined data sets."
    )


def _are_same_groups(classes: list[int], labels: list[int]) -> bool:
    """Whether rows have one class exactly where they have one label."""
    return len(set(zip(classes, labels, strict=True))) == len(set(classes)) == len(set(labels))


def _are_separate(classes: list[int], labels: list[int]) -> bool:
    """Whether the rows have at least as many labels as classes."""
    return len(set(labels)) >= len(set(classes))
