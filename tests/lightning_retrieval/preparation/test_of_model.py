"""The preparation of a backbone: what its weights want, and what a user changes."""

import pytest

from lightning_retrieval.models import Embedder, Preparation
from lightning_retrieval.preparation.of_model import merged_preparation

CROPPED = {"image_size": 240, "resize": 255, "interpolation": "bicubic"}
EXACT = {"image_size": 224, "resize": (256, 256)}


@pytest.mark.parametrize(
    ("of_weights", "wanted", "image_size", "resize"),
    [
        (CROPPED, {}, 240, 255),
        (CROPPED, {"image_size": 480}, 480, 510),
        (CROPPED, {"image_size": 480, "resize": 500}, 480, 500),
        (CROPPED, {"image_size": (32, 64)}, (32, 64), None),
        (EXACT, {"image_size": 112}, 112, (128, 128)),
        ({"image_size": 200, "resize": 200}, {"image_size": 33}, 33, 33),
        ({}, {"image_size": 64}, 64, None),
    ],
)
def test_images_are_resized_in_the_same_proportion_to_another_size(of_weights, wanted, image_size, resize):
    preparation = merged_preparation(of_weights, wanted)
    assert (preparation.image_size, preparation.resize) == (image_size, resize)
    assert preparation.interpolation == of_weights.get("interpolation", "bilinear")


def test_a_preparation_and_a_dict_of_settings():
    mean = {"mean": (0.5, 0.5, 0.5)}
    assert Embedder("resnet18", 8, preparation=mean).preparation == Preparation(**mean)
    assert Embedder("resnet18", 8, preparation=Preparation(64)).preparation == Preparation(64)
    assert Embedder("resnet18", 8, preparation=Preparation(64, resize=64), image_size=96).preparation == Preparation(96)
    assert Embedder("resnet18", 8, image_size=96).image_size == 96


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"preparation": {"size": 64}}, ValueError, "Embedder: `preparation` must have settings among .*, got 'size'"),
        ({"preparation": 64}, TypeError, r"must be a Preparation or a dict of its settings, got 64 \(int\)"),
        ({"image_size": 0}, ValueError, "Embedder: `image_size` must be .*, got 0"),
    ],
)
def test_invalid_preparation(settings, error, message):
    with pytest.raises(error, match=message):
        Embedder("resnet18", 8, **settings)
