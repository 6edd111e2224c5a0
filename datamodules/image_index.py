"""The index of a data set's images as arrays, the numbering and splitting of classes, and the cache of indices.

The cache has one file for each combination of sources and settings, so that the lists of a large data set are read only
once.
"""

import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_finite_number, check_strings, short_repr
from lightning_retrieval.datamodules.item_seeds import all_different, as_array
from lightning_retrieval.datamodules.table_file import ListLines
from lightning_retrieval.files import leaves_root, new_file
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.ranking.labels import Role
from lightning_retrieval.ranking.relevance import NO_TAG

# The roles of an image in evaluation. A distractor is ranked, but is relevant to no query.
ROLES = {"query": Role.QUERY, "gallery": Role.GALLERY, "both": Role.BOTH, "distractor": Role.GALLERY}
# Names of folders of splits and roles, in the structures of other programs.
VALIDATION = ("val", "valid", "validation")
QUERIES = ("query", "queries")
GALLERIES = ("gallery", "bounding_box_test", "database")
DISTRACTOR = -1  # the label of distractors
CACHE_VERSION = 6  # version of the file format of the cache

# Matches every path that leaves the root or is not normalized.
_MAY_BE_INVALID = r"^/|[/.]\n?$|\./|//|\\|:|(?i:(^|/)(con|prn|aux|nul|com[0-9]|lpt[0-9]) *([./]|$))"
_NOT_NORMALIZED = re.compile(r"(^|/)\./|//|/\.?$")  # matches a path that has a shorter spelling
_COLUMNS = ("labels", "categories", "levels", "boxes", "roles", "instances", "cameras", "tags")
_NAMES = {"names": "name_ends", "tag_names": "tag_name_ends"}  # keys of packed strings in `arrays()`

Result = TypeVar("Result")


def packed(name: str, strings: PackedStrings | Sequence[str]) -> PackedStrings:
    """Convert strings to `PackedStrings`; raise unless they are a sequence of strings."""
    if isinstance(strings, PackedStrings):
        return strings
    check_strings(name, strings)
    return PackedStrings(strings)


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    """Convert values to an array of any shape; raise unless they are 64-bit integers."""
    array = as_array(name, values)
    is_empty = array.size == 0
    is_integer = np.issubdtype(array.dtype, np.integer)
    if not is_empty and not (is_integer and array.max() <= np.iinfo(np.int64).max):
        raise InvalidType("must be integers of 64 bits", argument=name, got=array.dtype)
    return array.astype(np.int64, copy=False)


def integer_array(name: str, values: Any) -> NDArray[np.int64]:
    """Convert values to an array of one integer for each image; raise if that is not possible."""
    array = _integers(name, values)
    if array.ndim != 1:
        raise InvalidValue("must be one integer for each image", argument=name, got=f"shape {array.shape}")
    return array


def optional_array(name: str, values: Any) -> NDArray[np.int64] | None:
    """Like `integer_array`, but None is allowed."""
    if values is None:
        return None
    return integer_array(name, values)


def level_array(levels: Any) -> NDArray[np.int64] | None:
    """Convert labels to an array (images, levels); raise if that is not possible. None is allowed."""
    if levels is None:
        return None
    array = _integers("levels", levels)
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidValue("must be (images, levels)", argument="levels", got=f"shape {array.shape}")
    return array


def role_array(roles: Any) -> NDArray[np.uint8] | None:
    """Convert roles to an array of one role number for each image; raise if that is not possible. None is allowed."""
    if roles is None:
        return None
    numbers = integer_array("roles", roles)
    invalid = np.flatnonzero((numbers < Role.JUNK) | (numbers > Role.BOTH))
    if len(invalid):
        rule = "must be from 0 to 3"
        raise InvalidValue(rule, argument="roles", got=numbers[invalid[0]], cure="take them from ROLES")
    return numbers.astype(np.uint8)


def box_array(boxes: Any) -> NDArray[np.int32] | None:
    """Convert boxes to an array (images, 4); raise if that is not possible. None is allowed."""
    if boxes is None:
        return None
    array = _integers("boxes", boxes)
    if array.ndim != 2 or array.shape[1] != 4:
        raise InvalidValue("must be (images, 4)", argument="boxes", got=f"shape {array.shape}")
    too_large = np.flatnonzero((abs(array) >= 2**31).any(1))
    if len(too_large):
        first = array[too_large[0]].tolist()
        raise InvalidValue("must hold numbers of pixels below 2**31", argument="boxes", got=first)
    return array.astype(np.int32)


