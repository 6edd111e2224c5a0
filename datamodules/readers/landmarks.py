"""Landmarks-clean, the training set of AP-GeM: photographs of famous places."""

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
    path: str | None  # from the root, None where the file is missing
    landmark: int


class LandmarksClean(ImageDataModule):
    """Landmarks: 42,410 training images of 586; the validation list, with the same landmarks, is the test set.

    `root` holds the lists `annotation_clean_train.txt` and, if it is to be the test set, `annotation_clean_val.txt`, by
    themselves or in `annotations/`. Each line is `<URL> <landmark>`, as published, or `<path> <landmark>` with a path
    from the root; more fields may follow. An image of a URL is looked for in the folder `images` under the URL's last
    part. Since many URLs are dead, images that are not there are left out, with one warning that counts them.
    So are those of which the folder cannot say whose they are: of several URLs with one last part and one landmark the
    first stays, of such with several landmarks none.

    Args:
        root: the folder that holds the lists.
        images: the folder, from the root, of the images of URLs.
        settings: those of `ImageDataModule`, such as `transform` and `cache_dir`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if the training list, or the folder of the images of URLs, is not there.
        ValueError: if a line has fewer fields, a landmark is no integer, or no image of a list is there.

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
        Without the second list there is nothing to evaluate on: hold classes out by `val_fraction`.

    Source:
        Babenko et al., "Neural codes for image retrieval", ECCV 2014. Cleaned: Gordo et al., "Deep image retrieval",
        ECCV 2016. As training set of AP-GeM: Revaud et al., ICCV 2019.
    """

    published_counts = MappingProxyType({"train": [(42_410, 586)], "test": [(6_382, 586)]})
    shared_classes = True

    def __init__(self, root: str | Path, images: str = "images", **settings: Any) -> None:
        super().__init__(root, **settings)
        self.images = images

    def sources(self) -> list[Path]:
        """The lists, and the folders of the images, whose times change when a file comes or goes."""
        lists = self._lists().values()
        rows = (row for path in lists for row in read_rows("LandmarksClean", path, 2, more=True))
        folders = {self.root / self.images, *(self.root / Path(row[0]).parent for row in rows if "://" not in row[0])}
        return [*lists, *sorted(folder for folder in folders if folder.is_dir())]

    def read(self) -> Mapping[str, ImageIndex]:
        """The lines of the lists whose images are there."""
        listed = {split: self._rows(path) for split, path in self._lists().items()}
        every = [row for rows in listed.values() for row in rows]
        missing = [row for row in every if row.path is None]
        if missing:
            counts = ", ".join(
                f"{sum(row.path is None for row in rows)} of {len(rows)} of {split}" for split, rows in listed.items()
            )
            warnings.warn(
                f"LandmarksClean: left out {len(missing)} images that are not in {self._places(every)} ({counts}), "
                f"such as that of {missing[0].source}.",
                stacklevel=2,
            )
        kept = _without_collisions(listed)
        # Splits share their landmarks, so that these have the same numbers in each.
        names = sorted({row.landmark for rows in kept.values() for row in rows})
        number = {landmark: i for i, landmark in enumerate(names)}
        splits = {}
        for split, rows in kept.items():
            if not rows:
                raise ValueError(
                    f"LandmarksClean: `images` must hold images of {LISTS[split]}, got {self._places(listed[split])} "
                    f"with none of {len(listed[split])}."
                )
            labels = np.array([number[row.landmark] for row in rows])
            splits[split] = ImageIndex([str(row.path) for row in rows], labels, names=[str(name) for name in names])
        return splits

    def _lists(self) -> dict[str, Path]:
        """The list of each split; that of the test only if it is there."""
        found = {}
        for split, name in LISTS.items():
            places = [f"annotations/{name}", name]
            if split == "train" or any((self.root / place).is_file() for place in places):
                found[split] = find_file("LandmarksClean", self.root, *places)
        return found

    def _rows(self, path: Path) -> list[_Row]:
        rows = list(read_rows("LandmarksClean", path, 2, more=True))
        landmarks = parse_integers("LandmarksClean", path, "landmark", [row[1] for row in rows])
        there: set[str] = set()
        if any("://" in row[0] for row in rows):
            there = set(os.listdir(find_file("LandmarksClean", self.root, self.images)))
        return [_Row(row[0], self._path(row[0], there), landmark) for row, landmark in zip(rows, landmarks)]

    def _places(self, rows: Sequence[_Row]) -> Path:
        """The folder below which the images are looked for, for messages."""
        return self.root / self.images if all("://" in row.source for row in rows) else self.root

    def _path(self, source: str, there: set[str]) -> str | None:
        if "://" not in source:
            path = normalized_path(source)
            return path if LEAVES.search(path) or (self.root / path).is_file() else None
        name = source.rsplit("/", 1)[-1]
        found = next((name for name in (name, unquote(name)) if name in there), None)
        return None if found is None else (Path(self.images) / found).as_posix()


def _without_collisions(listed: Mapping[str, Sequence[_Row]]) -> dict[str, list[_Row]]:
    """The rows whose files are there, without those of which it is not known what the file shows; warned of."""
    of_path: dict[str, list[_Row]] = defaultdict(list)
    for rows in listed.values():
        for row in rows:
            if row.path is not None:
                of_path[row.path].append(row)
    unclear = {path for path, rows in of_path.items() if len({row.landmark for row in rows}) > 1}
    kept: dict[str, list[_Row]] = {}
    seen: set[str] = set()
    for split, rows in listed.items():
        kept[split] = []
        for row in rows:
            if row.path is not None and row.path not in unclear and row.path not in seen:
                seen.add(row.path)
                kept[split].append(row)
    shared = [rows for rows in of_path.values() if len(rows) > 1]
    if shared:
        left_out = sum(map(len, of_path.values())) - sum(map(len, kept.values()))
        warnings.warn(
            f"LandmarksClean: {len(shared)} file names are those of several lines, such as {shared[0][0].source} and "
            f"{shared[0][1].source}; left out {left_out} lines, all of {len(unclear)} names with several landmarks.",
            stacklevel=3,
        )
    return kept
