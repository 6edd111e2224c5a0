"""Revisited Oxford and Paris, and their million distractors: photographs of buildings, evaluated by lists.

For each query the ground truth lists the images that are easy, hard, and neither right nor wrong (junk); what it does
not list is wrong.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_not_empty, check_unique, read_lines
from lightning_retrieval.datamodules.files.plain_pickle import load_plain_pickle
from lightning_retrieval.datamodules.images.image_index import DISTRACTOR, ROLES, ImageIndex
from lightning_retrieval.datamodules.images.image_module import ImageDataModule
from lightning_retrieval.datamodules.images.image_set import ImageSet
from lightning_retrieval.datamodules.images.transforms import ReferenceName
from lightning_retrieval.metrics import RevisitedMetrics

LISTS = ("easy", "hard", "junk")
OFFICIAL = {"gnd_roxford5k.pkl", "gnd_rparis6k.pkl"}
DISTRACTORS = "revisitop1m.txt"
FOLDERS = ("jpg", "images")  # in which the images lie in one copy or another
LARGEST = np.iinfo(np.int32).max  # pixels, beyond any image
WHOLE = (0, 0, LARGEST, LARGEST)


@dataclass(frozen=True)
class GroundTruth:
    """What `gnd_*.pkl` says.

    Args:
        images: names of the database, without suffix.
        queries: names of the queries, without suffix.
        boxes: left, top, right, bottom of each query in pixels of its image.
        lists: `"easy"`, `"hard"` and `"junk"`, each for each query the places of images in the database.
    """

    images: list[str]
    queries: list[str]
    boxes: list[list[float]]
    lists: dict[str, list[list[int]]]


class RevisitedImages(ImageSet):
    """The images of an evaluation by lists: scaled so that the longer side is `image_size`, never enlarged.

    A query's crop is scaled by the factor of its whole image, as in the official code.
    """

    def __init__(self, *args: Any, image_size: int, lists: Mapping[str, Mapping[int, Sequence[int]]]) -> None:
        super().__init__(*args)
        self.image_size = image_size
        self.lists = lists

    def read(self, place: int) -> Image.Image:
        """The image in RGB and upright, cropped to its box and scaled."""
        image = super().read(place)
        with Image.open(self.root / self.index.paths[place]) as file:
            whole = max(file.size)
        size = max(1.0, self.image_size * max(image.size) / whole)
        image.thumbnail((size, size), Image.Resampling.LANCZOS)
        return image

    def metrics(self, ks: Sequence[int], **settings: Any) -> RevisitedMetrics:
        """What this set is evaluated by."""
        return RevisitedMetrics(**self.lists, ks=ks, **settings)


class _Revisited(ImageDataModule):
    """What both cities share; `city` is the name of the official folder and file."""

    city: ClassVar[str]
    older: ClassVar[str]  # the folder's name before the revision, in which some keep the new file

    def __init__(
        self,
        root: str | Path,
        distractors: str | Path | None = None,
        crop_queries: bool = True,
        image_size: int = 1024,
        transform: ReferenceName = "ap_gem",
        eval_batch_size: int = 1,
        **settings: Any,
    ) -> None:
        folders = [Path(path).expanduser() for path in (root, distractors) if path is not None]
        if distractors is not None:
            folders = [Path(os.path.abspath(folder)) for folder in folders]
        common = os.path.commonpath(folders)  # below which all images lie
        super().__init__(common, transform=transform, eval_batch_size=eval_batch_size, **settings)
        self.folder = folders[0]
        self.distractors = None if distractors is None else folders[1]
        self.crop_queries = crop_queries
        self.image_size = check_integer(type(self).__name__, "image_size", image_size, least=1)

    @property
    def val_set(self) -> ImageSet | dict[str, ImageSet]:
        """The test set: there is no other."""
        return self.test_set

    @cached_property
    def ground_truth(self) -> GroundTruth:
        """What the city's `gnd_*.pkl` says."""
        path = self._pickle()
        return parse_ground_truth(type(self).__name__, path, load_plain_pickle(type(self).__name__, path))

    def sources(self) -> list[Path]:
        """The ground truth and, where they are wanted, the list of distractors."""
        who, path = type(self).__name__, self._pickle()
        return [path] if self.distractors is None else [path, find_file(who, self.distractors, DISTRACTORS)]

    def read(self) -> Mapping[str, ImageIndex]:
        """The database in the order of `imlist`, so that its places are ids; distractors; queries."""
        who, truth = type(self).__name__, self.ground_truth
        path, *lists = self.sources()
        folder = find_file(who, path.parent, *FOLDERS).relative_to(self.root).as_posix()
        paths = [f"{folder}/{name}.jpg" for name in truth.images]
        if self.distractors is not None:
            folder_of_more = find_file(who, self.distractors, *FOLDERS).relative_to(self.root).as_posix()
            lines = [line.strip() for line in read_lines(who, lists[0]) if line.strip()]
            check_not_empty(who, lists[0], "distractors", lines)
            check_unique(who, lists[0], "image", lines)
            paths += [f"{folder_of_more}/{line}" for line in lines]
        ranked, queries = len(paths), len(truth.queries)
        paths += [f"{folder}/{name}.jpg" for name in truth.queries]
        boxes = [WHOLE] * ranked + [tuple(map(round, box)) for box in truth.boxes]  # rounded as PIL does
        roles = [ROLES["gallery"]] * len(truth.images) + [ROLES["distractor"]] * (ranked - len(truth.images))
        index = ImageIndex(
            paths,
            [DISTRACTOR] * ranked + list(range(queries)),
            boxes=boxes if self.crop_queries else None,
            roles=roles + [ROLES["query"]] * queries,
        )
        return {"test": index}

    def evaluation_set(self, name: str, index: ImageIndex) -> RevisitedImages:
        """The images with the lists of each query, by ids."""
        first = len(index) - len(self.ground_truth.queries)
        lists = {kind: dict(enumerate(of_all, first)) for kind, of_all in self.ground_truth.lists.items()}
        settings = index, self.root, self.eval_transform, self.on_error
        return RevisitedImages(*settings, image_size=self.image_size, lists=lists)

    def check(self) -> DataReport:
        """Look at the layout: counts beside the published ones, and files that are missing."""
        report = super().check()
        queries, database = len(self.ground_truth.queries), len(self.ground_truth.images)
        found = {"queries": (queries, queries), "database": (database, 0)}
        if self.distractors is not None:
            found["distractors"] = (len(self.splits["test"]) - queries - database, 0)
        report.splits = {name: (counts, self.published_counts[name]) for name, counts in found.items()}
        return report

    def _pickle(self) -> Path:
        who, name = type(self).__name__, f"gnd_{self.city}.pkl"
        for folder in (self.folder, self.folder / self.city, self.folder / self.older):
            found = sorted(path for path in folder.glob("gnd_*.pkl") if path.name not in OFFICIAL - {name})
            own = [path for path in found if path.name == name] or found
            if len(own) > 1:
                raise ValueError(
                    f"{who}: `root` must hold {name} or one other gnd_*.pkl, got {', '.join(p.name for p in own)} in "
                    f"{folder}."
                )
            if own:
                return own[0]
        return find_file(who, self.folder, name)  # which refuses


