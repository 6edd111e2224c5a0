"""Reads the user's images from folders, one folder for each class; files that are not images are ignored."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_retrieval.arguments import Seed, checked
from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, check_no_splits, check_test_fraction, split_by_class
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import composed
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned, owned_by
from lightning_retrieval.preparation.decoding import (
    FolderEntries,
    image_suffixes,
    list_folder,
    shown_suffixes,
    walk_folders,
)

OWNER = "ImageFolder"
SPLITS = ("train", "test")
LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # of an ImageFolder of Hugging Face
CLASSES = ("deepest", "top")
MOST_DEPTH = 100  # of the folder of a class
CURE = (
    'classes="deepest" makes a class of each folder that contains images, classes="top" of each folder in the root '
    "with all that is in it, and a number of each folder at this depth"
)

Classes = Literal["deepest", "top"] | int | None


def depth_of(classes: Classes) -> int:
    """The number of folders from the root to the folder of a class, the least one for `"deepest"`."""
    if isinstance(classes, int):
        return classes
    return 1


def is_split(root: Path) -> bool:
    """Whether a folder contains the folders `train` and `test`."""
    return all((root / name).is_dir() for name in SPLITS)


@dataclass
class ClassFolders:
    """Finds the images of each class, as paths relative to `root`, and records ignored files and folders.

    Args:
        root: the root of the data set.
        categories: whether the folder of each class is in the folder of its category.
        classes: which folder is the class of an image, see `ImageFolder`.
        unread: images that were found elsewhere than in class folders, by the place where they lie.
        ignored: files that were found, but are no images.
        empty: class folders that were found, but contain no image.
        suffixes: suffixes, in lower case, of image files.
    """

    root: Path
    categories: bool
    classes: Classes
    unread: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    suffixes: frozenset[str] = field(default_factory=image_suffixes)

    def find(self, top: Path) -> dict[str, list[str]]:
        """Return the images of each class below the folder `top`, in the order of the class names.

        Raises:
            ValueError: if there is no class with an image; the message says how the folders should be arranged.
        """
        entries = list_folder(top)
        check_no_splits(top, [folder.name for folder in entries.folders])
        if self.classes is None:
            class_folders = self._list_class_folders(entries)
            classes = self._read_class_folders(top, class_folders)
        else:
            class_folders = []
            classes = self._read_at_any_depth(top)
        if classes:
            return _by_composed_name(classes)
        cure = self._cure(top, class_folders)
        rule = f"must contain images as {self._wanted}, which {top} does not"
        raise InvalidValue(rule, "ImageFolder", "root", cure=cure)

    def cure_of_one_class(self, classes: Mapping[str, Sequence[str]]) -> str:
        """A suggestion for the user if there is only one class; "" if there are others, or no images for others.

        Args:
            classes: the images of each class, as `find` returns them.
        """
        if len(classes) != 1:
            return ""
        ((name, images),) = classes.items()
        depth = 1 + name.count("/")
        folders: set[str] = set()  # in the folder of the class
        for image in images:
            folders.update(image.split("/")[depth:-1][:1])
        if len(folders) > 1:
            return f"if the {len(folders):,} folders in it are the classes, pass root={self.root / name}"
        sentences = []
        for place, unread in self.unread.items():
            cure = ""
            if place == self._deeper:
                cure = f": {CURE}"
            sentences.append(f"{len(unread):,} more images lie {place}, such as {unread[0]}{cure}")
        return "; ".join(sentences)

    def add_beside(self, entries: FolderEntries, names: Sequence[str]) -> None:
        """Record what lies beside the folders of the splits.

        Args:
            entries: the entries of the root.
            names: the folders of the splits.
        """
        images: list[str] = []
        self._sort_files(entries, images)
        splits = {self.root / name for name in names}
        self._walk(sorted({*entries.folders} - splits), sorted(splits), images)
        self._add_unread(f"beside the folders {', '.join(names)}", images)

    @property
    def _wanted(self) -> str:
        """Where images are looked for."""
        if self.classes is None:
            return "<category>/<class>/<image>" if self.categories else "<class>/<image>"
        depth = depth_of(self.classes)
        return "/".join(["<folder>"] * (depth - 1) + ["<class>", "...", "<image>"])

    def _read_class_folders(self, top: Path, class_folders: list[Path]) -> dict[str, list[str]]:
        """The images that lie in class folders; those in the folders of class folders are recorded as deeper."""
        classes: dict[str, list[str]] = {}
        inner: list[Path] = []
        for folder in class_folders:
            images, inner_folders = self._images_of_class(folder)
            inner += inner_folders
            if images:
                classes[folder.relative_to(top).as_posix()] = images
        deeper: list[str] = []
        self._walk(inner, class_folders, deeper)
        self._add_unread(self._deeper, deeper)
        with_images = set(classes)
        for path in deeper:
            with_images.add("/".join((self.root / path).relative_to(top).parts[: 1 + self.categories]))
        for folder in class_folders:
            if folder.relative_to(top).as_posix() not in with_images:
                self.empty.append(self._relative(folder))
        return classes

    @property
    def _deeper(self) -> str:
        return f"deeper than {self._wanted}"

    @property
    def _higher(self) -> str:
        return f"higher than {self._wanted}"

    def _add_unread(self, place: str, images: list[str]) -> None:
        if images:
            self.unread.setdefault(place, []).extend(images)

    def _walk(self, begin: list[Path], read: list[Path], images: list[str]) -> None:
        """Add the images in folders at any depth to a list, without folders that were read and those above them."""
        if not begin:
            return
        unlisted = [Path(os.path.realpath(folder)) for folder in (self.root, *read)]
        for _, entries in walk_folders(begin, unlisted=[*unlisted[0].parents, *unlisted]):
            self._sort_files(entries, images)

    def _read_at_any_depth(self, top: Path) -> dict[str, list[str]]:
        """The images of each class, in which folders are classes whatever lies in them."""
        classes: dict[str, list[str]] = {}
        for folder, entries in walk_folders([top], unlisted=Path(os.path.realpath(top)).parents):
            images: list[str] = []
            self._sort_files(entries, images)
            parts = folder.relative_to(top).parts
            depth = len(parts) if self.classes == "deepest" else depth_of(self.classes)
            if not parts or len(parts) < depth:
                self._add_unread(self._higher, images)
            elif images:
                classes.setdefault("/".join(parts[:depth]), []).extend(images)
        return {name: sorted(classes[name]) for name in sorted(classes)}

    def _sort_files(self, entries: FolderEntries, images: list[str]) -> None:
        """Add the images of a folder to a list, and record its other files as ignored."""
        self.ignored += map(self._relative, entries.special)
        for file in entries.files:
            kind = images if self._is_image(file) else self.ignored
            kind.append(self._relative(file))

    def warn(self) -> None:
        """Issue one warning about all ignored files and folders, and one about all empty folders."""
        if self.ignored:
            warnings.warn(
                f"ImageFolder: ignored files in {self.root} that are no images: "
                f"{len(self.ignored):,}, such as {self.ignored[0]} ({shown_suffixes(self.ignored)}).",
                stacklevel=3,
            )
        for place, images in self.unread.items():
            cure = f"; {CURE}" if place == self._deeper else ""
            warnings.warn(
                f"ImageFolder: images in {self.root} that are not read, because they lie {place}: {len(images):,}, "
                f"such as {images[0]}{cure}.",
                stacklevel=3,
            )
        if self.empty:
            warnings.warn(
                f"ImageFolder: ignored folders in {self.root} that contain no image: {len(self.empty):,}, such as "
                f"{self.empty[0]}.",
                stacklevel=3,
            )

    def _list_class_folders(self, entries: FolderEntries) -> list[Path]:
        """Return the class folders below the top folder, which has these entries, and record what is above them."""
        class_folders = entries.folders
        higher: list[str] = []
        self._sort_files(entries, higher)
        if self.categories:
            class_folders = []
            for category in entries.folders:
                of_category = list_folder(category)
                class_folders += of_category.folders
                self._sort_files(of_category, higher)
        self._add_unread(self._higher, higher)
        return class_folders

    def _images_of_class(self, folder: Path) -> tuple[list[str], list[Path]]:
        """Return the images in a class folder and its folders, and record its other files as ignored."""
        entries = list_folder(folder)
        images: list[str] = []
        self._sort_files(entries, images)
        return images, entries.folders

    def _is_image(self, file: Path) -> bool:
        return file.suffix.lower() in self.suffixes

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _cure(self, top: Path, class_folders: list[Path]) -> str:
        """A suggestion for the user if no class folder has an image."""
        one_deeper: list[Path] = []
        splits: list[Path] = []
        for folder in class_folders:
            if self._has_images_below(folder):
                one_deeper.append(folder)
            elif is_split(folder):
                splits.append(folder)
        if splits and not is_split(self.root):
            return f"pass root={splits[0]}"
        if one_deeper and not self.categories:
            cure = "the images are one folder deeper: set categories=True if the folders above them are categories"
            cure += ', or classes="deepest" to make a class of each folder that contains images'
            if not is_split(self.root):
                cure += f", or pass root={one_deeper[0]}"
            return cure
        if self._deeper in self.unread:
            images = self.unread[self._deeper]
            return f"its {len(images):,} images lie deeper, such as {images[0]}: {CURE}"
        return self._cure_for_images_above(top)

    def _cure_for_images_above(self, top: Path) -> str:
        """Return a suggestion for the user if the images are in a folder above the class folders."""
        entries = list_folder(top)
        if self.categories:
            for folder in entries.folders:
                if list_folder(folder).files:
                    return "the images are one folder higher: set categories=False"
        images = sum(map(self._is_image, entries.files))
        for file in entries.files:
            if images and file.name in LISTS:
                return f"{file.name} has the labels of its {images} images: use HuggingFaceImages, which reads it"
        if images and depth_of(self.classes) == 1:
            return f"its {images} images are in no class folder: move those of each class into one, or use ImageTable"
        for place, unread in self.unread.items():
            return f"its {len(unread):,} images lie {place}, such as {unread[0]}"
        if self.ignored:
            return f"there is no image, only other files: {shown_suffixes(self.ignored)}"
        return "there is no image"

    def _has_images_below(self, folder: Path) -> bool:
        """Whether a subfolder of a folder contains an image."""
        for inner in list_folder(folder).folders:
            if any(map(self._is_image, list_folder(inner).files)):
                return True
        return False


def _by_composed_name(classes: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The images of each class, whose name is in one Unicode form, also if folders have it in several."""
    images: dict[str, list[str]] = {}
    for name in classes:
        images.setdefault(composed(name), []).extend(classes[name])
    return {name: sorted(images[name]) for name in sorted(images)}


