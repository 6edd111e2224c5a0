"""The image transforms of the papers."""

import pytest
import torch
from PIL import Image

from lightning_retrieval.datamodules import (
    reference_transform,
)


@pytest.mark.parametrize(
    ("name", "train", "shape"),
    [
        *((name, train, (3, 224, 224)) for name in ("plain", "smooth_ap", "roadmap") for train in (True, False)),
        ("ap_gem", True, (3, 800, 800)),
        ("ap_gem", False, (3, 300, 400)),
    ],
)
def test_reference_transforms_end_in_normalised_tensors(name, train, shape):
    grey = Image.new("RGB", (400, 300), (124, 116, 104))  # the mean
    tensor = reference_transform(name, train=train)(grey)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == torch.float32
    if name != "ap_gem" or not train:  # whose colours are changed
        assert tensor.abs().max() < 0.02


def test_roadmap_resizes_to_a_square_while_the_others_crop():
    wide = Image.new("RGB", (512, 256))
    wide.paste((255, 255, 255), (0, 0, 100, 256))  # the left fifth
    left = {
        name: reference_transform(name, train=False)(wide)[0, 112, 0] > 0 for name in ("plain", "smooth_ap", "roadmap")
    }
    assert left == {"plain": False, "smooth_ap": False, "roadmap": True}


def test_an_unknown_transform_raises():
    with pytest.raises(ValueError, match=r"^reference_transform: `name` must be one of 'plain', .*, got 'x'"):
        reference_transform("x", train=True)
