"""CocoDetection: boxes, labels, crowds and images without objects."""

import json

import pytest
from PIL import Image

from lightning_retrieval.datamodules import CocoDetection

CONTENT = {
    "info": {},
    "images": [
        {"id": 7, "file_name": "a.png", "width": 20, "height": 10},
        {"id": 3, "file_name": "b/c.png", "width": 30, "height": 40},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [2, 1, 7, 5.5], "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 18, "bbox": [0, 0, 20, 10], "iscrowd": 1},
    ],
    "categories": [{"id": 90, "name": "dog"}, {"id": 18, "name": "cat"}],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    Image.new("RGB", (30, 40)).save(tmp_path / "b" / "c.png")
    (tmp_path / "train.json").write_text(json.dumps(CONTENT))
    (tmp_path / "test.json").write_text(json.dumps(CONTENT))
    return tmp_path


def module(folder, **settings):
    return CocoDetection(folder, train="train.json", test=folder / "test.json", **settings)


def write_training(folder, **lists):
    (folder / "train.json").write_text(json.dumps({**CONTENT, **lists}))


@pytest.mark.parametrize("bbox", [[2, 1, 7.5, 0], [2, 1, 0, 3], [0, 0, 0, 0]])
def test_an_object_without_area_is_left_out(folder, bbox):
    """The official file of COCO's training set of 2017 has two of them."""
    flat = {"id": 3, "image_id": 7, "category_id": 90, "bbox": bbox}
    write_training(folder, annotations=[flat, *CONTENT["annotations"]])
    index = module(folder).splits["train"]
    assert [len(index.objects(image).labels) for image in range(2)] == [2, 0]


@pytest.mark.refusal
@pytest.mark.parametrize(
    "lists",
    [
        {"images": [{"id": 7, "file_name": "a.png"}, {"id": 7, "file_name": "b/c.png"}]},  # one would be lost
        {"categories": [{"id": 90}, {"id": 18, "name": "cat"}]},
    ],
)
def test_a_file_that_does_not_say_what_is_what_is_named(folder, lists):
    write_training(folder, **lists)
    with pytest.raises(ValueError, match=r"^CocoDetection: .*train\.json"):
        module(folder).prepare_data()


def test_boxes_labels_and_crowds(folder):
    data = module(folder, val="test.json", batch_size=2)
    assert data.class_names == ["cat", "dog"]  # in the order of the ids, 18 and 90
    assert data.splits["train"].paths == ["a.png", "b/c.png"]
    _, target = data.test_set[0]
    assert target["boxes"].tolist() == [[2, 1, 9, 6.5], [0, 0, 20, 10]]
    assert target["labels"].tolist() == [2, 1]
    assert target["difficult"].tolist() == [False, True]
    assert data.train_set[0][1]["labels"].tolist() == [2]
    assert data.test_set[1][1]["boxes"].shape == (0, 4)
    assert data.val_set is not data.test_set
    report = data.check()
    assert report.ok
    assert report.splits["train"] == ((2, 2), [])
    ((images, _),) = list(data.train_dataloader())
    assert sorted(image.shape[2] for image in images) == [20, 30]
