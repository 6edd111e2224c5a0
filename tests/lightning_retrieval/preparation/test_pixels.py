"""Images as tensors of uint8, against Pillow; and what transparent pixels show."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.preparation.pixels import check_colour, resize_bilinear, to_image, to_pixels
from lightning_retrieval.preparation.prepare import to_rgb

RANDOM = np.random.default_rng(0)
GREEN = (0, 128, 0)


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


def shown(image):
    return [image.getpixel((column, 0)) for column in range(image.width)]


def test_transparent_pixels_show_the_background():
    image = Image.new("RGBA", (3, 1), (255, 0, 0, 255))  # red: opaque, half and fully transparent
    image.putpixel((1, 0), (255, 0, 0, 128))
    image.putpixel((2, 0), (0, 0, 255, 0))
    assert shown(to_rgb(image)) == [(255, 0, 0), (255, 127, 127), (255, 255, 255)]
    assert shown(to_rgb(image, GREEN)) == [(255, 0, 0), (128, 64, 0), GREEN]


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA"])
def test_modes_with_transparency_show_the_background(mode):
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    image = Image.new(mode, (2, 2)) if mode in ("La", "PA") else clear.convert(mode)  # Pillow 11 makes PA opaque
    assert image.mode == mode
    assert shown(to_rgb(image, GREEN)) == [GREEN] * 2


@pytest.mark.parametrize(("mode", "transparent"), [("1", 0), ("L", 0), ("RGB", (0, 0, 0)), ("P", 0), ("P", b"\0\xff")])
def test_a_transparent_colour_shows_the_background(tmp_path, mode, transparent):
    image = Image.new(mode, (2, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    image.putpixel((1, 0), (255, 255, 255) if mode == "RGB" else 1)
    image.save(tmp_path / "a.png", transparency=transparent)
    with Image.open(tmp_path / "a.png") as file:
        assert "transparency" in file.info
        assert shown(to_rgb(file, GREEN))[0] == GREEN
        assert shown(to_rgb(file, GREEN))[1] != GREEN


@pytest.mark.refusal
def test_colours_are_names_or_three_numbers():
    assert check_colour("background", "white") == (255, 255, 255)
    assert check_colour("background", "#ff8000") == (255, 128, 0)
    assert check_colour("background", [1, 2, 3]) == (1, 2, 3)
    for value, error in (("whitish", ValueError), ((1, 2), ValueError), ((1, 2, 256), ValueError), (7, TypeError)):
        with pytest.raises(error, match=r"^`background` must be .* got "):
            check_colour("background", value)
