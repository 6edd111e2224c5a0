"""The user's own images in folders: one folder for each class."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lightning_retrieval.checks import check_bool, check_seed
from lightning_retrieval.datamodules.arguments import Unpack
from lightning_retrieval.datamodules.images.class_folders import SPLITS, ClassFolders, is_split, list_folder
from lightning_retrieval.datamodules.images.classes import check_test_fraction, split_by_class
from lightning_retrieval.datamodules.images.image_index import ImageIndex
from lightning_retrieval.datamodules.images.image_module import ImageDataModule, ImageSettings


def index_of_classes(classes: Mapping[str, Sequence[str]], categories: Sequence[str] | None) -> ImageIndex:
    """The index of the images of these classes.

    Args:
        classes: the paths of the images of each class.
        categories: the names of all categories in order, if the names of the classes begin with them.
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
    """Images in folders: `<class>/<image>`, or `<category>/<class>/<image>`.

    The classes are split between training and test, so no test class is used for training. If the root contains the
    folders `train` and `test`, these are the split; a folder `val` next to them is the set on which checkpoints are
    chosen. Images are files with any suffix that Pillow can decode, in upper or lower case. Hidden files are skipped
    silently, all other files with a warning.

    Args:
        root: the folder that contains the class folders.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there are `train`
            and `test` folders.
        categories: whether each class folder is in the folder of its category. `sampler="category"` uses categories.
        split_seed: determines which classes form the test set.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `on_error`,
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
        `ImageTable` reads a table of images, which need not be arranged in folders.
    """

    reads_in_check = True

    def __init__(
        self,
        root: str | Path,
        *,
        test_fraction: float = 0.5,
        categories: bool = False,
        split_seed: int = 0,
        **settings: Unpack[ImageSettings],
    ) -> None:
        super().__init__(root, **settings)
        self.test_fraction = check_test_fraction("ImageFolder", test_fraction)
        self.categories = check_bool("ImageFolder", "categories", categories)
        self.split_seed = check_seed("ImageFolder", "split_seed", split_seed)

    def sources(self) -> list[Path]:
        """The folders, whose modification times change if a file is added or removed."""
        if not self.root.is_dir():
            return []
        found = [self.root]
        level = [self.root]
        for _ in range(1 + is_split(self.root) + self.categories):
            below: list[Path] = []
            for folder in level:
                folders, _ = list_folder(folder)
                below += folders
            found += below
            level = below
        return found

    def read(self) -> Mapping[str, ImageIndex]:
        """Read the images of all class folders and split the classes."""
        if not self.root.is_dir():
            what = "which is a file" if self.root.is_file() else "which does not exist"
            raise FileNotFoundError(f"ImageFolder: `root` must be a folder of class folders, got {self.root}, {what}.")
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
        other_folders, other_files = list_folder(self.root)
        for file in other_files:
            folders.ignored.append(file.name)
        for folder in other_folders:
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
