"""Colours of image files: what transparent pixels show."""

import numpy as np
import pytest
from PIL import Image

from lightning_retrieval.preparation.pixels import check_colour, to_rgb

GREEN = (0, 128, 0)


def half_transparent():
    """Red: opaque, half and fully transparent; under the last pixel is blue."""
    image = Image.new("RGBA", (3, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (255, 0, 0, 128))
    image.putpixel((2, 0), (0, 0, 255, 0))
    return image


def pixels(image):
    return [image.getpixel((column, 0)) for column in range(image.width)]


def test_transparent_pixels_show_the_background():
    assert pixels(to_rgb(half_transparent())) == [(255, 0, 0), (255, 127, 127), (255, 255, 255)]
    assert pixels(to_rgb(half_transparent(), GREEN)) == [(255, 0, 0), (128, 64, 0), GREEN]


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA"])
def test_modes_with_transparency_show_the_background(mode):
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    image = Image.new(mode, (2, 2)) if mode in ("La", "PA") else clear.convert(mode)  # Pillow 11 makes PA opaque
    assert image.mode == mode
    assert pixels(to_rgb(image, GREEN)) == [GREEN] * 2


@pytest.mark.parametrize(("mode", "transparent"), [("1", 0), ("L", 0), ("RGB", (0, 0, 0)), ("P", 0), ("P", b"\0\xff")])
def test_a_transparent_colour_shows_the_background(tmp_path, mode, transparent):
    image = Image.new(mode, (2, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    image.putpixel((1, 0), (255, 255, 255) if mode == "RGB" else 1)
    image.save(tmp_path / "a.png", transparency=transparent)
    with Image.open(tmp_path / "a.png") as file:
        assert "transparency" in file.info
        assert pixels(to_rgb(file, GREEN))[0] == GREEN
        assert pixels(to_rgb(file, GREEN))[1] != GREEN


def test_opaque_images_keep_their_colours():
    values = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    assert np.array_equal(np.asarray(to_rgb(image, GREEN)), values)
    image.putalpha(255)
    assert np.array_equal(np.asarray(to_rgb(image, GREEN)), values)


@pytest.mark.refusal
def test_colours_are_names_or_three_numbers():
    assert check_colour("x", "background", "white") == (255, 255, 255)
    assert check_colour("x", "background", "#ff8000") == (255, 128, 0)
    assert check_colour("x", "background", [1, 2, 3]) == (1, 2, 3)
    with pytest.raises(ValueError, match=r"^x: `background` must be the name of a colour, .* got 'whitish'\.$"):
        check_colour("x", "background", "whitish")
    with pytest.raises(ValueError, match=r"\(red, green, blue\), got \(1, 2\)\.$"):
        check_colour("x", "background", (1, 2))
    with pytest.raises(ValueError, match=r"^x: `background` must be an integer from 0 to 255, got 256\.$"):
        check_colour("x", "background", (1, 2, 256))
    with pytest.raises(TypeError, match=r"got 7 \(int\)\.$"):
        check_colour("x", "background", 7)
