"""Revisited Oxford and Paris, optionally with a million distractors: photographs of buildings, for evaluation.

For each query, the ground truth lists the database images that are easy positives, hard positives or junk (ignored);
all other images are negatives.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import Tensor

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.checks import check_path
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.image_index import DISTRACTOR, ROLES, ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ReadingSettings
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.readers.plain_pickle import load_plain_pickle
from lightning_retrieval.datamodules.table_file import ListFile, find_file, join_paths
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.metrics import RevisitedMetrics
from lightning_retrieval.preparation.prepare import open_image
from lightning_retrieval.preparation.training_transforms import PaperName

KEYS = ("imlist", "qimlist", "gnd")
LISTS = ("easy", "hard", "junk")
OFFICIAL_PICKLES = {"gnd_roxford5k.pkl", "gnd_rparis6k.pkl"}
DISTRACTORS = "revisitop1m.txt"
IMAGE_FOLDERS = ("jpg", "images")
MAX_PIXELS = np.iinfo(np.int32).max  # larger than any image
FULL_IMAGE = (0, 0, MAX_PIXELS, MAX_PIXELS)
MAX_SHOWN = 80  # number of characters of an invalid value that a message shows


@dataclass(frozen=True)
class GroundTruth:
    """The content of a file `gnd_*.pkl`.

    Args:
        images: names of the database images, without suffix.
        queries: names of the queries, without suffix.
        boxes: left, top, right, bottom of each query, in pixels of its image.
        lists: maps `"easy"`, `"hard"` and `"junk"` to one list per query, which has the positions of images in the
            database.
    """

    images: list[str]
    queries: list[str]
    boxes: list[list[float]]
    lists: dict[str, list[list[int]]]


def read_ground_truth(path: Path) -> GroundTruth:
    """Read a `gnd_*.pkl` without running any code in it.

    Args:
        path: the file.

    Raises:
        ValueError: if the pickle needs anything but plain values and arrays, has the format of the original protocol
            instead of the revisited protocol, or has an invalid value.
    """
    content = load_plain_pickle(path)
    if not isinstance(content, dict):
        raise InvalidValue(f"{path} must be a dict with imlist, qimlist and gnd", got=type(content).__name__)
    if not content.keys() >= set(KEYS):
        rule = f"{path} must be a dict with imlist, qimlist and gnd"
        raise InvalidValue(rule, got=f"one with {sorted(map(str, content))}")
    images = _parse_names(path, "imlist", content["imlist"])
    queries = _parse_names(path, "qimlist", content["qimlist"])
    in_both = set(images) & set(queries)
    if in_both:
        raise InvalidValue(
            f"must not contain queries in {path}",
            argument="imlist",
            got=f"{len(in_both)}, such as {min(in_both)!r} at position {images.index(min(in_both))}, which is at "
            f"position {queries.index(min(in_both))} of `qimlist`",
        )
    entries = content["gnd"]
    _check_number_of_entries(path, entries, len(queries))
    truth = GroundTruth(images, queries, [], {"easy": [], "hard": [], "junk": []})
    for number, (query, entry) in enumerate(zip(queries, entries)):
        _add_entry(path, f"query {number} ({query}) in {path}", entry, truth)
    return truth


def _check_number_of_entries(path: Path, entries: Any, queries: int) -> None:
    found: Any = type(entries).__name__
    if isinstance(entries, (list, tuple)):
        found = len(entries)
    if found != queries:
        raise InvalidValue(f"must have one entry for each of {queries} queries in {path}", argument="gnd", got=found)


def _add_entry(path: Path, where: str, entry: Any, truth: GroundTruth) -> None:
    """Add the box and the lists of one query to the ground truth."""
    keys = set()
    if isinstance(entry, dict):
        keys = set(entry)
    if "ok" in keys and not keys >= {"easy", "hard"}:
        rule = f"{path} must be of the revisited protocol, with easy and hard images"
        got = "the original protocol with `ok`"
        raise InvalidValue(rule, got=got, cure="use the gnd_r*.pkl of the revisited data sets")
    if not keys >= {"bbx", *LISTS}:
        raise InvalidValue(f"must have bbx, easy, hard and junk of {where}", argument="gnd", got=sorted(map(str, keys)))
    truth.boxes.append(_parse_box(where, entry["bbx"]))
    times_listed = Counter[int]()
    for kind in LISTS:
        positions = _parse_positions(f"`{kind}` of {where}", entry[kind], len(truth.images))
        truth.lists[kind].append(positions)
        times_listed.update(positions)
    for position, times in times_listed.items():
        if times > 1:
            rule = f"easy, hard and junk must list an image only once for {where}"
            raise InvalidValue(rule, got=f"{position} ({truth.images[position]}) twice")


def _parse_names(path: Path, key: str, values: Any) -> list[str]:
    names = _to_list(values)
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidValue(f"must be a list of names in {path}", argument=key, got=_shown(values))
    first_with: dict[str, int] = {}
    for position, name in enumerate(names):
        first = first_with.setdefault(name, position)
        if first != position:
            rule = f"must contain each name only once in {path}"
            raise InvalidValue(rule, argument=key, got=f"{name!r} twice, at positions {first} and {position}")
        if leaves_root(name):
            rule = "must be names of images inside the root"
            raise InvalidValue(rule, argument=key, got=f"{name!r} at position {position} in {path}")
    return names


def _parse_box(where: str, values: Any) -> list[float]:
    box = _to_list(values) or []
    if len(box) != 4 or not all(map(_is_side, box)):
        raise InvalidValue(f"must be 4 finite numbers of pixels for {where}", argument="bbx", got=_shown(values))
    return box


def _parse_positions(where: str, values: Any, num_images: int) -> list[int]:
    positions = _to_list(values)
    if positions is None or not all(map(_is_integer, positions)):
        raise InvalidValue(f"{where} must be a list of integers", got=_shown(values))
    for position in positions:
        if not 0 <= position < num_images:
            raise InvalidValue(f"{where} must be positions in imlist, from 0 to {num_images - 1}", got=position)
    return positions


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_side(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < MAX_PIXELS  # False for NaN


def _shown(values: Any) -> str:
    return str(values)[:MAX_SHOWN]


def _to_list(values: Any) -> list[Any] | None:
    """The entries of a list, tuple or array, with NumPy's types converted to Python's; None for other values."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        return None
    entries = []
    for entry in values:
        if isinstance(entry, np.generic):
            entry = entry.item()
        entries.append(entry)
    return entries


