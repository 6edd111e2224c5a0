"""Reads the user's images from folders, one folder for each class; files that are not images are ignored."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_retrieval.arguments import Seed, checked
from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import (
    ImageIndex,
    check_no_roles,
    check_test_fraction,
    folders_of_splits,
)
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import Table, drawn_splits, number_splits
from lightning_retrieval.datamodules.table_file import composed
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned, owned_by
from lightning_retrieval.paths import cure_of_missing
from lightning_retrieval.preparation.decoding import (
    FolderEntries,
    image_suffixes,
    list_folder,
    shown_suffixes,
    walk_folders,
)

OWNER = "ImageFolder"
CLASSES = ("deepest", "top")
MOST_DEPTH = 100  # of the folder of a class
CURE = (
    "images lie as <class>/<image>, with categories=True as <category>/<class>/<image>, and with `classes` at any depth"
    "; without class folders, a table gives the class of each image (ImageTable)"
)

Classes = Literal["deepest", "top"] | int | None


def depth_of(classes: Classes) -> int:
    """The number of folders from the root to the folder of a class, the least one for `"deepest"`."""
    if isinstance(classes, int):
        return classes
    return 1


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

    def find(self, top: Path) -> Table:
        """Return the images of the classes below the folder `top`, in the order of the class names and the paths.

        Raises:
            ValueError: if there is no class with an image; the message says how the folders should be arranged.
        """
        entries = list_folder(top)
        check_no_roles(top, [folder.name for folder in entries.folders])
        if self.classes is None:
            class_folders = self._list_class_folders(entries)
            classes = self._read_class_folders(top, class_folders)
        else:
            class_folders = []
            classes = self._read_at_any_depth(top)
        if classes:
            images = sorted((composed(name), path) for name, paths in classes.items() for path in paths)
            labels, paths = zip(*images)
            kinds = [label.split("/")[0] for label in labels] if self.categories else None
            return Table({"path": paths, "label": labels}).with_columns(category=kinds)
        rule = f"must contain images as {self._wanted}, which {top} does not"
        raise InvalidValue(rule, OWNER, "root", got=self._elsewhere() or "no image", cure=CURE)

    def _elsewhere(self) -> str:
        """The images that were found elsewhere than in class folders."""
        places = [f"{len(images):,} {place}, such as {images[0]}" for place, images in self.unread.items()]
        return ", and ".join(places)

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
            entries = list_folder(folder)
            inner += entries.folders
            self._sort_files(entries, classes.setdefault(folder.relative_to(top).as_posix(), []))
        deeper: list[str] = []
        self._walk(inner, class_folders, deeper)
        self._add_unread(f"deeper than {self._wanted}", deeper)
        for name, images in classes.items():
            inside = f"{self._relative(top / name)}/"
            if not images and not any(path.startswith(inside) for path in deeper):
                self.empty.append(inside.rstrip("/"))
        return {name: images for name, images in classes.items() if images}

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
                self._add_unread(f"higher than {self._wanted}", images)
            elif images:
                classes.setdefault("/".join(parts[:depth]), []).extend(images)
        return classes

    def _sort_files(self, entries: FolderEntries, images: list[str]) -> None:
        """Add the images of a folder to a list, and record its other files as ignored."""
        for file in entries.files:
            kind = images if self._is_image(file) else self.ignored
            kind.append(self._relative(file))

    def warn(self) -> None:
        """Issue a warning for each kind of file and folder that is not read."""
        findings = {"ignored files in {root} that are no images": self.ignored}
        for place, images in self.unread.items():
            findings[f"images in {{root}} that are not read, because they lie {place}"] = images
        findings["ignored folders in {root} that contain no image"] = self.empty
        for finding, paths in findings.items():
            if paths:
                kinds = f" ({shown_suffixes(paths)})" if paths is self.ignored else ""
                text = f"{finding.format(root=self.root)}: {len(paths):,}, such as {paths[0]}{kinds}"
                warnings.warn(f"{OWNER}: {text}.", stacklevel=3)

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
        self._add_unread(f"higher than {self._wanted}", higher)
        return class_folders

    def _is_image(self, file: Path) -> bool:
        return file.suffix.lower() in self.suffixes

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


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
    folders of several splits, these define the split: `train`, `test`, and `val`, which is used to choose checkpoints,
    or other usual names such as `Training` and `validation`.
    Images are files with any suffix that Pillow can decode, in upper or lower case. Hidden files are skipped silently,
    all other files with a warning that counts them by their suffix.

    Args:
        root: the folder that contains the class folders.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there are folders
            of splits.
        classes: which folder is the class of an image. If None, the images lie in the class folders, and those in the
            folders of class folders are not read, with a warning. Else images are read at any depth: the class is the
            folder that contains the image (`"deepest"`), the folder in the root (`"top"`), or the folder at a depth, in
            which 1 is `"top"`. Its name is its path.
        categories: whether each class folder is in the folder of its category. `sampler="category"` uses categories.
        split_seed: determines which classes form the test set.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if `root` does not exist.
        ValueError: if there are no class folders with images, the folders are those of roles, such as `query` and
            `gallery`, or two of the same split, or `test_fraction` leaves no class in one of the sets.
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
    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of all class folders and split the classes."""
        if not self.root.is_dir():
            what = "which is a file" if self.root.is_file() else "which does not exist"
            rule, cure = "must be a folder of class folders", cure_of_missing(self.root)
            raise MissingFile(rule, OWNER, "root", got=f"{self.root}, {what}", cure=cure)
        folders = ClassFolders(self.root, categories=self.categories, classes=self.classes)
        entries = list_folder(self.root)
        names = folders_of_splits(folder.name for folder in entries.folders)
        if not names:
            table = folders.find(self.root)
            folders.warn()
            return number_splits(drawn_splits(table, self.test_fraction, self.split_seed))
        folders.add_beside(entries, list(names.values()))
        splits = {split: folders.find(self.root / name) for split, name in names.items()}
        folders.warn()
        return number_splits(splits)
