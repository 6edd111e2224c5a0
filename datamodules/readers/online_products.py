"""Stanford Online Products: products sold on eBay, each with a few photographs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, find_file, join_paths
from lightning_retrieval.invalid import owned

COLUMNS = ("image_id", "class_id", "super_class_id", "path")


class _Products(NamedTuple):
    """The columns of a list."""

    image_ids: list[int]
    class_ids: list[int]
    super_class_ids: list[int]
    paths: list[str]


class StanfordOnlineProducts(ImageDataModule):
    """Stanford Online Products: 120,053 images of 22,634 products, in 12 categories.

    The first half of the products is for training, the second for testing. In the test each image is a query, and all
    other test images are its gallery. The splits are those of `Ebay_train.txt` and `Ebay_test.txt`; the categories are
    the super classes in these lists.

    Args:
        root: the folder that contains `Ebay_train.txt` and the folders of images; or a folder with the lists in
            `Info_Files` and the folders of images in `images`.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the images are missing; the message suggests where they may be.
        ValueError: if the header of a list differs or a line lacks a field; if an id is not an integer or occurs twice;
            if a class is in two super classes.

    Example:
        >>> from pathlib import Path
        >>> from lightning_retrieval.datamodules import StanfordOnlineProducts
        >>> Path("mug_final").mkdir()
        >>> for name, row in {"train": "1 1 9 mug_final/1_0.JPG", "test": "2 2 9 mug_final/2_0.JPG"}.items():
        ...     with open(f"Ebay_{name}.txt", "w") as file:
        ...         print("image_id class_id super_class_id path", row, sep=chr(10), file=file)
        >>> print(StanfordOnlineProducts(".").check())
        split  images  classes  published: images  classes
        train       1        1             59,551   11,318
        test        1        1             60,502   11,316
        missing: mug_final/1_0.JPG
        missing: mug_final/2_0.JPG

    Relations:
        With `sampler="category"` each batch has images of two of the 12 categories, as in FastAP and ROADMAP.

    Source:
        Oh Song, Xiang, Jegelka and Savarese, Deep Metric Learning via Lifted Structured Feature Embedding, CVPR 2016.
    """

    published_counts = MappingProxyType({"train": [(59_551, 11_318)], "test": [(60_502, 11_316)]})

    def __init__(self, root: str | Path, **settings: Unpack[ImageSettings]) -> None:
        super().__init__(root, **settings)

    @owned
    def sources(self) -> list[Path]:
        """The two lists."""
        return [self._list("train").path, self._list("test").path]

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of both lists, in the order of each list."""
        train_list, test_list = self._list("train"), self._list("test")
        train, test = _read_list("train", train_list), _read_list("test", test_list)
        _check_no_shared_id(train_list, train.image_ids, test_list, test.image_ids)
        # The splits share categories, so a category must have the same number in both splits.
        categories, _ = class_numbers(train.super_class_ids + test.super_class_ids)
        folder = self._image_folder(train.paths[0])
        return {
            "train": _make_index(train_list, train, folder, categories[: len(train.paths)]),
            "test": _make_index(test_list, test, folder, categories[len(train.paths) :]),
        }

    def _list(self, split: str) -> ListFile:
        name = f"Ebay_{split}.txt"
        return ListFile(find_file(self.root, name, f"Info_Files/{name}"))

    def _image_folder(self, example: str) -> str:
        """The folder below the root that contains the folders of images."""
        first_part = Path(example).parts[0]
        folder = find_file(self.root, first_part, f"images/{first_part}").parent
        if folder == self.root:
            return ""
        return folder.name


def _read_list(split: str, file: ListFile) -> _Products:
    image_ids, class_ids, super_class_ids, paths = file.columns(len(COLUMNS), header=COLUMNS)
    file.check_not_empty(split, paths)
    products = _Products(
        file.integers("image_id", image_ids, skip=1),
        file.integers("class_id", class_ids, skip=1),
        file.integers("super_class_id", super_class_ids, skip=1),
        paths,
    )
    file.check_unique("image_id", products.image_ids, skip=1)
    _check_one_super_class_each(file, products)
    return products


def _make_index(file: ListFile, products: _Products, folder: str, categories: NDArray[np.int64]) -> ImageIndex:
    paths = products.paths
    if folder:
        paths = join_paths(folder, paths)
    file.check_unique("path", paths, skip=1)
    labels, names = class_numbers(products.class_ids)
    return ImageIndex(paths, labels, categories=categories, names=names, lines=ListLines(file, skip=1))


def _check_no_shared_id(
    train_list: ListFile, train_ids: Sequence[int], test_list: ListFile, test_ids: Sequence[int]
) -> None:
    row_of = dict(zip(train_ids, range(1, len(train_ids) + 1)))
    for row, image in enumerate(test_ids, 1):
        if image in row_of:
            raise test_list.error(
                f"`image_id` must be different in each line of both lists, got {image} twice, in "
                f"{train_list.where(row_of[image])} and in {test_list.where(row)}"
            )


def _check_one_super_class_each(file: ListFile, products: _Products) -> None:
    super_class_of: dict[int, int] = {}
    for row, (product, super_class) in enumerate(zip(products.class_ids, products.super_class_ids), 1):
        first = super_class_of.setdefault(product, super_class)
        if first != super_class:
            problem = f"each class_id must have one super_class_id, got {product} with {first} and with {super_class}"
            raise file.error(problem, row)
