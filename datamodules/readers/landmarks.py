"""Landmarks-clean, the training set of AP-GeM: photographs of famous landmarks."""

import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import normalized_path, parse_integers, read_rows
from lightning_retrieval.datamodules.images.image_index import LEAVES, ImageIndex
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

LISTS = {"train": "annotation_clean_train.txt", "test": "annotation_clean_val.txt"}


class _Row(NamedTuple):
    source: str  # URL or path
    path: str  # below the root; empty if the file is missing
    landmark: int


_Lists = Mapping[str, Sequence[_Row]]  # by split


class LandmarksClean(ImageDataModule):
    """Landmarks: 42,410 training images of 586 landmarks; the validation list, of the same landmarks, is the test set.

    `root` contains the lists `annotation_clean_train.txt` and, for a test set, `annotation_clean_val.txt`, directly or
    in `annotations/`. Each line is `<URL> <landmark>`, as published, or `<path> <landmark>` with a path relative to the
    root; more fields may follow. The image of a URL is the file in the folder `images` that is named as the URL's last
    part. Many URLs are dead, so images that are missing are skipped, with one warning that counts them. Ambiguous files
    are skipped, too: if several URLs have the same last part, the first is kept if they show the same landmark, and
    none is kept otherwise.

    Args:
        root: the folder that contains the lists.
        images: the folder, relative to the root, with the images of the URLs.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`, `on_error`,
            `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`,
            `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`, `persistent_workers`).

    Raises:
        FileNotFoundError: if the training list, or the folder with the images of the URLs, is missing.
        ValueError: if a line lacks a field, a landmark is not an integer, or no image of a list exists.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> Path("landmarks/images").mkdir(parents=True)
        >>> lines = [f"http://example.com/{i}/{i}.jpg {10 * (i // 2)}" for i in range(4)]
        >>> _ = Path("landmarks/annotation_clean_train.txt").write_text("\\n".join(lines))
        >>> for i in range(4):
        ...     Image.new("RGB", (60, 50)).save(f"landmarks/images/{i}.jpg")
        >>> data = LandmarksClean("landmarks", transform="ap_gem")
        >>> data.splits["train"].paths[3], data.splits["train"].labels
        ('images/3.jpg', array([0, 0, 1, 1]))

    Relations:
        Without the validation list there is no evaluation set; hold out classes with `val_fraction`.

    Source:
        Babenko et al., "Neural codes for image retrieval", ECCV 2014. Cleaned: Gordo et al., "Deep image retrieval",
        ECCV 2016. As training set of AP-GeM: Revaud et al., ICCV 2019.
    """

    published_counts = MappingProxyType({"train": [(42_410, 586)], "test": [(6_382, 586)]})
    shared_classes = True

    def __init__(self, root: str | Path, *, images: str = "images", **settings: Any) -> None:
        super().__init__(root, **settings)
        self.images = images

    def sources(self) -> list[Path]:
        """The lists, and the folders of the images, whose modification times change when a file is added or removed."""
        lists = self._lists().values()
        folders = {self.root / self.images}
        for path in lists:
            for row in read_rows("LandmarksClean", path, 2, more=True):
                if not _is_url(row[0]):
                    folders.add(self.root / Path(row[0]).parent)
        existing = [folder for folder in sorted(folders) if folder.is_dir()]
        return [*lists, *existing]

    def read(self) -> Mapping[str, ImageIndex]:
        """The lines of the lists whose images exist."""
        rows = {split: self._read_rows(path) for split, path in self._lists().items()}
        self._warn_of_missing(rows)
        kept = _without_ambiguous(rows)
        # All splits have the same landmarks, which therefore have the same numbers in all splits.
        landmarks = set[int]()
        for of_split in kept.values():
            landmarks.update(row.landmark for row in of_split)
        names = sorted(landmarks)
        splits = {}
        for split, of_split in kept.items():
            if not of_split:
                raise ValueError(
                    f"LandmarksClean: `images` must contain images of {LISTS[split]}, got "
                    f"{self._image_folder(rows[split])} with none of {len(rows[split])}."
                )
            labels = np.searchsorted(names, [row.landmark for row in of_split])
            splits[split] = ImageIndex([row.path for row in of_split], labels, names=list(map(str, names)))
        return splits

    def _lists(self) -> dict[str, Path]:
        """The list of each split; the test's only if it exists."""
        found = {}
        for split, name in LISTS.items():
            candidates = (f"annotations/{name}", name)
            if split == "train" or any((self.root / candidate).is_file() for candidate in candidates):
                found[split] = find_file("LandmarksClean", self.root, *candidates)
        return found

    def _read_rows(self, path: Path) -> list[_Row]:
        rows = list(read_rows("LandmarksClean", path, 2, more=True))
        landmarks = parse_integers("LandmarksClean", path, "landmark", [row[1] for row in rows])
        downloaded = set[str]()
        if any(_is_url(row[0]) for row in rows):
            downloaded.update(os.listdir(find_file("LandmarksClean", self.root, self.images)))
        found = []
        for row, landmark in zip(rows, landmarks):
            found.append(_Row(row[0], self._find_image(row[0], downloaded), landmark))
        return found

    def _find_image(self, source: str, downloaded: set[str]) -> str:
        """The path of an image below the root; empty if the file is missing."""
        if not _is_url(source):
            path = normalized_path(source)
            # A path that leaves the root is kept, for `ImageIndex` to raise an error.
            return path if LEAVES.search(path) or (self.root / path).is_file() else ""
        last_part = source.rsplit("/", 1)[-1]
        for name in (last_part, unquote(last_part)):
            if name in downloaded:
                return (Path(self.images) / name).as_posix()
        return ""

    def _warn_of_missing(self, rows: _Lists) -> None:
        missing = []
        counts = []
        for split, of_split in rows.items():
            missing_of_split = [row for row in of_split if not row.path]
            missing += missing_of_split
            counts.append(f"{len(missing_of_split)} of {len(of_split)} of {split}")
        if missing:
            every = [row for of_split in rows.values() for row in of_split]
            warnings.warn(
                f"LandmarksClean: skipped {len(missing)} images that are not in {self._image_folder(every)} "
                f"({', '.join(counts)}), such as that of {missing[0].source}.",
                stacklevel=3,
            )

    def _image_folder(self, rows: Sequence[_Row]) -> Path:
        """The folder that contains the images of these rows, for messages."""
        if all(_is_url(row.source) for row in rows):
            return self.root / self.images
        return self.root


