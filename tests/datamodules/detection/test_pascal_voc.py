"""PascalVOC on a small tree in the official layout: counts, boxes, and both years."""

import pytest

from lightning_retrieval.datamodules import PascalVOC
from lightning_retrieval.datamodules.detection.pascal_voc import CLASSES
from tests.datamodules.detection.small_voc import write_set

# image: (name of the class, difficult, box)
TRAIN_2007 = {
    "000005": [("chair", 0, (3, 4, 10, 12)), ("person", 1, (1, 1, 20, 16))],
    "000007": [],
}
TRAIN_2012 = {"2008_000002": [("tvmonitor", None, ("3.5", "4.25", "10", "12"))]}
TEST_2007 = {"000001": [("dog", 0, (2, 2, 9, 9))], "000002": [("train", 0, (1, 1, 20, 16))]}


@pytest.fixture
def devkit(tmp_path):
    write_set(tmp_path / "VOCdevkit" / "VOC2007", "trainval", TRAIN_2007)
    write_set(tmp_path / "VOCdevkit" / "VOC2007", "test", TEST_2007)
    write_set(tmp_path / "VOCdevkit" / "VOC2012", "trainval", TRAIN_2012)
    return tmp_path


def test_both_years_and_both_roots(devkit):
    data = PascalVOC(devkit / "VOCdevkit", train_sets=["VOC2007", "VOC2012"])
    assert data.splits["train"].paths == [
        "VOC2007/JPEGImages/000005.jpg",
        "VOC2007/JPEGImages/000007.jpg",
        "VOC2012/JPEGImages/2008_000002.jpg",
    ]
    assert data.class_names == list(CLASSES)
    assert len(PascalVOC(devkit).train_set) == 2
    assert PascalVOC(devkit).splits["test"].paths[0] == "VOCdevkit/VOC2007/JPEGImages/000001.jpg"


def test_boxes_are_continuous_and_difficult_objects_are_for_evaluation_only(devkit):
    data = PascalVOC(devkit, train_sets=["VOC2007", "VOC2012"])
    objects = data.splits["train"].objects(0)
    assert objects.boxes.tolist() == [[2, 3, 10, 12], [0, 0, 20, 16]]  # inclusive pixels counted from 1
    assert [CLASSES[label - 1] for label in objects.labels] == ["chair", "person"]
    assert objects.difficult.tolist() == [False, True]
    assert data.splits["train"].objects(2).boxes.tolist() == [[2.5, 3.25, 10, 12]]
    assert data.train_set[0][1]["labels"].tolist() == [CLASSES.index("chair") + 1]
    assert data.train_set[1][1]["boxes"].shape == (0, 4)
    assert data.val_set is data.test_set
    (image, target) = data.test_set[0]
    assert image.shape == (3, 16, 20)
    assert target["boxes"].tolist() == [[1, 1, 9, 9]]


def test_check_compares_with_the_published_counts(devkit):
    report = PascalVOC(devkit).check()
    assert report.splits == {"train": ((2, 20), [(5011, 20)]), "test": ((2, 20), [(4952, 20)])}
    assert not report.ok
    (devkit / "VOCdevkit/VOC2007/JPEGImages/000007.jpg").unlink()
    report = PascalVOC(devkit, train_sets=["VOC2007", "VOC2012"]).check()
    assert report.missing_files == ["VOCdevkit/VOC2007/JPEGImages/000007.jpg"]
    assert report.splits["train"] == ((3, 20), [(5011 + 11540, 20)])
    assert any("40,058" in problem for problem in report.problems)  # objects that are not difficult: 12,608 + 27,450
