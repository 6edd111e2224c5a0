"""Decoding images: colours, orientation, boxes and pixels of more than 8 bits."""

import warnings

import numpy as np
import pytest
from PIL import Image

from lightning_retrieval.datamodules import (
    ImageIndex,
    ImageSet,
)
from tests.datamodules.images.pictures import as_it_is, picture
from tests.datamodules.trees import truncate, write_image


def save(path, values):
    Image.fromarray(values).save(path)
    return path.name


def mode_of(path):
    with Image.open(path) as image:
        return image.mode


def test_images_are_rgb_upright_and_cropped(tmp_path):
    grid = picture(tmp_path / "a.png")
    picture(tmp_path / "grey.png", "L")
    picture(tmp_path / "cmyk.JPG", "CMYK")
    picture(tmp_path / "palette.png", "P")
    rotated = Image.fromarray(grid)
    exif = rotated.getexif()
    exif[0x0112] = 6  # to be rotated by 90 degrees, clockwise
    rotated.save(tmp_path / "rotated.png", exif=exif)
    names = ["a.png", "grey.png", "cmyk.JPG", "palette.png", "rotated.png"]
    images = ImageSet(ImageIndex(names, range(5)), tmp_path, as_it_is)
    assert [tuple(images[i]["images"].shape) for i in range(5)] == [(4, 6, 3)] * 4 + [(6, 4, 3)]
    assert np.array_equal(images[0]["images"], grid)
    assert np.array_equal(images[4]["images"], np.rot90(grid, -1))
    assert (images[1]["images"][..., 0] == images[1]["images"][..., 2]).all()
    boxes = ImageSet(
        ImageIndex(["a.png"] * 3, range(3), boxes=[[1, 2, 3, 4], [-5, -5, 2, 99], [9, 9, 12, 12]]), tmp_path, as_it_is
    )
    assert np.array_equal(boxes[0]["images"], grid[2:4, 1:3])
    assert np.array_equal(boxes[1]["images"], grid[:, :2])
    with pytest.raises(ValueError, match=r"a\.png \(its box \[9, 9, 12, 12\] is outside of its 6 x 4 pixels\)"):
        boxes[2]


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    """Values are divided by 257 and rounded, so that the largest number is white."""
    ramp = (np.arange(256, dtype=np.int64).reshape(16, 16) * 257).clip(max=65535)
    shades = ramp + np.arange(16) * 8  # up to half a step away
    shades[-1, -1] = 65535
    names = [
        save(tmp_path / "a.png", shades.astype(np.uint16)),
        save(tmp_path / "b.tif", shades.astype(">u2")),
        save(tmp_path / "c.tif", shades.astype(np.int32)),
    ]
    (tmp_path / "d.pgm").write_bytes(b"P5 16 16 65535\n" + shades.astype(">u2").tobytes())
    assert {mode_of(tmp_path / name) for name in names} == {"I;16", "I;16B", "I"}
    images = ImageSet(ImageIndex([*names, "d.pgm"], range(4)), tmp_path, as_it_is)
    wanted = np.array([[min(int(value / 257 + 0.5), 255) for value in row] for row in shades.tolist()])
    for position in range(4):
        found = images[position]["images"].numpy()
        assert found.shape == (16, 16, 3)
        assert all(np.array_equal(found[..., channel], wanted) for channel in range(3))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (np.full((4, 4), 0.5, np.float32), "it holds floating-point numbers, whose range"),
        (np.full((4, 4), 65536, np.int32), "it holds 32-bit integers from 65536 to 65536, whose range"),
        (np.full((4, 4), -1, np.int32), "it holds 32-bit integers from -1 to -1"),
        (np.full((4, 4), 200, np.int32), "it holds 32-bit integers from 200 to 200"),
    ],
)
def test_pixels_of_unknown_range_raise(tmp_path, values, sentence):
    images = ImageSet(ImageIndex([save(tmp_path / "a.tif", values)], [0]), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=rf"^ImageSet: cannot read the image {tmp_path}/a\.tif \({sentence}"):
        images[0]


def test_a_palette_with_transparency_is_composed_on_white_without_a_warning(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.save(tmp_path / "a.png", transparency=bytes([255, 128]))
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, as_it_is)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert images[0]["images"][0, 0].tolist() == [227, 177, 152]  # of [200, 100, 50], whose alpha is 128 / 255


@pytest.mark.parametrize("error", [RuntimeError("of a decoder"), NotImplementedError("of another")])
def test_any_error_of_a_decoder_names_the_path(tmp_path, monkeypatch, error):
    picture(tmp_path / "a.png")

    def fails(*_):
        raise error

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fails)
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=rf"^ImageSet: cannot read the image {tmp_path}/a\.png \(of a"):
        images[0]
    images.on_error = "skip"
    with pytest.warns(UserWarning, match="skipped so far: 1"):
        assert images[0]["roles"] == 0
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        images[0]


# What each EXIF orientation does to the pixels of the file, by the standard's description of row 0 and column 0.
UPRIGHT = {
    1: lambda grid: grid,
    2: lambda grid: grid[:, ::-1],
    3: lambda grid: grid[::-1, ::-1],
    4: lambda grid: grid[::-1],
    5: lambda grid: grid.transpose(1, 0, 2),
    6: lambda grid: grid[::-1].transpose(1, 0, 2),
    7: lambda grid: grid[::-1, ::-1].transpose(1, 0, 2),
    8: lambda grid: grid[:, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_boxes_are_in_pixels_of_the_file_or_of_the_upright_image(tmp_path, orientation, suffix):
    grid = picture(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(grid).save(tmp_path / f"b.{suffix}", exif=exif, **options)
    index = ImageIndex([f"b.{suffix}"], [0], boxes=[[1, 0, 3, 4]])
    if suffix != "tif":  # Pillow itself rotates TIFF files when it decodes them
        before = ImageSet(index, tmp_path, as_it_is, boxes_before_rotation=True)
        assert np.array_equal(before[0]["images"], UPRIGHT[orientation](grid[0:4, 1:3]))
    after = ImageSet(index, tmp_path, as_it_is)
    assert np.array_equal(after[0]["images"], UPRIGHT[orientation](grid)[0:4, 1:3])


def test_truncated_images_are_decoded_if_wanted(tmp_path):
    whole = np.asarray(Image.open(write_image(tmp_path / "a.jpg", size=(64, 64))))
    truncate(tmp_path / "a.jpg", 0.7)
    index = ImageIndex(["a.jpg"], [0])
    found = ImageSet(index, tmp_path, as_it_is, load_truncated=True)[0]["images"].numpy()
    assert found.shape == whole.shape
    assert np.array_equal(found[:8], whole[:8])
    assert not np.array_equal(found, whole)
    # Pillow's setting is as before, so that nobody else decodes truncated images.
    with pytest.raises(ValueError, match=r"cannot read the image .*a\.jpg \(.*truncated"):
        ImageSet(index, tmp_path, as_it_is)[0]


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["load_truncated", "boxes_before_rotation"])
def test_settings_of_decoding_that_are_no_flags_raise(tmp_path, name):
    with pytest.raises(TypeError, match=rf"^ImageSet: `{name}` must be True or False, got 'no'"):
        ImageSet(ImageIndex(["a.jpg"], [0]), tmp_path, as_it_is, **{name: "no"})
