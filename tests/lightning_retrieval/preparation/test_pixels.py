"""Images as tensors of uint8, against Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.preparation.pixels import (
    centre_crop,
    check_pixels,
    resize_bilinear,
    resize_image,
    size_with_short_side,
    to_image,
    to_pixels,
)

RANDOM = np.random.default_rng(0)


def noise(height, width):
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_an_image_becomes_pixels_and_an_image_again():
    image = noise(5, 7)
    pixels = to_pixels(image)
    assert pixels.shape == (3, 5, 7)
    assert np.array_equal(pixels.permute(1, 2, 0), np.asarray(image))
    assert np.array_equal(to_image(pixels), np.asarray(image))
    assert to_pixels(image.convert("L")).shape == (1, 5, 7)
    pixels[:] = 0  # a copy
    assert np.asarray(image).any()


@pytest.mark.parametrize("size", [(40, 30), (200, 17), (61, 61), (2, 300), (55, 70)])
@pytest.mark.parametrize("cropped", [False, True])
def test_bilinear_is_that_of_pillow_to_1_of_255(size, cropped):
    image = noise(61, 53)
    pixels = to_pixels(image)
    if cropped:
        image, pixels = image.crop((3, 9, 50, 61)), pixels[:, 9:61, 3:50]
    found = resize_bilinear(pixels, *size)
    wanted = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
    assert found.shape == (3, *size)
    assert abs(found.permute(1, 2, 0).numpy() - wanted).max() <= 1
    assert torch.equal(found, resize_bilinear(pixels.contiguous(), *size))


def test_images_of_the_right_size_are_not_resized():
    image = noise(6, 8)
    assert resize_image(image, 6, 8, "lanczos") is image
    pixels = to_pixels(image)
    assert resize_bilinear(pixels, 6, 8) is pixels


@pytest.mark.parametrize(
    ("size", "resized"), [((400, 500), (256, 320)), ((500, 400), (320, 256)), ((3, 100), (256, 8533))]
)
def test_the_short_side_gets_the_length(size, resized):
    assert size_with_short_side(*size, 256) == resized


@pytest.mark.parametrize("size", [(4, 4), (5, 8), (9, 9), (3, 2)])
def test_the_centre_is_that_of_torchvision(size):
    from torchvision.transforms.v2.functional import center_crop

    pixels = to_pixels(noise(9, 9))
    assert torch.equal(centre_crop(pixels, *size), center_crop(pixels, size))


@pytest.mark.refusal
def test_what_is_no_image_raises():
    with pytest.raises(TypeError, match=r"^X: `image` must be a PIL image or a tensor of uint8, got torch.int64\.$"):
        check_pixels("X", "image", torch.zeros(3, 4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^X: `image` must have shape \(3, height, width\), got \(2, 3, 4, 4\)\.$"):
        check_pixels("X", "image", torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
