"""Checks that no class and no image is used for training and for evaluation."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.images.image_index import ImageIndex


def check_no_shared_classes(owner: str, splits: Mapping[str, ImageIndex]) -> None:
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
            raise ValueError(
                f"{owner}: classes must be in training or in evaluation, not in both, got {len(shared)} in train and "
                f"{name}, such as {shared[0]!r}{_where_class(train, shared[0])}{_where_class(index, shared[0])}."
            )


def _where_class(index: ImageIndex, name: str) -> str:
    """The line of the first image of a class, for the message."""
    label = list(index.names or ()).index(name)
    return index.where(int(np.argmax(index.labels == label)))


def check_no_shared_images(owner: str, splits: Mapping[str, ImageIndex]) -> None:
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
            raise ValueError(
                f"{owner}: images must be in training or in evaluation, not in both, got {len(shared)} in train and "
                f"{name}, such as {shared[0][0]}{_where_image(train, shared[0])}{_where_image(index, shared[0])}."
            )


def _where_image(index: ImageIndex, key: tuple[Any, ...]) -> str:
    """The line of an image, for the message."""
    position = next(position for position in range(len(index)) if index.key(position) == key)
    return index.where(position)


def _positions_with_hash_in(index: ImageIndex, sorted_hashes: NDArray[np.int64]) -> list[int]:
    hashes = index.hashes()
    nearest = np.searchsorted(sorted_hashes, hashes).clip(max=len(sorted_hashes) - 1)
    positions: list[int] = np.flatnonzero(sorted_hashes[nearest] == hashes).tolist()
    return positions
