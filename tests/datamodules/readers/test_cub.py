"""CUB-200-2011: read as written, trained on; invalid lists raise."""

import pytest

from lightning_retrieval.datamodules.readers.cub import CUB200
from tests.datamodules.trees import write_cub


@pytest.mark.parametrize("boxes", [False, True])
def test_images_are_read_as_they_were_written(tmp_path, boxes):
    written = write_cub(tmp_path)
    splits = CUB200(tmp_path, boxes=boxes).splits
    assert list(splits) == ["train", "test"]
    for split, index in splits.items():
        rows = [row for row in written if (row[2] <= 100) == (split == "train")]
        assert list(index.paths) == [f"images/{name}" for _, name, _, _ in rows]
        assert [int(index.names[label]) for label in index.labels] == [number for _, _, number, _ in rows]
        numbers = {"train": [1, 2, 20, 100], "test": [101, 102, 200]}[split]
        assert index.labels.tolist() == [numbers.index(number) for _, _, number, _ in rows]
        if boxes:  # x 3.5, 4.5, 5.5, y 2, width 20.25, height 30
            assert index.boxes.tolist() == [[3, 2, 24, 32], [4, 2, 25, 32], [5, 2, 26, 32]] * len(numbers)
        else:
            assert index.boxes is None
        assert index.categories is index.roles is None
