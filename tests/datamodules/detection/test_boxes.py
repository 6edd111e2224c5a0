"""BoxIndex and BoxSet: the objects of each image and its pixels, flipped in training."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.datamodules import BoxIndex, BoxSet
from lightning_retrieval.datamodules.item_seeds import SeededIndex

BOX, OTHER = [1, 2, 5, 6], [0.5, 0, 3, 9]


def test_objects_of_each_image():
    images = [([BOX, OTHER], [2, 1], [False, True]), ([], [], []), ([OTHER], [1], [False])]
    index = BoxIndex(["a", "b", "c"], images, class_names=["cat", "dog"])
    assert len(index) == 3
    for position, (boxes, labels, difficult) in enumerate(images):
        objects = index.objects(position)
        assert objects.boxes.dtype == np.float32
        assert objects.boxes.tolist() == boxes
        assert objects.labels.tolist() == labels
        assert objects.difficult.tolist() == difficult
    assert index.count_objects() == 2
    assert index.count_objects(difficult=True) == 3


BOXES = [[2, 1, 9, 8], [0, 0, 30, 4]]  # the second one is wider than the image


@pytest.fixture
def folder(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path, pixels


def box_set(folder, train=False, boxes=BOXES):
    index = BoxIndex(
        ["a.png"], [(boxes, [3, 1][: len(boxes)], [False, True][: len(boxes)])], class_names=["x", "y", "z"]
    )
    return BoxSet(index, folder, train=train)


def test_evaluation_keeps_difficult_objects_and_cuts_boxes_off_at_the_edges(folder):
    image, target = box_set(folder[0])[0]
    torch.testing.assert_close(image, torch.tensor(folder[1]).permute(2, 0, 1) / 255, rtol=0, atol=1e-7)
    assert target["boxes"].tolist() == [[2, 1, 9, 8], [0, 0, 20, 4]]
    assert target["labels"].tolist() == [3, 1]
    assert target["difficult"].tolist() == [False, True]
    assert target["image_id"] == 0


def test_training_leaves_difficult_objects_out_and_flips_by_the_seed_of_the_item(folder):
    plain, _ = box_set(folder[0])[0]
    seen = set()
    for seed in range(20):
        image, target = box_set(folder[0], train=True)[SeededIndex(0, seed)]
        again, _ = box_set(folder[0], train=True)[SeededIndex(0, seed)]
        assert torch.equal(image, again)
        assert target["labels"].tolist() == [3]
        (left, top, right, bottom) = target["boxes"][0].int().tolist()
        assert (top, bottom, right - left) == (1, 8, 7)
        inside = image[:, top:bottom, left:right]
        expected = plain[:, 1:8, 2:9]
        seen.add(torch.equal(inside, expected))
        assert torch.equal(inside, expected) or torch.equal(inside.flip(-1), expected)
    assert seen == {True, False}


def test_an_image_may_have_no_object(folder):
    for train in (True, False):
        _, target = box_set(folder[0], train, boxes=[])[0]
        assert target["boxes"].shape == (0, 4)
        assert target["labels"].dtype == torch.int64
