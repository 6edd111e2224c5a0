"""A cache of image indexes on disk, so that the lists of a large data set are read only once."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.image_check import record_warnings
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.files import new_file
from lightning_retrieval.packed_strings import PackedStrings

VERSION = 4  # of the file format


def read_cached(
    read: Callable[[], Mapping[str, ImageIndex]],
    sources: Sequence[Path],
    settings: Any,
    folder: Path,
    *,
    root: Path | None = None,
    owner: str = "ImageDataModule",
) -> dict[str, ImageIndex]:
    """Return the result of `read()` and issue its warnings, from the cache if sources and settings are unchanged.

    If the result cannot be written to the cache, a warning is issued.

    Args:
        read: reads the index of each split.
        sources: the files that it reads; a change of their size or modification time invalidates the cache.
        settings: plain values; a change of them invalidates the cache, too.
        folder: the folder of the cache, which is created if it does not exist. If a file in it is damaged, a warning is
            issued and the file is replaced.
        root: the folder that the paths of the images are relative to. If none of the images that are looked for there
            exists, the images were moved, for example to another accepted directory structure, and are read again.
            Not looked for if None.
        owner: prefix of error messages and warnings.

    Raises:
        ValueError: if `folder` is a file or is inside one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"{owner}: `cache_dir` must be a folder or a path where one can be created, got {folder} "
            f"({error.strerror})."
        ) from None
    except OSError as error:
        _warn_of_failure(owner, folder, error)
        return dict(read())
    file = folder / f"index-{_key(sources, settings)}.npz"
    if file.exists():
        loaded = _load(owner, file)
        if loaded is not None and not _were_moved(loaded[0], root):
            splits, messages = loaded
            for message in messages:
                warnings.warn(message, stacklevel=2)
            return splits
    result, messages_now = record_warnings(lambda: dict(read()))
    try:
        _save(file, result, messages_now)
    except OSError as error:
        _warn_of_failure(owner, folder, error)
    return result


def _warn_of_failure(owner: str, folder: Path, error: OSError) -> None:
    warnings.warn(
        f"{owner}: the index of the images is not stored, because `cache_dir` cannot be written, got {folder} "
        f"({error.strerror}).",
        stacklevel=4,
    )


def _were_moved(splits: Mapping[str, ImageIndex], root: Path | None) -> bool:
    """Whether, in a split, neither the first image nor the middle one nor the last one exists."""
    if root is None:
        return False
    for index in splits.values():
        positions = (0, len(index) // 2, len(index) - 1)
        if not any((root / index.paths[position]).is_file() for position in positions):
            return True
    return False


def _key(sources: Sequence[Path], settings: Any) -> str:
    stats: list[tuple[str, int, int]] = []
    for path in sources:
        stat = path.stat()
        stats.append((str(path), stat.st_size, stat.st_mtime_ns))
    content = json.dumps([VERSION, stats, settings], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _save(file: Path, splits: Mapping[str, ImageIndex], messages: Sequence[str]) -> None:
    packed_messages = PackedStrings(messages)
    arrays: dict[str, Any] = {"warnings": packed_messages.data, "warning_ends": packed_messages.ends}
    for split, index in splits.items():
        for name, array in index.arrays().items():
            arrays[f"{split}/{name}"] = array
    with new_file(file) as stream:
        np.savez(stream, **arrays)


def _load(owner: str, file: Path) -> tuple[dict[str, ImageIndex], PackedStrings] | None:
    """The splits and the warnings that a file of the cache holds; None if the file is damaged."""
    arrays_of_split: dict[str, dict[str, NDArray[Any]]] = {}
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            for key in arrays.files:
                split, _, name = key.rpartition("/")
                arrays_of_split.setdefault(split, {})[name] = arrays[key]
        unnamed = arrays_of_split.pop("")
        messages = PackedStrings.from_arrays(unnamed["warnings"], unnamed["warning_ends"])
        splits = {split: ImageIndex.from_arrays(parts) for split, parts in arrays_of_split.items()}
    except Exception as error:  # zipfile and NumPy do not document the types of their errors
        warnings.warn(
            f"{owner}: the lists are read again because the cache file {file} is damaged ({error!r}).",
            stacklevel=3,
        )
        return None
    return splits, messages
