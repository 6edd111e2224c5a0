"""The base classes of the data modules for detectors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypedDict

from torch.utils.data import DataLoader

from lightning_retrieval.checks import check_flag, check_integer, check_path
from lightning_retrieval.datamodules.arguments import ShownArguments, Unpack, refuse_unknown_arguments
from lightning_retrieval.datamodules.boxes.box_index import BoxIndex
from lightning_retrieval.datamodules.boxes.box_set import BoxSet, collate_boxes
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.loader import loader_settings, training_loader
from lightning_retrieval.datamodules.samplers.random_batches import RandomBatchSampler
from lightning_retrieval.training.checkpointed_module import CheckpointedDataModule
from lightning_retrieval.training.random_state import seed_of_run


class DetectionSettings(TypedDict, total=False):
    """Arguments of `DetectionDataModule`."""

    batch_size: int
    eval_batch_size: int
    num_workers: int
    seed: int | None
    pin_memory: bool | None


class DetectionDataModule(ShownArguments, CheckpointedDataModule, ABC):
    """Base class of the data modules for detectors: random global batches for training, evaluation in order.

    A subclass defines `class_names` and the sets `train_set`, `val_set` and `test_set`, whose items are pairs of an
    image and a target as those of `BoxSet`.

    Args:
        batch_size: number of images in a global batch, >= 1, which the processes share.
        eval_batch_size: number of images at a time in evaluation, >= 1.
        num_workers: number of processes that load images, >= 0; with 0 the training process loads them.
        seed: determines the batches and the augmentation, together with the epoch; if None, the seed of
            `seed_everything`, else 0.
        pin_memory: whether batches are copied to page-locked memory; if None, only if there is a GPU.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number is not an integer, or `pin_memory` is not True, False or None.

    Relations:
        A run does not depend on the number of workers. One that was interrupted within an epoch continues with the
        next batch.
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        eval_batch_size: int = 8,
        num_workers: int = 0,
        seed: int | None = None,
        pin_memory: bool | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown_arguments(type(self), unknown)
        super().__init__()
        owner = type(self).__name__
        self.batch_size = check_integer(owner, "batch_size", batch_size, least=1)
        self.eval_batch_size = check_integer(owner, "eval_batch_size", eval_batch_size, least=1)
        self.num_workers = check_integer(owner, "num_workers", num_workers, least=0)
        self.seed = seed_of_run(owner, seed)
        self.pin_memory = check_flag(owner, "pin_memory", pin_memory)

    @property
    @abstractmethod
    def class_names(self) -> list[str]:
        """Names of the classes 1, 2, ...; 0 is background."""

    @property
    @abstractmethod
    def train_set(self) -> Any:
        """The training set, with augmentation."""

    @property
    @abstractmethod
    def val_set(self) -> Any:
        """The set on which checkpoints are chosen."""

    @property
    @abstractmethod
    def test_set(self) -> Any:
        """The set for which results are reported."""

    def train_dataloader(self) -> DataLoader[Any]:
        """A loader of random batches, which begins where a resumed run continues.

        With `Trainer(overfit_batches=...)` the batches are in order, since Lightning repeats the first ones.
        """
        trainer = self.trainer
        if trainer is not None and getattr(trainer, "overfit_batches", 0) > 0:
            share = max(1, self.batch_size // trainer.world_size)  # Lightning's sampler divides the images
            return DataLoader(self.train_set, batch_size=share, **self._loader_settings())
        sampler = RandomBatchSampler(len(self.train_set), batch_size=self.batch_size, seed=self.seed)
        return training_loader(trainer, self.train_set, sampler, **self._loader_settings())

    def val_dataloader(self) -> DataLoader[Any]:
        """A loader of the validation set in order."""
        return self._evaluation_loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """A loader of the test set in order."""
        return self._evaluation_loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """A loader of the test set in order."""
        return self._evaluation_loader(self.test_set)

    def _evaluation_loader(self, dataset: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=self.eval_batch_size, **self._loader_settings())

    def _loader_settings(self) -> dict[str, Any]:
        return loader_settings(self.num_workers, pin_memory=self.pin_memory, collate_fn=collate_boxes)


class BoxDataModule(DetectionDataModule):
    """Base class of the data modules that read image files and annotations.

    A subclass returns in `read` the images of the splits `"train"`, `"test"` and optionally `"val"`.

    Args:
        root: the data set's folder; `~` is the home folder.
        settings: arguments of `DetectionDataModule`: `batch_size`, `eval_batch_size`, `num_workers`, `seed`,
            `pin_memory`.

    Raises:
        FileNotFoundError: if `root` does not contain the files; the message says where they may be.
        ValueError: if a file is not as expected, a split is missing, or an argument is invalid.
    """

    # (images, objects that are not difficult) of each split as published, for `check`
    published_objects: ClassVar[Mapping[str, tuple[int, int]]] = MappingProxyType({})

    def __init__(self, root: str | Path, **settings: Unpack[DetectionSettings]) -> None:
        super().__init__(**settings)
        self.root = check_path(type(self).__name__, "root", root)

    @abstractmethod
    def read(self) -> Mapping[str, BoxIndex]:
        """Read the images of each split."""

    def prepare_data(self) -> None:
        """Read the annotations, so that a mistake in the files is found before anything else happens."""
        self.splits  # noqa: B018

    @cached_property
    def splits(self) -> dict[str, BoxIndex]:
        """The images of each split, which all have the same classes."""
        return dict(self.read())

    @property
    def class_names(self) -> list[str]:
        """Names of the classes 1, 2, ...; 0 is background."""
        return next(iter(self.splits.values())).class_names

    @cached_property
    def train_set(self) -> BoxSet:
        """The training images, half of them flipped, without difficult objects."""
        return BoxSet(self._split("train"), self.root, train=True)

    @cached_property
    def val_set(self) -> BoxSet:
        """The split `"val"` if there is one, else the test set."""
        if "val" not in self.splits:
            return self.test_set
        return BoxSet(self._split("val"), self.root)

    @cached_property
    def test_set(self) -> BoxSet:
        """The split `"test"`."""
        return BoxSet(self._split("test"), self.root)

    def check(self) -> DataReport:
        """Compare the counts with the published ones, and look for missing image files."""
        report = DataReport()
        for name, index in self.splits.items():
            images, classes = len(index), len(index.class_names)
            published = self.published_objects.get(name)
            expected: list[tuple[int, int]] = []
            if published is not None:
                expected.append((published[0], classes))
                if published[1] != index.count_objects():
                    report.problems.append(
                        f"{name} has {index.count_objects():,} objects that are not difficult, published: "
                        f"{published[1]:,}"
                    )
            report.splits[name] = ((images, classes), expected)
            for path in index.paths:
                if not (self.root / path).is_file():
                    report.missing_files.append(path)
        return report

    def _split(self, name: str) -> BoxIndex:
        if name not in self.splits:
            found = ", ".join(map(repr, self.splits))
            raise ValueError(f"{type(self).__name__}: has no split {name!r}, only {found}.")
        return self.splits[name]
