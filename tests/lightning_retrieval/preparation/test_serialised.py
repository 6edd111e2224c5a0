"""What is recorded of image transforms, and the same transforms from it; those of albumentations as functions."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.serialised import (
    named_transform,
    of_pil_images,
    rebuild_transform,
    recorded_preparation,
    serialise_transform,
)

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def noise():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))


def test_a_preparation_is_the_same_after_plain_data():
    preparation = Preparation((40, 30), interpolation="bicubic", background=(1, 2, 3))
    assert rebuild_transform(json.loads(json.dumps(serialise_transform(preparation)))) == preparation


def own(image):
    return v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (own, f"{__name__}.own"),
        (lambda image: image, None),
        (v2.Compose([own, *TO_TENSOR]), None),
    ],
)
def test_code_of_the_user_has_a_name_or_none(transform, name):
    assert serialise_transform(transform) == {"function": name}


def test_a_function_is_looked_up_if_the_caller_names_it():
    name = f"{__name__}.own"
    assert rebuild_transform({"function": name}, name) is own
    assert rebuild_transform({"function": "__main__.own"}, name) is own  # of a script
    assert rebuild_transform({"function": None}, name) is own  # there is no name to compare with


@pytest.mark.refusal
def test_a_function_is_not_imported_without_its_name(planted):
    name = f"{planted[0]}.Net"
    for given in (None, "os.remove", "plain"):
        with pytest.raises(ValueError, match=name):
            rebuild_transform({"function": name}, given)
    assert planted[0] not in sys.modules


@pytest.mark.refusal
@pytest.mark.parametrize(
    "forged",
    [
        {"class_path": "os.system", "init_args": {"x": 1}},
        {"preparation": {"image_size": 0}},
        {"function": [1]},
        {"function": None, "preparation": {}},
        "text",
    ],
)
def test_other_data_describe_no_transform(forged):
    with pytest.raises(ValueError, match="transform"):
        recorded_preparation(forged)


def test_names_of_callers():
    assert named_transform("roadmap") == Preparation.named("roadmap")
    assert named_transform(f"{__name__}.own") is own


def random_crop():
    albumentations = pytest.importorskip("albumentations")
    to_tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2()
    return albumentations.Compose([albumentations.RandomCrop(8, 8), albumentations.Normalize(), to_tensor])


def test_random_numbers_are_those_of_torchs_seed():
    transform = of_pil_images(random_crop())
    crops = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        crops.append(transform(noise()))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(crops[0], crops[2])
    assert not torch.equal(crops[0], crops[1])