def tag_array(tags: Any) -> NDArray[np.int64] | None:
    """Convert tags to an array (images, tags); raise if that is not possible. None is allowed."""
    if tags is None:
        return None
    array = _integers("tags", tags)
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidValue("must be (images, tags)", argument="tags", got=f"shape {array.shape}")
    if array.size and array.min() < NO_TAG:
        raise InvalidValue(f"must be numbers >= 0, or {NO_TAG} for no tag", argument="tags", got=array.min())
    return array


def tag_numbers(tags_of_images: Sequence[Sequence[Any]]) -> tuple[NDArray[np.int64], list[str]]:
    """Number tags 0, 1, ... in sorted order; a tag that an image has several times counts once.

    Args:
        tags_of_images: the original tags of each image, all of them text or all integers.

    Returns:
        The tag numbers of each image, (images, T) with T >= 1, and the original tags as text.
    """
    different = [list(dict.fromkeys(tags)) for tags in tags_of_images]
    counts = np.fromiter(map(len, different), np.int64, len(different))
    numbers, names = class_numbers(list(itertools.chain.from_iterable(different)))
    table = np.full((len(different), max(1, counts.max(initial=0))), NO_TAG)
    table[np.arange(table.shape[1]) < counts[:, None]] = numbers
    return table, names


