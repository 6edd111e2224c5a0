"""BoxIndex: the objects of each image, and what it refuses."""

import numpy as np
import pytest

from lightning_retrieval.datamodules import BoxIndex

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


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("paths", "objects", "error", "message"),
    [
        ("abc", [], TypeError, "`paths`"),
        ([], [], ValueError, "`paths` must have at least one image, got none"),
        (["a"], [], ValueError, "`objects` must have one entry for each path, got 0 for 1 paths"),
        (["a"], [([BOX], [], [])], ValueError, "for each object, got 1, 0 and 0"),
        (["a"], [([BOX], [0], [False])], ValueError, "labels from 1 to 2, the number of classes, got 0 in a;"),
        (["a"], [([BOX], [3], [False])], ValueError, "labels from 1 to 2, the number of classes, got 3 in a;"),
        (["a", "b"], [([], [], []), ([[5, 2, 5, 6]], [1], [0])], ValueError, r"got \[5.0, 2.0, 5.0, 6.0\] in b"),
        (["a"], [([[1, 2, 5, float("nan")]], [1], [0])], ValueError, r"got \[1.0, 2.0, 5.0, nan\] in a"),
    ],
)
def test_invalid_arguments(paths, objects, error, message):
    with pytest.raises(error, match=f"BoxIndex: .*{message}"):
        BoxIndex(paths, objects, class_names=["cat", "dog"])
