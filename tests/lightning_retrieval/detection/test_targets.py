"""What a batch of a detector may hold, and how the number of classes is found."""

import pytest
import torch
from torch import nn

from lightning_retrieval.detection import TinyFasterRCNN
from lightning_retrieval.detection.targets import check_targets, num_classes

IMAGE = torch.zeros(3, 20, 30)


def target(boxes, labels, **more):
    return {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels), **more}


def test_valid_targets():
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    check_targets("X", [IMAGE, IMAGE], [target([[0, 0, 30, 20]], [2]), nothing], 2)


def test_the_number_of_classes():
    assert num_classes(TinyFasterRCNN(5)) == 5
    assert num_classes(nn.Linear(2, 3)) is None


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (ValueError, r"`targets` must be one for each image, got 2 for 1 images", [target([], []), target([], [])]),
        (TypeError, r"`targets` must have tensors .* lacks \['labels'\] of image 0", [{"boxes": torch.zeros(0, 4)}]),
        (ValueError, r"`boxes` of shape \(objects, 4\) .* got \(1, 4\) and \(2,\)", [target([[0, 0, 1, 1]], [1, 1])]),
        (TypeError, r"`labels` int64, got torch.float32 and torch.float32", [target([[0, 0, 1, 1]], [1.0])]),
        (ValueError, r"`labels` must be from 1 to 2, got 0", [target([[0, 0, 1, 1]], [0])]),
        (ValueError, r"got \[5.0, 0.0, 5.0, 9.0\] in image 0 of 30 x 20 pixels", [target([[5, 0, 5, 9]], [1])]),
        (ValueError, r"got \[0.0, 0.0, 31.0, 9.0\] in image 0", [target([[0, 0, 31, 9]], [1])]),
        (ValueError, r"got \[-1.0, 0.0, 3.0, 9.0\] in image with image_id 7",
         [target([[-1, 0, 3, 9]], [1], image_id=7)]),
        (ValueError, r"got \[nan, 0.0, 3.0, 9.0\] in image 0", [target([[float("nan"), 0, 3, 9]], [1])]),
    ],
)  # fmt: skip
def test_invalid_targets(error, match, given):
    with pytest.raises(error, match=f"^X: .*{match}"):
        check_targets("X", [IMAGE], given, 2)
