"""The list of a data set's images as arrays: millions of entries take little memory and are not copied to workers."""

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.files.record_warnings import record_warnings
from lightning_retrieval.ranking.roles import Role
from lightning_retrieval.search.packed_strings import PackedStrings

# What an image is in evaluation: ranked for, ranked, or both. A distractor is ranked and right for nobody.
ROLES = {"query": Role.QUERY, "gallery": Role.GALLERY, "both": Role.BOTH, "distractor": Role.GALLERY}
DISTRACTOR = -1  # the label of distractors
LEAVES = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(^|[/\\])\.\.([/\\]|$)")  # an absolute path, or one with a step up
_DETOUR = re.compile(r"(^|/)\./|//|/\.?$")  # by which one path may be spelt in several ways
VERSION = 3  # of the cache's format
_COLUMNS = ("labels", "categories", "levels", "boxes", "roles", "instances")


class ImageIndex:
    """Paths, labels and what else is known of the images of one split.

    Args:
        paths: relative to the data set's root, and inside it.
        labels: the class of each image, integers; `DISTRACTOR` for none.
        categories: a coarser class of each, or None.
        levels: (images, L) labels, finest level first, for hierarchical losses, or None.
        boxes: (images, 4) left, top, right, bottom in pixels of the image, or None; the image is cropped to it.
        roles: of each image in evaluation, from `ROLES`; both where None.
        instances: what each image shows, any integers: in evaluation the images of one instance, such as a video's
            frames, are averaged and count as one; each counts for itself where None.
        names: of the classes, in the order of the labels 0, 1, ...; or None.

    Raises:
        ValueError: if there is no image, the lengths differ, a path leaves the root or is spelt with `./`, a box holds
            no pixel or is beyond 32 bits, or an instance has images of several classes.

    Example:
        >>> from lightning_retrieval.datamodules import ImageIndex
        >>> index = ImageIndex(["cats/1.jpg", "cats/2.jpg", "dogs/1.jpg"], [0, 0, 1], names=["cats", "dogs"])
        >>> len(index), index.paths[2], list(index[index.labels == 0].paths)
        (3, 'dogs/1.jpg', ['cats/1.jpg', 'cats/2.jpg'])

    Relations:
        `ImageSet` reads the images, `ImageDataModule.read` gives an index of each split.
    """

    def __init__(
        self,
        paths: PackedStrings | Sequence[str],
        labels: Any,
        *,
        categories: Any = None,
        levels: Any = None,
        boxes: Any = None,
        roles: Any = None,
        instances: Any = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.paths = paths if isinstance(paths, PackedStrings) else PackedStrings(paths)
        self.labels: NDArray[np.int64] = np.asarray(labels, dtype=np.int64)
        self.categories = None if categories is None else np.asarray(categories, dtype=np.int64)
        self.levels = None if levels is None else np.asarray(levels, dtype=np.int64)
        self.boxes = None if boxes is None else _pixels(boxes)
        self.roles = None if roles is None else np.asarray(roles, dtype=np.uint8)
        self.instances = None if instances is None else np.asarray(instances, dtype=np.int64)
        self.names = None if names is None else PackedStrings(names)
        if len(self) == 0:
            raise ValueError("ImageIndex: `paths` must hold at least one image, got none.")
        for name, values in self._columns().items():
            if values is not None and len(values) != len(self):
                raise ValueError(
                    f"ImageIndex: `{name}` must have one entry for each of {len(self)} paths, got {len(values)}."
                )
        for path in self.paths:
            if LEAVES.search(path):
                raise ValueError(f"ImageIndex: `paths` must lie inside the root, got {path!r}.")
            if _DETOUR.search(path):
                raise ValueError(f"ImageIndex: `paths` must be without './' and '//', got {path!r}.")
        if self.boxes is not None:
            empty = np.flatnonzero((self.boxes[:, 2] <= self.boxes[:, 0]) | (self.boxes[:, 3] <= self.boxes[:, 1]))
            if len(empty):
                raise ValueError(
                    f"ImageIndex: `boxes` must hold pixels, got {self.boxes[empty[0]].tolist()} for "
                    f"{self.paths[int(empty[0])]} ({len(empty)} such boxes)."
                )
        if self.instances is not None:
            _, first, of_each = np.unique(self.instances, return_index=True, return_inverse=True)
            odd = np.flatnonzero(self.labels != self.labels[first[of_each]])
            if len(odd):
                other = int(first[of_each[odd[0]]])
                raise ValueError(
                    f"ImageIndex: `instances` must have one label each, got {self.labels[[other, odd[0]]].tolist()} "
                    f"for instance {self.instances[other]} ({self.paths[other]} and {self.paths[int(odd[0])]})."
                )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Any) -> "ImageIndex":
        """The images at these places: a slice, a mask or integers."""
        paths = self.paths[rows]
        if len(paths) == 0:
            raise ValueError(f"ImageIndex: `rows` must take at least one image, got none of {len(self)}.")
        parts = {name: value[rows] for name, value in self._columns().items() if value is not None}
        return ImageIndex.of_arrays({**self.arrays(), **parts, "paths": paths.data, "ends": paths.ends})

    def image(self, place: int) -> tuple[Any, ...]:
        """What is shown at a place: a path, and the box where there are boxes."""
        return self.paths[place], *([] if self.boxes is None else self.boxes[place].tolist())

    def _columns(self) -> dict[str, NDArray[Any] | None]:
        return {name: getattr(self, name) for name in _COLUMNS}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it as arrays."""
        found: dict[str, NDArray[Any]] = {"paths": self.paths.data, "ends": self.paths.ends}
        found |= {name: value for name, value in self._columns().items() if value is not None}
        return found if self.names is None else {**found, "names": self.names.data, "name_ends": self.names.ends}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "ImageIndex":
        """The index whose `arrays()` these are, as it was checked when it was made."""
        index = cls.__new__(cls)
        index.paths = PackedStrings.from_arrays(arrays["paths"], arrays["ends"])
        for name in _COLUMNS:
            setattr(index, name, arrays.get(name))
        index.names = PackedStrings.from_arrays(arrays["names"], arrays["name_ends"]) if "names" in arrays else None
        return index


def _pixels(boxes: Any) -> NDArray[np.int32]:
    """The boxes, whose numbers must fit into 32 bits."""
    try:
        return np.asarray(boxes, dtype=np.int32).reshape(-1, 4)
    except OverflowError:
        odd = next(box for box in boxes if any(abs(side) >= 2**31 for side in box))
        raise ValueError(f"ImageIndex: `boxes` must hold numbers of pixels below 2**31, got {list(odd)}.") from None


def image_keys(index: ImageIndex) -> NDArray[np.int64]:
    """A hash of each image, and of its box where there are boxes."""
    keys = np.fromiter(map(hash, index.paths), np.int64, len(index))  # of millions of paths, a set of them is large
    for side in () if index.boxes is None else index.boxes.T:
        keys = keys * np.int64(1_000_003) + side  # wraps around
    return keys


def class_numbers(originals: Sequence[Any] | NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Labels 0, 1, ... in the order of the sorted original ids, and these as text."""
    values = originals.tolist() if isinstance(originals, np.ndarray) else originals
    found = sorted(set(values))
    number = {name: place for place, name in enumerate(found)}
    return np.fromiter((number[value] for value in values), np.int64, len(values)), [str(name) for name in found]


