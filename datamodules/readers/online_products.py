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


class StanfordOnlineProducts(ImageDataModule):
    """Stanford Online Products: 120,053 images of 22,634 products, in 12 categories.

    The first half of the products is for training, the other for the test, in which each image is ranked for against
    all others. The splits are those of `Ebay_train.txt` and `Ebay_test.txt`, the categories their super classes.

    Args:
        root: the folder that holds `Ebay_train.txt` and the folders of images; or one that holds `Info_Files` with the
            lists and `images` with the folders.
        settings: those of `ImageDataModule`: `transform`, `on_error`, `num_workers` and so on.

    Raises:
        FileNotFoundError: if the lists or the images are not there, saying where they may be.
        ValueError: if a list has another header, lines with missing fields, or ids that are no integers or come twice.

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
        With `sampler="category"` the images of a batch are of two of the 12 categories, as in FastAP and ROADMAP.

    Source:
        Oh Song, Xiang, Jegelka and Savarese, Deep Metric Learning via Lifted Structured Feature Embedding, CVPR 2016.
    """

    published_counts = MappingProxyType({"train": [(59_551, 11_318)], "test": [(60_502, 11_316)]})

    def __init__(self, root: str | Path, **settings: Any) -> None:
        super().__init__(root, **settings)

    def sources(self) -> list[Path]:
        """The two lists."""
        return [self._list(split) for split in ("train", "test")]

    def read(self) -> Mapping[str, ImageIndex]:
        """The images of both lists, in their order."""
        who = type(self).__name__
        lists = dict(zip(("train", "test"), self.sources()))
        rows = {split: list(read_rows(who, path, 4, header=COLUMNS)) for split, path in lists.items()}
        for split, path in lists.items():
            check_not_empty(who, path, split, rows[split])
        every = [*rows["train"], *rows["test"]]
        both = lists["train"].with_name("Ebay_{train,test}.txt")
        ids, groups = (
            [
                number
                for split, path in lists.items()
                for number in parse_integers(who, path, name, [row[column] for row in rows[split]])
            ]
            for column, name in ((0, "image_id"), (2, "super_class_id"))
        )
        check_unique(who, both, "image_id", ids)
        categories, _ = class_numbers(groups)
        first = Path(every[0][3]).parts[0]
        folder = find_file(who, self.root, first, f"images/{first}").parent
        prefix = "" if folder == self.root else f"{folder.name}/"
        splits, begin = {}, 0
        for split, path in lists.items():
            labels, names = class_numbers(parse_integers(who, path, "class_id", [row[1] for row in rows[split]]))
            paths = [prefix + row[3] for row in rows[split]]
            check_unique(who, path, "path", paths)
            end = begin + len(paths)
            splits[split] = ImageIndex(paths, labels, categories=categories[begin:end], names=names)
            begin = end
        return splits

    def _list(self, split: str) -> Path:
        name = f"Ebay_{split}.txt"
        return find_file(type(self).__name__, self.root, name, f"Info_Files/{name}")
