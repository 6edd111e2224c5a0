"""Reads the user's images from folders, one folder for each class; files that are not images are ignored."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_retrieval.arguments import Seed, checked
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, check_test_fraction, split_by_class
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.preparation.decoding import image_suffixes, list_folder

OWNER = "ImageFolder"
SPLITS = ("train", "test")


def is_split(root: Path) -> bool:
    """Whether a folder contains the folders `train` and `test`."""
    return all((root / name).is_dir() for name in SPLITS)


@dataclass
class ClassFolders:
    """Finds the images of each class, as paths relative to `root`, and records ignored files and folders.

    Args:
        root: the root of the data set.
        categories: whether the folder of each class is in the folder of its category.
        ignored: files and folders that were found, but are not images of a class.
        empty: class folders that were found, but contain no image.
        suffixes: suffixes, in lower case, of image files.
    """

    root: Path
    categories: bool
    ignored: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    suffixes: frozenset[str] = field(default_factory=image_suffixes)

    def find(self, top: Path) -> dict[str, list[str]]:
        """Return the images of each class below the folder `top`, in the order of the class names.

        Raises:
            ValueError: if there is no class with an image; the message says how the folders should be arranged.
        """
        class_folders, files_above = self._list_class_folders(top)
        classes: dict[str, list[str]] = {}
        for folder in class_folders:
            images = self._images_of_class(folder)
            if images:
                classes[folder.relative_to(top).as_posix()] = images
        for file in files_above:
            self.ignored.append(self._relative(file))
        if classes:
            return classes
        wanted = "<category>/<class>/<image>" if self.categories else "<class>/<image>"
        cure = self._cure(top, class_folders)
        rule = f"must contain images as {wanted}, which {top} does not"
        raise InvalidValue(rule, "ImageFolder", "root", cure=cure)

    def warn(self) -> None:
        """Issue one warning about all ignored files and folders, and one about all empty folders."""
        if self.ignored:
            warnings.warn(
                f"ImageFolder: ignored files or folders in {self.root} that are not images of a class: "
                f"{len(self.ignored):,}, such as {self.ignored[0]}.",
                stacklevel=3,
            )
        if self.empty:
            warnings.warn(
                f"ImageFolder: ignored folders in {self.root} that contain no image: {len(self.empty):,}, such as "
                f"{self.empty[0]}.",
                stacklevel=3,
            )

    def _list_class_folders(self, top: Path) -> tuple[list[Path], list[Path]]:
        """Return the class folders, and the files that are in the folders above the class folders."""
        entries = list_folder(OWNER, top)
        files = entries.files + entries.special
        if not self.categories:
            return entries.folders, files
        class_folders: list[Path] = []
        for category in entries.folders:
            of_category = list_folder(OWNER, category)
            class_folders += of_category.folders
            files += of_category.files + of_category.special
        return class_folders, files

    def _images_of_class(self, folder: Path) -> list[str]:
        """Return the images in a class folder, and record other files and folders in this folder as ignored."""
        entries = list_folder(OWNER, folder)
        self.ignored += map(self._relative, entries.special)
        images: list[str] = []
        for file in entries.files:
            if self._is_image(file):
                images.append(self._relative(file))
            else:
                self.ignored.append(self._relative(file))
        if not images:
            self.empty.append(self._relative(folder))
            return images
        for inner in entries.folders:
            self.ignored.append(f"{self._relative(inner)}/")
        return images

    def _is_image(self, file: Path) -> bool:
        return file.suffix.lower() in self.suffixes

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _cure(self, top: Path, class_folders: list[Path]) -> str:
        """A suggestion for the user if no class folder has an image."""
        deeper: list[Path] = []
        splits: list[Path] = []
        for folder in class_folders:
            if self._has_images_below(folder):
                deeper.append(folder)
            elif is_split(folder):
                splits.append(folder)
        if splits and not is_split(self.root):
            return f"pass root={splits[0]}"
        if deeper and not self.categories:
            cure = "the images are one folder deeper: set categories=True if the folders above them are categories"
            if not is_split(self.root):
                cure += f", or pass root={deeper[0]}"
            return cure
        return self._cure_for_images_above(top)

    def _cure_for_images_above(self, top: Path) -> str:
        """Return a suggestion for the user if the images are in a folder above the class folders."""
        entries = list_folder(OWNER, top)
        if self.categories:
            for folder in entries.folders:
                if list_folder(OWNER, folder).files:
                    return "the images are one folder higher: set categories=False"
        images = sum(map(self._is_image, entries.files))
        if images:
            return f"its {images} images are in no class folder: move those of each class into one, or use ImageTable"
        return "there is no image"

    def _has_images_below(self, folder: Path) -> bool:
        """Whether a subfolder of a folder contains an image."""
        for inner in list_folder(OWNER, folder).folders:
            if any(map(self._is_image, list_folder(OWNER, inner).files)):
                return True
        return False


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


class ImageFolder(ImageDataModule):
    """Reads images from folders: `<class>/<image>`, or `<category>/<class>/<image>`.

    The classes are split between training and test, so no test class is used for training. If the root contains the
    folders `train` and `test`, these folders define the split; a folder `val` next to them is used to choose
    checkpoints.
    Images are files with any suffix that Pillow can decode, in upper or lower case. Hidden files are skipped silently,
    all other files with a warning.

    Args:
        root: the folder that contains the class folders.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there are `train`
            and `test` folders.
        categories: whether each class folder is in the folder of its category. `sampler="category"` uses categories.
        split_seed: determines which classes form the test set.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if `root` does not exist.
        ValueError: if there are no class folders with images, or `test_fraction` leaves no class in one of the sets.
        TypeError: if `categories` is not a bool.

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
        categories: bool = False,
        split_seed: Seed = 0,
        **settings: Unpack[ImageSettings],
    ) -> None:
        super().__init__(root, **settings)
        self.test_fraction = check_test_fraction("ImageFolder", test_fraction)
        self.categories = checked(self, categories=categories)
        self.split_seed = checked(self, split_seed=split_seed)

    def sources(self) -> list[Path]:
        """The root and the folders below it. If a file is added or removed, the modification time of one changes."""
        if not self.root.is_dir():
            return []
        found = [self.root]
        level = [self.root]
        for _ in range(1 + is_split(self.root) + self.categories):
            below: list[Path] = []
            for folder in level:
                below += list_folder(OWNER, folder).folders
            found += below
            level = below
        return found

    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of all class folders and split the classes."""
        if not self.root.is_dir():
            what = "which is a file" if self.root.is_file() else "which does not exist"
            raise MissingFile("must be a folder of class folders", "ImageFolder", "root", got=f"{self.root}, {what}")
        folders = ClassFolders(self.root, categories=self.categories)
        if is_split(self.root):
            splits = self._find_splits(folders)
        else:
            splits = self._split_classes(folders.find(self.root))
        folders.warn()
        categories = self._category_names(splits.values())
        return {name: index_of_classes(classes, categories) for name, classes in splits.items()}

    def _find_splits(self, folders: ClassFolders) -> dict[str, dict[str, list[str]]]:
        """The images of each class in the folders `train`, `test` and, if it exists, `val`."""
        names = list(SPLITS)
        if (self.root / "val").is_dir():
            names.append("val")
        entries = list_folder(OWNER, self.root)
        for file in entries.files + entries.special:
            folders.ignored.append(file.name)
        for folder in entries.folders:
            if folder.name not in names:
                folders.ignored.append(f"{folder.name}/")
        return {name: folders.find(self.root / name) for name in names}

    def _split_classes(self, classes: Mapping[str, list[str]]) -> dict[str, dict[str, list[str]]]:
        """Split the classes between training and test."""
        test = split_by_class("ImageFolder", "test_fraction", list(classes), self.test_fraction, self.split_seed)
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
