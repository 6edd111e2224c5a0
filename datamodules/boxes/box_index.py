"""The list of the images of one split of a detection data set, with the objects in each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_bool, check_sequence, check_strings, short_repr


class ImageObjects(NamedTuple):
    """The objects in one image.

    `boxes` are (objects, 4) left, top, right and bottom in pixels of the image, `labels` from 1 to C, and `difficult`
    is True for objects that are neither trained on nor counted in evaluation.
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    difficult: NDArray[np.bool_]


class BoxIndex:
    """Paths of the images of one split, and the objects in each.

    Args:
        paths: relative to the data set's root.
        objects: those of each image: boxes, labels from 1, and whether each object is difficult. An image may have no
            object.
        class_names: names of the classes 1, 2, ...

    Raises:
        TypeError: if `paths` or `class_names` is no sequence of strings.
        ValueError: if there is no image, lengths differ, a label is not from 1 to the number of classes, or a box has
            no area or is not finite.

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
        check_strings("BoxIndex", "paths", paths)
        check_strings("BoxIndex", "class_names", class_names)
        check_sequence("BoxIndex", "objects", objects)
        if len(paths) == 0:
            raise ValueError("BoxIndex: `paths` must have at least one image, got none.")
        if len(class_names) == 0:
            raise ValueError("BoxIndex: `class_names` must name at least one class, got none.")
        if len(paths) != len(objects):
            raise ValueError(
                f"BoxIndex: `objects` must have one entry for each path, got {len(objects)} for {len(paths)} paths."
            )
        self.paths = list(paths)
        self.class_names = list(class_names)
        images = [_image_objects(given) for given in objects]
        # Joined arrays are not copied to the workers, unlike millions of small ones.
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
        """Number of objects, without the difficult ones if not asked for them."""
        if check_bool("BoxIndex", "difficult", difficult):
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
            raise ValueError(
                f"BoxIndex: `objects` must have labels from 1 to {known}, the number of classes, got "
                f"{self._labels[first]} in {self._path_of_object(first)}; 0 is background."
            )
        left, top, right, bottom = self._boxes.T
        valid = np.isfinite(self._boxes).all(1) & (left < right) & (top < bottom)
        if not valid.all():
            first = int(valid.argmin())
            raise ValueError(
                "BoxIndex: `objects` must have boxes (left, top, right, bottom) with left < right and top < bottom, "
                f"got {self._boxes[first].tolist()} in {self._path_of_object(first)}."
            )

    def _path_of_object(self, position: int) -> str:
        """The image that an object is in, for error messages."""
        return self.paths[int(np.searchsorted(self._ends, position, side="right"))]


def _image_objects(given: Any) -> ImageObjects:
    try:
        boxes, labels, difficult = given
        image = ImageObjects(
            np.asarray(boxes, np.float32).reshape(-1, 4), np.asarray(labels, np.int64), np.asarray(difficult, bool)
        )
    except (TypeError, ValueError):
        raise ValueError(
            "BoxIndex: `objects` must have (boxes, labels, difficult) for each image, arrays of 4 numbers, an integer "
            f"and a flag for each object, got {short_repr(given)}."
        ) from None
    if not len(image.boxes) == len(image.labels) == len(image.difficult):
        raise ValueError(
            "BoxIndex: `objects` must have a box, a label and a difficult flag for each object, got "
            f"{len(image.boxes)}, {len(image.labels)} and {len(image.difficult)}."
        )
    return image
