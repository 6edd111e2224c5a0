"""The base class of all data modules: a loader of global batches for training, plain loaders for evaluation.

The constructor of a data module takes the arguments of its base class as `**settings`, so that each argument is defined
once. For type checkers and editors, a `TypedDict` lists the names and types of these arguments. At run time, the
signature of a class lists them with the defaults of the base class; `help`, notebooks and `inspect.signature` show this
signature. If a constructor passes no arguments on, it takes unknown arguments as `**unknown` and calls
`check_no_unknown_arguments`, because Python's own error would name the base class instead of the user's class.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypedDict, get_args, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from lightning_retrieval.arguments import NotNegativeInt, PositiveInt, Seed, Several, checked
from lightning_retrieval.backend import TrainerFn
from lightning_retrieval.checks import check_choice
from lightning_retrieval.datamodules.image_check import Count, DataReport
from lightning_retrieval.datamodules.image_index import digest_of_arrays
from lightning_retrieval.datamodules.item_seeds import as_array
from lightning_retrieval.datamodules.loader import (
    RetrievalDataLoader,
    evaluation_loader,
    loader_settings,
    training_loader,
)
from lightning_retrieval.datamodules.samplers.all_classes import AllClassesSampler
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler
from lightning_retrieval.datamodules.samplers.category import CategorySampler
from lightning_retrieval.datamodules.samplers.pk import PKSampler
from lightning_retrieval.datamodules.samplers.tags import TagSampler
from lightning_retrieval.distributed import together
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned
from lightning_retrieval.loading import CheckpointedDataModule
from lightning_retrieval.models.sides import Side
from lightning_retrieval.random_state import seed_or_default

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:

    class Unpack:
        """At run time `**settings: Unpack[ImageSettings]` means `**settings: Any`.

        jsonargparse generates the command-line options. From the `TypedDict`, jsonargparse would take only names; from
        the base class, it also takes defaults and descriptions.
        """

        def __class_getitem__(cls, settings: Any) -> Any:
            return Any


UNKNOWN = "unknown"  # name of the `**` argument of a constructor that passes nothing on


class ShownArguments:
    """Base class of classes whose `inspect.signature` lists the base classes' arguments instead of `**settings`."""

    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.__signature__ = Signature(list(all_arguments(cls).values()))


