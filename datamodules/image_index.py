"""The index of a data set's images as arrays, and the numbering and splitting of classes."""

import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_finite_number, check_strings, short_repr
from lightning_retrieval.datamodules.item_seeds import all_different, as_array
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.ranking.labels import Role
from lightning_retrieval.ranking.relevance import NO_TAG

# The roles of an image in evaluation. A distractor is ranked, but is relevant to no query.
ROLES = {"query": Role.QUERY, "gallery": Role.GALLERY, "both": Role.BOTH, "distractor": Role.GALLERY}
# The usual names of splits, in any case. A split of another name is an evaluation set of its own.
USES = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "val": ("val", "valid", "validation", "dev"),
}
# Names of folders of roles, in the structures of other programs.
QUERIES = ("query", "queries")
GALLERIES = ("gallery", "bounding_box_test", "database")
DISTRACTOR = -1  # the label of distractors

# Matches every path that leaves the root or is not normalized.
_MAY_BE_INVALID = r"^/|[/.]\n?$|\./|//|\\|:|(?i:(^|/)(con|prn|aux|nul|com[0-9]|lpt[0-9]) *([./]|$))"
_NOT_NORMALIZED = re.compile(r"(^|/)\./|//|/\.?$")  # matches a path that has a shorter spelling
# Optional columns of numbers: the type, and what one image has.
_COLUMNS: dict[str, tuple[Any, str]] = {
    "labels": (np.int64, ""),
    "categories": (np.int64, ""),
    "levels": (np.int64, "levels"),
    "boxes": (np.int32, "4"),
    "roles": (np.uint8, ""),
    "instances": (np.int64, ""),
    "cameras": (np.int64, ""),
    "tags": (np.int64, "tags"),
}
_RANGES = {  # the numbers that a column may hold
    "boxes": (1 - 2**31, 2**31 - 1, "numbers of pixels below 2**31"),
    "roles": (Role.JUNK, Role.BOTH, "from 0 to 3"),
    "tags": (NO_TAG, 2**63 - 1, f"numbers >= 0, or {NO_TAG} for no tag"),
}
# Columns of text, and the end positions of their strings, in `arrays()`.
_STRINGS = {"paths": "ends", "names": "name_ends", "tag_names": "tag_name_ends", "texts": "text_ends"}

Result = TypeVar("Result")


def _optional(convert: Callable[[str, Any], Result], name: str, values: Any) -> Result | None:
    """A column that an index may lack."""
    return None if values is None else convert(name, values)


def _strings(name: str, values: PackedStrings | Sequence[str]) -> PackedStrings:
    """Strings as `PackedStrings`; raise if they are a single string."""
    if isinstance(values, PackedStrings):
        return values
    check_strings(name, values)
    try:
        return PackedStrings(values)
    except AttributeError:  # a Path has no `encode`
        raise InvalidType("must hold strings only", argument=name, got=short_repr(values)) from None


