"""Stanford Online Products: products sold on eBay, each with a few photographs."""

from collections.abc import Mapping
from types import MappingProxyType

from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule
from lightning_retrieval.datamodules.table import Table, number_splits, read_list
from lightning_retrieval.invalid import owned
from lightning_retrieval.paths import find_file


class StanfordOnlineProducts(ImageDataModule):
    """Stanford Online Products: 120,053 images of 22,634 products, in 12 categories.

    The first half of the products is for training, the second for testing. In the test each image is a query, and all
    other test images are its gallery. The splits are those of `Ebay_train.txt` and `Ebay_test.txt`; the categories are
    the super classes in these lists.

    Args:
        root: the folder that contains `Ebay_train.txt` and the folders of images; or a folder with the lists in
            `Info_Files` and the folders of images in `images`.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if a list or the images are missing.
        ValueError: if the header of a list differs or a line lacks a field; if a class id is not an integer; if an
            image occurs twice.

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

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of both lists, in the order of each list."""
        return number_splits({split: self._table(split) for split in ("train", "test")})

    def _table(self, split: str) -> Table:
        file = find_file(self.root, f"Ebay_{split}.txt", f"Info_Files/Ebay_{split}.txt")
        table = read_list(file, "image_id class_id super_class_id path", header=True)
        table.check_unique("path")
        paths = table["path"]
        first_folder = paths[0].partition("/")[0]
        if find_file(self.root, first_folder, f"images/{first_folder}").parent != self.root:
            paths = [f"images/{path}" for path in paths]
        return table.with_columns(
            path=paths, label=table.parsed("class_id", int), category=table.parsed("super_class_id", int)
        )