class RevisitedImages(ImageSet):
    """The images of one city, scaled so that the longer side has `image_size` pixels, but never enlarged.

    The crop of a query is scaled by the same factor as the full image of the query, as in the official code. The set is
    evaluated with the lists in the ground truth.
    """

    def __init__(
        self,
        index: ImageIndex,
        root: str | Path,
        transform: Callable[[Any], Tensor],
        *,
        image_size: int,
        lists: Mapping[str, Mapping[int, Sequence[int]]],
        **reading: Any,
    ) -> None:
        super().__init__(index, root, transform, **reading)
        self.image_size = image_size
        self.lists = lists

    def read(self, position: int) -> Image.Image:
        """The image in RGB and upright, cropped to its box and scaled."""
        image = super().read(position)
        with open_image(self.root / self.index.paths[position]) as file:
            longer_side = max(file.size)
        size = max(1.0, self.image_size * max(image.size) / longer_side)
        image.thumbnail((size, size), Image.Resampling.LANCZOS)
        return image

    def metrics(self, ks: Sequence[int], **settings: Any) -> RevisitedMetrics:
        """The metrics that `RetrievalEvaluation` computes for this set, with the settings of the callback."""
        return RevisitedMetrics(**self.lists, ks=ks, **settings)


class _Revisited(ImageDataModule):
    """Base class of `RevisitedOxford` and `RevisitedParis`."""

    city: ClassVar[str]  # name of the official folder, and part of the official file's name
    original_city: ClassVar[str]  # folder of the original data set, which may also contain the new ground truth
    boxes_before_rotation = True  # as in the official code, which crops first and ignores the EXIF orientation

    def __init__(
        self,
        root: str | Path,
        *,
        distractors: str | Path | None = None,
        crop_queries: bool = True,
        image_size: PositiveInt = 1024,
        transform: PaperName | None = "ap_gem",
        eval_batch_size: int = 1,
        **settings: Unpack[ReadingSettings],
    ) -> None:
        owner = type(self).__name__
        folder = common = check_path("root", root, owner=owner)
        distractor_folder = None
        if distractors is not None:
            folder = Path(os.path.abspath(folder))
            distractor_folder = Path(os.path.abspath(check_path("distractors", distractors, owner=owner)))
            common = Path(os.path.commonpath([folder, distractor_folder]))  # folder that contains all images
        super().__init__(common, transform=transform, eval_batch_size=eval_batch_size, **settings)
        self.folder = folder
        self.distractors = distractor_folder
        self.crop_queries = crop_queries
        self.image_size = self.longer_side = checked(self, image_size=image_size)

    @property
    def val_set(self) -> ImageSet | dict[str, ImageSet]:
        """The test set, since there is no other set."""
        return self.test_set

    @cached_property
    @owned
    def ground_truth(self) -> GroundTruth:
        """The content of the city's `gnd_*.pkl`."""
        return read_ground_truth(self._pickle())

    @owned
    def sources(self) -> list[Path]:
        """The ground truth and, if there are distractors, their list."""
        found = [self._pickle()]
        if self.distractors is not None:
            found.append(self._distractor_list(self.distractors))
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The database, then the distractors, then the queries. Database ids are the positions in `imlist`."""
        truth = self.ground_truth
        self.sources()  # raises an error if a list is missing
        folder = self._image_folder(self._pickle().parent)
        database = join_paths(folder, truth.images, ".jpg")
        distractors = self._read_distractors()
        queries = join_paths(folder, truth.queries, ".jpg")
        num_gallery = len(database) + len(distractors)
        roles = [ROLES["gallery"]] * len(database)
        roles += [ROLES["distractor"]] * len(distractors)
        roles += [ROLES["query"]] * len(queries)
        boxes = None
        if self.crop_queries:
            boxes = [FULL_IMAGE] * num_gallery
            boxes += self._query_boxes(queries)
        labels = [DISTRACTOR] * num_gallery + list(range(len(queries)))
        index = ImageIndex(database + distractors + queries, labels, boxes=boxes, roles=roles)
        return {"test": index}

    def evaluation_set(self, name: str, index: ImageIndex) -> RevisitedImages:
        """The images, with the lists of the queries, by the id of each query."""
        first_query = len(index) - len(self.ground_truth.queries)
        lists = {}
        for kind, list_of_query in self.ground_truth.lists.items():
            lists[kind] = dict(enumerate(list_of_query, first_query))
        return RevisitedImages(
            index,
            self.root,
            self.eval_transform,
            image_size=self.longer_side,
            lists=lists,
            **self.reading,
        )

    def check(self) -> DataReport:
        """Count queries, database images and distractors, and look for missing files."""
        report = super().check()
        queries, database = len(self.ground_truth.queries), len(self.ground_truth.images)
        counts = {"queries": (queries, queries), "database": (database, 0)}
        if self.distractors is not None:
            counts["distractors"] = (len(self.splits["test"]) - queries - database, 0)
        report.splits = {name: (count, self.published_counts[name]) for name, count in counts.items()}
        return report

    def _pickle(self) -> Path:
        """The path of the ground truth. It has the official name, or is the only other `gnd_*.pkl` in its folder."""
        official = f"gnd_{self.city}.pkl"
        for folder in (self.folder, self.folder / self.city, self.folder / self.original_city):
            if (folder / official).exists():
                return folder / official
            names = {path.name for path in folder.glob("gnd_*.pkl")}
            others = sorted(names - OFFICIAL_PICKLES)
            if len(others) == 1:
                return folder / others[0]
            if others:
                rule = f"must contain {official} or one other gnd_*.pkl"
                raise InvalidValue(rule, argument="root", got=f"{', '.join(others)} in {folder}")
        return find_file(self.folder, official)  # raises an error with a suggestion

    def _distractor_list(self, folder: Path) -> Path:
        return find_file(folder, DISTRACTORS, root_name="distractors")

    def _image_folder(self, folder: Path) -> str:
        """The subfolder of `folder` that contains the images, relative to the root."""
        return find_file(folder, *IMAGE_FOLDERS).relative_to(self.root).as_posix()

    def _query_boxes(self, paths: Sequence[str]) -> list[tuple[int, int, int, int]]:
        """The box of each query in pixels; each box must contain at least one pixel."""
        boxes = []
        for number, (path, sides) in enumerate(zip(paths, self.ground_truth.boxes)):
            left, top, right, bottom = map(round, sides)  # Pillow rounds boxes in the same way
            if left >= right or top >= bottom:
                got = f"{[left, top, right, bottom]} for {path}, query {number} in {self._pickle()}"
                raise InvalidValue("must contain at least one pixel", argument="boxes", got=got)
            boxes.append((left, top, right, bottom))
        return boxes

    def _read_distractors(self) -> list[str]:
        """The paths of the distractors, relative to the root."""
        if self.distractors is None:
            return []
        file = ListFile(self._distractor_list(self.distractors))
        folder = self._image_folder(self.distractors)
        names = []
        for number, line in enumerate(file.lines(), 1):
            name = line.strip()
            if leaves_root(name):
                raise file.error(f"the images must lie inside the root, got {name!r} in line {number} of {file.path}")
            if name:
                names.append(name)
        file.check_not_empty("distractors", names)
        file.check_unique("image", names)
        return join_paths(folder, names)


class RevisitedOxford(_Revisited):
    """Revisited Oxford: 70 queries, 4,993 images of buildings in Oxford; for evaluation only.

    `test_set` and `val_set` are the same set. It is evaluated with `RevisitedMetrics`: `RetrievalEvaluation` logs
    `test/mAP/easy`, `test/mAP/medium`, `test/mAP/hard`, `test/mP@1/medium` and so on. Ids number the images of
    `imlist`, then the distractors, then the queries of `qimlist`. Each query is a class of its own; all other images
    have the label of distractors.

    Images keep their aspect ratio and therefore differ in size, so the default `eval_batch_size` is 1. It may be larger
    with an `eval_transform` that crops all images to one size.

    Args:
        root: the folder that contains `gnd_roxford5k.pkl` (or one other `gnd_*.pkl`) and the images in `jpg` or
            `images`. If this folder is named `roxford5k` or `oxford5k`, `root` may also be its parent folder.
        distractors: the folder `revisitop1m`, with `revisitop1m.txt` and 1,001,001 images in `jpg`, which are added to
            the gallery; None for no distractors. With distractors, paths are relative to `data.root`, which is then the
            closest common parent of both folders.
        crop_queries: whether each query is cropped to its box, as prescribed by the protocol; without cropping, results
            are too high. The box is in pixels of the file, before the rotation by EXIF orientation.
        image_size: length in pixels of the longer side after scaling; images are never enlarged. A query's crop is
            scaled by the same factor as the full image.
        transform: name of the transform after scaling, see `Preparation`; `"ap_gem"` does not change the size.
        eval_batch_size: number of images that are embedded at a time.
        settings: further keyword arguments of `ImageDataModule` (`train_transform`, `eval_transform`, `resize`, `mean`,
            `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`, `load_truncated`, `val_fraction`,
            `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`, `num_workers`, `seed`,
            `sampler`, `pin_memory`, `persistent_workers`). JPEGs are decoded at full size, even with `reduced_scale`.

    Raises:
        FileNotFoundError: if the ground truth, the images or the list of distractors is missing; the message suggests
            where it may be.
        ValueError: if the pickle needs anything but plain values and arrays (no code in it is run), has the format of
            the original protocol, or has an invalid value.
        TypeError: if `image_size` is not an integer.

    Example:
        >>> import pickle
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import RevisitedOxford
        >>> Path("roxford5k/jpg").mkdir(parents=True)
        >>> truth = {"imlist": ["oriel_1", "worcester_1"], "qimlist": ["oriel_2"]}
        >>> truth["gnd"] = [{"bbx": [10, 0, 60, 80], "easy": [0], "hard": [], "junk": []}]
        >>> _ = Path("roxford5k/gnd_roxford5k.pkl").write_bytes(pickle.dumps(truth))
        >>> for name in [*truth["imlist"], *truth["qimlist"]]:
        ...     Image.new("RGB", (120, 80)).save(f"roxford5k/jpg/{name}.jpg")
        >>> images = RevisitedOxford("roxford5k", image_size=60).test_set
        >>> [tuple(images[i]["images"].shape) for i in range(3)]
        [(3, 40, 60), (3, 40, 60), (3, 40, 25)]

    Relations:
        Its usual training set is `LandmarksClean`.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, "Revisiting Oxford and Paris: large-scale image retrieval
        benchmarking", CVPR 2018, and its official code.
    """

    city = "roxford5k"
    original_city = "oxford5k"
    published_counts = MappingProxyType(
        {"queries": [(70, 70)], "database": [(4_993, 0)], "distractors": [(1_001_001, 0)]}
    )


class RevisitedParis(_Revisited):
    """Revisited Paris: 70 queries, 6,322 images of buildings in Paris; for evaluation only.

    Metrics, ids and labels are as in `RevisitedOxford`. Images differ in size, so the default `eval_batch_size` is 1.

    Args:
        root: the folder that contains `gnd_rparis6k.pkl` (or one other `gnd_*.pkl`) and the images in `jpg` or
            `images`. If this folder is named `rparis6k` or `paris6k`, `root` may also be its parent folder.
        distractors: the folder `revisitop1m`; None for no distractors.
        crop_queries: whether each query is cropped to its box.
        image_size: length in pixels of the longer side after scaling.
        transform: name of the transform after scaling, see `Preparation`.
        eval_batch_size: number of images that are embedded at a time.
        settings: further keyword arguments of `ImageDataModule` (`train_transform`, `eval_transform`, `resize`, `mean`,
            `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`, `load_truncated`, `val_fraction`,
            `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`, `num_workers`, `seed`,
            `sampler`, `pin_memory`, `persistent_workers`). JPEGs are decoded at full size, even with `reduced_scale`.

    Raises:
        FileNotFoundError: as in `RevisitedOxford`.
        ValueError: as in `RevisitedOxford`.
        TypeError: as in `RevisitedOxford`.

    Example:
        >>> from lightning_retrieval.datamodules import RevisitedParis
        >>> RevisitedParis("rparis6k", num_workers=4).splits
        Traceback (most recent call last):
            ...
        lightning_retrieval.invalid.MissingFile: RevisitedParis: `root` must be a folder that contains gnd_rparis6k.pkl,
        got rparis6k, which does not exist.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, CVPR 2018.
    """

    city = "rparis6k"
    original_city = "paris6k"
    published_counts = MappingProxyType(
        {"queries": [(70, 70)], "database": [(6_322, 0)], "distractors": [(1_001_001, 0)]}
    )
