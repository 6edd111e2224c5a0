"""Index, dataset and base classes of the data modules for images with objects in boxes, to train detectors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional

from lightning_retrieval.arguments import NotNegativeInt, PositiveInt, Seed, checked
from lightning_retrieval.checks import check_strings
from lightning_retrieval.datamodules.base import ShownArguments, Unpack, check_no_unknown_arguments
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.item_seeds import item_generator
from lightning_retrieval.datamodules.loader import evaluation_loader, loader_settings, training_loader
from lightning_retrieval.datamodules.samplers.base import RandomBatchSampler
from lightning_retrieval.files import is_system_error, leaves_root
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned
from lightning_retrieval.loading import CheckpointedDataModule
from lightning_retrieval.paths import check_path, cure_of_missing
from lightning_retrieval.preparation.prepare import open_image, to_rgb
from lightning_retrieval.random_state import seed_or_default


class ImageObjects(NamedTuple):
    """The objects in one image.

    `boxes` (objects, 4) are left, top, right and bottom in pixels of the image. `labels` (objects,) are from 1 to C.
    `difficult` (objects,) is True for objects that are neither trained on nor counted in evaluation.
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    difficult: NDArray[np.bool_]


class BoxIndex:
    """Paths of the images of one split, and the objects in each image.

    Args:
        paths: paths relative to the data set's root.
        objects: for each image, its boxes, its labels from 1, and whether each object is difficult. An image may have
            no object.
        class_names: names of the classes 1, 2, ...

    Raises:
        TypeError: if `paths` or `class_names` is a single string.
        ValueError: if there is no image; if lengths differ; if a label is not from 1 to the number of classes; if a box
            has no area or is not finite.

    Example:
        >>> from lightning_retrieval.datamodules import BoxIndex
        >>> index = BoxIndex(["a.jpg", "b.jpg"], [([[2, 3, 9, 8]], [1], [False]), ([], [], [])], class_names=["cat"])
        >>> len(index), index.count_objects(), index.objects(0).labels.tolist()
        (2, 1, [1])

    Relations:
        `BoxSet` reads the images. `BoxDataModule.read` returns an index for each split.
    """

    def __init__(
        self, paths: Sequence[str], objects: Sequence[tuple[Any, Any, Any]], *, class_names: Sequence[str]
    ) -> None:
        check_strings("paths", paths, owner="BoxIndex")
        check_strings("class_names", class_names, owner="BoxIndex")
        if len(paths) == 0:
            raise InvalidValue("must have at least one image", "BoxIndex", "paths", got="none")
        if len(paths) != len(objects):
            rule = "must have one entry for each path"
            raise InvalidValue(rule, "BoxIndex", "objects", got=f"{len(objects)} for {len(paths)} paths")
        outside = list(filter(leaves_root, paths))
        if outside:
            raise InvalidValue("must lie inside the root", "BoxIndex", "paths", got=repr(outside[0]))
        self.paths = list(paths)
        self.class_names = list(class_names)
        images = [_image_objects(given) for given in objects]
        # The arrays are concatenated, because forked workers would copy millions of small arrays.
        self._ends = np.cumsum([len(image.labels) for image in images])
        self._boxes = np.concatenate([image.boxes for image in images])
        self._labels = np.concatenate([image.labels for image in images])
        self._difficult = np.concatenate([image.difficult for image in images])
        self._check_labels_and_boxes()

    def __len__(self) -> int:
        return len(self.paths)

    def objects(self, position: int) -> ImageObjects:
        """The objects in the image at this position."""
        end = self._ends[position]
        begin = end - self._count(position)
        return ImageObjects(self._boxes[begin:end], self._labels[begin:end], self._difficult[begin:end])

    def count_objects(self, *, difficult: bool = False) -> int:
        """Number of objects; difficult objects are only counted if `difficult` is True."""
        if difficult:
            return len(self._labels)
        return int((~self._difficult).sum())

    def _count(self, position: int) -> int:
        if position == 0:
            return int(self._ends[0])
        return int(self._ends[position] - self._ends[position - 1])

    def _check_labels_and_boxes(self) -> None:
        known = len(self.class_names)
        invalid = (self._labels < 1) | (self._labels > known)
        if invalid.any():
            first = int(invalid.argmax())
            rule = f"must have labels from 1 to {known}, the number of classes"
            got = f"{self._labels[first]} in {self._path_of_object(first)}"
            raise InvalidValue(rule, "BoxIndex", "objects", got=got, cure="0 is background")
        left, top, right, bottom = self._boxes.T
        valid = np.isfinite(self._boxes).all(1) & (left < right) & (top < bottom)
        if not valid.all():
            first = int(valid.argmin())
            rule = "must have boxes (left, top, right, bottom) with left < right and top < bottom"
            got = f"{self._boxes[first].tolist()} in {self._path_of_object(first)}"
            raise InvalidValue(rule, "BoxIndex", "objects", got=got)

    def _path_of_object(self, position: int) -> str:
        """The path of the image that contains an object, for error messages."""
        return self.paths[int(np.searchsorted(self._ends, position, side="right"))]