def index_of_classes(classes: Mapping[str, Sequence[str]], categories: Sequence[str] | None) -> ImageIndex:
    """Create the index of the images of some classes.

    Args:
        classes: the paths of the images of each class.
        categories: the sorted names of all categories, if class names have the form `<category>/<class>`; else None.
    """
    names = sorted(classes)
    paths: list[str] = []
    counts: list[int] = []
    for name in names:
        paths += classes[name]
        counts.append(len(classes[name]))
    labels = np.repeat(np.arange(len(names)), counts)
    if categories is None:
        return ImageIndex(paths, labels, names=names)
    category_of_class = [categories.index(category_of(name)) for name in names]
    return ImageIndex(paths, labels, categories=np.repeat(category_of_class, counts), names=names)


def category_of(class_name: str) -> str:
    """The category of a class `<category>/<class>`."""
    return class_name.split("/")[0]


def _check_classes(value: Any) -> Classes:
    """Return `classes`; raise unless it is one of its names, a depth or None."""
    if value is None or (isinstance(value, str) and value in CLASSES):
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        rule = "must be 'deepest', 'top' or a number of folders"
        raise InvalidValue(rule, OWNER, "classes", got=short_repr(value))
    return check_integer("classes", value, 1, MOST_DEPTH, owner=OWNER)