def class_numbers(originals: Sequence[Any] | NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Number classes 0, 1, ... in the order of their sorted original ids.

    Args:
        originals: the original id of the class of each image.

    Returns:
        The class number of each image, and the original id of each class as text.
    """
    values = originals
    if isinstance(originals, np.ndarray):
        values = originals.tolist()
    classes = sorted(set(values))
    number_of_class = dict(zip(classes, range(len(classes))))
    numbers = np.fromiter((number_of_class[value] for value in values), np.int64, len(values))
    return numbers, list(map(str, classes))


def split_by_class(setting: str, classes: Sequence[Any], fraction: float, seed: int, *, cure: str = "") -> set[Any]:
    """Draw a fraction of the classes at random; the result does not depend on the order of `classes`.

    Args:
        setting: name of the argument with the fraction, for error messages.
        classes: all classes.
        fraction: the fraction to draw.
        seed: determines which classes are drawn.
        cure: what helps if there is one class, which no fraction splits; "" if nothing is known.

    Raises:
        ValueError: if no class or every class would be drawn.
    """
    if len(classes) < 2:
        got = "none"
        if classes:
            got = f"one class, {short_repr(classes[0])}"
        cure = cure or "give each class a label, or a folder, of its own"
        raise InvalidValue("must have at least two classes to split", argument=setting, got=got, cure=cure)
    count = round(fraction * len(classes))
    if not 0 < count < len(classes):
        rule = "must leave at least one class on each side of the split"
        got = f"{fraction} of {len(classes)} classes"
        raise InvalidValue(rule, argument=setting, got=got, cure="change it, or add classes")
    ordered = sorted(classes)
    drawn = np.random.default_rng(seed).permutation(len(ordered))[:count]
    return {ordered[index] for index in drawn}


def check_no_splits(root: Path, folders: Collection[str], argument: str = "root") -> None:
    """Raise if folders that would be read as classes are those of splits or roles.

    Args:
        root: the folder that contains them.
        folders: their names.
        argument: name of the argument with the root, for the message.
    """
    names = {name.lower(): name for name in folders}
    queries, galleries = list(filter(names.get, QUERIES)), list(filter(names.get, GALLERIES))
    if queries and galleries:
        got = f"{root}, whose folders {names[queries[0]]} and {names[galleries[0]]} hold queries and a gallery"
        cure = "write a table with the column role, for ImageTable"
        raise InvalidValue("must contain the folders of classes", argument=argument, got=got, cure=cure)
    validation = list(filter(names.get, VALIDATION))
    if "train" in names and validation and "test" not in names:
        name = names[validation[0]]
        got = f"{root}, which has train and {name}"
        cure = f"rename {name} to test if it has other classes, or pass {argument}={root / names['train']}"
        rule = "must contain the folders train and test, or those of classes"
        raise InvalidValue(rule, argument=argument, got=got, cure=cure)


def check_test_fraction(test_fraction: float) -> float:
    """Return `test_fraction` unchanged; raise an error unless it is between 0 and 1."""
    fraction = check_finite_number("test_fraction", test_fraction)
    if not 0 < fraction < 1:
        raise InvalidValue("must be between 0 and 1", argument="test_fraction", got=test_fraction)
    return fraction


def digest_of_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A hash of the names, types and values of arrays, the same in each process and on each machine."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class ImageIndex:
    """Paths, labels and other annotations of the images of one split.

    Args:
        paths: paths relative to the data set's root; they must not leave the root.
        labels: the class of each image as an integer; `DISTRACTOR` for images without a class.
        categories: a coarser class of each image, or None.
        levels: (images, L) labels, finest level first, for hierarchical losses, or None.
        boxes: (images, 4) left, top, right, bottom in pixels of the image, or None; the image is cropped to its box.
        roles: the role of each image in evaluation, from `ROLES`; `both` if None.
        instances: an integer for each image that identifies what it shows. In evaluation, the embeddings of all images
            of one instance, such as the frames of a video, are averaged and count as one. If None, each image is an
            instance.
        cameras: an integer for each image that identifies its camera or sequence. In evaluation, images with the class
            and the camera of a query are excluded from the list of the query, as in Market-1501. If None, only the
            query itself is excluded.
        tags: (images, T) numbers >= 0 of the tags of each image, for the rule `SharedTags`; -1 fills rows with fewer
            than T tags. None if the images have no tags.
        names: names of the classes, in the order of the labels 0, 1, ...; or None.
        tag_names: names of the tags, in the order of the tags 0, 1, ...; or None.
        lines: for error messages, a `ListLines` with the line of the list that each image was read from; or None.

    Raises:
        TypeError: if `paths`, `names` or `tag_names` is a single string, `lines` is not a `ListLines`, or
            another argument does not hold integers.
        ValueError: if there is no image; if the lengths differ; if a path leaves the root or contains `./` or `//`; if
            a role is not from 0 to 3; if a tag is below -1 or has no name in `tag_names`; if images with the same label
            at a level have different labels at the next level; if a box contains no pixel or does not fit into 32 bits;
            if `instances` is None and an image (with its box, if there are boxes) has two labels; or if an instance has
            images of several classes, cameras or roles.

    Example:
        >>> from lightning_retrieval.datamodules import ImageIndex
        >>> index = ImageIndex(["cats/1.jpg", "cats/2.jpg", "dogs/1.jpg"], [0, 0, 1], names=["cats", "dogs"])
        >>> len(index), index.paths[2], list(index[index.labels == 0].paths)
        (3, 'dogs/1.jpg', ['cats/1.jpg', 'cats/2.jpg'])

    `ImageDataModule.read` may change an index, such as its labels, until it returns the index. Afterwards, the index
    must not change.

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
        cameras: Any = None,
        tags: Any = None,
        names: Sequence[str] | None = None,
        tag_names: Sequence[str] | None = None,
        lines: ListLines | None = None,
    ) -> None:
        if lines is not None and not isinstance(lines, ListLines):
            raise InvalidType("must be a ListLines or None", "ImageIndex", "lines", got=type(lines).__name__)
        self.lines = lines
        with owned_by("" if lines else "ImageIndex"):  # a data set whose list was read names itself
            self.paths = packed("paths", paths)
            self.labels = integer_array("labels", labels)
            self.categories = optional_array("categories", categories)
            self.levels = level_array(levels)
            self.boxes = box_array(boxes)
            self.roles = role_array(roles)
            self.instances = optional_array("instances", instances)
            self.cameras = optional_array("cameras", cameras)
            self.tags = tag_array(tags)
            self.names = None if names is None else packed("names", names)
            self.tag_names = None if tag_names is None else packed("tag_names", tag_names)
            _check_lengths(self)
            _check_paths(self)
            _check_boxes(self)
            _check_levels(self)
            _check_tag_names(self)
            _check_one_label_each(self)
            _check_instances(self)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Any) -> "ImageIndex":
        """Return an index of the images that a slice, a mask or an array of integers selects."""
        paths = self.paths[rows]
        if len(paths) == 0:
            raise InvalidValue("must select at least one image", "ImageIndex", "rows", got=f"none of {len(self)}")
        arrays = self.arrays()
        for name in _COLUMNS:
            if name in arrays:
                arrays[name] = arrays[name][rows]
        arrays["paths"] = paths.data
        arrays["ends"] = paths.ends
        return ImageIndex.from_arrays(arrays)

    def key(self, position: int) -> tuple[Any, ...]:
        """The identity of an image: its path and, if there are boxes, its box."""
        if self.boxes is None:
            return (self.paths[position],)
        return (self.paths[position], *self.boxes[position].tolist())

    def hashes(self) -> NDArray[np.int64]:
        """A hash of the `key` of each image; hashes need much less memory than a set of millions of paths."""
        hashes = np.fromiter(map(hash, self.paths), np.int64, len(self))
        if self.boxes is not None:
            for side in self.boxes.T:
                hashes = hashes * np.int64(1_000_003) + side  # the integers overflow on purpose
        return hashes

    def where(self, *positions: int) -> str:
        """The lines that these images were read from, for an error message; empty if the lines are not known."""
        if self.lines is None:
            return ""
        return " in " + " and ".join(map(self.lines.where, positions))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All data of the index as named arrays."""
        arrays: dict[str, NDArray[Any]] = {"paths": self.paths.data, "ends": self.paths.ends}
        for name in _COLUMNS:
            values = getattr(self, name)
            if values is not None:
                arrays[name] = values
        for name, ends in _NAMES.items():
            strings = getattr(self, name)
            if strings is not None:
                arrays |= {name: strings.data, ends: strings.ends}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "ImageIndex":
        """Rebuild an index from its `arrays()`, without checking these arrays again."""
        index = cls.__new__(cls)
        index.lines = None
        index.paths = PackedStrings.from_arrays(arrays["paths"], arrays["ends"])
        for name in _COLUMNS:
            setattr(index, name, arrays.get(name))
        for name, ends in _NAMES.items():
            strings = None
            if name in arrays:
                strings = PackedStrings.from_arrays(arrays[name], arrays[ends])
            setattr(index, name, strings)
        return index

    @cached_property
    def digest(self) -> str:
        """A hash of all data of the index, the same in each process and on each machine."""
        return digest_of_arrays(self.arrays())


def _check_lengths(index: ImageIndex) -> None:
    if len(index) == 0:
        raise InvalidValue("must hold at least one image", argument="paths", got="none")
    for name in _COLUMNS:
        values = getattr(index, name)
        if values is not None and len(values) != len(index):
            rule = f"must have one entry for each of {len(index)} paths"
            raise InvalidValue(rule, argument=name, got=len(values))


def _check_paths(index: ImageIndex) -> None:
    import pyarrow.compute

    may_be_invalid = pyarrow.compute.match_substring_regex(index.paths.arrow(), _MAY_BE_INVALID)
    for position in pyarrow.compute.indices_nonzero(may_be_invalid).to_pylist():
        path = index.paths[position]
        if leaves_root(path):
            raise InvalidValue("must lie inside the root", argument="paths", got=f"{path!r}{index.where(position)}")
        if _NOT_NORMALIZED.search(path):
            rule = "must be without './' and '//'"
            raise InvalidValue(rule, argument="paths", got=f"{path!r}{index.where(position)}")


def _check_boxes(index: ImageIndex) -> None:
    if index.boxes is None:
        return
    left, top, right, bottom = index.boxes.T
    empty = np.flatnonzero((right <= left) | (bottom <= top))
    if len(empty):
        first = int(empty[0])
        got = f"{index.boxes[first].tolist()} for {index.paths[first]}{index.where(first)} ({len(empty)} such boxes)"
        raise InvalidValue("must contain at least one pixel", argument="boxes", got=got)


def _first_conflict(groups: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return two positions in a group whose values differ, the earlier first; None if each group has one value."""
    _, first_of_group, group = np.unique(groups, return_index=True, return_inverse=True)
    different = np.flatnonzero(values != values[first_of_group][group])
    if len(different) == 0:
        return None
    second = int(different[0])
    return int(first_of_group[group[second]]), second


