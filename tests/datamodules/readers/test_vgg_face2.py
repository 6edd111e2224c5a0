"""VGGFace2: lists with and without the split, folders without lists, boxes, trained on; invalid lists raise."""

import numpy as np
import pytest
from PIL import Image

from lightning_retrieval.datamodules.readers.vgg_face2 import VGGFace2
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import begin_with_byte_order_mark, write_vgg_face2

refusal = pytest.mark.refusal


@pytest.mark.parametrize("folder", ["", "meta"])
@pytest.mark.parametrize("prefixed", [False, True])
def test_lists_are_read_with_people_in_order(tmp_path, prefixed, folder):
    paths = write_vgg_face2(tmp_path, prefixed, folder)
    begin_with_byte_order_mark(tmp_path / folder / "train_list.txt")
    splits = VGGFace2(tmp_path).splits
    assert {split: list(index.paths) for split, index in splits.items()} == paths
    assert list(splits["train"].names) == ["n000002", "n000007", "n000010"]
    assert splits["train"].labels.tolist() == [0, 0, 0, 2, 2, 2, 1, 1, 1]
    assert splits["test"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert splits["train"].boxes is None


def test_folders_are_read_if_there_are_no_lists(tmp_path):
    paths = write_vgg_face2(tmp_path)
    for split in paths:
        (tmp_path / "meta" / f"{split}_list.txt").unlink()
    write_image(tmp_path / "train" / "n000002" / "9 ß.JPG")
    write_text(tmp_path / "train" / "n000002" / "._0001_01.jpg", "")
    write_text(tmp_path / "train" / "n000002" / "notes.txt", "")
    splits = VGGFace2(tmp_path, cache_dir=tmp_path / "cache").splits
    assert list(splits["train"].paths) == sorted([*paths["train"], "train/n000002/9 ß.JPG"])
    assert splits["train"].labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert list(splits["test"].paths) == paths["test"]
    write_image(tmp_path / "test" / "n000001" / "more.jpg")
    assert len(VGGFace2(tmp_path, cache_dir=tmp_path / "cache").splits["test"]) == 7


def reorder(path, order):
    header, *rows = path.read_text().splitlines()
    write_text(path, "\n".join([header, *(rows[i] for i in order)]) + "\n")


@pytest.mark.parametrize("order", [range(9), [8, 0, 1, 5, 3, 4, 2, 7, 6]])
def test_boxes_are_joined_by_name_and_cut_to_the_image(tmp_path, order):
    paths = write_vgg_face2(tmp_path)
    reorder(tmp_path / "bb_landmark" / "loose_bb_train.csv", order)
    data = VGGFace2(tmp_path, boxes=True)
    wanted = [[-3 - i, i, 17, 30 + i] for i in range(9)]
    assert data.splits["train"].boxes.tolist() == wanted
    assert data.splits["test"].boxes.tolist() == wanted[:6]
    whole = Image.open(tmp_path / paths["train"][4])
    assert np.array_equal(np.asarray(data.train_set.read(4)), np.asarray(whole.crop((0, 4, 17, 34))))


def test_boxes_of_other_images_are_ignored(tmp_path):
    paths = write_vgg_face2(tmp_path)
    write_text(tmp_path / "meta" / "train_list.txt", f"{paths['train'][7]}\n{paths['train'][1]}\n")
    data = VGGFace2(tmp_path, boxes=True)
    assert data.splits["train"].boxes.tolist() == [[-10, 7, 17, 37], [-4, 1, 17, 31]]


@refusal
def test_folders_without_images_raise(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    with pytest.raises(ValueError, match="must contain lists, or images as train/<person>/<image>, got none in"):
        VGGFace2(tmp_path).prepare_data()


@refusal
def test_the_list_of_another_data_set_is_not_suggested(tmp_path):
    write_text(tmp_path / "VehicleID_V1.0" / "train_test_split" / "train_list.txt", "0000001 7\n")
    (tmp_path / "faces").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train_list.txt, got .*faces, .* no folder near it contains one\.$"):
        VGGFace2(tmp_path / "faces").prepare_data()