class RevisitedOxford(_Revisited):
    """Revisited Oxford: 70 queries, 4,993 images of buildings in Oxford; for evaluation only.

    The one evaluation set, `test_set` and `val_set` alike, says by `RevisitedMetrics` how it is evaluated:
    `RetrievalEvaluation` logs `test/mAP/easy`, `test/mAP/medium`, `test/mAP/hard`, `test/mP@1/medium` and so on. Ids
    are places in `imlist`, then in the list of distractors, then in `qimlist`. Each query is a class of its own, all
    else has the label of distractors.

    Images keep their aspect and so have several sizes, which is why `eval_batch_size` is 1. With an `eval_transform`
    that crops them to one size it may be larger.

    Args:
        root: the folder that holds `gnd_roxford5k.pkl` (or one other `gnd_*.pkl`) and the images in `jpg` or `images`;
            or the folder above it, in which it is called `roxford5k` or `oxford5k`.
        distractors: the folder `revisitop1m`, which holds `revisitop1m.txt` and the images in `jpg`, to rank its
            1,001,001 images too; None without them. Paths are then relative to the folder above both, which is
            `data.root`.
        crop_queries: crop each query to its box, as the protocol says; results without are too good.
        image_size: pixels of the longer side that images are scaled to, never enlarged; a query's crop is scaled by
            the factor of its whole image.
        transform: what follows, see `reference_transform`; `"ap_gem"` leaves the size as it is.
        eval_batch_size: images embedded at a time.
        settings: those of `ImageDataModule`: `eval_transform`, `on_error`, `num_workers` and so on.

    Raises:
        FileNotFoundError: if the ground truth, the images or the list of distractors is not there, saying where it may
            be.
        ValueError: if the pickle asks for anything but plain values and arrays (nothing in it is run), is of the old
            protocol, or is not as it should be.

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
        The training set that goes with it is `LandmarksClean`.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, "Revisiting Oxford and Paris: large-scale image retrieval
        benchmarking", CVPR 2018, and its official code.
    """

    city = "roxford5k"
    older = "oxford5k"
    published_counts = MappingProxyType(
        {"queries": [(70, 70)], "database": [(4_993, 0)], "distractors": [(1_001_001, 0)]}
    )


