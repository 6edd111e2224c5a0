"""Landmarks-clean, the training set of AP-GeM: photographs of famous landmarks."""

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

import numpy as np

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import Table, normalized_path, number_splits, read_list
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.paths import find_file

LISTS = {"train": "annotation_clean_train.txt", "test": "annotation_clean_val.txt"}


class LandmarksClean(ImageDataModule):
    """Landmarks-clean: 42,410 training images of 586 landmarks, and 6,382 test images of 554 of these landmarks.

    `root` contains the list `annotation_clean_train.txt`, directly or in `annotations/`. For a test set, it also
    contains the published validation list `annotation_clean_val.txt`. Each line is `<URL> <landmark>`, as published, or
    `<path> <landmark>` with a path relative to the root; more fields may follow.

    The image of a URL is the file `<host>/<path>` in the folder `images`, as stored by `wget -x`. If this file does not
    exist, the image is the file in `images` whose name is the last part of the URL. Many URLs are dead, so missing
    images are skipped, and one warning gives their number. A file name that is the last part of several URLs is
    ambiguous: if all these URLs show the same landmark, only the first line is kept, otherwise no line. If all files
    are named by the last part of their URL, 3,573 of the 48,792 published lines (7.3 %) are skipped even if no URL is
    dead. If all files are at `<host>/<path>`, no file is ambiguous.

    Args:
        root: the folder that contains the lists.
        images: the folder, relative to the root, with the images of the URLs.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

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

    published_counts = MappingProxyType({"train": [(42_410, 586)], "test": [(6_382, 554)]})
    shared_classes = True

    def __init__(self, root: str | Path, *, images: str = "images", **settings: Unpack[ImageSettings]) -> None:
        super().__init__(root, **settings)
        self.images = images

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The lines of the lists whose images exist, each file once."""
        splits: dict[str, Table] = {}
        for split, name in LISTS.items():
            exists = (self.root / "annotations" / name).is_file() or (self.root / name).is_file()
            if split == "train" or exists:
                splits[split] = self._table(find_file(self.root, f"annotations/{name}", name))
        self._warn_of_missing(splits)
        kept = _rows_without_ambiguous(splits)
        for split, table in splits.items():
            if not kept[split]:
                got = f"{self._image_folder([table])} with none of {len(table)}"
                raise InvalidValue(f"must contain images of {LISTS[split]}", "LandmarksClean", "images", got=got)
            splits[split] = table.chosen(np.array(kept[split]))
        return number_splits(splits, common=("label",))

    def _table(self, file: Path) -> Table:
        """The rows of a list, with the path of each image below the root, empty if the file is missing."""
        table = read_list(file, "source landmark", more=True)
        sources = table["source"]
        downloaded = set[str]()
        if any(map(_is_url, sources)):
            downloaded.update(os.listdir(find_file(self.root, self.images, argument="images")))
        paths = [self._find_image(source, downloaded) for source in sources]
        return table.with_columns(path=paths, label=table.parsed("landmark", int))

    def _find_image(self, source: str, downloaded: set[str]) -> str:
        """The path of an image below the root; empty if the file is missing."""
        if not _is_url(source):
            path = normalized_path(source)
            # A path that leaves the root is kept, for `ImageIndex` to raise an error.
            return path if leaves_root(path) or (self.root / path).is_file() else ""
        mirrored = _mirrored_path(source)
        for name in (mirrored, unquote(mirrored)):
            if name and not leaves_root(name) and os.path.isfile(self.root / self.images / name):
                return (Path(self.images) / name).as_posix()
        last_part = source.rsplit("/", 1)[-1]
        for name in (last_part, unquote(last_part)):
            if name in downloaded:
                return (Path(self.images) / name).as_posix()
        return ""

    def _warn_of_missing(self, splits: Mapping[str, Table]) -> None:
        missing = []
        for table in splits.values():
            missing += [source for path, source in zip(table["path"], table["source"]) if not path]
        if missing:
            images = sum(map(len, splits.values()))
            warnings.warn(
                f"LandmarksClean: skipped {len(missing)} images that are not in {self._image_folder(splits.values())} "
                f"(of {images}), such as that of {missing[0]}.",
                stacklevel=3,
            )

    def _image_folder(self, tables: Iterable[Table]) -> Path:
        """The folder that contains the images of these rows, for messages."""
        if all(_is_url(source) for table in tables for source in table["source"]):
            return self.root / self.images
        return self.root


def _is_url(source: str) -> bool:
    return "://" in source


def _mirrored_path(url: str) -> str:
    """The path `<host>/<path>` at which `wget -x` stores the file of a URL; empty if the URL is invalid."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    host = parts.netloc.rpartition("@")[2].lower()
    path = parts.path
    if not path.strip("/") or path.endswith("/"):
        path += "/index.html"
    if parts.query:
        path += f"?{parts.query}"
    return normalized_path(f"{host}/{path}")


def _rows_without_ambiguous(splits: Mapping[str, Table]) -> dict[str, list[int]]:
    """The rows of each split whose files exist, each file once, without those that have several landmarks."""
    rows_of_path: dict[str, list[tuple[str, int]]] = {}
    for split, table in splits.items():
        for row, path in enumerate(table["path"]):
            if path:
                rows_of_path.setdefault(path, []).append((split, row))
    kept: dict[str, list[int]] = {split: [] for split in splits}
    labels = {split: table["label"] for split, table in splits.items()}
    shared: list[list[tuple[str, int]]] = []
    ambiguous = skipped = 0
    for rows in rows_of_path.values():
        if len(rows) > 1:
            shared.append(rows)
        if len({labels[split][row] for split, row in rows}) > 1:
            ambiguous += 1
            skipped += len(rows)
            continue
        split, row = rows[0]
        kept[split].append(row)
        skipped += len(rows) - 1
    if shared:
        first, second = (splits[split]["source"][row] for split, row in shared[0][:2])
        warnings.warn(
            f"LandmarksClean: {len(shared)} file names belong to several lines, such as {first} and "
            f"{second}; skipped {skipped} lines, including all of {ambiguous} names with several "
            "landmarks. Store the images as <host>/<path>, as `wget -x` does, to keep them apart.",
            stacklevel=3,
        )
    return kept
