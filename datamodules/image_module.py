"""The base class of the data modules that read image files: splits, transforms, and checks of a data set.

No class and no image may be used for both training and evaluation, and all processes must have the same images.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_retrieval.arguments import Number, checked
from lightning_retrieval.datamodules.base import LoaderSettings, RetrievalDataModule, RetrievalSettings, Unpack
from lightning_retrieval.datamodules.image_check import (
    DataReport,
    add_tags,
    check_contents,
    count_images_and_classes,
    look_for_files,
)
from lightning_retrieval.datamodules.image_index import ImageIndex, record_warnings, split_by_class
from lightning_retrieval.datamodules.image_set import ImageSet, OnError
from lightning_retrieval.distributed import together, world_size
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.models.sides import side_of_module
from lightning_retrieval.paths import check_path, cure_of_missing
from lightning_retrieval.preparation.decoding import CurrentTransform
from lightning_retrieval.preparation.of_run import RunPreparation, normalized_batch
from lightning_retrieval.preparation.pixels import Interpolation
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import Transform
from lightning_retrieval.preparation.training_transforms import PaperName


def check_no_shared_classes(splits: Mapping[str, ImageIndex]) -> None:
    """Raise a ValueError if a class is in the split `"train"` and in another split."""
    if "train" not in splits:
        return
    train = splits["train"]
    train_classes = set(train.names or ())
    for name, index in splits.items():
        if name == "train":
            continue
        shared = sorted(train_classes & set(index.names or ()))
        if shared:
            where = " and".join(_where_class(part, shared[0]) for part in (train, index))
            got = f"{len(shared)} in train and {name}, such as {shared[0]!r}{where.removesuffix(' and')}"
            cure = "split the classes anew, or leave out the labels if only tags count"
            raise InvalidValue("classes must be in training or in evaluation, not in both", got=got, cure=cure)


def _where_class(index: ImageIndex, name: str) -> str:
    """The line of the first image of a class, for an error message."""
    label = list(index.names or ()).index(name)
    return index.where(int(np.argmax(index.labels == label)))


def check_no_shared_images(splits: Mapping[str, ImageIndex]) -> None:
    """Raise a ValueError if the same image with the same box is in the split `"train"` and in another split."""
    if "train" not in splits or len(splits) == 1:
        return
    train = splits["train"]
    train_hashes = np.sort(train.hashes())
    for name, index in splits.items():
        if name == "train":
            continue
        candidates = set(map(index.key, _positions_with_hash_in(index, train_hashes)))
        if not candidates:
            continue
        # Different images may have the same hash, so the images themselves are compared.
        shared = sorted(candidates.intersection(map(train.key, range(len(train)))))
        if shared:
            got = f"{len(shared)} in train and {name}, such as {shared[0][0]}{_where_image((train, index), shared[0])}"
            raise InvalidValue("images must be in training or in evaluation, not in both", got=got)


def _where_image(indices: Sequence[ImageIndex], key: tuple[Any, ...]) -> str:
    """Return the line of an image in each of these indices, for an error message."""
    lines = []
    for index in indices:
        position = next(position for position in range(len(index)) if index.key(position) == key)
        lines.append(index.where(position))
    return " and".join(filter(None, lines))


def _positions_with_hash_in(index: ImageIndex, sorted_hashes: NDArray[np.int64]) -> list[int]:
    hashes = index.hashes()
    nearest = np.searchsorted(sorted_hashes, hashes).clip(max=len(sorted_hashes) - 1)
    positions: list[int] = np.flatnonzero(sorted_hashes[nearest] == hashes).tolist()
    return positions


def check_same_images(read: Callable[[], Mapping[str, ImageIndex]]) -> None:
    """Read the splits, and check that all processes have the same splits; all processes must call this.

    Args:
        read: reads the splits of this process.

    Raises:
        ValueError: on all processes, if the images of one process differ from those of rank 0.
        Exception: on all processes, if one process cannot read the splits.
    """
    splits_of_rank = together(lambda: {name: (len(index), index.digest) for name, index in read().items()})
    expected = splits_of_rank[0]
    for rank, splits in enumerate(splits_of_rank):
        if splits == expected:
            continue
        names = expected.keys() | splits.keys()
        name = min(name for name in names if expected.get(name) != splits.get(name))
        count, first_count = splits.get(name, (0, ""))[0], expected.get(name, (0, ""))[0]
        rule = "all processes must have the same images with the same labels"
        got = f"another list {name!r} on rank {rank} ({count:,} images) than on rank 0 ({first_count:,} images)"
        raise InvalidValue(rule, got=got, cure="give all machines the same files")


class ReadingSettings(LoaderSettings, total=False):
    """Arguments of `ImageDataModule` and `RetrievalDataModule` with the same defaults in all data modules of images."""

    train_transform: Transform | None
    eval_transform: Transform | None
    resize: int | tuple[int, int] | Literal["fit"] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    interpolation: Interpolation | None
    background: str | tuple[int, int, int] | None
    reduced_scale: bool | None
    fill: str | tuple[int, int, int] | None
    on_error: OnError
    load_truncated: bool
    val_fraction: Number


class ImageSettings(ReadingSettings, RetrievalSettings, total=False):
    """Arguments of `ImageDataModule`, except `root`, and of `RetrievalDataModule`."""

    transform: PaperName | None
    image_size: int | tuple[int, int] | None


class ImageDataModule(RetrievalDataModule):
    """Base class of the data modules that read image files.

    The method `read` of a subclass returns the images of each split: `"train"`, then `"test"` or several evaluation
    sets with other names, and optionally `"val"`, which is used to choose checkpoints.

    By default, the preparation of images depends on the model of the run. If the model was evaluated earlier, the
    preparation of that evaluation is used; else the preparation for the weights of its `Embedder`; else a size of 224
    pixels. The checkpoint records the preparation of evaluation. In a run of a Trainer, images are sent to the device
    as uint8 and normalised there, before any hook sees them.

    Args:
        root: the data set's folder, as unpacked; `~` is the home folder.
        transform: name of the paper whose transforms are used, see `Preparation` and `training_transform`; if None, the
            training transform is `"plain"`, and evaluation follows the model.
        train_transform: the training transform, instead of the paper's: a function from a PIL image to a tensor, or a
            transform of torchvision, timm or albumentations.
        eval_transform: the evaluation transform: like `train_transform`, or a `Preparation`.
        image_size: height and width of the images, or one number for both, as in `Preparation`.
        resize: size of images before cropping, or `"fit"` to pad images instead of cropping them, as in `Preparation`.
        mean: mean of the channels, as in `Preparation`.
        std: standard deviation of the channels, as in `Preparation`.
        interpolation: interpolation of resizing, as in `Preparation`.
        background: the colour that shows through transparent pixels, as in `Preparation`.
        reduced_scale: whether JPEGs are decoded at a reduced scale, as in `Preparation`.
        fill: the colour of the padding of `resize="fit"`, as in `Preparation`.
        on_error: what happens if an image cannot be decoded: `"raise"` raises an error; `"skip"` skips the image with a
            warning and counts it.
        load_truncated: whether truncated files are decoded as far as possible, with the rest grey, as in the official
            code of Revisited Oxford and Paris. If False, a truncated file counts as undecodable.
        val_fraction: fraction of the training classes, at least 0 and below 1, that is held out to choose checkpoints.
            With 0, checkpoints are chosen on the test set, as in the papers. A split `"val"` takes precedence.
        settings: arguments of `RetrievalDataModule`: `classes_per_batch`, `samples_per_class`, `eval_batch_size`,
            `num_workers`, `seed`, `sampler`, `pin_memory`, `persistent_workers`.

    Raises:
        FileNotFoundError: if `root` does not contain the files.
        ValueError: if a file is not as expected, a class or an image is in both training and evaluation, a split is
            empty, or an argument is invalid.
    """

    shared_classes: ClassVar[bool] = False  # whether training and evaluation may share classes
    boxes_before_rotation: ClassVar[bool] = False  # whether boxes are in pixels of the files, before EXIF rotation
    reads_in_check: ClassVar[bool] = False  # whether `check` reads all images, instead of looking for their files

    def __init__(
        self,
        root: str | Path,
        *,
        transform: PaperName | None = None,
        train_transform: Transform | None = None,
        eval_transform: Transform | None = None,
        image_size: int | tuple[int, int] | None = None,
        resize: int | tuple[int, int] | Literal["fit"] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        interpolation: Interpolation | None = None,
        background: str | tuple[int, int, int] | None = None,
        reduced_scale: bool | None = None,
        fill: str | tuple[int, int, int] | None = None,
        on_error: OnError = "raise",
        load_truncated: bool = False,
        val_fraction: Number = 0.0,
        **settings: Unpack[RetrievalSettings],
    ) -> None:
        super().__init__(**settings)
        owner = type(self).__name__
        self.root = check_path("root", root, owner=owner)
        self.transform = checked(self, transform=transform)
        self.image_size, self.resize = image_size, resize
        self.mean, self.std = mean, std
        self.interpolation, self.background = interpolation, background
        self.reduced_scale = reduced_scale
        self.fill = fill
        self._run_preparation = self._prepare_run(train_transform, eval_transform)
        self.on_error = checked(self, on_error=on_error)
        self.load_truncated = load_truncated
        self.val_fraction = checked(self, val_fraction=val_fraction)
        if not 0 <= val_fraction < 1:
            raise InvalidValue("must be at least 0 and below 1", owner, "val_fraction", got=val_fraction)

    @abstractmethod
    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of each split: `"train"`, and `"test"` or several evaluation sets by their names."""

    @property
    def train_transform(self) -> CurrentTransform:
        """The transform of images in training."""
        return self._run_preparation.train

    @property
    def eval_transform(self) -> CurrentTransform:
        """The transform of images in evaluation."""
        return self._run_preparation.evaluation

    @property
    def preparation(self) -> Preparation:
        """The preparation (size, mean, standard deviation) in evaluation, unless `eval_transform` was given."""
        return self._run_preparation.preparation

    @property
    def serialised_preparation(self) -> dict[str, Any]:
        """The evaluation transform as plain data, for checkpoints."""
        return self._run_preparation.serialised()

    def prepare_data(self) -> None:
        """Read the splits, so that errors in the data set's files are found before anything else happens."""
        try:
            self.splits  # noqa: B018
        except Exception:  # ignored if there are several processes: `setup` reads again, and raises on all
            if self.trainer is None or world_size() == 1:
                raise

    @owned
    def setup(self, stage: str) -> None:
        """Check that all processes have the same images, and prepare images for the model of the run.

        Before training, the training set is created, so that a missing training set raises an error before the model
        sees an image.
        """
        if self.trainer is not None and world_size() > 1:
            check_same_images(lambda: self.splits)
        self._follow_module()
        if stage == "fit":
            self.train_set  # noqa: B018

    @cached_property
    def splits(self) -> dict[str, ImageIndex]:
        """The images of each split."""
        return self._splits_and_warnings[0]

    @cached_property
    def _splits_and_warnings(self) -> tuple[dict[str, ImageIndex], list[str]]:
        return record_warnings(self._read_and_check)

    @owned
    def _read_and_check(self) -> dict[str, ImageIndex]:
        splits = dict(self.read())
        if not self.shared_classes:
            check_no_shared_classes(splits)
        check_no_shared_images(splits)
        for index in splits.values():
            index.lines = None  # only errors of `read` need the lines, which would be sent to each worker
        return splits

    def _training_images(self) -> dict[str, Any]:
        index = self.train_set.index
        return {"count": len(index), "digest": index.digest}

    @cached_property
    def train_set(self) -> ImageSet:
        """The training images, with augmentation, without the classes that are held out for validation."""
        train = self._split("train")
        if self.val_fraction:
            train = train[~self._held_out]
        return self.image_set(train, self.train_transform)

    @cached_property
    def val_set(self) -> ImageSet | dict[str, ImageSet]:
        """The split `"val"` if there is one, else the images of the held-out classes, else the test set."""
        if "val" in self.splits:
            return self.evaluation_set("val", self.splits["val"])
        if not self.val_fraction:
            return self.test_set
        return self.evaluation_set("val", self._held_out_images())

    @cached_property
    def test_set(self) -> ImageSet | dict[str, ImageSet]:
        """The split `"test"`, or a dict of all evaluation splits by name; the split `"val"` if there is no other."""
        names = [name for name in self.splits if name not in ("train", "val")]
        if not names:
            return self.evaluation_set("val", self._split("val"))
        if names == ["test"]:
            return self.evaluation_set("test", self._split("test"))
        return {name: self.evaluation_set(name, self._split(name)) for name in names}

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of `ImageSet` that determine how the images are decoded."""
        return {
            "on_error": self.on_error,
            "load_truncated": self.load_truncated,
            "boxes_before_rotation": self.boxes_before_rotation,
        }

    def image_set(self, index: ImageIndex, transform: Transform) -> ImageSet:
        """Create a dataset of images. Override this method for images that are not in separate files.

        Args:
            index: the images.
            transform: the transform of each image.
        """
        return ImageSet(index, self.root, transform, **self.reading)

    def evaluation_set(self, name: str, index: ImageIndex) -> ImageSet:
        """Create the dataset of an evaluation split. Override this method for a split with another protocol.

        The returned `ImageSet` may have a method `metrics(ks, **settings)` that creates the metrics of the protocol.
        """
        return self.image_set(index, self.eval_transform)

    def val_dataloader(self) -> Any:
        """A loader of the validation set in order; no loader if there are only training images."""
        if set(self.splits) == {"train"} and not self.val_fraction:
            return []
        return super().val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device with the hook of the module, and normalise images of uint8 there."""
        trainer: Any = self.trainer
        moved = trainer.lightning_module.transfer_batch_to_device(batch, device, dataloader_idx)
        convert = trainer.precision_plugin.convert_input
        return normalized_batch(moved, lambda images: convert(self.preparation.normalize(images)))

    def _set_of_loader(self, dataset: Any) -> Any:
        """In a run, return the set in uint8 if `transfer_batch_to_device` can normalise as the transform would."""
        if isinstance(dataset, ImageSet) and self._run_preparation.sends_uint8(self, dataset.transform.current):
            return dataset.in_uint8()
        return dataset

    @owned
    def _follow_module(self) -> None:
        """Adapt the transforms to the model of the run. The data sets may have been created before the model."""
        if self.trainer is None:
            return
        side = side_of_module(self.trainer.lightning_module, self.side)
        self._run_preparation.follow(side, predicts=self.trainer.state.fn == "predict")

    @owned
    def _prepare_run(self, train_transform: Transform | None, eval_transform: Transform | None) -> RunPreparation:
        """The preparation of images in a run, according to the arguments of the constructor."""
        settings = {}
        for name in ("image_size", "resize", "mean", "std", "interpolation", "background", "reduced_scale", "fill"):
            value = getattr(self, name)
            if value is not None:
                settings[name] = value
        return RunPreparation(
            self.transform,
            settings,
            train_transform=train_transform,
            eval_transform=eval_transform,
        )

    def _split(self, name: str) -> ImageIndex:
        if name in self.splits:
            return self.splits[name]
        cure = "."
        if name == "train":
            cure = "; train on another data module, and evaluate on this one."
        found = ", ".join(map(repr, self.splits))
        raise InvalidValue(f"has no split {name!r}, only {found}{cure}", type(self).__name__)

    def _held_out_images(self) -> ImageIndex:
        """The images of the split `"train"` whose classes are held out for validation."""
        return self._split("train")[self._held_out]

    @cached_property
    @owned
    def _held_out(self) -> NDArray[np.bool_]:
        """Mask of the images in the split `"train"` whose classes are held out for validation."""
        labels = self._split("train").labels
        classes = np.unique(labels).tolist()
        held_out = split_by_class("val_fraction", classes, self.val_fraction, self.seed)
        return np.isin(labels, sorted(held_out))

    def check(self) -> DataReport:
        """Check the data set's files before training: compare the published counts, and look for missing files.

        With `reads_in_check`, as for the user's own images, all images are read, which takes about as long as loading
        an epoch. The report then lists undecodable files, images that occur twice or in both training and evaluation,
        classes with one image, and the range of sizes.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report contains the warnings of `read`
            splits, messages = self._splits_and_warnings
        report = DataReport(problems=list(messages))
        for name, index in splits.items():
            report.splits[name] = (count_images_and_classes(index), self.published_counts.get(name, ()))
            add_tags(report, name, index)
            if not self.reads_in_check:
                look_for_files(report, name, index, self.root)
        if self.reads_in_check:
            sets = {name: self.image_set(index, self.eval_transform) for name, index in splits.items()}
            check_contents(report, sets, self.eval_transform.current)
        self._explain_missing(report, sum(map(len, splits.values())))
        return report

    def _explain_missing(self, report: DataReport, images: int) -> None:
        """Add to a report why all images are missing, if it is known."""
        if not report.missing_files or len(report.missing_files) < images:
            return
        reason = cure_of_missing(self.root / report.missing_files[0])
        if reason:
            report.problems.append(f"no image is in {self.root}: {reason}")
