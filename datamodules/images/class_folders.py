"""Find the images of classes that are stored as folders, and any other files and folders among them."""

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from lightning_retrieval.datamodules.images.image_file import image_suffixes

SPLITS = ("train", "test")


def list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folders and the files in a folder, sorted by name, without hidden ones; both empty if it does not exist."""
    folders: list[Path] = []
    files: list[Path] = []
    if not folder.is_dir():
        return folders, files
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(Path(entry.path))
            else:
                files.append(Path(entry.path))
    return sorted(folders), sorted(files)


def is_split(root: Path) -> bool:
    """Whether a folder contains the folders `train` and `test`."""
    return all((root / name).is_dir() for name in SPLITS)


@dataclass
class ClassFolders:
    """Finds the images of each class, as paths relative to `root`, and collects what is ignored.

    Args:
        root: the root of the data set.
        categories: whether the folder of each class is in the folder of its category.
        ignored: files and folders that are not an image of a class.
        empty: folders of classes without an image.
        suffixes: suffixes, in lower case, of image files.
    """

    root: Path
    categories: bool
    ignored: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    suffixes: frozenset[str] = field(default_factory=image_suffixes)

    def find(self, top: Path) -> dict[str, list[str]]:
        """The images of each class below the folder `top`, in the order of the class names.

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
        raise ValueError(f"ImageFolder: `root` must contain images as {wanted}, which {top} does not; {cure}.")

    def warn(self) -> None:
        """Issue one warning about all ignored files and folders, and one about all empty folders."""
        if self.ignored:
            warnings.warn(
                f"ImageFolder: ignored {len(self.ignored)} files or folders in {self.root} that are not images of a "
                f"class, such as {self.ignored[0]}.",
                stacklevel=3,
            )
        if self.empty:
            warnings.warn(
                f"ImageFolder: ignored {len(self.empty)} folders in {self.root} that contain no image, such as "
                f"{self.empty[0]}.",
                stacklevel=3,
            )

    def _list_class_folders(self, top: Path) -> tuple[list[Path], list[Path]]:
        """The folders of the classes, and the files in the folders above them."""
        folders, files = list_folder(top)
        if not self.categories:
            return folders, files
        class_folders: list[Path] = []
        for category in folders:
            folders_of_category, files_of_category = list_folder(category)
            class_folders += folders_of_category
            files += files_of_category
        return class_folders, files

    def _images_of_class(self, folder: Path) -> list[str]:
        """The images of a class; everything else in its folder is ignored."""
        folders, files = list_folder(folder)
        images: list[str] = []
        for file in files:
            if self._is_image(file):
                images.append(self._relative(file))
            else:
                self.ignored.append(self._relative(file))
        if not images:
            self.empty.append(self._relative(folder))
            return images
        for inner in folders:
            self.ignored.append(f"{self._relative(inner)}/")
        return images

    def _is_image(self, file: Path) -> bool:
        return file.suffix.lower() in self.suffixes

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _cure(self, top: Path, class_folders: list[Path]) -> str:
        """What the user can do if no class folder has an image."""
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
        """What the user can do if the images are not in class folders, but above them."""
        folders, files = list_folder(top)
        if self.categories:
            for folder in folders:
                _, files_of_category = list_folder(folder)
                if files_of_category:
                    return "the images are one folder higher: set categories=False"
        images = sum(map(self._is_image, files))
        if images:
            return f"its {images} images are in no class folder: move those of each class into one, or use ImageTable"
        return "there is no image"

    def _has_images_below(self, folder: Path) -> bool:
        """Whether a folder inside this one contains an image."""
        inner_folders, _ = list_folder(folder)
        for inner in inner_folders:
            _, files = list_folder(inner)
            if any(map(self._is_image, files)):
                return True
        return False
