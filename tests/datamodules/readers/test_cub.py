"""CUB-200-2011: images are read as they were written."""

import pytest

from lightning_retrieval.datamodules import CUB200
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import write_cub

NUMBERS = {"train": [1, 2, 20, 100], "test": [101, 102, 200]}


@pytest.mark.parametrize("boxes", [False, True])
def test_images_are_read_as_they_were_written(tmp_path, boxes):
    written = write_cub(tmp_path)
    data = CUB200(tmp_path, boxes=boxes)
    assert list(data.splits) == list(NUMBERS)
    for split, numbers in NUMBERS.items():
        rows = [row for row in written if row[2] in numbers]
        found = columns(data, split)
        assert found["paths"] == [f"images/{name}" for _, name, _, _ in rows]
        assert found["labels"] == [numbers.index(number) for _, _, number, _ in rows]
        assert list(map(int, found["classes"])) == [number for _, _, number, _ in rows]
        assert found["categories"] is found["roles"] is None
        # Written as x 3.5, 4.5, 5.5, y 2, width 20.25 and height 30.
        wanted = [[3, 2, 24, 32], [4, 2, 25, 32], [5, 2, 26, 32]] * len(numbers)
        assert found["boxes"] == (wanted if boxes else None)
