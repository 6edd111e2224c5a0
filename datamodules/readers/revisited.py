"""Revisited Oxford and Paris, optionally with a million distractors: photographs of buildings, for evaluation.

For each query, the ground truth lists the database images that are easy positives, hard positives or junk (ignored);
all other images are negatives.
"""

import operator
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
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.image_index import ROLES, ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ReadingSettings
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.readers.plain_pickle import load_plain_pickle
from lightning_retrieval.datamodules.table import Table, number_splits, read_list
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.metrics import RevisitedMetrics
from lightning_retrieval.paths import check_path, find_file
from lightning_retrieval.preparation.prepare import open_image
from lightning_retrieval.preparation.training_transforms import PaperName

LISTS = ("easy", "hard", "junk")
OFFICIAL_PICKLES = {"gnd_roxford5k.pkl", "gnd_rparis6k.pkl"}
DISTRACTORS = "revisitop1m.txt"
IMAGE_FOLDERS = ("jpg", "images")
MAX_PIXELS = np.iinfo(np.int32).max  # larger than any image
FULL_IMAGE = (0, 0, MAX_PIXELS, MAX_PIXELS)


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
    boxes: list[tuple[int, int, int, int]]
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
    try:
        images, queries = _names(content["imlist"]), _names(content["qimlist"])
        if len(content["gnd"]) != len(queries):
            rule = "must have one entry for each query"
            raise InvalidValue(rule, argument="gnd", got=f"{len(content['gnd'])} for {len(queries)}")
        in_both = set(images) & set(queries)
        if in_both:
            raise InvalidValue("must not contain queries", argument="imlist", got=repr(min(in_both)))
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from None
    truth = GroundTruth(images, queries, [], {kind: [] for kind in LISTS})
    for query, entry in zip(queries, content["gnd"]):
        try:
            _add_entry(entry, truth)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise _damaged(path, error, f" of the query {query}") from None
    return truth


def _damaged(path: Path, error: Exception, where: str = "") -> InvalidValue:
    """The error for a file whose content is wrong, which names what could not be read."""
    rule = f"{path} must have imlist, qimlist and gnd, with bbx, easy, hard and junk of each query"
    return InvalidValue(rule, got=f"an error in the entries{where}: {' '.join(str(error).split())}")


def _names(values: Any) -> list[str]:
    """Names of images inside the root, each once."""
    names = [str(name) for name in values]
    for name, count in Counter(names).items():
        if count > 1 or leaves_root(name):
            raise ValueError(f"names must lie inside the root, each once, got {name!r}")
    return names


def _add_entry(entry: Any, truth: GroundTruth) -> None:
    """Add the box and the lists of one query to the ground truth."""
    if "ok" in entry and "easy" not in entry:
        raise ValueError("`ok` is of the original protocol; use the gnd_r*.pkl of the revisited data sets")
    left, top, right, bottom = map(round, entry["bbx"])  # Pillow rounds boxes in the same way
    truth.boxes.append((left, top, right, bottom))
    if left >= right or top >= bottom or max(map(abs, truth.boxes[-1])) >= MAX_PIXELS:
        raise ValueError(f"`bbx` must contain at least one pixel, got {truth.boxes[-1]}")
    times_listed = Counter[int]()
    for kind in LISTS:
        positions = list(map(operator.index, entry[kind]))
        truth.lists[kind].append(positions)
        times_listed.update(positions)
    for position, times in times_listed.items():
        if not 0 <= position < len(truth.images):
            raise ValueError(f"positions must be from 0 to {len(truth.images) - 1}, got {position}")
        if times > 1:
            raise ValueError(f"easy, hard and junk must list {truth.images[position]} once")


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
    def read(self) -> Mapping[str, ImageIndex]:
        """The database, then the distractors, then the queries. Database ids are the positions in `imlist`."""
        truth = self.ground_truth
        folder = self._image_folder(self._pickle().parent)
        distractors = self._read_distractors()
        num_gallery, num_queries = len(truth.images) + len(distractors), len(truth.queries)
        roles = [ROLES["gallery"]] * len(truth.images) + [ROLES["distractor"]] * len(distractors)
        database, queries = ([f"{folder}/{name}.jpg" for name in names] for names in (truth.images, truth.queries))
        columns: dict[str, Any] = {
            "path": database + distractors + queries,
            "label": [*[None] * num_gallery, *range(num_queries)],
            "role": roles + [ROLES["query"]] * num_queries,
        }
        if self.crop_queries:
            columns["box"] = [FULL_IMAGE] * num_gallery + truth.boxes
        return number_splits({"test": Table(columns)}, name_of_class=None)

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
        return find_file(self.folder, official)  # raises an error

    def _image_folder(self, folder: Path, root_name: str = "root") -> str:
        """The subfolder of `folder` that contains the images, relative to the root."""
        return find_file(folder, *IMAGE_FOLDERS, root_name=root_name).relative_to(self.root).as_posix()

    def _read_distractors(self) -> list[str]:
        """The paths of the distractors, relative to the root."""
        if self.distractors is None:
            return []
        table = read_list(find_file(self.distractors, DISTRACTORS, root_name="distractors"), "image")
        table.check("image", leaves_root, "lie inside the root")
        table.check_unique("image")
        folder = self._image_folder(self.distractors, "distractors")
        return [f"{folder}/{name}" for name in table["image"]]


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
            `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`, `load_truncated`, `val_fraction`)
            and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`, `num_workers`, `seed`, `sampler`,
            `pin_memory`, `persistent_workers`). JPEGs are decoded at full size, even with `reduced_scale`.

    Raises:
        FileNotFoundError: if the ground truth, the images or the list of distractors is missing.
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
            `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`, `load_truncated`, `val_fraction`)
            and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`, `num_workers`, `seed`, `sampler`,
            `pin_memory`, `persistent_workers`). JPEGs are decoded at full size, even with `reduced_scale`.

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
