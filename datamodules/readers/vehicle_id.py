"""PKU VehicleID: cars seen by surveillance cameras, each from the front or from behind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from lightning_retrieval.checks import check_choice
from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_not_empty, check_unique, parse_integers, read_rows
from lightning_retrieval.datamodules.images.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule
from lightning_retrieval.datamodules.images.image_set import ImageSet
from lightning_retrieval.metrics import RandomGalleryMetrics

Size = Literal["small", "medium", "large"]
VEHICLES = {"small": 800, "medium": 1600, "large": 2400}
LISTS = "train_test_split"


class _RandomGallerySet(ImageSet):
    """Images evaluated by random galleries of one image of each vehicle."""

    def __init__(self, *args: Any, seed: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seed = seed

    def metrics(self, ks: Sequence[int], **settings: Any) -> RandomGalleryMetrics:
        """The metrics that `RetrievalEvaluation` takes for this set, with its settings."""
        return RandomGalleryMetrics(ks, draws=10, seed=self.seed, **settings)


class VehicleID(ImageDataModule):
    """PKU VehicleID: 221,763 images of 26,267 vehicles, with test sets of 800, 1,600 and 2,400 vehicles.

    There are two protocols, whose numbers are not comparable. In `"retrieval"` (Smooth-AP, XBM) each image of a test
    set is ranked for against all others. In `"reid"` one random image of each vehicle is the gallery and all other
    images are queries, ten times over, with draws that follow from `seed`; the metrics are the means over the ten. The
    images are embedded once.

    The categories are the vehicles' models, where `attribute/model_attr.txt` is there; the vehicles without a model are
    one category of their own.

    Args:
        root: the folder that holds `train_test_split` with the lists, and the images in `image` or `images`.
        sizes: which test sets: `"small"`, `"medium"`, `"large"`, or several.
        protocol: `"retrieval"` or `"reid"`.
        select_by_vid: take all images that `attribute/img2vid.txt` has of a list's vehicles (FastAP), in place of those
            listed.
        settings: those of `ImageDataModule`: `transform`, `on_error`, `num_workers` and so on.

    Raises:
        FileNotFoundError: if the lists or the images are not there, saying where they may be.
        ValueError: if a size or the protocol is unknown; if a list has lines with missing fields, a vehicle's id that
            is no integer, an image twice, or a vehicle without images; if an image is of two vehicles in two lists, or
            no vehicle of a test set has two images for `"reid"`.

    Example:
        >>> from lightning_retrieval.datamodules import VehicleID
        >>> VehicleID("VehicleID_V1.0", sizes=["small", "tiny"])
        Traceback (most recent call last):
            ...
        ValueError: VehicleID: `sizes` must be one of 'small', 'medium', 'large', got 'tiny'.

    Relations:
        The test sets hold vehicles in common, so the metrics of each bear its name: `val/small/mAP`.

    Source:
        Liu, Tian, Wang, Pang and Huang, Deep Relative Distance Learning: Tell the Difference Between Similar Vehicles,
        CVPR 2016.
    """

    published_counts = MappingProxyType(  # as in the papers, and as fast-reid's reader of the same lists has them
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
        sizes: Size | Sequence[Size] = ("small", "medium", "large"),
        protocol: Literal["retrieval", "reid"] = "retrieval",
        select_by_vid: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(root, **settings)
        who = type(self).__name__
        listed = [sizes] if isinstance(sizes, str) else list(sizes)
        if not listed:
            raise ValueError(f"{who}: `sizes` must name at least one test set, got {sizes!r}.")
        self.sizes: list[Size] = [check_choice(who, "sizes", size, tuple(VEHICLES)) for size in dict.fromkeys(listed)]
        self.protocol: Literal["retrieval", "reid"] = check_choice(who, "protocol", protocol, ("retrieval", "reid"))
        self.select_by_vid = select_by_vid

    def sources(self) -> list[Path]:
        """The lists and, where they are needed or there, the tables of all images and of the models."""
        who = type(self).__name__
        names = [f"{LISTS}/{name}" for name in self._lists().values()]
        names += ["attribute/img2vid.txt"] if self.select_by_vid else []
        models = self.root / "attribute/model_attr.txt"
        return [*(find_file(who, self.root, name) for name in names), *([models] if models.exists() else [])]

    def read(self) -> Mapping[str, ImageIndex]:
        """The images of the lists, in their order; those of `img2vid.txt` in its order."""
        who = type(self).__name__
        self.sources()  # all of them are there
        folder = find_file(who, self.root, "image", "images").name
        every = self._rows("attribute/img2vid.txt") if self.select_by_vid else None
        models = self._models()
        splits: dict[str, ImageIndex] = {}
        of_image: dict[str, int] = {}
        for split, name in self._lists().items():
            images, vehicles = self._rows(f"{LISTS}/{name}")
            check_not_empty(who, self.root / LISTS / name, split, images)
            if every is not None:
                images, vehicles = self._images_of(vehicles, *every)
            for image, vehicle in zip(images, vehicles):
                if of_image.setdefault(image, vehicle) != vehicle:
                    raise ValueError(
                        f"{who}: an image must be of one vehicle in all lists, got {image} of {of_image[image]} and of "
                        f"{vehicle} in {self.root / LISTS / name}."
                    )
            if self.protocol == "reid" and split != "train" and len(set(vehicles)) == len(vehicles):
                raise ValueError(
                    f"{who}: the protocol 'reid' needs a vehicle with two images or more, got none in "
                    f"{self.root / LISTS / name}."
                )
            labels, names = class_numbers(vehicles)
            paths = [f"{folder}/{image}.jpg" for image in images]
            categories = None if models is None else [models.get(vid, models[None]) for vid in vehicles]
            splits[split] = ImageIndex(paths, labels, categories=categories, names=names)
        return splits

    def evaluation_set(self, name: str, index: ImageIndex) -> ImageSet:
        """The images of a test set, or of training vehicles held out, with the protocol's metrics."""
        if self.protocol == "retrieval":
            return super().evaluation_set(name, index)
        return _RandomGallerySet(index, self.root, self.eval_transform, self.on_error, seed=self.seed)

    def _lists(self) -> dict[str, str]:
        return {"train": "train_list.txt", **{size: f"test_list_{VEHICLES[size]}.txt" for size in self.sizes}}

    def _rows(self, name: str) -> tuple[list[str], list[int]]:
        """The images as text, since their numbers begin with zeros, and the vehicles' ids."""
        who, path = type(self).__name__, self.root / name
        rows = list(read_rows(who, path, 2))
        images = [row[0] for row in rows]
        check_unique(who, path, "image", images)
        return images, parse_integers(who, path, "vehicle id", [row[1] for row in rows])

    def _images_of(self, wanted: list[int], images: list[str], vehicles: list[int]) -> tuple[list[str], list[int]]:
        among = set(wanted)
        without = sorted(among.difference(vehicles))
        if without:
            raise ValueError(
                f"{type(self).__name__}: {self.root / 'attribute/img2vid.txt'} must hold images of each listed "
                f"vehicle, which {len(without)} have not, such as {without[0]}."
            )
        found = [(image, vid) for image, vid in zip(images, vehicles) if vid in among]
        return [image for image, _ in found], [vid for _, vid in found]

    def _models(self) -> dict[int | None, int] | None:
        """The model's number by vehicle, and by None that of the vehicles without one."""
        who, path = type(self).__name__, self.root / "attribute/model_attr.txt"
        if not path.exists():
            return None
        rows = sorted({(row[0], row[1]) for row in read_rows(who, path, 2)})  # a line may come twice, saying the same
        vehicles = parse_integers(who, path, "vehicle id", [vid for vid, _ in rows])
        check_unique(who, path, "vehicle id", vehicles)
        numbers, names = class_numbers(parse_integers(who, path, "model id", [model for _, model in rows]))
        return {None: len(names), **dict(zip(vehicles, numbers.tolist()))}
