"""Stanford Online Products: products sold on eBay, each with a few photographs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_not_empty, check_unique, parse_integers, read_rows
from lightning_retrieval.datamodules.images.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

COLUMNS = ("image_id", "class_id", "super_class_id", "path")
SPLITS = ("train", "test")


class StanfordOnlineProducts(ImageDataModule):
    """Stanford Online Products: 120,053 images of 22,634 products, in 12 categories.

    The first half of the products is for training, the second for testing. In the test each image is a query, and all
    other test images are its gallery. The splits are those of `Ebay_train.txt` and `Ebay_test.txt`; the categories are
    their super classes.

    Args:
        root: the folder that contains `Ebay_train.txt` and the folders of images; or one that contains the lists in
            `Info_Files` and the folders in `images`.
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`, `on_error`,
            `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`,
            `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`, `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the images are missing; the message suggests where they may be.
        ValueError: if the header of a list differs, a line lacks a field, or an id is not an integer or occurs twice.

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

    def __init__(self, root: str | Path, **settings: Any) -> None:
        super().__init__(root, **settings)

    def sources(self) -> list[Path]:
        """The two lists."""
        return [self._list(split) for split in SPLITS]

    def read(self) -> Mapping[str, ImageIndex]:
        """The images of both lists, in their order."""
        owner = type(self).__name__
        self.sources()  # raises if one is missing
        rows = {split: self._read_rows(split) for split in SPLITS}
        both_lists = self._list("train").with_name("Ebay_{train,test}.txt")
        check_unique(owner, both_lists, "image_id", self._integers_of_both(rows, "image_id"))
        # Both splits have the same categories, which therefore have the same numbers in both.
        categories, _ = class_numbers(self._integers_of_both(rows, "super_class_id"))
        prefix = self._prefix_of_paths(rows["train"][0][3])
        splits = {}
        first = 0
        for split, of_split in rows.items():
            path = self._list(split)
            labels, names = class_numbers(self._integers(split, of_split, "class_id"))
            paths = [prefix + row[3] for row in of_split]
            check_unique(owner, path, "path", paths)
            end = first + len(paths)
            splits[split] = ImageIndex(paths, labels, categories=categories[first:end], names=names)
            first = end
        return splits

    def _list(self, split: str) -> Path:
        name = f"Ebay_{split}.txt"
        return find_file(type(self).__name__, self.root, name, f"Info_Files/{name}")

    def _read_rows(self, split: str) -> list[list[str]]:
        owner, path = type(self).__name__, self._list(split)
        rows = list(read_rows(owner, path, len(COLUMNS), header=COLUMNS))
        check_not_empty(owner, path, split, rows)
        return rows

    def _integers(self, split: str, rows: list[list[str]], column: str) -> list[int]:
        position = COLUMNS.index(column)
        return parse_integers(type(self).__name__, self._list(split), column, [row[position] for row in rows])

    def _integers_of_both(self, rows: Mapping[str, list[list[str]]], column: str) -> list[int]:
        return self._integers("train", rows["train"], column) + self._integers("test", rows["test"], column)

    def _prefix_of_paths(self, example: str) -> str:
        """The folder of the images below the root, with a slash; empty if it is the root."""
        first_part = Path(example).parts[0]
        folder = find_file(type(self).__name__, self.root, first_part, f"images/{first_part}").parent
        if folder == self.root:
            return ""
        return f"{folder.name}/"
