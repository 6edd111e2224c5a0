"""The random image transforms of training of the papers."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, RandomResizedCrop, v2

from lightning_retrieval.datamodules import training_transform
from lightning_retrieval.models import Preparation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEPS = {  # as the official code has them; for "ap_gem", the kinds of transforms of Revaud et al., section 4.2
    "plain": [v2.Resize(256), v2.RandomCrop(224), v2.RandomHorizontalFlip()],
    "smooth_ap": [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()],
    "roadmap": [
        v2.Resize(256),
        v2.RandomResizedCrop(224, scale=(0.16, 1.0), ratio=(0.75, 1.33)),
        v2.RandomHorizontalFlip(),
    ],
    "ap_gem": [
        v2.RandomRotation(10, InterpolationMode.BILINEAR),
        v2.RandomResizedCrop(800, scale=(0.5, 1.0)),
        v2.ColorJitter(0.3, 0.3, 0.2, 0.1),
        v2.RandomHorizontalFlip(),
    ],
}


def noise(width=400, height=300):
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def seeded(transform, image):
    torch.manual_seed(7)
    return transform(image)


@pytest.mark.parametrize("name", STEPS)
def test_training_transforms_are_those_of_the_papers(name):
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    official = v2.Compose([*STEPS[name], *to_tensor])
    found, by_pillow = seeded(training_transform(name), noise()), seeded(official, noise())
    if name == "ap_gem":
        assert torch.equal(found, by_pillow)
        return
    pixels = v2.functional.pil_to_tensor(noise())
    assert torch.equal(found, seeded(official, pixels))
    assert torch.equal(found, seeded(training_transform(name), pixels))
    levels = 255 * torch.tensor(STD)[:, None, None] * (found - by_pillow)
    assert levels.abs().max() < 1.001


@pytest.mark.parametrize(("name", "size"), [("plain", (1500, 5)), ("roadmap", (5, 1500))])
def test_thin_images_are_those_of_the_papers(name, size):
    pixels = v2.functional.pil_to_tensor(noise(*size))
    transform = training_transform(name)
    torch.manual_seed(3)
    found = transform.to_uint8(pixels)
    following = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(found, v2.Compose(STEPS[name])(pixels))
    assert torch.equal(following, torch.rand(2))  # as many random numbers were drawn


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", [(1, 1), (1, 40)])
def test_the_smallest_images_are_transformed_with_any_seed(name, size):
    transform = training_transform(name, Preparation(32))
    image = noise(*size)
    for seed in range(8):
        torch.manual_seed(seed)
        assert transform(image).shape == (3, 32, 32)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("settings", [{"interpolation": "lanczos"}, {"channels": 1}])
def test_other_filters_and_grey_images_are_those_of_pillow(name, settings):
    ones = (1.0,) * settings.get("channels", 3)
    preparation = Preparation(64, mean=ones, std=ones, **settings)
    transform = training_transform(name, preparation)
    found = seeded(transform.to_uint8, noise())
    assert torch.equal(found, seeded(v2.Compose([*transform.transforms, v2.PILToTensor()]), noise()))
    assert torch.equal(found, seeded(transform.to_uint8, v2.functional.pil_to_tensor(noise())))


@pytest.mark.parametrize("name", STEPS)
def test_the_filter_is_that_of_the_preparation(name):
    """`nearest` mixes no colours, but "ap_gem" also changes them."""
    image, found = noise().convert("1").convert("RGB"), []
    for interpolation in ("nearest", "bilinear"):
        transform = training_transform(name, Preparation(64, interpolation=interpolation))
        found.append(seeded(transform.to_uint8, image))
    assert not torch.equal(*found)
    assert name == "ap_gem" or found[0].unique().tolist() == [0, 255]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "preparation",
    [
        Preparation(64, mean=(0.5,) * 3, std=(0.25,) * 3, interpolation="bicubic"),
        Preparation((48, 64), resize=(50, 70)),
        Preparation((48, 64), resize="fit", channels=1, mean=(0.5,), std=(0.25,)),
        Preparation(None),
    ],
)
def test_size_and_colours_are_those_of_the_preparation(name, preparation):
    tensor = seeded(training_transform(name, preparation), Image.new("RGB", (100, 90), "white"))
    size = preparation.crop_size or ((800, 800) if name == "ap_gem" else (224, 224))
    assert tuple(tensor.shape) == (preparation.channels, *size)
    white = (1 - torch.tensor(preparation.mean)) / torch.tensor(preparation.std)
    if name != "ap_gem":  # which changes the colours
        assert torch.allclose(tensor.amax((1, 2)), white)


@pytest.mark.parametrize("size", [(400, 300), (90, 260), (50, 50)])
@pytest.mark.parametrize(
    "settings", [{}, {"fill": "red", "interpolation": "bicubic"}, {"channels": 1, "mean": (0.5,), "std": (0.25,)}]
)
def test_plain_training_pads_images_as_evaluation_does_and_cuts_nothing(settings, size):
    preparation = Preparation((48, 64), resize="fit", **settings)
    wanted = preparation(noise(*size))
    transform = training_transform("plain", preparation)
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        image = transform(noise(*size))
        found.append((torch.equal(image, wanted), torch.equal(image, wanted.flip(-1))))
    assert set(found) == {(True, False), (False, True)}


@pytest.mark.parametrize("name", ["smooth_ap", "roadmap", "ap_gem"])
def test_random_crops_are_crops_of_the_padded_image(name):
    preparation = Preparation(48, resize="fit", fill=(0, 0, 0), mean=(0.5,) * 3, std=(0.5,) * 3)
    transform = training_transform(name, preparation)
    shown = set()
    for seed in range(20):
        torch.manual_seed(seed)
        pixels = transform.to_uint8(Image.new("RGB", (120, 60), "white"))
        assert pixels.shape == (3, 48, 48)
        shown |= set(pixels.unique().tolist())
    assert {0, 255} <= shown


@pytest.mark.parametrize("size", [(20, 36), (36, 20), (28, 28)])
@pytest.mark.parametrize("name", ["smooth_ap", "ap_gem"])
def test_no_random_crop_of_the_least_size_is_enlarged(name, size):
    transform = training_transform(name, Preparation(size, reduced_scale=True))
    (crop,) = (step for step in transform.transforms if isinstance(step, v2.RandomResizedCrop))
    height, width = transform.least_size
    torch.manual_seed(0)
    image = torch.zeros(3, height, width)
    crops = torch.tensor([RandomResizedCrop.get_params(image, crop.scale, crop.ratio) for _ in range(2000)])
    beyond = crops[:, 2:].amin(0) - torch.tensor(size)
    assert 0 <= beyond.min() < 4  # no image could be smaller
