"""VGGFace2: lists with and without the split, folders without lists, and loose boxes."""

import numpy as np
import pytest
from PIL import Image

from lightning_retrieval.datamodules import VGGFace2
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import begin_with_byte_order_mark, write_vgg_face2

LOOSE = "bb_landmark/loose_bb_train.csv"


@pytest.mark.parametrize(("prefixed", "folder"), [(False, "meta"), (True, "")])
def test_lists_are_read_with_people_in_order(tmp_path, prefixed, folder):
    paths = write_vgg_face2(tmp_path, prefixed, folder)
    begin_with_byte_order_mark(tmp_path / folder / "train_list.txt")
    train, test = (columns(VGGFace2(tmp_path), split) for split in ("train", "test"))
    assert {"train": train["paths"], "test": test["paths"]} == paths
    assert train["classes"] == ["n000002"] * 3 + ["n000010"] * 3 + ["n000007"] * 3
    assert (train["labels"], test["labels"]) == ([0, 0, 0, 2, 2, 2, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    assert train["boxes"] is None


def test_folders_are_read_if_there_are_no_lists(tmp_path):
    paths = write_vgg_face2(tmp_path)
    for split in paths:
        (tmp_path / "meta" / f"{split}_list.txt").unlink()
    write_image(tmp_path / "train" / "n000002" / "9 ß.JPG")
    write_text(tmp_path / "train" / "n000002" / "._0001_01.jpg", "")
    write_text(tmp_path / "train" / "n000002" / "notes.txt", "")
    train = columns(VGGFace2(tmp_path), "train")
    assert train["paths"] == sorted([*paths["train"], "train/n000002/9 ß.JPG"])
    assert train["labels"] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert columns(VGGFace2(tmp_path), "test")["paths"] == paths["test"]


def test_boxes_are_joined_by_name_and_cut_to_the_image(tmp_path):
    """The order of the boxes is another than that of the images, and there are boxes of other images."""
    paths = write_vgg_face2(tmp_path)
    header, *rows = (tmp_path / LOOSE).read_text().splitlines()
    order = [8, 0, 1, 5, 3, 4, 2, 7, 6]
    write_text(tmp_path / LOOSE, "\n".join([header, '"n000099/0001_01",1,2,3,4', *(rows[i] for i in order)]) + "\n")
    data = VGGFace2(tmp_path, boxes=True)
    assert columns(data, "train")["boxes"] == [[-3 - i, i, 17, 30 + i] for i in range(9)]
    assert columns(data, "test")["boxes"] == [[-3 - i, i, 17, 30 + i] for i in range(6)]
    whole = Image.open(tmp_path / paths["train"][4])
    assert np.array_equal(np.asarray(data.train_set.read(4)), np.asarray(whole.crop((0, 4, 17, 34))))