def split_by_class(who: str, setting: str, classes: Sequence[Any], fraction: float, seed: int) -> set[Any]:
    """A fraction of the classes, drawn from them in order.

    Raises:
        ValueError: if no class is left on one of the sides, naming the setting that the fraction is.
    """
    held = round(fraction * len(classes))
    if not 0 < held < len(classes):
        raise ValueError(
            f"{who}: `{setting}` must leave classes on both sides, got {fraction} of {len(classes)} classes."
        )
    ordered = sorted(classes)
    return {ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))[:held]}


def cached(
    read: Callable[[], Mapping[str, ImageIndex]], sources: Sequence[Path], settings: Any, folder: Path
) -> dict[str, ImageIndex]:
    """What `read()` gives and warns of, kept in `folder` for as long as the sources and settings stay as they are.

    Args:
        read: makes the index of each split.
        sources: the files that it reads, whose sizes and times of change decide.
        settings: what else decides, plain values.
        folder: where the cache lies; made where missing. A damaged file in it is warned of and written anew.

    Raises:
        ValueError: if `folder` is a file, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"ImageDataModule: `cache_dir` must be a folder or a place for one, got {folder} ({error.strerror})."
        ) from None
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    key = hashlib.sha256(json.dumps([VERSION, stats, settings], default=str).encode()).hexdigest()[:24]
    file = folder / f"index-{key}.npz"
    found = _load(file) if file.exists() else None
    if found is not None:
        splits, said = found
        for message in said:
            warnings.warn(message, stacklevel=2)
        return splits
    result, warned = record_warnings(lambda: dict(read()))
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".npz")
    parts: dict[str, Any] = {f"{s}/{name}": a for s, index in result.items() for name, a in index.arrays().items()}
    said_now = PackedStrings(warned)
    parts |= {"warnings": said_now.data, "warning_ends": said_now.ends}
    try:
        with os.fdopen(descriptor, "wb") as stream:
            np.savez(stream, **parts)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return result


def _load(file: Path) -> tuple[dict[str, ImageIndex], PackedStrings] | None:
    """The splits in a cache's file and what reading them warned of; None where the file is damaged."""
    splits: dict[str, dict[str, NDArray[Any]]] = {}
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            for name in arrays.files:
                split, _, part = name.rpartition("/")
                splits.setdefault(split, {})[part] = arrays[name]
        said = splits.pop("")
        found = {split: ImageIndex.of_arrays(parts) for split, parts in splits.items()}
        return found, PackedStrings.from_arrays(said["warnings"], said["warning_ends"])
    except Exception as error:  # zipfile and NumPy promise no kind of their errors
        warnings.warn(f"ImageDataModule: read the lists again, since {file} is damaged ({error!r}).", stacklevel=3)
        return None
