"""What every data module shares: a loader of global batches for training, plain loaders for evaluation."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import pytorch_lightning as pl
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_retrieval.checks import check_flag, check_integer
from lightning_retrieval.datamodules.files.data_report import Count, DataReport
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, resume_position
from lightning_retrieval.datamodules.samplers.all_classes import AllClassesSampler
from lightning_retrieval.datamodules.samplers.category import CategorySampler
from lightning_retrieval.datamodules.samplers.pk import GlobalBatchSampler, PKSampler

SamplerName = Literal["pk", "category", "all_classes"]


@runtime_checkable
class LabelledImages(Protocol):
    """A map-style dataset whose items are dicts with `images`, `labels` and `ids`, the id being the item's index."""

    labels: Int[Tensor, " item"]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class RetrievalDataModule(pl.LightningDataModule, ABC):
    """Base of the data modules: training batches of P classes with K images each, evaluation sets as they are.

    A subclass says what the three sets are, in `train_set`, `val_set` and `test_set`; the latter two may be dicts of
    several sets by name. One that wants training batches of its own overrides `train_sampler`.

    Args:
        classes_per_batch: P, the classes of a global batch.
        samples_per_class: K, the images of each, >= 2.
        eval_batch_size: images embedded at a time in evaluation, >= 1.
        num_workers: processes that load images, >= 0; with 0 the training process does.
        seed: what the batches and the augmentation follow from, together with the epoch; that of `seed_everything`
            where None, and 0 without one.
        sampler: of training batches: `"pk"` (`PKSampler`), `"category"` (`CategorySampler`, two categories a batch, of
            the training set's `categories`) or `"all_classes"` (`AllClassesSampler`, of P K images); or a
            `GlobalBatchSampler` that was made with the training set's labels, for which P and K here count nothing.
        pin_memory: whether batches are put into page-locked memory, from which a GPU is fed faster; where there is one
            where None.
        persistent_workers: whether the workers stay from epoch to epoch; they do where None.

    Raises:
        ValueError: if a number is out of its range, `sampler` is unknown, or workers are to persist and there are none;
            P and K, and a sampler of your own, against the data when training begins.
        TypeError: if a number is not an integer, `sampler` is neither a name nor a `GlobalBatchSampler`, or one of the
            last two is not True, False or None.

    Relations:
        A run does not depend on the number of workers or processes, and goes on in the middle of an epoch with the next
        batch.
    """

    published_counts: ClassVar[Mapping[str, Sequence[Count]]] = MappingProxyType({})  # of each set, for `check`

    def __init__(
        self,
        classes_per_batch: int = 32,
        samples_per_class: int = 4,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        seed: int | None = None,
        sampler: SamplerName | GlobalBatchSampler = "pk",
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.classes_per_batch = check_integer(who, "classes_per_batch", classes_per_batch, least=1)
        self.samples_per_class = check_integer(who, "samples_per_class", samples_per_class, least=2)
        self.eval_batch_size = check_integer(who, "eval_batch_size", eval_batch_size, least=1)
        self.num_workers = check_integer(who, "num_workers", num_workers, least=0)
        default = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.seed = default if seed is None else check_integer(who, "seed", seed, least=0)
        self.sampler = _check_sampler(who, sampler)
        self.pin_memory = check_flag(who, "pin_memory", pin_memory)
        self.persistent_workers = check_flag(who, "persistent_workers", persistent_workers)
        if self.persistent_workers and not self.num_workers:
            raise ValueError(f"{who}: `persistent_workers` need workers, got num_workers=0; set it to 1 or more.")

    @property
    @abstractmethod
    def train_set(self) -> LabelledImages:
        """What is trained on, augmented."""

    @property
    @abstractmethod
    def val_set(self) -> LabelledImages | Mapping[str, LabelledImages]:
        """What checkpoints are chosen by, or several such sets by name."""

    @property
    @abstractmethod
    def test_set(self) -> LabelledImages | Mapping[str, LabelledImages]:
        """What is reported, or several such sets by name."""

    def train_sampler(self) -> GlobalBatchSampler:
        """The sampler of the training batches. For one that is made of the data read, override this method.

        It is asked for when training begins, and is made of the `train_set`'s labels and `self.seed`.
        """
        labels, P, K = self.train_set.labels, self.classes_per_batch, self.samples_per_class
        if isinstance(self.sampler, GlobalBatchSampler):
            if self.sampler.size != len(labels):
                raise ValueError(
                    f"{type(self).__name__}: `sampler` must be made with the labels of the {len(labels):,} training "
                    f"images, got one made with {self.sampler.size:,}."
                )
            return self.sampler
        if self.sampler == "all_classes":
            return AllClassesSampler(labels, batch_size=P * K, seed=self.seed)
        if self.sampler == "category":
            categories = getattr(self.train_set, "categories", None)
            return CategorySampler(labels, categories, classes_per_batch=P, samples_per_class=K, seed=self.seed)
        return PKSampler(labels, classes_per_batch=P, samples_per_class=K, seed=self.seed)

    def train_dataloader(self) -> RetrievalDataLoader:
        """The batches of `train_sampler`, from the position a resumed run goes on at."""
        position = {} if self.trainer is None else resume_position(self.trainer)
        return RetrievalDataLoader(self.train_set, self.train_sampler(), **position, **self._loading(self.train_set))

    def val_dataloader(self) -> Any:
        """The validation set, in order; a dict of loaders where there are several."""
        return self._evaluation(self.val_set)

    def test_dataloader(self) -> Any:
        """The test set, in order; a dict of loaders where there are several."""
        return self._evaluation(self.test_set)

    def predict_dataloader(self) -> Any:
        """The test set, in order; a dict of loaders where there are several."""
        return self._evaluation(self.test_set)

    def check(self) -> DataReport:
        """Count the images and classes of each set, before training, beside the published counts."""
        report = DataReport()
        for stage, found in {"train": self.train_set, "val": self.val_set, "test": self.test_set}.items():
            sets = (
                {f"{stage}/{name}": part for name, part in found.items()}
                if isinstance(found, Mapping)
                else {stage: found}
            )
            for name, dataset in sets.items():
                counts = (len(dataset), len(dataset.labels.unique()))
                report.splits[name] = (counts, self.published_counts.get(name, ()))
        return report

    def _evaluation(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._evaluation(part) for name, part in dataset.items()}
        return DataLoader(dataset, batch_size=self.eval_batch_size, **self._loading(dataset))

    def _loading(self, dataset: Any) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0 if self.persistent_workers is None else self.persistent_workers,
            "pin_memory": torch.cuda.is_available() if self.pin_memory is None else self.pin_memory,
            "collate_fn": getattr(dataset, "collate", None),
        }


def _check_sampler(who: str, sampler: SamplerName | GlobalBatchSampler) -> SamplerName | GlobalBatchSampler:
    if isinstance(sampler, GlobalBatchSampler) or sampler in get_args(SamplerName):
        return sampler
    kind = ValueError if isinstance(sampler, str) else TypeError
    names = ", ".join(map(repr, get_args(SamplerName)))
    raise kind(f"{who}: `sampler` must be one of {names}, or a GlobalBatchSampler, got {sampler!r}.")
