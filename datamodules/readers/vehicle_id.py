"""PKU VehicleID: cars seen by surveillance cameras, from the front or from behind."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from lightning_retrieval.arguments import checked
from lightning_retrieval.checks import check_choice, check_strings
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, find_file, join_paths
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.metrics import RandomGalleryMetrics

Size = Literal["small", "medium", "large"]
ProtocolName = Literal["retrieval", "reid"]
NUM_VEHICLES = {"small": 800, "medium": 1600, "large": 2400}
LISTS = "train_test_split"
ALL_IMAGES, MODELS = "attribute/img2vid.txt", "attribute/model_attr.txt"

_Images = tuple[list[str], list[int]]  # the name of each image, without suffix, and its vehicle's id


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
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the folder of images is missing; the message suggests where it may be.
        ValueError: if a size or the protocol is unknown; if a line lacks a field, a vehicle's id is not an integer, an
            image occurs twice or with two vehicles, or a vehicle has no images or two models; for `"reid"`, if no
            vehicle of a test set has two images.

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
    def sources(self) -> list[Path]:
        """The lists; if `select_by_vid` is True, the list of all images; and, if it exists, the list of models."""
        names = list(self._lists().values())
        if self.select_by_vid:
            names.append(ALL_IMAGES)
        found = [find_file(self.root, name) for name in names]
        if (self.root / MODELS).exists():
            found.append(self.root / MODELS)
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images in the order of the lists or, with `select_by_vid`, of `img2vid.txt`."""
        self.sources()  # raises an error if a list is missing
        folder = find_file(self.root, "image", "images").name
        all_images = self._read_images(ALL_IMAGES) if self.select_by_vid else None
        model_of = self._read_models()
        vehicle_of: dict[str, int] = {}  # the vehicle of each image, from all lists
        splits: dict[str, ImageIndex] = {}
        for split, name in self._lists().items():
            images, vehicles = self._read_images(name)
            self._list(name).check_not_empty(split, images)
            lines = ListLines(self._list(name))
            if all_images is not None:
                images, vehicles, rows = self._images_of(set(vehicles), all_images)
                lines = ListLines(self._list(ALL_IMAGES), rows)
            _check_one_vehicle_each(lines, images, vehicles, vehicle_of)
            if split != "train":
                self._check_protocol(name, vehicles)
            labels, names = class_numbers(vehicles)
            categories = None
            if model_of is not None:
                categories = [model_of.get(vehicle, model_of[None]) for vehicle in vehicles]
            paths = join_paths(folder, images, ".jpg")
            splits[split] = ImageIndex(paths, labels, categories=categories, names=names, lines=lines)
        return splits

    def evaluation_set(self, name: str, index: ImageIndex) -> ImageSet:
        """The images of a test set, or of held-out training vehicles, evaluated by the protocol."""
        if self.protocol == "retrieval":
            return super().evaluation_set(name, index)
        return _RandomGallerySet(index, self.root, self.eval_transform, seed=self.seed, **self.reading)

    def _list(self, name: str) -> ListFile:
        return ListFile(self.root / name)

    def _lists(self) -> dict[str, str]:
        """The path of each split's list, relative to the root."""
        found = {"train": f"{LISTS}/train_list.txt"}
        for size in self.sizes:
            found[size] = f"{LISTS}/test_list_{NUM_VEHICLES[size]}.txt"
        return found

    def _read_images(self, name: str) -> _Images:
        """The images and vehicles of a list. Image names are not converted to integers, since they begin with zeros."""
        file = self._list(name)
        images, vehicles = file.columns(2)
        file.check_unique("image", images)
        return images, file.integers("vehicle id", vehicles)

    def _images_of(self, wanted: set[int], all_images: _Images) -> tuple[list[str], list[int], list[int]]:
        """All images of the wanted vehicles, with their vehicles and rows; raises if a vehicle has no image."""
        without = sorted(wanted.difference(all_images[1]))
        if without:
            rule = f"{self.root / ALL_IMAGES} must have images of each listed vehicle"
            raise InvalidValue(rule, got=f"none for {len(without)} vehicles, such as {without[0]}")
        images = []
        vehicles = []
        rows = []
        for row, (image, vehicle) in enumerate(zip(*all_images)):
            if vehicle in wanted:
                images.append(image)
                vehicles.append(vehicle)
                rows.append(row)
        return images, vehicles, rows

    def _check_protocol(self, name: str, vehicles: Sequence[int]) -> None:
        if self.protocol == "reid" and len(set(vehicles)) == len(vehicles):
            rule = "the protocol 'reid' needs a vehicle with two images or more"
            raise InvalidValue(rule, got=f"none in {self.root / name}")

    def _read_models(self) -> dict[int | None, int] | None:
        """Map each vehicle's id to the number of its model, and None to the number for vehicles without a model."""
        file = self._list(MODELS)
        if not file.path.exists():
            return None
        vehicle_ids, model_ids = file.columns(2)
        vehicles = file.integers("vehicle id", vehicle_ids)
        models = file.integers("model id", model_ids)
        _check_one_model_each(file, vehicles, models)
        numbers, names = class_numbers(models)
        return {None: len(names), **dict(zip(vehicles, numbers.tolist()))}


def _check_one_model_each(file: ListFile, vehicles: Sequence[int], models: Sequence[int]) -> None:
    """Check that no vehicle has two models. The file may repeat lines."""
    first_with: dict[int, int] = {}
    for row, vehicle in enumerate(vehicles):
        first = first_with.setdefault(vehicle, row)
        if models[first] != models[row]:
            raise file.error(
                f"`vehicle id` must be different or have the same model in each line of {file.path}, got {vehicle} "
                f"twice, with the models {models[first]} and {models[row]}, in lines {file.line_number(first)} and "
                f"{file.line_number(row)}"
            )


def _check_one_vehicle_each(
    lines: ListLines, images: Sequence[str], vehicles: Sequence[int], vehicle_of: dict[str, int]
) -> None:
    """Check that each image has the same vehicle as in `vehicle_of`, and add new images to `vehicle_of`."""
    for position, (image, vehicle) in enumerate(zip(images, vehicles)):
        if vehicle_of.setdefault(image, vehicle) != vehicle:
            got = f"{image} with {vehicle_of[image]} and with {vehicle} in {lines.where(position)}"
            raise InvalidValue("an image must have the same vehicle in all lists", got=got)


def _check_sizes(sizes: Size | Sequence[Size]) -> list[Size]:
    """The names of the test sets, each once."""
    names: Sequence[str] = [sizes] if isinstance(sizes, str) else sizes
    check_strings("sizes", names)
    if len(names) == 0:
        raise InvalidValue("must name at least one test set", argument="sizes", got=repr(sizes))
    return [check_choice("sizes", name, tuple(NUM_VEHICLES)) for name in dict.fromkeys(names)]
