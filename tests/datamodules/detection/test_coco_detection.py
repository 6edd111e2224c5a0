"""CocoDetection: boxes, labels, crowds and images without objects; errors name the file and the entry."""

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


def changed(**lists):
    return json.dumps({**CONTENT, **lists})


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


NAN = float("nan")
ANNOTATION = CONTENT["annotations"][0]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": [\n1,\n', "train.json must be a JSON file, got an error in line 3"),
        ("[]", "train.json must have the list 'images'"),
        (changed(categories=3), "train.json must have the list 'categories'"),
        (changed(images=[3]), "must have objects in 'images', got 3 in entry 0"),
        (changed(images=[{"id": 7}]), "the key 'file_name' of type str, got None in entry 0"),
        (changed(annotations=[{**ANNOTATION, "bbox": "x"}]), "the key 'bbox' of type list, got 'x' in entry 0"),
        (changed(annotations=[{**ANNOTATION, "bbox": [1, 2]}]), r"got \[1, 2\] in annotation 1"),
        (changed(annotations=[{**ANNOTATION, "bbox": [1, 2, 0, 3]}]), r"got \[1, 2, 0, 3\] in annotation 1"),
        (changed(annotations=[{**ANNOTATION, "bbox": [1, NAN, 3, 3]}]), r"got \[1, nan, 3, 3\] in annotation 1"),
        (changed(annotations=[{**ANNOTATION, "image_id": 8}]), "got image_id 8 in annotation 1"),
        (changed(annotations=[{**ANNOTATION, "category_id": 8}]), "got category_id 8 in annotation 1"),
        (changed(images=[CONTENT["images"][0]] * 2), "each image once, got the id 7 twice"),
        (changed(categories=[{"id": 1, "name": "cat"}, {"id": 1, "name": "eel"}]), "each category once, got the id 1"),
        (changed(categories=[{"id": 1, "name": "cat"}, {"id": 2, "name": "cat"}]), "once, got the name 'cat' twice"),
        ("[" * 100_000, "train.json must be a JSON file in COCO's format, got lists in lists"),
        (changed(images=[{"id": 7, "file_name": "../a.png"}]), "inside of `root`, got '../a.png' for image 7"),
        (changed(images=[], annotations=[]), "must have at least one image, got none"),
        (
            changed(annotations=[], categories=[{"id": 1, "name": "eel"}]),
            "`test` must have the categories .* eel, got cat",
        ),
    ],
)
def test_invalid_file(folder, text, message):
    (folder / "train.json").write_text(text)
    with pytest.raises(ValueError, match=f"CocoDetection: .*{message}"):
        module(folder).prepare_data()


@pytest.mark.refusal
def test_missing_file(folder):
    (folder / "test.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"CocoDetection: .*test.json must be a JSON file"):
        module(folder).prepare_data()