class RevisitedParis(_Revisited):
    """Revisited Paris: 70 queries, 6,322 images of buildings in Paris; for evaluation only.

    All is as with `RevisitedOxford`: metrics, ids, labels, and images of several sizes, which is why `eval_batch_size`
    is 1.

    Args:
        root: the folder that holds `gnd_rparis6k.pkl` (or one other `gnd_*.pkl`) and the images in `jpg` or `images`;
            or the folder above it, in which it is called `rparis6k` or `paris6k`.
        distractors: the folder `revisitop1m`, or None.
        crop_queries: crop each query to its box.
        image_size: pixels of the longer side that images are scaled to.
        transform: what follows, see `reference_transform`.
        eval_batch_size: images embedded at a time.
        settings: those of `ImageDataModule`: `eval_transform`, `on_error`, `num_workers` and so on.

    Raises:
        FileNotFoundError: as `RevisitedOxford`.
        ValueError: as `RevisitedOxford`.

    Example:
        >>> from lightning_retrieval.datamodules import RevisitedParis
        >>> RevisitedParis("rparis6k", num_workers=4).splits
        Traceback (most recent call last):
            ...
        FileNotFoundError: RevisitedParis: `root` must be a folder that holds gnd_rparis6k.pkl, got rparis6k, which is
        not there.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, CVPR 2018.
    """

    city = "rparis6k"
    older = "paris6k"
    published_counts = MappingProxyType(
        {"queries": [(70, 70)], "database": [(6_322, 0)], "distractors": [(1_001_001, 0)]}
    )


def parse_ground_truth(who: str, path: Path, value: Any) -> GroundTruth:
    """What an unpickled `gnd_*.pkl` says.

    Args:
        who: begins every message.
        path: of the file, for messages.
        value: a dict with `imlist`, `qimlist` and `gnd`.

    Raises:
        ValueError: if it is of the old protocol or anything in it is not as it should be.
    """
    if not isinstance(value, dict) or not {"imlist", "qimlist", "gnd"} <= value.keys():
        came = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{who}: {path} must hold a dict with imlist, qimlist and gnd, got {came}.")
    images, queries = (_names(who, path, key, value[key]) for key in ("imlist", "qimlist"))
    both = set(images) & set(queries)
    if both:
        raise ValueError(
            f"{who}: `imlist` must hold none of the queries in {path}, got {len(both)}, such as {min(both)!r}."
        )
    entries = value["gnd"]
    if not isinstance(entries, (list, tuple)) or len(entries) != len(queries):
        count = len(entries) if isinstance(entries, (list, tuple)) else type(entries).__name__
        raise ValueError(f"{who}: `gnd` must have one entry for each of {len(queries)} queries in {path}, got {count}.")
    boxes: list[list[float]] = []
    lists: dict[str, list[list[int]]] = {kind: [] for kind in LISTS}
    for query, entry in enumerate(entries):
        where = f"query {query} ({queries[query]}) in {path}"
        keys = entry.keys() if isinstance(entry, dict) else set()
        if "ok" in keys and not {"easy", "hard"} <= keys:
            raise ValueError(
                f"{who}: {path} must be of the revisited protocol, with easy and hard images, got the older one with "
                "`ok`; take the gnd_r*.pkl of the revisited sets."
            )
        if not {"bbx", *LISTS} <= keys:
            raise ValueError(
                f"{who}: `gnd` must have bbx, easy, hard and junk of {where}, got {sorted(map(str, keys))}."
            )
        boxes.append(_box(who, where, entry["bbx"]))
        for kind in LISTS:
            lists[kind].append(_places(who, f"`{kind}` of {where}", entry[kind], len(images)))
        listed = [place for kind in LISTS for place in lists[kind][query]]
        if len(set(listed)) < len(listed):
            twice = next(place for place in listed if listed.count(place) > 1)
            raise ValueError(
                f"{who}: easy, hard and junk must list an image once for {where}, got {twice} ({images[twice]}) twice."
            )
    return GroundTruth(images, queries, boxes, lists)


def _names(who: str, path: Path, key: str, values: Any) -> list[str]:
    names = _as_list(values)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{who}: `{key}` must be a list of names in {path}, got {str(values)[:80]}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{who}: `{key}` must hold each name once in {path}, got {twice!r} twice.")
    return names


def _box(who: str, where: str, values: Any) -> list[float]:
    box = _as_list(values) or []
    if len(box) != 4 or not all(isinstance(value, (int, float)) and abs(value) < LARGEST for value in box):
        raise ValueError(f"{who}: `bbx` must be 4 finite numbers of pixels for {where}, got {str(values)[:80]}.")
    return box


def _places(who: str, where: str, values: Any, images: int) -> list[int]:
    places = _as_list(values)
    if places is None or not all(isinstance(place, int) and not isinstance(place, bool) for place in places):
        raise ValueError(f"{who}: {where} must be a list of integers, got {str(values)[:80]}.")
    odd = [place for place in places if not 0 <= place < images]
    if odd:
        raise ValueError(f"{who}: {where} must be places in imlist, from 0 to {images - 1}, got {odd[0]}.")
    return places


def _as_list(values: Any) -> list[Any] | None:
    """A list, tuple or array, whose entries may be NumPy's, as Python's own; None if it is none of these."""
    if not isinstance(values, (list, tuple, np.ndarray)):
        return None
    entries = values.tolist() if isinstance(values, np.ndarray) else values
    return [entry.item() if isinstance(entry, np.generic) else entry for entry in entries]
