"""A dataset of images in the rows of a data set of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning_retrieval.datamodules.images.hugging_face_rows import file_of_row
from lightning_retrieval.datamodules.images.image_index import ImageIndex
from lightning_retrieval.datamodules.images.image_set import ImageSet


def row_path(split: str, row: int) -> str:
    """What an `ImageIndex` holds as the path of an image: its split and its row."""
    return f"{split}/{row}"


def parse_row_path(path: str) -> tuple[str, int]:
    """The split and the row of the image with this path."""
    split, _, row = path.rpartition("/")
    return split, int(row)


class HuggingFaceSet(ImageSet):
    """An `ImageSet` whose images are rows of memory-mapped tables instead of files.

    Args:
        index: labels and other annotations; its paths are made by `row_path`.
        root: the data set's folder, or its name.
        transform: as for `ImageSet`.
        tables: the splits, with images that are not decoded.
        image_column: name of the column of images.
        settings: further settings of `ImageSet`.
    """

    def __init__(
        self,
        index: ImageIndex,
        root: str | Path,
        transform: Any,
        *,
        tables: Mapping[str, Any],
        image_column: str,
        **settings: Any,
    ) -> None:
        super().__init__(index, root, transform, **settings)
        self.tables = dict(tables)
        self.image_column = image_column

    def file(self, position: int) -> Path | BinaryIO:
        """The encoded image: its bytes in memory, or the path of its file."""
        split, row = parse_row_path(self.index.paths[position])
        return file_of_row(self.tables[split], self.image_column, row, self.root)