def all_arguments(cls: type) -> dict[str, Parameter]:
    """The arguments of a constructor by name, including the keyword-only arguments that `**settings` stands for."""
    found: dict[str, Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *listed = inspect.signature(vars(base)["__init__"]).parameters.values()
        passed_on = [parameter for parameter in listed if parameter.kind is Parameter.KEYWORD_ONLY]
        if not found:
            passed_on = [parameter for parameter in listed if parameter.kind is not Parameter.VAR_KEYWORD]
        for parameter in passed_on:
            found.setdefault(parameter.name, parameter)
        if not listed or listed[-1].kind is not Parameter.VAR_KEYWORD or listed[-1].name == UNKNOWN:
            break
    return found


def check_no_unknown_arguments(cls: type, unknown: Mapping[str, Any]) -> None:
    """Raise if there is an argument that no constructor of a class has.

    Args:
        cls: the class that the user calls.
        unknown: the arguments that no constructor has taken.

    Raises:
        TypeError: if there is such an argument.
    """
    if not unknown:
        return
    name, names = next(iter(unknown)), list(all_arguments(cls))
    raise InvalidType(f"has no argument `{name}`; it has {', '.join(names)}.", cls.__name__)


SamplerName = Literal["pk", "category", "all_classes", "tags"]


@runtime_checkable
class LabelledImages(Protocol):
    """A map-style dataset whose items are dicts with `images`, `labels` and `ids`; an item's id is its index.

    The items of a `PairSet` are pairs of a side and such a dict.
    """

    @property
    def labels(self) -> Int[Tensor, " item"]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless the training images are the same as when a checkpoint was written.

    Args:
        before: values that identify the images of the checkpoint; `count` is the number of images.
        now: the same values for the present images.
    """
    if now == before:
        return
    found = f"{now['count']:,} instead of {before['count']:,}"
    if now["count"] == before["count"]:
        found = f"as many, {now['count']:,}, with other labels or paths or in another order"
    raise InvalidValue(
        "a run must continue with the training images that it began with",
        got=found,
        cure="restore the list of images and the settings that choose from it, or begin a new run with the weights "
        "of the checkpoint",
    )


class LoaderSettings(TypedDict, total=False):
    """Arguments of `RetrievalDataModule` that have the same defaults in all data modules."""

    classes_per_batch: PositiveInt
    samples_per_class: Several
    num_workers: NotNegativeInt
    seed: Seed | None
    sampler: SamplerName | GlobalBatchSampler
    pin_memory: bool | None
    persistent_workers: bool | None


class RetrievalSettings(LoaderSettings, total=False):
    """Arguments of `RetrievalDataModule`."""

    eval_batch_size: PositiveInt


class RetrievalDataModule(ShownArguments, CheckpointedDataModule, ABC):
    """Base class of the data modules, whose training batches hold P classes with K images each.

    A subclass defines the three sets `train_set`, `val_set` and `test_set`. `val_set` and `test_set` may be dicts from
    names to sets. Evaluation reads the images of each set in order.

    Args:
        classes_per_batch: P, the number of classes (or tags) in a global batch.
        samples_per_class: K, the number of images per class (or tag), >= 2.
        eval_batch_size: number of images that are embedded at a time in evaluation, >= 1.
        num_workers: number of processes that load images, >= 0; with 0, the training process loads the images.
        seed: determines the batches and the augmentation, together with the epoch. None means the seed of
            `seed_everything`, or 0 if `seed_everything` was not called.
        sampler: the sampler of the training batches: `"pk"` (`PKSampler`), `"category"` (`CategorySampler`, with two
            categories per batch), `"all_classes"` (`AllClassesSampler`), `"tags"` (`TagSampler`), or a
            `GlobalBatchSampler` made with the labels or tags of the training set, which ignores P and K.
        pin_memory: whether batches are copied to page-locked memory, which makes the transfer to a GPU faster; if None,
            only if there is a GPU.
        persistent_workers: whether workers stay alive between epochs; None means True if there are workers.

    Raises:
        ValueError: if a number is out of its range, or `sampler` is neither a name nor a `GlobalBatchSampler`; when
            training begins, if P, K or the sampler do not fit the training set.
        TypeError: if a number is not an integer.

    Relations:
        A run does not depend on the number of workers or processes. A run that was interrupted within an epoch
        continues with the next batch. If the list of training images has changed meanwhile, an error is raised.
    """

    published_counts: ClassVar[Mapping[str, Sequence[Count]]] = MappingProxyType({})  # published counts of each set
    side: Side = "candidates"  # the side of batches that this data is, if `Pairs` pairs it with other data

    def __init__(
        self,
        *,
        classes_per_batch: PositiveInt = 32,
        samples_per_class: Several = 4,
        eval_batch_size: PositiveInt = 256,
        num_workers: NotNegativeInt = 0,
        seed: Seed | None = None,
        sampler: SamplerName | GlobalBatchSampler = "pk",
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        **unknown: Any,
    ) -> None:
        check_no_unknown_arguments(type(self), unknown)
        super().__init__()
        self.classes_per_batch = checked(self, classes_per_batch=classes_per_batch)
        self.samples_per_class = checked(self, samples_per_class=samples_per_class)
        self.eval_batch_size = checked(self, eval_batch_size=eval_batch_size)
        self.num_workers = checked(self, num_workers=num_workers)
        self.seed = seed_or_default(checked(self, seed=seed))
        self.sampler = sampler
        if not isinstance(sampler, GlobalBatchSampler):
            self.sampler = check_choice("sampler", sampler, get_args(SamplerName), owner=type(self).__name__)
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self._images_of_run: dict[str, Any] | None = None

    @property
    @abstractmethod
    def train_set(self) -> LabelledImages:
        """The training set, with augmentation."""

    @property
    @abstractmethod
    def val_set(self) -> LabelledImages | Mapping[str, LabelledImages]:
        """The set on which checkpoints are chosen, or several such sets by name."""

    @property
    @abstractmethod
    def test_set(self) -> LabelledImages | Mapping[str, LabelledImages]:
        """The set for which results are reported, or several such sets by name."""

    def train_sampler(self) -> GlobalBatchSampler:
        """Return the sampler of the training batches, according to the argument `sampler`.

        This method is called when training begins. Override it only in a subclass whose sampler must be built from the
        training set, for example from a grouping of the labels.
        """
        labels, P, K = self.train_set.labels, self.classes_per_batch, self.samples_per_class
        if isinstance(self.sampler, GlobalBatchSampler):
            if self.sampler.dataset_size != len(labels):
                rule = f"must be made with the labels of the {len(labels):,} training images"
                got = f"one made with {self.sampler.dataset_size:,}"
                raise InvalidValue(rule, type(self).__name__, "sampler", got=got)
            return self.sampler
        if self.sampler == "all_classes":
            return AllClassesSampler(labels, batch_size=P * K, seed=self.seed)
        if self.sampler == "category":
            categories = getattr(self.train_set, "categories", None)
            return CategorySampler(labels, categories, classes_per_batch=P, samples_per_class=K, seed=self.seed)
        if self.sampler == "tags":
            tags = getattr(self.train_set, "tags", None)
            return TagSampler(tags, tags_per_batch=P, samples_per_tag=K, seed=self.seed)
        return PKSampler(labels, classes_per_batch=P, samples_per_class=K, seed=self.seed)

    def train_dataloader(self) -> RetrievalDataLoader:
        """Return a loader of the batches of `train_sampler`; it begins at the batch where a resumed run continues."""
        self._follow_module()
        self._images_of_run = self._training_images()
        dataset = self._set_of_loader(self.train_set)
        return training_loader(self.trainer, dataset, self.train_sampler(), **self._loader_settings(dataset))

    def state_dict(self) -> dict[str, Any]:
        """Values that identify the training images, for the checkpoints of the run."""
        if self._images_of_run is None:
            return {}
        return {"training_images": self._images_of_run}

    @owned
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise, on all processes, if the training images have changed since the checkpoint.

        Raises:
            ValueError: if the list of images of any process has changed.
        """
        before = state_dict.get("training_images")
        if before is not None and self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            together(lambda: check_unchanged(before, self._training_images()))

    @owned
    def _training_images(self) -> dict[str, Any]:
        """Return plain values that identify the training images: their number, and a digest of labels and tags.

        Override this method in a subclass that can identify the images better.
        """
        arrays = {"labels": as_array("labels", self.train_set.labels)}
        tags = getattr(self.train_set, "tags", None)
        if tags is not None:
            arrays["tags"] = as_array("tags", tags)
        return {"count": len(arrays["labels"]), "digest": digest_of_arrays(arrays)}

    def val_dataloader(self) -> Any:
        """A loader of the validation set in order, or a dict of loaders if there are several sets."""
        return self._evaluation_loader(self.val_set)

    def test_dataloader(self) -> Any:
        """A loader of the test set in order, or a dict of loaders if there are several sets."""
        return self._evaluation_loader(self.test_set)

    def predict_dataloader(self) -> Any:
        """A loader of the test set in order, or a dict of loaders if there are several sets."""
        return self._evaluation_loader(self.test_set)

    def check(self) -> DataReport:
        """Count the images and classes of each set before training, and compare them with the published counts."""
        report = DataReport()
        self._count(report, "train", self.train_set)
        self._count(report, "val", self.val_set)
        self._count(report, "test", self.test_set)
        return report

    def _count(self, report: DataReport, name: str, dataset: Any) -> None:
        if isinstance(dataset, Mapping):
            for part, part_set in dataset.items():
                self._count(report, f"{name}/{part}", part_set)
            return
        counts = (len(dataset), len(dataset.labels.unique()))
        report.splits[name] = (counts, self.published_counts.get(name, ()))

    @owned
    def _evaluation_loader(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._evaluation_loader(part) for name, part in dataset.items()}
        self._follow_module()
        dataset = self._set_of_loader(dataset)
        return evaluation_loader(dataset, self.eval_batch_size, **self._loader_settings(dataset))

    def _follow_module(self) -> None:
        """Adapt to the model of the run before a loader is created. Override this if the data depends on the model."""

    def _set_of_loader(self, dataset: Any) -> Any:
        """Return the dataset that a loader reads. Override this if loaders need the images in another form."""
        return dataset

    def _loader_settings(self, dataset: Any) -> dict[str, Any]:
        """The common arguments of the loaders for training and for evaluation."""
        return loader_settings(
            self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
            collate_fn=getattr(dataset, "collate", None),
        )
