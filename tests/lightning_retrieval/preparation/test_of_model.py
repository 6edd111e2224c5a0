"""The preparation of a model: what its weights want, and what a user changes."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval import Embedder
from lightning_retrieval.models import Preparation
from tests.lightning_retrieval.models.hugging_face_folders import PROCESSOR, write_folder

OF_PROCESSOR = Preparation((32, 32), 48, interpolation="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def test_a_preparation_and_a_dict_of_settings():
    mean = {"mean": (0.5, 0.5, 0.5)}
    name = "squeezenet1_1"
    assert Embedder(name, 8, preparation=mean).preparation == Preparation(**mean)
    assert Embedder(name, 8, preparation=Preparation(64)).preparation == Preparation(64)
    assert Embedder(name, 8, preparation=Preparation(64, resize=64), image_size=96).preparation == Preparation(96)
    assert Embedder(name, 8, image_size=96).image_size == 96
    fit = Preparation(64, resize="fit", fill="black")
    assert Embedder(name, 8, preparation=fit, image_size=96).preparation == Preparation(96, resize="fit", fill="black")


def test_preparation_of_a_folder_is_what_its_image_processor_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_folder(tmp_path)
    embedder = Embedder(f"hf/{tmp_path}", 8)
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((70, 90), Image.Resampling.BOX)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    expected = torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])
    torch.testing.assert_close(embedder.preparation(image), expected, rtol=0, atol=0.05)  # one step of 255 or two
    assert embedder.image_size == (32, 32)
    assert Embedder(f"hf/{tmp_path}", 8, image_size=64).image_size == 64


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (None, Preparation(32)),  # the size is that of the config
        ({"size": 224}, Preparation(224, 224)),
        ({"size": {"height": 20, "width": 30}}, Preparation((20, 30), (20, 30))),
        ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}, Preparation(40, 40)),
        ({"do_normalize": False}, Preparation(32, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))),
        (PROCESSOR, OF_PROCESSOR),
    ],
)
def test_the_preparation_is_that_of_the_weights(tmp_path, processor, expected):
    pytest.importorskip("transformers")
    write_folder(tmp_path, processor=processor)
    assert Embedder(f"hf/{tmp_path}", 8).preparation == expected


CROPPED = {"do_center_crop": True, "size": {"shortest_edge": 255}, "crop_size": 240}
EXACT = {"do_center_crop": True, "size": {"height": 256, "width": 256}, "crop_size": 224}


@pytest.mark.parametrize(
    ("processor", "wanted", "image_size", "resize"),
    [
        (CROPPED, {}, 240, 255),
        (CROPPED, {"image_size": 480}, 480, 510),
        (CROPPED, {"image_size": 480, "resize": 500}, 480, 500),
        (CROPPED, {"resize": "fit"}, 240, "fit"),
        (EXACT, {"image_size": 112}, 112, (128, 128)),
        (EXACT, {"image_size": 64, "resize": "fit"}, 64, "fit"),
        ({"size": 200}, {"image_size": 33}, 33, 33),
        (None, {"image_size": 64}, 64, None),
    ],
)
def test_images_are_resized_in_the_same_proportion_to_another_size(tmp_path, processor, wanted, image_size, resize):
    pytest.importorskip("transformers")
    write_folder(tmp_path, processor=processor)
    preparation = Embedder(f"hf/{tmp_path}", 8, preparation=wanted).preparation
    assert (preparation.image_size, preparation.resize) == (image_size, resize)
