"""The ground truth of Revisited Oxford and Paris, `gnd_*.pkl`: parsed and validated."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_retrieval.datamodules.files.lists import leaves_root
from lightning_retrieval.datamodules.files.plain_pickle import load_plain_pickle

KEYS = ("imlist", "qimlist", "gnd")
LISTS = ("easy", "hard", "junk")
MAX_PIXELS = np.iinfo(np.int32).max  # beyond any image
MAX_SHOWN = 80  # characters of an invalid value in a message


@dataclass(frozen=True)
class GroundTruth:
    """What `gnd_*.pkl` contains.

    Args:
        images: names of the database images, without suffix.
        queries: names of the queries, without suffix.
        boxes: left, top, right, bottom of each query, in pixels of its image.
        lists: `"easy"`, `"hard"` and `"junk"`; each has for each query the positions of images in the database.
    """

    images: list[str]
    queries: list[str]
    boxes: list[list[float]]
    lists: dict[str, list[list[int]]]


def read_ground_truth(owner: str, path: Path) -> GroundTruth:
    """Read a `gnd_*.pkl` without running any code in it.

    Args:
        owner: prefix of error messages.
        path: the file.

    Raises:
        ValueError: if the pickle asks for anything but plain values and arrays, has the format of the original protocol
            instead of the revisited one, or has any invalid value.
    """
    content = load_plain_pickle(owner, path)
    if not isinstance(content, dict):
        raise ValueError(f"{owner}: {path} must be a dict with imlist, qimlist and gnd, got {type(content).__name__}.")
    if not content.keys() >= set(KEYS):
        raise ValueError(
            f"{owner}: {path} must be a dict with imlist, qimlist and gnd, got one with {sorted(map(str, content))}."
        )
    images = _parse_names(owner, path, "imlist", content["imlist"])
    queries = _parse_names(owner, path, "qimlist", content["qimlist"])
    in_both = set(images) & set(queries)
    if in_both:
        raise ValueError(
            f"{owner}: `imlist` must not contain queries in {path}, got {len(in_both)}, such as {min(in_both)!r} at "
            f"position {images.index(min(in_both))}, which is at position {queries.index(min(in_both))} of `qimlist`."
        )
    entries = content["gnd"]
    _check_number_of_entries(owner, path, entries, len(queries))
    truth = GroundTruth(images, queries, [], {"easy": [], "hard": [], "junk": []})
    for number, (query, entry) in enumerate(zip(queries, entries)):
        _add_entry(owner, path, f"query {number} ({query}) in {path}", entry, truth)
    return truth


def _check_number_of_entries(owner: str, path: Path, entries: Any, queries: int) -> None:
    found: Any = type(entries).__name__
    if isinstance(entries, (list, tuple)):
        found = len(entries)
    if found != queries:
        raise ValueError(f"{owner}: `gnd` must have one entry for each of {queries} queries in {path}, got {found}.")


def _add_entry(owner: str, path: Path, where: str, entry: Any, truth: GroundTruth) -> None:
    """Add the box and the lists of one query to the ground truth."""
    keys = set()
    if isinstance(entry, dict):
        keys = set(entry)
    if "ok" in keys and not keys >= {"easy", "hard"}:
        raise ValueError(
            f"{owner}: {path} must be of the revisited protocol, with easy and hard images, got the original protocol "
            "with `ok`; use the gnd_r*.pkl of the revisited data sets."
        )
    if not keys >= {"bbx", *LISTS}:
        raise ValueError(f"{owner}: `gnd` must have bbx, easy, hard and junk of {where}, got {sorted(map(str, keys))}.")
    truth.boxes.append(_parse_box(owner, where, entry["bbx"]))
    times_listed = Counter[int]()
    for kind in LISTS:
        positions = _parse_positions(owner, f"`{kind}` of {where}", entry[kind], len(truth.images))
        truth.lists[kind].append(positions)
        times_listed.update(positions)
    for position, times in times_listed.items():
        if times > 1:
            raise ValueError(
                f"{owner}: easy, hard and junk must list an image only once for {where}, got {position} "
                f"({truth.images[position]}) twice."
            )


def _parse_names(owner: str, path: Path, key: str, values: Any) -> list[str]:
    names = _to_list(values)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{owner}: `{key}` must be a list of names in {path}, got {_shown(values)}.")
    first_with: dict[str, int] = {}
    for position, name in enumerate(names):
        first = first_with.setdefault(name, position)
        if first != position:
            raise ValueError(
                f"{owner}: `{key}` must contain each name only once in {path}, got {name!r} twice, at positions "
                f"{first} and {position}."
            )
        if leaves_root(name):
            raise ValueError(
                f"{owner}: `{key}` must be names of images inside the root, got {name!r} at position {position} in "
                f"{path}."
            )
    return names


def _parse_box(owner: str, where: str, values: Any) -> list[float]:
    box = _to_list(values) or []
    if len(box) != 4 or not all(map(_is_side, box)):
        raise ValueError(f"{owner}: `bbx` must be 4 finite numbers of pixels for {where}, got {_shown(values)}.")
    return box


def _parse_positions(owner: str, where: str, values: Any, num_images: int) -> list[int]:
    positions = _to_list(values)
    if positions is None or not all(map(_is_integer, positions)):
        raise ValueError(f"{owner}: {where} must be a list of integers, got {_shown(values)}.")
    for position in positions:
        if not 0 <= position < num_images:
            raise ValueError(
                f"{owner}: {where} must be positions in imlist, from 0 to {num_images - 1}, got {position}."
            )
    return positions


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_side(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < MAX_PIXELS  # which is False for NaN


def _shown(values: Any) -> str:
    return str(values)[:MAX_SHOWN]


def _to_list(values: Any) -> list[Any] | None:
    """The entries of a list, tuple or array, converted from NumPy's types to Python's; None for anything else."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        return None
    entries = []
    for entry in values:
        if isinstance(entry, np.generic):
            entry = entry.item()
        entries.append(entry)
    return entries
