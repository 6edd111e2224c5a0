"""CUB-200-2011: photographs of 200 bird species."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, enclosing_pixels, find_file, join_paths
from lightning_retrieval.invalid import owned

PATHS, CLASSES, BOXES = "images.txt", "image_class_labels.txt", "bounding_boxes.txt"
NUM_CLASSES = 200
SPECIES = {"train": range(1, 101), "test": range(101, 201)}

_Box = tuple[int, int, int, int]  # left, top, right, bottom


class CUB200(ImageDataModule):
    """Caltech-UCSD Birds 200-2011: 11,788 images of 200 species.

    Species 1 to 100 are for training, 101 to 200 for testing. In the test each image is a query, and all other test
    images are its gallery. `train_test_split.txt`, a split for classification within each species, is not used.

    Args:
        root: the folder that contains `images.txt`, `image_class_labels.txt` and `images`.
        boxes: whether each image is cropped to the bird's box in `bounding_boxes.txt`, rounded outwards to
            pixels.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the folder of images is missing; the message suggests where it may be.
        ValueError: if a line lacks a field; if an id is not an integer, occurs twice or is missing in another list; if
            a class is not from 1 to 200; if a box is empty or not four finite numbers.

    Example:
        >>> from lightning_retrieval.datamodules import CUB200
        >>> CUB200("CUB_200_2011", boxes=True).splits
        Traceback (most recent call last):
            ...
        lightning_retrieval.invalid.MissingFile: CUB200: `root` must be a folder that contains images.txt, got
        CUB_200_2011, which does not exist.

    Relations:
        CUB has few classes with many images each; `StanfordOnlineProducts` has many classes with few images.

    Source:
        Wah, Branson, Welinder, Perona and Belongie, The Caltech-UCSD Birds-200-2011 Dataset, Caltech 2011. Split by
        species: Oh Song et al., CVPR 2016.
    """

    boxes_before_rotation = True
    published_counts = MappingProxyType({"train": [(5_864, 100)], "test": [(5_924, 100)]})

    def __init__(self, root: str | Path, *, boxes: bool = False, **settings: Unpack[ImageSettings]) -> None:
        super().__init__(root, **settings)
        self.boxes = boxes

    @owned
    def sources(self) -> list[Path]:
        """The lists of images, of their classes and, if `boxes` is True, of their boxes."""
        found = [self._list(PATHS).path, self._list(CLASSES).path]
        if self.boxes:
            found.append(self._list(BOXES).path)
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images in the order of `images.txt`, joined with the other lists by image id."""
        self.sources()  # raises an error if a list is missing
        find_file(self.root, "images")
        path_list = self._list(PATHS)
        image_ids, (paths,) = _read_by_id(path_list, 2)
        path_list.check_unique("path", paths)
        species = self._read_species(image_ids)
        boxes = None
        if self.boxes:
            boxes = self._read_boxes(image_ids)
        splits = {}
        for split, of_split in SPECIES.items():
            images = {}
            rows = []
            for row, (image, path) in enumerate(zip(image_ids, paths)):
                if species[image] in of_split and not _is_macos_metadata(path):
                    images[image] = path
                    rows.append(row)
            self._list(CLASSES).check_not_empty(split, images)
            splits[split] = _make_index(images, species, boxes, ListLines(path_list, rows))
        return splits

    def _list(self, name: str) -> ListFile:
        return ListFile(find_file(self.root, name))

    def _read_species(self, image_ids: Sequence[int]) -> dict[int, int]:
        """Map the id of each image to its class."""
        file = self._list(CLASSES)
        ids, (texts,) = _read_by_id(file, 2)
        self._check_same_ids(image_ids, file, ids)
        species = {}
        for position, (image, text) in enumerate(zip(ids, texts)):
            is_number = re.fullmatch("[0-9]{1,9}", text) is not None
            if not is_number or not 1 <= int(text) <= NUM_CLASSES:
                problem = f"the class must be an integer from 1 to {NUM_CLASSES}, got {text!r} for image {image}"
                raise file.error(problem, position)
            species[image] = int(text)
        return species

    def _read_boxes(self, image_ids: Sequence[int]) -> dict[int, _Box]:
        """Map the id of each image to its box."""
        file = self._list(BOXES)
        ids, sides = _read_by_id(file, 5)
        self._check_same_ids(image_ids, file, ids)
        boxes = {}
        for position, (image, texts) in enumerate(zip(ids, zip(*sides))):
            box = enclosing_pixels(texts)
            if box is None:
                raise file.error(f"a box must be four finite numbers, got {' '.join(texts)!r}", position)
            left, top, right, bottom = box
            if left >= right or top >= bottom:
                problem = f"`boxes` must contain at least one pixel, got {list(box)} for image {image}"
                raise file.error(problem, position)
            boxes[image] = box
        return boxes

    def _check_same_ids(self, image_ids: Sequence[int], other: ListFile, other_ids: Sequence[int]) -> None:
        """Check that `images.txt` and another list have the same image ids."""
        file = self._list(PATHS)
        _check_no_unmatched(file, other.path, set(image_ids).difference(other_ids))
        _check_no_unmatched(other, file.path, set(other_ids).difference(image_ids))


def _read_by_id(file: ListFile, fields: int) -> tuple[list[int], list[list[str]]]:
    """The image ids of a list, and the other columns of the list."""
    id_texts, *columns = file.columns(fields)
    ids = file.integers("image_id", id_texts)
    file.check_unique("image_id", ids)
    return ids, columns


def _check_no_unmatched(file: ListFile, other: Path, unmatched: set[int]) -> None:
    if unmatched:
        raise file.error(
            f"each image_id must be in {file.path.name} and in {other.name}, got {len(unmatched)} in {file.path} that "
            f"are not in {other}, such as {min(unmatched)}"
        )


def _is_macos_metadata(path: str) -> bool:
    """Whether a path is a macOS metadata file `._name`, which is not an image."""
    return path.rpartition("/")[2].startswith("._")


def _make_index(
    images: Mapping[int, str], species: Mapping[int, int], boxes: Mapping[int, _Box] | None, lines: ListLines
) -> ImageIndex:
    """The index of the images of a split; `images` maps image ids to paths."""
    species_of_images = []
    boxes_of_images = []
    for image in images:
        species_of_images.append(species[image])
        if boxes is not None:
            boxes_of_images.append(boxes[image])
    labels, names = class_numbers(species_of_images)
    paths = join_paths("images", images.values())
    return ImageIndex(paths, labels, boxes=boxes_of_images or None, names=names, lines=lines)
