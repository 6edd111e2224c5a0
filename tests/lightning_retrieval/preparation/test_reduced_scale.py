"""Decoding at a reduced scale, against Pillow's `draft` called by hand."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.pixels import reduce_scale


def encoded(size, kind="JPEG", mode="RGB", **settings):
    """A file of smooth noise."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(stream, kind, **settings)
    return stream


def by_hand(stream, divisor):
    """The pixels of the file at a half, a quarter or an eighth, by Pillow alone."""
    with Image.open(stream) as image:
        if divisor > 1:
            image.draft(image.mode, (image.width // divisor, image.height // divisor))
        assert image.size != (0, 0)
        return image.convert("RGB")


def largest_divisor(size, least_size):
    """The divisor, by the lengths of all scales."""
    width, height = size
    allowed = [d for d in (1, 2, 4, 8) if d == 1 or (height / d >= least_size[0] and width / d >= least_size[1])]
    return allowed[-1]


@pytest.mark.parametrize("size", [(640, 480), (641, 479), (480, 640), (63, 255), (17, 17), (16, 16), (31, 900)])
@pytest.mark.parametrize("least_size", [(16, 16), (60, 60), (30, 80), (120, 160), (1, 1)])
def test_a_jpeg_is_decoded_at_the_smallest_scale_that_is_large_enough(size, least_size):
    stream = encoded(size)
    divisor = largest_divisor(size, least_size)
    with Image.open(stream) as image:
        assert reduce_scale(image, least_size) == divisor
        assert image.size == (-(-size[0] // divisor), -(-size[1] // divisor))
        assert divisor == 1 or (image.height >= least_size[0] and image.width >= least_size[1])
        assert np.array_equal(image.convert("RGB"), by_hand(stream, divisor))


@pytest.mark.parametrize("settings", [{"mode": "L"}, {"mode": "CMYK"}, {"progressive": True}, {"kind": "MPO"}])
def test_other_jpegs_are_reduced_too(settings):
    stream = encoded((90, 70), **settings)
    with Image.open(stream) as image:
        mode = image.mode
        assert reduce_scale(image, (16, 16)) == 4
        assert (image.size, image.mode) == ((23, 18), mode)
        assert np.array_equal(image.convert("RGB"), by_hand(stream, 4))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_other_formats_are_left_as_they_are(kind):
    with Image.open(encoded((90, 70), kind)) as image:
        assert reduce_scale(image, (1, 1)) == 1
        assert image.size == (90, 70)


def test_images_that_are_decoded_already_are_left_as_they_are():
    with Image.open(encoded((90, 70))) as image:
        image.load()
        assert reduce_scale(image, (1, 1)) == 1
        assert image.size == (90, 70)
    with Image.open(encoded((90, 70))) as image:
        assert reduce_scale(image, (16, 16)) == 4
        assert reduce_scale(image, (1, 1)) == 1  # Pillow reduces a file once
        assert reduce_scale(Image.new("RGB", (90, 70)), (1, 1)) == 1


def test_the_scale_is_that_of_a_part_if_only_that_is_used():
    with Image.open(encoded((160, 160))) as image:
        assert reduce_scale(image, (20, 10), part=(40, 80)) == 2
        assert image.size == (80, 80)
    with Image.open(encoded((160, 160))) as image:
        assert reduce_scale(image, (20, 10), part=(39, 80)) == 1
    with Image.open(encoded((160, 160))) as image:
        assert reduce_scale(image, None) == 1
        assert image.size == (160, 160)


@pytest.mark.parametrize(
    ("settings", "least_size", "divisor"),
    [
        ({"image_size": 28}, (32, 32), 4),
        ({"image_size": 56, "resize": 60}, (60, 60), 2),
        ({"image_size": (20, 30)}, (20, 30), 4),
        ({"image_size": 28, "interpolation": "bicubic"}, (32, 32), 4),
        ({"image_size": 28, "channels": 1, "mean": (0.5,), "std": (0.5,)}, (32, 32), 4),
        ({"image_size": None, "resize": 70}, (70, 70), 2),
        ({"image_size": None}, None, 1),
        ({"image_size": 224}, (256, 256), 1),
    ],
)
def test_a_preparation_reduces_a_file_that_is_not_decoded_yet(settings, least_size, divisor):
    stream, preparation = encoded((200, 150)), Preparation(**settings, reduced_scale=True)
    assert preparation.least_size == least_size
    with Image.open(stream) as image:
        found = preparation.to_uint8(image)
    assert torch.equal(found, Preparation(**settings).to_uint8(by_hand(stream, divisor)))
    with Image.open(stream) as image:
        full = Preparation(**settings).to_uint8(image)
    assert Preparation(**settings).least_size is None
    assert torch.equal(full, Preparation(**settings).to_uint8(by_hand(stream, 1)))
    assert torch.equal(full, found) == (divisor == 1)
    assert (full.int() - found.int()).abs().float().mean() < 4


def test_it_is_part_of_the_plain_data_of_a_preparation():
    preparation = Preparation(64, reduced_scale=True)
    assert Preparation(**preparation.as_dict()) == preparation
    assert preparation.as_dict()["reduced_scale"] is True
    assert preparation.with_size(32).least_size == (37, 37)


@pytest.mark.refusal
def test_a_number_is_no_flag():
    with pytest.raises(TypeError, match=r"^Preparation: `reduced_scale` must be True or False, got 1"):
        Preparation(reduced_scale=1)