class ImageFolder(ImageDataModule):
    """Reads images from folders: `<class>/<image>`, or `<category>/<class>/<image>`.

    The classes are split between training and test, so no test class is used for training. If the root contains the
    folders `train` and `test`, these folders define the split; a folder `val` next to them is used to choose
    checkpoints.
    Images are files with any suffix that Pillow can decode, in upper or lower case. Hidden files are skipped silently,
    all other files with a warning that counts them by their suffix.

    Args:
        root: the folder that contains the class folders.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there are `train`
            and `test` folders.
        classes: which folder is the class of an image. If None, the images lie in the class folders, and those in the
            folders of class folders are not read, with a warning. Else images are read at any depth: the class is the
            folder that contains the image (`"deepest"`), the folder in the root (`"top"`), or the folder at a depth, in
            which 1 is `"top"`. Its name is its path.
        categories: whether each class folder is in the folder of its category. `sampler="category"` uses categories.
        split_seed: determines which classes form the test set.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if `root` does not exist.
        ValueError: if there are no class folders with images, the folders are those of other splits or of roles, such
            as `train` and `val` without `test`, or `query` and `gallery`, or `test_fraction` leaves no class in one of
            the sets.
        TypeError: if `classes` has another type.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> for name in ("cat", "dog", "owl", "yak"):
        ...     Path("pets", name).mkdir(parents=True)
        ...     for i in range(3):
        ...         Image.new("RGB", (60, 50), (80 * i, 0, 0)).save(f"pets/{name}/{i}.png")
        >>> data = ImageFolder("pets", test_fraction=0.5, classes_per_batch=2, samples_per_class=3)
        >>> len(data.train_set), len(data.test_set), list(data.splits["test"].names)
        (6, 6, ['cat', 'owl'])

    Relations:
        `ImageTable` reads a table of images, which can be in any folders.
    """

    reads_in_check = True

    def __init__(
        self,
        root: str | Path,
        *,
        test_fraction: float = 0.5,
        classes: Classes = None,
        categories: bool = False,
        split_seed: Seed = 0,
        **settings: Unpack[ImageSettings],
    ) -> None:
        super().__init__(root, **settings)
        with owned_by(OWNER):
            self.test_fraction = check_test_fraction(test_fraction)
        self.categories = categories
        self.classes = _check_classes(classes)
        if self.categories and depth_of(self.classes) < 2 and self.classes is not None:
            rule = "must be a depth of 2 or more with categories=True, because classes lie in the folders of categories"
            raise InvalidValue(rule, OWNER, "classes", got=repr(classes))
        self.split_seed = checked(self, split_seed=split_seed)

    @owned
    def sources(self) -> list[Path]:
        """The root and the folders below it. If a file is added or removed, the modification time of one changes."""
        if not self.root.is_dir():
            return []
        if self.classes is not None:
            above = Path(os.path.realpath(self.root)).parents
            return [folder for folder, _ in walk_folders([self.root], unlisted=above)]
        found = [self.root]
        level = [self.root]
        for _ in range(1 + is_split(self.root) + self.categories):
            below: list[Path] = []
            for folder in level:
                below += list_folder(folder).folders
            found += below
            level = below
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of all class folders and split the classes."""
        if not self.root.is_dir():
            what = "which is a file" if self.root.is_file() else "which does not exist"
            raise MissingFile("must be a folder of class folders", "ImageFolder", "root", got=f"{self.root}, {what}")
        folders = ClassFolders(self.root, categories=self.categories, classes=self.classes)
        if is_split(self.root):
            splits = self._find_splits(folders)
        else:
            classes = folders.find(self.root)
            splits = self._split_classes(classes, folders.cure_of_one_class(classes))
        folders.warn()
        categories = self._category_names(splits.values())
        return {name: index_of_classes(classes, categories) for name, classes in splits.items()}

    def _find_splits(self, folders: ClassFolders) -> dict[str, dict[str, list[str]]]:
        """The images of each class in the folders `train`, `test` and, if it exists, `val`."""
        names = list(SPLITS)
        if (self.root / "val").is_dir():
            names.append("val")
        entries = list_folder(self.root)
        folders.add_beside(entries, names)
        splits = {name: folders.find(self.root / name) for name in names}
        for name in names[1:]:
            shared = sorted(splits["train"].keys() & splits[name].keys())
            if shared:
                rule = "classes must be in training or in evaluation, not in both"
                got = f"{len(shared)} in train and {name}, such as {shared[0]!r}"
                cure = f"pass root={self.root / 'train'}, whose classes are split by `test_fraction`"
                raise InvalidValue(rule, OWNER, got=got, cure=cure)
        return splits

    def _split_classes(self, classes: Mapping[str, list[str]], cure: str) -> dict[str, dict[str, list[str]]]:
        """Split the classes between training and test; `cure` says what helps if there is only one."""
        test = split_by_class("test_fraction", list(classes), self.test_fraction, self.split_seed, cure=cure)
        splits: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
        for name, paths in classes.items():
            split = "test" if name in test else "train"
            splits[split][name] = paths
        return splits

    def _category_names(self, splits: Iterable[Mapping[str, Sequence[str]]]) -> list[str] | None:
        if not self.categories:
            return None
        categories: set[str] = set()
        for classes in splits:
            categories.update(map(category_of, classes))
        return sorted(categories)