def _check_levels(index: ImageIndex) -> None:
    """Check that levels nest: images with one label at a level must have one label at the next, coarser level."""
    if index.levels is None:
        return
    columns = index.levels.T
    for level in range(len(columns) - 1):
        conflict = _first_conflict(columns[level], columns[level + 1])
        if conflict is not None:
            first, second = conflict
            raise InvalidValue(
                "must nest, the finest first",
                argument="levels",
                got=f"{index.levels[first].tolist()} for {index.paths[first]} and {index.levels[second].tolist()} "
                f"for {index.paths[second]}{index.where(first, second)}",
            )


def _check_tag_names(index: ImageIndex) -> None:
    if index.tags is None or index.tag_names is None:
        return
    count, largest = len(index.tag_names), int(index.tags.max())
    if largest >= count:
        raise InvalidValue("must have a name for each tag", argument="tag_names", got=f"{count} for tag {largest}")


def _check_one_label_each(index: ImageIndex) -> None:
    """Check that no image has two labels, except with instances. Distractors have no label."""
    if index.instances is not None:
        return
    hashes = index.hashes()
    if all_different(hashes):
        return
    first_with: dict[tuple[Any, ...], int] = {}
    for position in np.flatnonzero(index.labels != DISTRACTOR).tolist():
        first = first_with.setdefault(index.key(position), position)
        if index.labels[first] != index.labels[position]:
            raise InvalidValue(
                "must be the same each time that an image is listed with one box or without any",
                argument="labels",
                got=f"{index.labels[[first, position]].tolist()} for "
                f"{index.paths[position]}{index.where(first, position)}",
            )


