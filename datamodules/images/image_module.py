"""The base of data modules that read images from files: splits, transforms, the layout's check."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_finite_number
from lightning_retrieval.datamodules.base import RetrievalDataModule
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.files.record_warnings import record_warnings
from lightning_retrieval.datamodules.images.image_index import (
    DISTRACTOR,
    ImageIndex,
    cached,
    image_keys,
    split_by_class,
)
from lightning_retrieval.datamodules.images.image_set import ImageSet
from lightning_retrieval.datamodules.images.transforms import ReferenceName, reference_transform

Transform = Callable[[Any], Tensor]


class ImageDataModule(RetrievalDataModule):
    """Base of the data modules of images in files.

    A subclass says in `read` which images each split has: `"train"`, `"test"` or several of other names for evaluation,
    and perhaps `"val"`, what checkpoints are chosen by.

    Args:
        root: the data set's folder, as it was unpacked; `~` is the user's own.
        transform: the paper whose transforms are taken, see `reference_transform`.
        train_transform: from a PIL image to a tensor, in place of that for training.
        eval_transform: the same for evaluation.
        on_error: what happens at an image that cannot be decoded: `"raise"`, or `"skip"`, with a warning and counted.
        val_fraction: fraction of the training classes, at least 0 and below 1, that is held out to choose checkpoints;
            with 0 the test set is used for that, as in the papers. A split `"val"` takes precedence.
        cache_dir: where the index of images is kept, so that it is read only once; nowhere where None.
        settings: those of `RetrievalDataModule`: `classes_per_batch`, `samples_per_class`, `num_workers` and so on.

    Raises:
        FileNotFoundError: if `root` does not hold the files, saying where they may be.
        ValueError: if a file is not as it should be, a class or an image is in training and in evaluation, a split is
            empty, or a setting is unknown.
    """

    shared_classes: ClassVar[bool] = False  # whether classes may be in training and in evaluation

    def __init__(
        self,
        root: str | Path,
        transform: ReferenceName = "plain",
        train_transform: Transform | None = None,
        eval_transform: Transform | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        val_fraction: float = 0.0,
        cache_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        who = type(self).__name__
        self.root = Path(root).expanduser()
        self.transform: ReferenceName = transform
        self.train_transform = (
            reference_transform(transform, train=True) if train_transform is None else train_transform
        )
        self.eval_transform = reference_transform(transform, train=False) if eval_transform is None else eval_transform
        self._of_reference = self.eval_transform if eval_transform is None else None
        self.on_error: Literal["raise", "skip"] = check_choice(who, "on_error", on_error, ("raise", "skip"))
        if not 0 <= check_finite_number(who, "val_fraction", val_fraction) < 1:
            raise ValueError(f"{who}: `val_fraction` must be at least 0 and below 1, got {val_fraction}.")
        self.val_fraction = val_fraction
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        self._not_of_read = frozenset(vars(self))  # what a subclass sets besides decides what it reads

    @abstractmethod
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of each split: `"train"`, and `"test"` or several by their own names."""

    def state_dict(self) -> dict[str, Any]:
        """How evaluation prepares images, for checkpoints: `transform`, or `"own"` where `eval_transform` was given."""
        return {"transform": self.transform if self.eval_transform is self._of_reference else "own"}

    def sources(self) -> list[Path]:
        """The files that `read` reads, whose change makes it read again; none where nothing is to be cached."""
        return []

    def prepare_data(self) -> None:
        """Read the splits, so that a mistake in the layout shows before anything else."""
        self.splits  # noqa: B018

    def setup(self, stage: str) -> None:
        """Have the training images before the model sees any other, so that a set without them is refused first."""
        if stage == "fit":
            self.train_set  # noqa: B018

    @cached_property
    def splits(self) -> dict[str, ImageIndex]:
        """The images of each split."""
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[dict[str, ImageIndex], list[str]]:
        """The images of each split, and what reading them warned of."""
        return record_warnings(self._read_or_cached)

    def _read_or_cached(self) -> dict[str, ImageIndex]:
        sources = self.sources()
        if self.cache_dir is None or not sources:
            return self._read_checked()
        kinds = (str, int, float, tuple, list, Path)
        own = {k: v for k, v in vars(self).items() if k not in self._not_of_read and isinstance(v, kinds)}
        return cached(self._read_checked, sources, [type(self).__name__, self.root, own], self.cache_dir)

    def _read_checked(self) -> dict[str, ImageIndex]:
        splits = dict(self.read())
        self._refuse_shared_classes(splits)
        self._refuse_shared_images(splits)
        return splits

    def _refuse_shared_classes(self, splits: Mapping[str, ImageIndex]) -> None:
        train = set(splits["train"].names or ()) if "train" in splits else set()
        for name, index in splits.items():
            shared = [] if name == "train" or self.shared_classes else sorted(train & set(index.names or ()))
            if shared:
                raise ValueError(
                    f"{type(self).__name__}: classes must be in training or in evaluation, not in both, got "
                    f"{len(shared)} in train and {name}, such as {shared[0]!r}."
                )

    def _refuse_shared_images(self, splits: Mapping[str, ImageIndex]) -> None:
        """Refuse an image, or one box of it, that is trained on and evaluated."""
        others = [name for name in splits if name != "train"]
        if "train" not in splits or not others:
            return
        train = splits["train"]
        keys = np.sort(image_keys(train))
        for name in others:
            index = splits[name]
            own = image_keys(index)
            places = np.searchsorted(keys, own).clip(max=len(keys) - 1)
            alike = [index.image(place) for place in np.flatnonzero(keys[places] == own).tolist()]
            if not alike:
                continue
            shared = sorted(set(alike).intersection(train.image(place) for place in range(len(train))))
            if shared:  # and not of one hash alone
                raise ValueError(
                    f"{type(self).__name__}: images must be in training or in evaluation, not in both, got "
                    f"{len(shared)} in train and {name}, such as {shared[0][0]}."
                )

    @cached_property
    def train_set(self) -> ImageSet:
        """The training images, augmented, without the classes held out."""
        return ImageSet(self._training[0], self.root, self.train_transform, self.on_error)

    @cached_property
    def val_set(self) -> ImageSet | dict[str, ImageSet]:
        """The split `"val"` where there is one, else the images of the classes held out, else the test set."""
        if "val" in self.splits:
            return self.evaluation_set("val", self.splits["val"])
        held_out = self._training[1] if self.val_fraction else None
        return self.test_set if held_out is None else self.evaluation_set("val", held_out)

    @cached_property
    def test_set(self) -> ImageSet | dict[str, ImageSet]:
        """The split `"test"`, or all other splits by name; the split `"val"` where there is none."""
        names = [name for name in self.splits if name not in ("train", "val")] or ["val"]
        sets = {name: self.evaluation_set(name, self._split(name)) for name in names}
        if names == ["val"]:
            return sets["val"]
        return sets["test"] if list(sets) == ["test"] else sets

    def evaluation_set(self, name: str, index: ImageIndex) -> ImageSet:
        """The images of an evaluation split, by its name. For one with a protocol of its own, override this method.

        The `ImageSet` that it then makes says in `metrics(ks, **settings)` by which metrics it is evaluated.
        """
        return ImageSet(index, self.root, self.eval_transform, self.on_error)

    def val_dataloader(self) -> Any:
        """The validation set, in order; nothing where training images are all there is."""
        alone = set(self.splits) == {"train"} and not self.val_fraction
        return [] if alone else super().val_dataloader()

    def _split(self, name: str) -> ImageIndex:
        if name not in self.splits:
            cure = "; train on another data module, and evaluate on this one" if name == "train" else ""
            raise ValueError(
                f"{type(self).__name__}: has no split {name!r}, only {', '.join(map(repr, self.splits))}{cure}."
            )
        return self.splits[name]

    @cached_property
    def _training(self) -> tuple[ImageIndex, ImageIndex | None]:
        """The training images, and those of the classes held out."""
        train = self._split("train")
        if not self.val_fraction:
            return train, None
        classes = np.unique(train.labels).tolist()
        held = split_by_class(type(self).__name__, "val_fraction", classes, self.val_fraction, self.seed)
        mask = np.isin(train.labels, sorted(held))
        return train[~mask], train[mask]

    def check(self) -> DataReport:
        """Look at the layout before training: counts beside the published ones, and files that are missing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what reading warns of stands in the report
            splits, warned = self._read
        report = DataReport(problems=list(warned))
        for name, index in splits.items():
            classes = np.unique(index.labels)
            found = (len(index), int((classes != DISTRACTOR).sum()))
            report.splits[name] = (found, self.published_counts.get(name, ()))
            paths = Tqdm(index.paths, desc=f"Looking for the images of {name}", delay=2, leave=False)
            report.missing_files += [path for path in paths if not (self.root / path).is_file()]
            twice = len(index) - len(set(index.paths)) if index.boxes is None else 0
            if twice:
                report.problems.append(f"{twice} paths are listed twice in {name}")
        return report
