"""The list of a data set's images as arrays: millions of entries take little memory and are not copied to workers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.ranking.roles import Role
from lightning_retrieval.search.packed_strings import PackedStrings

# The roles of an image in evaluation. A distractor is ranked, but relevant to no query.
ROLES = {"query": Role.QUERY, "gallery": Role.GALLERY, "both": Role.BOTH, "distractor": Role.GALLERY}
DISTRACTOR = -1  # the label of distractors
_OUTSIDE_ROOT = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(^|[/\\])\.\.([/\\]|$)")  # an absolute path, or a part `..`
_NOT_NORMALIZED = re.compile(r"(^|/)\./|//|/\.?$")  # parts that allow several spellings of one path
_COLUMNS = ("labels", "categories", "levels", "boxes", "roles", "instances")


def leaves_root(path: str) -> bool:
    """Whether a path is absolute or goes up with `..`, and so may be outside of the data set's root."""
    return _OUTSIDE_ROOT.search(path) is not None


class ImageIndex:
    """Paths, labels and other annotations of the images of one split.

    Args:
        paths: relative to the data set's root, and inside it.
        labels: the class of each image, integers; `DISTRACTOR` for images without a class.
        categories: a coarser class of each image, or None.
        levels: (images, L) labels, finest level first, for hierarchical losses, or None.
        boxes: (images, 4) left, top, right, bottom in pixels of the image, or None; the image is cropped to its box.
        roles: the role of each image in evaluation, from `ROLES`; `both` if None.
        instances: what each image shows, any integers. In evaluation the embeddings of the images of one instance, such
            as the frames of a video, are averaged and count as one. If None, each image counts by itself.
        names: names of the classes, in the order of the labels 0, 1, ...; or None.

    Raises:
        ValueError: if there is no image, the lengths differ, a path leaves the root or contains `./` or `//`, a box
            contains no pixel or does not fit into 32 bits, or an instance has images of several classes.

    Example:
        >>> from lightning_retrieval.datamodules import ImageIndex
        >>> index = ImageIndex(["cats/1.jpg", "cats/2.jpg", "dogs/1.jpg"], [0, 0, 1], names=["cats", "dogs"])
        >>> len(index), index.paths[2], list(index[index.labels == 0].paths)
        (3, 'dogs/1.jpg', ['cats/1.jpg', 'cats/2.jpg'])

    Relations:
        `ImageSet` reads the images. `ImageDataModule.read` returns an index for each split.
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
        if not isinstance(paths, PackedStrings):
            paths = PackedStrings(paths)
        self.paths = paths
        self.labels: NDArray[np.int64] = np.asarray(labels, dtype=np.int64)
        self.categories: NDArray[np.int64] | None = _optional_array(categories, np.int64)
        self.levels: NDArray[np.int64] | None = _optional_array(levels, np.int64)
        self.boxes = _box_array(boxes)
        self.roles: NDArray[np.uint8] | None = _optional_array(roles, np.uint8)
        self.instances: NDArray[np.int64] | None = _optional_array(instances, np.int64)
        self.names = None if names is None else PackedStrings(names)
        _check_lengths(self)
        _check_paths(self.paths)
        _check_boxes(self)
        _check_instances(self)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Any) -> "ImageIndex":
        """The images that a slice, a mask or an array of integers selects."""
        paths = self.paths[rows]
        if len(paths) == 0:
            raise ValueError(f"ImageIndex: `rows` must select at least one image, got none of {len(self)}.")
        arrays = self.arrays()
        for name in _COLUMNS:
            if name in arrays:
                arrays[name] = arrays[name][rows]
        arrays["paths"] = paths.data
        arrays["ends"] = paths.ends
        return ImageIndex.from_arrays(arrays)

    def key(self, position: int) -> tuple[Any, ...]:
        """What identifies an image: its path and, if there are boxes, its box."""
        if self.boxes is None:
            return (self.paths[position],)
        return (self.paths[position], *self.boxes[position].tolist())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All parts of the index as named arrays."""
        arrays: dict[str, NDArray[Any]] = {"paths": self.paths.data, "ends": self.paths.ends}
        for name in _COLUMNS:
            values = getattr(self, name)
            if values is not None:
                arrays[name] = values
        if self.names is not None:
            arrays["names"] = self.names.data
            arrays["name_ends"] = self.names.ends
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "ImageIndex":
        """The index that returned these `arrays()`, without checking them again."""
        index = cls.__new__(cls)
        index.paths = PackedStrings.from_arrays(arrays["paths"], arrays["ends"])
        for name in _COLUMNS:
            setattr(index, name, arrays.get(name))
        index.names = None
        if "names" in arrays:
            index.names = PackedStrings.from_arrays(arrays["names"], arrays["name_ends"])
        return index


def _optional_array(values: Any, dtype: Any) -> NDArray[Any] | None:
    if values is None:
        return None
    return np.asarray(values, dtype=dtype)


def _box_array(boxes: Any) -> NDArray[np.int32] | None:
    if boxes is None:
        return None
    try:
        return np.asarray(boxes, dtype=np.int32).reshape(-1, 4)
    except OverflowError:
        invalid = next(box for box in boxes if max(map(abs, box)) >= 2**31)
        raise ValueError(f"ImageIndex: `boxes` must hold numbers of pixels below 2**31, got {list(invalid)}.") from None


def _check_lengths(index: ImageIndex) -> None:
    if len(index) == 0:
        raise ValueError("ImageIndex: `paths` must hold at least one image, got none.")
    for name in _COLUMNS:
        values = getattr(index, name)
        if values is not None and len(values) != len(index):
            raise ValueError(
                f"ImageIndex: `{name}` must have one entry for each of {len(index)} paths, got {len(values)}."
            )


def _check_paths(paths: PackedStrings) -> None:
    for path in paths:
        if leaves_root(path):
            raise ValueError(f"ImageIndex: `paths` must lie inside the root, got {path!r}.")
        if _NOT_NORMALIZED.search(path):
            raise ValueError(f"ImageIndex: `paths` must be without './' and '//', got {path!r}.")


def _check_boxes(index: ImageIndex) -> None:
    if index.boxes is None:
        return
    left, top, right, bottom = index.boxes.T
    empty = np.flatnonzero((right <= left) | (bottom <= top))
    if len(empty):
        first = int(empty[0])
        raise ValueError(
            f"ImageIndex: `boxes` must contain at least one pixel, got {index.boxes[first].tolist()} for "
            f"{index.paths[first]} ({len(empty)} such boxes)."
        )


def _check_instances(index: ImageIndex) -> None:
    if index.instances is None:
        return
    _, first_image, instance_of_image = np.unique(index.instances, return_index=True, return_inverse=True)
    label_of_instance = index.labels[first_image]
    different = np.flatnonzero(index.labels != label_of_instance[instance_of_image])
    if len(different):
        second = int(different[0])
        first = int(first_image[instance_of_image[second]])
        raise ValueError(
            f"ImageIndex: `instances` must have one label each, got {index.labels[[first, second]].tolist()} for "
            f"instance {index.instances[first]} ({index.paths[first]} and {index.paths[second]})."
        )