def _image_objects(given: tuple[Any, Any, Any]) -> ImageObjects:
    boxes, labels, difficult = given
    image = ImageObjects(
        np.asarray(boxes, np.float32).reshape(-1, 4), np.asarray(labels, np.int64), np.asarray(difficult, bool)
    )
    if not len(image.boxes) == len(image.labels) == len(image.difficult):
        rule = "must have a box, a label and a difficult flag for each object"
        got = f"{len(image.boxes)}, {len(image.labels)} and {len(image.difficult)}"
        raise InvalidValue(rule, "BoxIndex", "objects", got=got)
    return image


Item = tuple[Tensor, dict[str, Tensor]]


class BoxSet(Dataset[Item]):
    """A map-style dataset of pairs of an image and its target, in the format of torchvision's detectors.

    The image is a float tensor (3, height, width) from 0 to 1. The target is a dict of `boxes` (objects, 4), which are
    left, top, right and bottom in pixels, `labels` (objects,), `difficult` (objects,) and `image_id`, the image's
    position in the index. Images are not rotated by their EXIF orientation, since boxes refer to the pixels of the
    file. Boxes are clipped to their image.

    Args:
        index: the images and their objects.
        root: the folder that the paths are relative to.
        train: whether difficult objects are skipped and each image is flipped with probability 0.5. The seed that
            `RetrievalDataLoader` gives each index decides about the flip.

    Raises:
        ValueError: when an item is read, if the image cannot be decoded or a box is outside the image.
        FileNotFoundError: when an item is read, if the file does not exist.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import BoxIndex, BoxSet
        >>> Image.new("RGB", (20, 10)).save("a.png")
        >>> image, target = BoxSet(BoxIndex(["a.png"], [([[2, 3, 9, 8]], [1], [False])], class_names=["cat"]), ".")[0]
        >>> image.shape, target["boxes"].tolist(), target["labels"]
        (torch.Size([3, 10, 20]), [[2.0, 3.0, 9.0, 8.0]], tensor([1]))

    Relations:
        `collate_boxes` makes a batch of items: a list of images and a list of targets.
    """

    def __init__(self, index: BoxIndex, root: str | Path, *, train: bool = False) -> None:
        self.index = index
        self.root = check_path("root", root, owner="BoxSet")
        self.train = train

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Item:
        image = self._read(position)
        objects = self.index.objects(position)
        boxes, labels = torch.tensor(objects.boxes), torch.tensor(objects.labels)
        difficult = torch.tensor(objects.difficult)
        height, width = image.shape[-2:]
        boxes = self._inside(position, boxes, height, width)
        if self.train:
            boxes, labels, difficult = boxes[~difficult], labels[~difficult], difficult[~difficult]
            if bool(torch.rand((), generator=item_generator(position)) < 0.5):
                image = image.flip(-1)
                boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
        target = {"boxes": boxes, "labels": labels, "difficult": difficult, "image_id": torch.tensor(int(position))}
        return image, target

    def _read(self, position: int) -> Tensor:
        path = self.root / self.index.paths[position]
        try:
            with open_image(path) as file:
                pixels = functional.pil_to_tensor(to_rgb(file))
        except FileNotFoundError:
            rule = f"cannot read the image {path}, which does not exist"
            raise MissingFile(rule, "BoxSet", cure=cure_of_missing(path)) from None
        except Exception as error:  # Pillow raises errors of many types
            if is_system_error(error):
                raise
            rule = f"cannot read the image {path} ({error})"
            raise InvalidValue(rule, "BoxSet", cure="repair or remove it") from error
        image: Tensor = functional.to_dtype(pixels, torch.float32, scale=True)
        return image

    def _inside(self, position: int, boxes: Tensor, height: int, width: int) -> Tensor:
        """The boxes, clipped to the image."""
        inside = boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
        empty = (inside[:, 0] >= inside[:, 2]) | (inside[:, 1] >= inside[:, 3])
        if bool(empty.any()):
            outside = boxes[empty][0].tolist()
            got = f"{outside} in {self.index.paths[position]}, which has {width} x {height} pixels"
            raise InvalidValue("boxes must be inside of their image", "BoxSet", got=got, cure="correct the annotation")
        return inside


