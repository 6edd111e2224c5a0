"""The user's own images in folders: a folder for each class."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_retrieval.checks import check_finite_number, check_integer
from lightning_retrieval.datamodules.images.image_index import ImageIndex, split_by_class
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

SPLITS = ("train", "test")


class ImageFolder(ImageDataModule):
    """Images in folders: `<class>/<image>`, or `<category>/<class>/<image>`.

    The classes are split between training and test, so that test classes were never seen. Where `train` and `test`
    folders lie in the root, they are the split, and a `val` folder beside them is what checkpoints are chosen by.
    Images are files of any suffix that Pillow opens, upper or lower case; hidden files are passed over, and all others
    warned of.

    Args:
        root: the folder of folders.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there are `train`
            and `test` folders.
        categories: whether each class lies in the folder of its category; categories are for `sampler="category"`.
        split_seed: another one draws other test classes.
        settings: those of `ImageDataModule`, such as `transform` and `cache_dir`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if `root` is not there.
        ValueError: if there are no class folders with images, or `test_fraction` leaves no class on one of the sides.

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
        `ImageTable` takes a table of images, which need not lie in folders.
    """

    def __init__(
        self,
        root: str | Path,
        test_fraction: float = 0.5,
        categories: bool = False,
        split_seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(root, **settings)
        self.test_fraction = check_test_fraction("ImageFolder", test_fraction)
        self.categories = categories
        self.split_seed = check_integer("ImageFolder", "split_seed", split_seed, least=0)

    def sources(self) -> list[Path]:
        """The folders: their times change when a file comes or goes."""
        level = found = [self.root] if self.root.is_dir() else []
        for _ in range(1 + self._is_split() + self.categories):
            level = [folder for above in level for folder in _listed(above)[0]]
            found = [*found, *level]
        return found

    def read(self) -> Mapping[str, ImageIndex]:
        """The images of each class folder, of which each is of one split."""
        who = "ImageFolder"
        if not self.root.is_dir():
            what = "a file" if self.root.is_file() else "not there"
            raise FileNotFoundError(f"{who}: `root` must be a folder of class folders, got {self.root}: {what}.")
        litter: list[str] = []
        empty: list[str] = []
        if self._is_split():
            parts = [*SPLITS, *(["val"] if (self.root / "val").is_dir() else [])]
            folders, files = _listed(self.root)
            litter += [file.name for file in files] + [
                f"{folder.name}/" for folder in folders if folder.name not in parts
            ]
            found = {part: self._classes(self.root / part, litter, empty) for part in parts}
        else:
            classes = self._classes(self.root, litter, empty)
            test = split_by_class(who, "test_fraction", list(classes), self.test_fraction, self.split_seed)
            found = {
                "train": {name: paths for name, paths in classes.items() if name not in test},
                "test": {name: paths for name, paths in classes.items() if name in test},
            }
        if litter:
            warnings.warn(
                f"{who}: left out {len(litter)} files or folders in {self.root} that are no images of a class, such as "
                f"{litter[0]}.",
                stacklevel=2,
            )
        if empty:
            warnings.warn(
                f"{who}: left out {len(empty)} folders in {self.root} that hold no image, such as {empty[0]}.",
                stacklevel=2,
            )
        groups = sorted({_category(name) for classes in found.values() for name in classes}) if self.categories else []
        return {part: _index(classes, groups) for part, classes in found.items()}

    def _is_split(self) -> bool:
        return all((self.root / part).is_dir() for part in SPLITS)

    def _classes(self, top: Path, litter: list[str], empty: list[str]) -> dict[str, list[str]]:
        """Paths, relative to the root, of the images of each class; in the order of the names."""
        suffixes = image_suffixes()
        folders, files = _listed(top)
        images = sum(file.suffix.lower() in suffixes for file in files)
        above = [*files]
        if self.categories:
            inner = [_listed(folder) for folder in folders]
            above += [file for _, of_category in inner for file in of_category]
            folders = [folder for of_category, _ in inner for folder in of_category]
        classes: dict[str, list[str]] = {}
        deeper: list[Path] = []
        split: list[Path] = []
        for folder in folders:
            within, of_class = _listed(folder)
            paths = [file for file in of_class if file.suffix.lower() in suffixes]
            litter += [_relative(file, self.root) for file in of_class if file.suffix.lower() not in suffixes]
            if paths:
                classes[_relative(folder, top)] = [_relative(path, self.root) for path in paths]
                litter += [f"{_relative(inside, self.root)}/" for inside in within]
            else:
                empty.append(_relative(folder, self.root))
                if any(file.suffix.lower() in suffixes for inside in within for file in _listed(inside)[1]):
                    deeper.append(folder)
                elif all((folder / part).is_dir() for part in SPLITS):
                    split.append(folder)
        litter += [_relative(file, self.root) for file in above]
        if not classes:
            self._refuse(top, images, len(above) - images, deeper, split)
        return classes

    def _refuse(
        self, top: Path, images: int, in_categories: int, deeper: Sequence[Path], split: Sequence[Path]
    ) -> None:
        wanted = "<category>/<class>/<image>" if self.categories else "<class>/<image>"
        if split and not self._is_split():
            cure = f"give root={split[0]}"
        elif deeper and not self.categories:
            cure = "images lie one folder deeper: set categories=True if those above are categories"
            cure += "" if self._is_split() else f", or give root={deeper[0]}"
        elif self.categories and in_categories:
            cure = "images lie one folder higher: set categories=False"
        elif images:
            cure = f"its {images} images lie in no folder: move those of each class into a folder, or use ImageTable"
        else:
            cure = "no image lies there"
        raise ValueError(f"ImageFolder: `root` must hold images as {wanted}, which {top} does not; {cure}.")


def image_suffixes() -> frozenset[str]:
    """Suffixes, in lower case, of the files that Pillow opens."""
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def check_test_fraction(who: str, test_fraction: float) -> float:
    """Return `test_fraction` as it came, refused unless it is between 0 and 1."""
    if not 0 < check_finite_number(who, "test_fraction", test_fraction) < 1:
        raise ValueError(f"{who}: `test_fraction` must be between 0 and 1, got {test_fraction}.")
    return test_fraction


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """Folders and files, sorted by name, without hidden ones."""
    folders: list[Path] = []
    files: list[Path] = []
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else files).append(Path(entry.path))
    return sorted(folders), sorted(files)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _category(name: str) -> str:
    return name.split("/")[0]


def _index(classes: Mapping[str, Sequence[str]], groups: Sequence[str]) -> ImageIndex:
    names = sorted(classes)
    counts = [len(classes[name]) for name in names]
    numbers = [groups.index(_category(name)) for name in names] if groups else []
    return ImageIndex(
        [path for name in names for path in classes[name]],
        np.repeat(np.arange(len(names)), counts),
        categories=np.repeat(numbers, counts) if groups else None,
        names=names,
    )