def _check_instances(index: ImageIndex) -> None:
    if index.instances is None:
        return
    annotations: dict[str, Any] = {"label": index.labels}
    if index.cameras is not None:
        annotations["camera"] = index.cameras
    if index.roles is not None:
        annotations["role"] = index.roles
    for name, values in annotations.items():
        conflict = _first_conflict(index.instances, values)
        if conflict is not None:
            first, second = conflict
            raise InvalidValue(
                f"must have one {name} each",
                argument="instances",
                got=f"{values[[first, second]].tolist()} for instance {index.instances[first]} "
                f"({index.paths[first]} and {index.paths[second]}){index.where(first, second)}",
            )


def record_warnings(read: Callable[[], Result]) -> tuple[Result, list[str]]:
    """Call `read()`; return its result and the messages of its warnings. The warnings are also issued as usual."""
    recorded: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            result = read()
    finally:  # the warnings are issued even if `read` has raised an error
        for warning in recorded:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return result, [str(warning.message) for warning in recorded]


def read_cached(
    read: Callable[[], Mapping[str, ImageIndex]],
    sources: Sequence[Path],
    settings: Any,
    folder: Path,
    *,
    root: Path | None = None,
) -> dict[str, ImageIndex]:
    """Return the result of `read()`, from the cache if sources and settings are unchanged.

    The warnings of `read()` are issued in either case.

    If the result cannot be written to the cache, a warning is issued.

    Args:
        read: reads the index of each split.
        sources: the files that `read` reads; a change of their size or modification time invalidates the cache.
        settings: plain values; a change of these values invalidates the cache too.
        folder: the folder of the cache, which is created if it does not exist. If a cache file is damaged, a warning is
            issued and the file is replaced.
        root: the folder that the paths of the images are relative to. If none of a few images of a split exists there,
            the images have been moved, for example to another accepted directory structure, and the index is read
            again. If None, this is not checked.

    Raises:
        ValueError: if `folder` is a file or is inside one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        rule = "must be a folder or a path where one can be created"
        raise InvalidValue(rule, argument="cache_dir", got=f"{folder} ({error.strerror})") from None
    except OSError as error:
        _warn_of_failure(folder, error)
        return dict(read())
    file = folder / f"index-{_key(sources, settings)}.npz"
    if file.is_file():
        loaded = _load(file)
        if loaded is not None and not _were_moved(loaded[0], root):
            splits, messages = loaded
            for message in messages:
                warnings.warn(message, stacklevel=2)
            return splits
    result, messages_now = record_warnings(lambda: dict(read()))
    try:
        _save(file, result, messages_now)
    except OSError as error:
        _warn_of_failure(folder, error)
    return result


def _warn_of_failure(folder: Path, error: OSError) -> None:
    warnings.warn(
        f"ImageDataModule: the index of the images is not stored, because `cache_dir` cannot be written, got {folder} "
        f"({error.strerror}).",
        stacklevel=4,
    )


def _were_moved(splits: Mapping[str, ImageIndex], root: Path | None) -> bool:
    """Whether the first, the middle and the last image of any split are all missing."""
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
    content = json.dumps([CACHE_VERSION, stats, settings], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _save(file: Path, splits: Mapping[str, ImageIndex], messages: Sequence[str]) -> None:
    packed_messages = PackedStrings(messages)
    arrays: dict[str, Any] = {"warnings": packed_messages.data, "warning_ends": packed_messages.ends}
    for split, index in splits.items():
        for name, array in index.arrays().items():
            arrays[f"{split}/{name}"] = array
    with new_file(file) as stream:
        np.savez(stream, **arrays)


def _load(file: Path) -> tuple[dict[str, ImageIndex], PackedStrings] | None:
    """The splits and the warnings in a file of the cache; None if the file is damaged."""
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
            f"ImageDataModule: the lists are read again because the cache file {file} cannot be read ({error!r}).",
            stacklevel=3,
        )
        return None
    return splits, messages