def collate_boxes(items: list[Item]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A batch: a list of images, whose sizes may differ, and a list of targets."""
    images, targets = zip(*items)
    return list(images), list(targets)


class DetectionSettings(TypedDict, total=False):
    """Arguments of `DetectionDataModule`."""

    batch_size: PositiveInt
    eval_batch_size: PositiveInt
    num_workers: NotNegativeInt
    seed: Seed | None
    pin_memory: bool | None


class DetectionDataModule(ShownArguments, CheckpointedDataModule, ABC):
    """Base class of the data modules for detectors: training batches are random, evaluation batches are in order.

    A subclass defines `class_names` and the sets `train_set`, `val_set` and `test_set`, whose items are pairs of an
    image and a target in the format of `BoxSet`.

    Args:
        batch_size: number of images in a global batch, >= 1, which is distributed over the processes.
        eval_batch_size: number of images at a time in evaluation, >= 1.
        num_workers: number of processes that load images, >= 0; with 0 the training process loads them.
        seed: seed that, together with the epoch, determines the batches and the augmentation. If None, the seed of
            `seed_everything` is used, or 0 if none was set.
        pin_memory: whether batches are copied to page-locked memory; if None, only if there is a GPU.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number is not an integer, or `pin_memory` is not True, False or None.

    Relations:
        A run does not depend on the number of workers. A run that was interrupted within an epoch continues with the
        next batch.
    """

    def __init__(
        self,
        *,
        batch_size: PositiveInt = 8,
        eval_batch_size: PositiveInt = 8,
        num_workers: NotNegativeInt = 0,
        seed: Seed | None = None,
        pin_memory: bool | None = None,
        **unknown: Any,
    ) -> None:
        check_no_unknown_arguments(type(self), unknown)
        super().__init__()
        self.batch_size = checked(self, batch_size=batch_size)
        self.eval_batch_size = checked(self, eval_batch_size=eval_batch_size)
        self.num_workers = checked(self, num_workers=num_workers)
        self.seed = seed_or_default(checked(self, seed=seed))
        self.pin_memory = pin_memory

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
        """A loader of random batches, which begins at the batch where a resumed run continues.

        With `Trainer(overfit_batches=...)`, batches are in order instead, since Lightning repeats the first batches.
        """
        trainer = self.trainer
        if trainer is not None and getattr(trainer, "overfit_batches", 0) > 0:
            # This is the size per process, since Lightning's sampler distributes single images.
            size = max(1, self.batch_size // trainer.world_size)
            return DataLoader(self.train_set, batch_size=size, **self._loader_settings())
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

    @owned
    def _evaluation_loader(self, dataset: Any) -> DataLoader[Any]:
        return evaluation_loader(dataset, self.eval_batch_size, **self._loader_settings())

    def _loader_settings(self) -> dict[str, Any]:
        return loader_settings(self.num_workers, pin_memory=self.pin_memory, collate_fn=collate_boxes)


class BoxDataModule(DetectionDataModule):
    """Base class of the data modules that read image files and annotations.

    The method `read` of a subclass returns the images of the splits `"train"`, `"test"` and optionally `"val"`.

    Args:
        root: the data set's folder; `~` is the home folder.
        settings: arguments of `DetectionDataModule`: `batch_size`, `eval_batch_size`, `num_workers`, `seed`,
            `pin_memory`.

    Raises:
        FileNotFoundError: if `root` does not contain the files.
        ValueError: if a file is not as expected, a split is missing, or an argument is invalid.
    """

    # Published numbers of each split, for `check`: (images, objects that are not difficult).
    published_objects: ClassVar[Mapping[str, tuple[int, int]]] = MappingProxyType({})

    def __init__(self, root: str | Path, **settings: Unpack[DetectionSettings]) -> None:
        super().__init__(**settings)
        self.root = check_path("root", root, owner=type(self).__name__)

    @abstractmethod
    def read(self) -> Mapping[str, BoxIndex]:
        """Read the images of each split."""

    def prepare_data(self) -> None:
        """Read the annotations, so that errors in the files are found before anything else happens."""
        self.splits  # noqa: B018

    @cached_property
    def splits(self) -> dict[str, BoxIndex]:
        """The images of each split. All splits have the same classes."""
        return dict(self.read())

    @property
    def class_names(self) -> list[str]:
        """Names of the classes 1, 2, ...; 0 is background."""
        return next(iter(self.splits.values())).class_names

    @cached_property
    def train_set(self) -> BoxSet:
        """The training images, each flipped with probability 0.5, without difficult objects."""
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
        """Compare the counts with the published counts, and look for missing image files."""
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
            raise InvalidValue(f"has no split {name!r}, only {found}", type(self).__name__)
        return self.splits[name]
