"""Landmarks-clean, the training set of AP-GeM: photographs of famous landmarks."""

import os
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, find_file, normalized_path
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.preparation.decoding import list_folder

LISTS = {"train": "annotation_clean_train.txt", "test": "annotation_clean_val.txt"}


class _Row(NamedTuple):
    split: str
    source: str  # URL or path
    path: str  # below the root; empty if the file is missing
    landmark: int
    position: int  # position in its list


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
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

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
    def sources(self) -> list[Path]:
        """The lists, and the folders of the images, whose modification times change when a file is added or removed."""
        lists = self._lists().values()
        folders = set[Path]()
        below = deque([self.root / self.images])
        while below:
            folder = below.popleft()
            folders.add(folder)
            below += [inner for inner in list_folder(folder).folders if not inner.is_symlink()]
        for file in lists:
            for row in file.rows(2, more=True):
                if not _is_url(row[0]):
                    folders.add(self.root / Path(row[0]).parent)
        found = [file.path for file in lists]
        for folder in sorted(folders):
            if folder.is_dir():
                found.append(folder)
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The lines of the lists whose images exist."""
        rows: list[_Row] = []
        for split, file in self._lists().items():
            rows += self._read_rows(split, file)
        self._warn_of_missing(rows)
        kept = _without_ambiguous(rows)
        # The splits share landmarks, so a landmark must have the same number in both splits.
        labels, names = class_numbers([row.landmark for row in kept])
        splits = {}
        for split, file in self._lists().items():
            chosen = [number for number, row in enumerate(kept) if row.split == split]
            paths = [kept[number].path for number in chosen]
            self._check_has_images(split, rows, paths)
            lines = ListLines(file, [kept[number].position for number in chosen])
            splits[split] = ImageIndex(paths, labels[chosen], names=names, lines=lines)
        return splits

    def _lists(self) -> dict[str, ListFile]:
        """The list of each split. The test split is left out if its list does not exist."""
        found = {}
        for split, name in LISTS.items():
            exists = (self.root / "annotations" / name).is_file() or (self.root / name).is_file()
            if split == "train" or exists:
                path = find_file(self.root, f"annotations/{name}", name)
                found[split] = ListFile(path)
        return found

    def _read_rows(self, split: str, file: ListFile) -> list[_Row]:
        sources = []
        landmark_ids = []
        for source, landmark_id, *_ in file.rows(2, more=True):
            sources.append(source)
            landmark_ids.append(landmark_id)
        landmarks = file.integers("landmark", landmark_ids)
        downloaded = set[str]()
        if any(map(_is_url, sources)):
            downloaded.update(os.listdir(find_file(self.root, self.images, argument="images")))
        rows = []
        for position, (source, landmark) in enumerate(zip(sources, landmarks)):
            image = self._find_image(source, downloaded)
            rows.append(_Row(split, source, image, landmark, position))
        return rows

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

    def _warn_of_missing(self, rows: Sequence[_Row]) -> None:
        images_of = Counter[str]()
        missing_of = Counter[str]()
        example = ""
        for row in rows:
            images_of[row.split] += 1
            if not row.path:
                missing_of[row.split] += 1
                example = example or row.source
        if example:
            counts = ", ".join(f"{missing_of[split]} of {images} of {split}" for split, images in images_of.items())
            warnings.warn(
                f"LandmarksClean: skipped {missing_of.total()} images that are not in {self._image_folder(rows)} "
                f"({counts}), such as that of {example}.",
                stacklevel=3,
            )

    def _check_has_images(self, split: str, rows: Sequence[_Row], paths: Sequence[str]) -> None:
        if not paths:
            of_split = [row for row in rows if row.split == split]
            got = f"{self._image_folder(of_split)} with none of {len(of_split)}"
            raise InvalidValue(f"must contain images of {LISTS[split]}", "LandmarksClean", "images", got=got)

    def _image_folder(self, rows: Sequence[_Row]) -> Path:
        """The folder that contains the images of these rows, for messages."""
        for row in rows:
            if not _is_url(row.source):
                return self.root
        return self.root / self.images


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


def _without_ambiguous(rows: Sequence[_Row]) -> list[_Row]:
    """The rows whose files exist, each file once, without files that are listed with several landmarks."""
    rows_of_path: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        if row.path:
            rows_of_path[row.path].append(row)
    kept = []
    shared = []
    ambiguous = 0
    skipped = 0
    for of_path in rows_of_path.values():
        if len(of_path) > 1:
            shared.append(of_path)
        if len({row.landmark for row in of_path}) > 1:
            ambiguous += 1
            skipped += len(of_path)
        else:
            kept.append(of_path[0])
            skipped += len(of_path) - 1
    if shared:
        warnings.warn(
            f"LandmarksClean: {len(shared)} file names belong to several lines, such as {shared[0][0].source} and "
            f"{shared[0][1].source}; skipped {skipped} lines, including all of {ambiguous} names with several "
            "landmarks. Store the images as <host>/<path>, as `wget -x` does, to keep them apart.",
            stacklevel=3,
        )
    return kept
