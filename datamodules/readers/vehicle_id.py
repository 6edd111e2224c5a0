"""PKU VehicleID: cars seen by surveillance cameras, from the front or from behind."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from torch import Tensor

from lightning_retrieval.arguments import checked
from lightning_retrieval.checks import check_choice, check_strings
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.table import Table, number_splits, read_list
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.metrics import RandomGalleryMetrics
from lightning_retrieval.paths import find_file

Size = Literal["small", "medium", "large"]
ProtocolName = Literal["retrieval", "reid"]
NUM_VEHICLES = {"small": 800, "medium": 1600, "large": 2400}
LISTS = "train_test_split"
ALL_IMAGES, MODELS = "attribute/img2vid.txt", "attribute/model_attr.txt"
NO_MODEL = 1 << 62  # sorted after all models


class _RandomGallerySet(ImageSet):
    """Images that are evaluated with random galleries; a gallery has one image of each vehicle."""

    def __init__(
        self,
        index: ImageIndex,
        root: str | Path,
        transform: Callable[[Any], Tensor],
        *,
        seed: int,
        **reading: Any,
    ) -> None:
        super().__init__(index, root, transform, **reading)
        self.seed = seed

    def metrics(self, ks: Sequence[int], **settings: Any) -> RandomGalleryMetrics:
        """The metrics that `RetrievalEvaluation` computes for this set, with the settings of the callback."""
        return RandomGalleryMetrics(ks, draws=10, seed=self.seed, **settings)


class VehicleID(ImageDataModule):
    """PKU VehicleID: 221,763 images of 26,267 vehicles, with test sets of 800, 1,600 and 2,400 vehicles.

    There are two protocols, whose results are not comparable. In `"retrieval"` (Smooth-AP, XBM) each image of a test
    set is a query, and all other images of the set are its gallery. In `"reid"`, the gallery is one random image of
    each vehicle and all other images are queries; metrics are means over ten such galleries, which depend on `seed`.
    The images are embedded only once.

    If `attribute/model_attr.txt` exists, the categories are the models of the vehicles; vehicles without a model form
    one further category.

    Args:
        root: the folder that contains `train_test_split` with the lists, and the images in `image` or `images`.
        sizes: the test sets: `"small"`, `"medium"`, `"large"`, or several of them.
        protocol: `"retrieval"` or `"reid"`.
        select_by_vid: whether the list of a split only selects vehicles, as in FastAP: the split then has all images of
            these vehicles in `attribute/img2vid.txt`, instead of the images in the list.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if a list or the folder of images is missing.
        ValueError: if a size or the protocol is unknown; if a line lacks a field, a vehicle's id is not an integer, an
            image occurs twice, or a vehicle has no images; for `"reid"`, if no vehicle of a test set has two images.

    Example:
        >>> from lightning_retrieval.datamodules import VehicleID
        >>> VehicleID("VehicleID_V1.0", sizes=["small", "tiny"])
        Traceback (most recent call last):
            ...
        lightning_retrieval.invalid.InvalidValue: VehicleID: `sizes` must be one of 'small', 'medium', 'large',
            got 'tiny'.

    Relations:
        The test sets share vehicles, so each has separate metrics, such as `val/small/mAP`.

    Source:
        Liu, Tian, Wang, Pang and Huang, Deep Relative Distance Learning: Tell the Difference Between Similar Vehicles,
        CVPR 2016.
    """

    published_counts = MappingProxyType(  # counts in the papers, then counts of fast-reid's reader in the same lists
        {
            "train": [(110_178, 13_134), (113_346, 13_164)],
            "small": [(7_332, 800), (6_493, 800)],
            "medium": [(12_995, 1_600), (13_377, 1_600)],
            "large": [(20_038, 2_400), (19_777, 2_400)],
        }
    )

    def __init__(
        self,
        root: str | Path,
        *,
        sizes: Size | Sequence[Size] = ("small", "medium", "large"),
        protocol: ProtocolName = "retrieval",
        select_by_vid: bool = False,
        **settings: Unpack[ImageSettings],
    ) -> None:
        super().__init__(root, **settings)
        with owned_by(type(self).__name__):
            self.sizes = _check_sizes(sizes)
        self.protocol = checked(self, protocol=protocol)
        self.select_by_vid = select_by_vid

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images in the order of the lists or, with `select_by_vid`, of `img2vid.txt`."""
        lists = {"train": "train_list"}
        lists |= {size: f"test_list_{NUM_VEHICLES[size]}" for size in self.sizes}
        return number_splits({split: self._table(split, f"{LISTS}/{name}.txt") for split, name in lists.items()})

    def evaluation_set(self, name: str, index: ImageIndex) -> ImageSet:
        """The images of a test set, or of held-out training vehicles, evaluated by the protocol."""
        if self.protocol == "retrieval":
            return super().evaluation_set(name, index)
        return _RandomGallerySet(index, self.root, self.eval_transform, seed=self.seed, **self.reading)

    def _table(self, split: str, name: str) -> Table:
        """The images of a list. Image names are not converted to integers, since they begin with zeros."""
        table = self._images(name)
        if self.select_by_vid:
            wanted = table["label"]
            table = self._images(ALL_IMAGES)
            _check_have_images(table, wanted)
            table = table.chosen(np.flatnonzero(np.isin(table["label"], wanted)))
        vehicles = table["label"]
        if split != "train" and self.protocol == "reid" and len(set(vehicles)) == len(vehicles):
            rule = "the protocol 'reid' needs a vehicle with two images or more"
            raise InvalidValue(rule, got=f"none in {self.root / name}")
        folder = find_file(self.root, "image", "images").name
        models = None
        if (self.root / MODELS).exists():
            known = read_list(self.root / MODELS, "vehicle_id model_id")
            model_of = dict(zip(known.parsed("vehicle_id", int), known.parsed("model_id", int)))
            models = [model_of.get(vehicle, NO_MODEL) for vehicle in vehicles]
        return table.with_columns(path=[f"{folder}/{image}.jpg" for image in table["image"]], category=models)

    def _images(self, name: str) -> Table:
        table = read_list(find_file(self.root, name), "image vehicle_id")
        table.check_unique("image")
        return table.with_columns(label=table.parsed("vehicle_id", int))


def _check_have_images(table: Table, vehicles: Sequence[int]) -> None:
    without = sorted(set(vehicles).difference(table["label"]))
    if without:
        rule = f"{table.file} must have images of each listed vehicle"
        raise InvalidValue(rule, got=f"none for {len(without)} vehicles, such as {without[0]}")


def _check_sizes(sizes: Size | Sequence[Size]) -> list[Size]:
    """The names of the test sets, each once."""
    names: Sequence[str] = [sizes] if isinstance(sizes, str) else sizes
    check_strings("sizes", names)
    if len(names) == 0:
        raise InvalidValue("must name at least one test set", argument="sizes", got=repr(sizes))
    return [check_choice("sizes", name, tuple(NUM_VEHICLES)) for name in dict.fromkeys(names)]