def _numbers(name: str, values: Any) -> NDArray[Any]:
    """A column of numbers in its type; raise unless it holds integers of its range, and as many as an image has."""
    dtype, of_image = _COLUMNS[name]
    array = as_array(name, values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise InvalidType("must be integers of 64 bits", argument=name, got=array.dtype)
    is_valid = array.ndim == (2 if of_image else 1)
    if is_valid and of_image:
        is_valid = array.shape[1] == 4 if of_image == "4" else array.shape[1] > 0
    if not is_valid:
        rule = f"must be (images, {of_image})" if of_image else "must be one integer for each image"
        raise InvalidValue(rule, argument=name, got=f"shape {array.shape}")
    if name in _RANGES:
        least, most, rule = _RANGES[name]
        wrong = array[(array < least) | (array > most)]
        if wrong.size:
            raise InvalidValue(f"must be {rule}", argument=name, got=wrong[0])
    return array.astype(dtype, copy=False)


def tag_numbers(tags_of_images: Sequence[Sequence[Any]]) -> tuple[NDArray[np.int64], list[str]]:
    """Number tags 0, 1, ... in sorted order; a tag that an image has several times counts once.

    Args:
        tags_of_images: the original tags of each image, all of them text or all integers; or multi-hot, which is 0 or 1
            for each of at least three tags.

    Returns:
        The tag numbers of each image, (images, T) with T >= 1, and the original tags as text.
    """
    longest = max(map(len, tags_of_images))
    if longest > 2 and {0, 1, "0", "1"}.issuperset(itertools.chain.from_iterable(tags_of_images)):
        tags_of_images = [list(itertools.compress(itertools.count(), map(int, tags))) for tags in tags_of_images]
    different = [dict.fromkeys(tags) for tags in tags_of_images]
    counts = np.array(list(map(len, different)))
    numbers, tags = class_numbers(list(itertools.chain.from_iterable(different)))
    table = np.full((len(different), counts.max(initial=1)), NO_TAG)
    table[np.arange(table.shape[1]) < counts[:, None]] = numbers
    return table, list(map(str, tags))


def class_numbers(originals: Sequence[Any]) -> tuple[NDArray[np.int64], list[Any]]:
    """Number classes 0, 1, ... in the order of their sorted original ids.

    Args:
        originals: the original id of the class of each image.

    Returns:
        The class number of each image, and the original id of each class.
    """
    classes = sorted(set(originals))
    number_of_class = dict(zip(classes, range(len(classes))))
    numbers = np.fromiter((number_of_class[value] for value in originals), np.int64, len(originals))
    return numbers, classes


def split_by_class(setting: str, classes: Sequence[Any], fraction: float, seed: int) -> set[Any]:
    """Draw a fraction of the classes at random; the result does not depend on the order of `classes`.

    Args:
        setting: name of the argument with the fraction, for error messages.
        classes: all classes.
        fraction: the fraction to draw.
        seed: determines which classes are drawn.

    Raises:
        ValueError: if no class or every class would be drawn.
    """
    count = round(fraction * len(classes))
    if not 0 < count < len(classes):
        rule = "must leave at least one class on each side of the split"
        got = f"{fraction} of {len(classes)} classes, such as {short_repr(next(iter(classes), None))}"
        raise InvalidValue(rule, argument=setting, got=got, cure="change it, or add classes")
    ordered = sorted(classes)
    drawn = np.random.default_rng(seed).permutation(len(ordered))[:count]
    return {ordered[index] for index in drawn}


def use_of(split: str) -> str:
    """`train`, `test` or `val` if a split has a usual name of one of them, else its own name."""
    return next((use for use, names in USES.items() if split.lower() in names), split)


def splits_by_use(names: Iterable[str], argument: str) -> dict[str, str]:
    """The names of splits by their uses. Beside `test`, or `val`, another name of it is an evaluation set of its own.

    Args:
        names: the names.
        argument: name of the argument that determines the names, for the message.

    Raises:
        ValueError: if two splits have the same use.
    """
    different = list(dict.fromkeys(names))
    splits = {name: name for name in different if name in USES}
    for name in different:
        use = use_of(name)
        if use != "train" and use in different:
            use = name  # beside `test`, `eval` is another evaluation set
        first = splits.setdefault(use, name)
        if first != name:
            got = f"{first!r} and {name!r}, which both mean {use}"
            raise InvalidValue("must have one name for each split", argument=argument, got=got, cure="rename one")
    return splits


def folders_of_splits(folders: Iterable[str], argument: str = "root") -> dict[str, str]:
    """The folder of each split among the folders in a root; empty if they are not those of splits, but of classes.

    Args:
        folders: the names of the folders.
        argument: name of the argument with the root, for the message.
    """
    named = [name for name in sorted(folders) if use_of(name) in USES]
    if len(set(map(use_of, named))) < 2:
        return {}
    found = splits_by_use(named, argument)
    return {split: found[split] for split in sorted(found, key=[*USES, *named].index)}


def class_folders(paths: Sequence[str], argument: str = "images") -> tuple[list[str], list[str] | None]:
    """The folder of each image, which is its class, below the folder of its split; and the splits if there are several.

    Args:
        paths: paths of images, relative to one folder. The class of an image in that folder itself is ".".
        argument: name of the argument with the images, for messages.
    """
    folders = [PurePosixPath(path).parent for path in paths]
    split_of_folder = {}
    tops = {folder.parts[0] for folder in folders if folder.parts}
    for split, folder in folders_of_splits(tops, argument).items():
        split_of_folder[folder] = split
    if not split_of_folder:
        return list(map(str, folders)), None
    splits = [split_of_folder.get(path.partition("/")[0], path.partition("/")[0]) for path in paths]
    return [str(PurePosixPath(*folder.parts[1:])) for folder in folders], splits


def check_no_roles(root: Path, folders: Iterable[str], argument: str = "root") -> None:
    """Raise if folders that would be read as classes are those of roles.

    Args:
        root: the folder that contains them.
        folders: their names.
        argument: name of the argument with the root, for the message.
    """
    names = {name.lower() for name in folders}
    if not names.isdisjoint(QUERIES) and not names.isdisjoint(GALLERIES):
        rule = "must contain the folders of classes, or of splits such as train and test"
        cure = "write a table with the columns split and role, for ImageTable"
        got = f"{root} with {', '.join(sorted(folders)[:5])}"
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
        texts: a text for each row, of which the path is only its number; or None.
        lines: for error messages, a table whose method `where` gives the line of each image; or None.

    Raises:
        TypeError: if `paths`, `names`, `tag_names` or `texts` is a single string, or another argument does not hold
            integers.
        ValueError: if there is no image; if the lengths differ; if a path leaves the root or contains `./` or `//`; if
            a role is not from 0 to 3; if a tag is below -1; if a label has no name in `names`, or a tag none in
            `tag_names`; if images with the same label at a level have different labels at the next level; if a box
            contains no pixel or does not fit into 32 bits;
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
        texts: Sequence[str] | None = None,
        lines: Any = None,
    ) -> None:
        self.lines = lines
        with owned_by("" if lines else "ImageIndex"):  # a data set whose list was read names itself
            self.paths = _strings("paths", paths)
            self.labels = _numbers("labels", labels)
            self.categories = _optional(_numbers, "categories", categories)
            self.levels = _optional(_numbers, "levels", levels)
            self.boxes = _optional(_numbers, "boxes", boxes)
            self.roles = _optional(_numbers, "roles", roles)
            self.instances = _optional(_numbers, "instances", instances)
            self.cameras = _optional(_numbers, "cameras", cameras)
            self.tags = _optional(_numbers, "tags", tags)
            self.names = _optional(_strings, "names", names)
            self.tag_names = _optional(_strings, "tag_names", tag_names)
            self.texts = _optional(_strings, "texts", texts)
            self._check()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Any) -> "ImageIndex":
        """Return an index of the images that a slice, a mask or an array of integers selects."""
        arrays = self.arrays()
        for name in _COLUMNS.keys() & arrays.keys():
            arrays[name] = arrays[name][rows]
        for name in ("paths", "texts"):
            if name in arrays:
                strings = getattr(self, name)[rows]
                arrays |= {name: strings.data, _STRINGS[name]: strings.ends}
        if len(arrays["labels"]) == 0:
            raise InvalidValue("must select at least one image", "ImageIndex", "rows", got=f"none of {len(self)}")
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
        arrays = {name: getattr(self, name) for name in _COLUMNS if getattr(self, name) is not None}
        for name, ends in _STRINGS.items():
            strings = getattr(self, name)
            if strings is not None:
                arrays |= {name: strings.data, ends: strings.ends}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "ImageIndex":
        """Rebuild an index from its `arrays()`, without checking these arrays again."""
        index = cls.__new__(cls)
        index.lines = None
        for name in _COLUMNS:
            setattr(index, name, arrays.get(name))
        for name, ends in _STRINGS.items():
            strings = None
            if name in arrays:
                strings = PackedStrings.from_arrays(arrays[name], arrays[ends])
            setattr(index, name, strings)
        return index

    @cached_property
    def digest(self) -> str:
        """A hash of all data of the index, the same in each process and on each machine."""
        return digest_of_arrays(self.arrays())

    def _check(self) -> None:
        """Raise if columns have different lengths, or what they hold contradicts itself."""
        if len(self) == 0:
            raise InvalidValue("must hold at least one image", argument="paths", got="none")
        for name in (*_COLUMNS, "texts"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self):
                rule = f"must have one entry for each of {len(self)} paths"
                raise InvalidValue(rule, argument=name, got=len(values))
        for names, numbers in (("names", self.labels), ("tag_names", self.tags)):
            known = getattr(self, names)
            if known is not None and numbers is not None and numbers.max() >= len(known):
                rule = f"must have a name for each number of `{'tags' if names == 'tag_names' else 'labels'}`"
                raise InvalidValue(rule, argument=names, got=f"{len(known)} for the number {numbers.max()}")
        _check_paths(self)
        if self.boxes is not None:
            left, top, right, bottom = self.boxes.T
            empty = np.flatnonzero((right <= left) | (bottom <= top)).tolist()
            if empty:
                got = f"{self.boxes[empty[0]].tolist()} for {self.paths[empty[0]]}{self.where(empty[0])}"
                raise InvalidValue("must contain at least one pixel", argument="boxes", got=got)
        if self.levels is not None:
            for finer, coarser in itertools.pairwise(self.levels.T):
                self._check_one_each("levels", "nest, the finest first", finer, coarser)
        if self.instances is None:
            _check_one_label_each(self)
            return
        for name in ("labels", "cameras", "roles"):
            self._check_one_each("instances", f"have one of `{name}` each", self.instances, getattr(self, name))

    def _check_one_each(
        self, argument: str, rule: str, groups: NDArray[np.int64], values: NDArray[np.int64] | None
    ) -> None:
        """Raise unless all images of a group have the same value."""
        if values is None:
            return
        _, first_of_group, group = np.unique(groups, return_index=True, return_inverse=True)
        different = np.flatnonzero(values != values[first_of_group][group])
        if len(different):
            second = int(different[0])
            first = int(first_of_group[group[second]])
            got = f"{values[[first, second]].tolist()} for {self.paths[first]} and {self.paths[second]}"
            raise InvalidValue(f"must {rule}", argument=argument, got=f"{got}{self.where(first, second)}")


def _check_paths(index: ImageIndex) -> None:
    import pyarrow.compute

    may_be_invalid = pyarrow.compute.match_substring_regex(index.paths.arrow(), _MAY_BE_INVALID)
    for position in pyarrow.compute.indices_nonzero(may_be_invalid).to_pylist():
        path = index.paths[position]
        rule = ""
        if leaves_root(path):
            rule = "must lie inside the root"
        elif _NOT_NORMALIZED.search(path):
            rule = "must be without './' and '//'"
        if rule:
            raise InvalidValue(rule, argument="paths", got=f"{path!r}{index.where(position)}")


def _check_one_label_each(index: ImageIndex) -> None:
    """Check that no image has two labels. Distractors have no label."""
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