def _is_url(source: str) -> bool:
    return "://" in source


def _without_ambiguous(rows: _Lists) -> dict[str, list[_Row]]:
    """The rows whose files exist, each file once, without the files that are listed with several landmarks."""
    rows_of_path: dict[str, list[_Row]] = defaultdict(list)
    for of_split in rows.values():
        for row in of_split:
            if row.path:
                rows_of_path[row.path].append(row)
    ambiguous = {path for path, of_path in rows_of_path.items() if _has_several_landmarks(of_path)}
    kept: dict[str, list[_Row]] = {}
    seen = {"", *ambiguous}
    for split, of_split in rows.items():
        kept[split] = []
        for row in of_split:
            if row.path not in seen:
                seen.add(row.path)
                kept[split].append(row)
    shared = [of_path for of_path in rows_of_path.values() if len(of_path) > 1]
    if shared:
        skipped = sum(map(len, rows_of_path.values())) - sum(map(len, kept.values()))
        warnings.warn(
            f"LandmarksClean: {len(shared)} file names belong to several lines, such as {shared[0][0].source} and "
            f"{shared[0][1].source}; skipped {skipped} lines, including all of {len(ambiguous)} names with several "
            "landmarks.",
            stacklevel=3,
        )
    return kept


def _has_several_landmarks(rows: Sequence[_Row]) -> bool:
    return any(row.landmark != rows[0].landmark for row in rows)
