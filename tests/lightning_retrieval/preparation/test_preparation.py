"""What is done to an image before the network, against torchvision's transforms and Pillow's `draft`."""

import dataclasses
import io
import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode, v2

from lightning_retrieval.datamodules import ImageIndex, ImageSet, training_transform
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.decoding import read_image
from lightning_retrieval.preparation.prepare import prepare
from tests.datamodules.pictures import write_pictures_of_all_kinds

GREEN = [0, 128, 0]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
BILINEAR = InterpolationMode.BILINEAR
# Older versions of torchvision resize in floating point on some processors, and then round.
RESIZES_UINT8 = v2.functional._geometry._do_native_uint8_resize_on_cpu(BILINEAR)
STEPS = {
    "plain": [v2.Resize(256, BILINEAR), v2.CenterCrop(224)],
    "smooth_ap": [v2.Resize(256, BILINEAR), v2.CenterCrop(224)],
    "roadmap": [v2.Resize((256, 256), BILINEAR), v2.CenterCrop(224)],
    "ap_gem": [],
}


def noise(width, height):
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def by_torchvision(steps, image, mean=MEAN, std=STD):
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    return v2.Compose([*steps, *to_tensor])(image)


def assert_as_torchvision(preparation, steps, image):
    """The same as torchvision's transforms of tensors; with Pillow's filters at most 1 of 255 beside it."""
    mean, std = preparation.mean, preparation.std
    found = preparation(image)
    assert found.dtype == torch.float32
    by_pillow = by_torchvision(steps, image, mean, std)
    if not preparation.takes_pixels:
        assert torch.equal(found, by_pillow)
        return
    by_tensors = by_torchvision(steps, v2.functional.pil_to_tensor(image), mean, std)
    if RESIZES_UINT8:
        assert torch.equal(found, by_tensors)
    assert torch.equal(found, preparation(v2.functional.pil_to_tensor(image)))
    for other in (by_tensors, by_pillow):
        levels = 255 * torch.tensor(std)[:, None, None] * (found - other)
        assert levels.abs().max() < 1.001


@pytest.mark.parametrize("size", [(500, 375), (256, 256), (64, 64), (77, 1001)])
@pytest.mark.parametrize("name", STEPS)
def test_named_preparations_are_torchvisions_bit_for_bit(name, size):
    assert_as_torchvision(Preparation.named(name), STEPS[name], noise(*size))


@pytest.mark.parametrize(
    ("size", "interpolation"), [((1500, 5), "bilinear"), ((5, 1500), "bicubic"), ((1, 700), "nearest")]
)
def test_thin_images_are_torchvisions(size, interpolation):
    steps = [v2.Resize(256, InterpolationMode(interpolation)), v2.CenterCrop(224)]
    assert_as_torchvision(Preparation(224, interpolation=interpolation), steps, noise(*size))


def test_an_image_that_is_too_thin_to_be_resized_is_refused(tmp_path):
    """Its 1,280,000 x 256 pixels would take a gigabyte."""
    noise(1, 5000).save(tmp_path / "thin.png")
    index = ImageIndex(["thin.png"], [0])
    for transform in (Preparation(224), training_transform("roadmap"), Preparation(224, interpolation="bicubic")):
        with pytest.raises(ValueError, match=r"thin\.png"):
            ImageSet(index, tmp_path, transform)[0]
    assert ImageSet(index, tmp_path, Preparation(224, resize=(224, 224)))[0]["images"].shape == (3, 224, 224)


def test_an_image_straight_from_a_file_is_upright(tmp_path):
    """A service passes on what `Image.open` returns; the images of a data set were rotated when they were read."""
    exif = Image.Exif()
    exif[0x0112] = 6  # as phones write it for a picture in portrait format
    noise(50, 30).save(tmp_path / "phone.png", exif=exif)
    preparation = Preparation(image_size=(24, 20))
    wanted = preparation(noise(50, 30).transpose(Image.Transpose.ROTATE_270))
    with Image.open(tmp_path / "phone.png") as file:
        assert torch.equal(preparation(file), wanted)
    assert torch.equal(preparation(read_image(tmp_path / "phone.png")), wanted)  # and not rotated twice


def test_the_reduced_scale_is_that_of_the_upright_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(160, 90).save(tmp_path / "phone.jpg", exif=exif)  # upright 160 high and 90 wide
    preparation = Preparation(image_size=None, resize=(80, 45), reduced_scale=True)
    with Image.open(tmp_path / "phone.jpg") as file:
        found = preparation(file)
    with Image.open(tmp_path / "phone.jpg") as file:
        file.draft(None, (80, 45))
        wanted = preparation(file.transpose(Image.Transpose.ROTATE_270))
    assert torch.equal(found, wanted)


def test_glyphs_are_grey_and_not_normalised():
    image = noise(50, 40)
    grey = np.asarray(image.convert("L").resize((32, 32)))
    wanted = torch.from_numpy(grey.copy())[None].float() * (1 / 255)
    assert torch.equal(Preparation.named("glyphs")(image), wanted)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"image_size": 64}, [v2.Resize(73), v2.CenterCrop(64)]),
        ({"image_size": 64, "resize": 64}, [v2.Resize(64), v2.CenterCrop(64)]),
        ({"image_size": (48, 96)}, [v2.Resize((48, 96))]),
        ({"image_size": (30, 41), "resize": (50, 60)}, [v2.Resize((50, 60)), v2.CenterCrop((30, 41))]),
        ({"image_size": None, "resize": 40}, [v2.Resize(40)]),
        (
            {"image_size": 64, "interpolation": "bicubic", "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)},
            [v2.Resize(73, InterpolationMode.BICUBIC), v2.CenterCrop(64)],
        ),
    ],
)
def test_settings_are_those_of_torchvision(settings, steps):
    preparation = Preparation(**settings)
    for size in [(130, 77), (64, 64), (20, 31)]:
        assert_as_torchvision(preparation, steps, noise(*size))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_and_pil_images_give_the_same(interpolation, channels):
    ones = (1.0,) * channels
    preparation = Preparation(20, channels=channels, mean=ones, std=ones, interpolation=interpolation)
    for image in (noise(40, 31), noise(11, 90)):
        pixels = v2.functional.pil_to_tensor(image)  # in another order in memory
        assert torch.equal(preparation.to_uint8(pixels), preparation.to_uint8(image))


FRAMES = [((48, 96), (48, 96)), (7, (7, 7))]
SHAPES = [(130, 77), (77, 130), (64, 64), (20, 31), (30, 200), (1, 1)]  # width and height


def in_a_frame_by_pillow(image, frame, interpolation, colour):
    height, width = frame
    return ImageOps.pad(image, (width, height), Image.Resampling[interpolation.upper()], color=colour)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("image_size", "frame"), FRAMES)
def test_fit_is_pillows_padding_and_loses_nothing(interpolation, channels, image_size, frame):
    ones = (1.0,) * channels
    settings = {"channels": channels, "mean": ones, "std": ones, "interpolation": interpolation}
    preparation = Preparation(image_size, resize="fit", fill=(250, 120, 10), **settings)
    for size in SHAPES:
        image = noise(*size)
        shown = image.convert("L") if channels == 1 else image
        colour = Image.new("RGB", (1, 1), (250, 120, 10)).convert(shown.mode).getpixel((0, 0))
        found = preparation.to_uint8(image)
        wanted = np.asarray(in_a_frame_by_pillow(shown, frame, interpolation, colour)).reshape(*frame, channels)
        largest = 1 if preparation.takes_pixels else 0
        assert np.abs(found.permute(1, 2, 0).numpy().astype(int) - wanted).max() <= largest, size
        assert torch.equal(found, preparation.to_uint8(v2.functional.pil_to_tensor(image)))


@pytest.mark.parametrize("channels", [1, 3])
def test_fit_pads_with_the_colour_of_the_border(channels):
    """Also if something touches the border, and if the border is transparent."""
    middle = [0.5] * channels
    preparation = Preparation(16, resize="fit", channels=channels, mean=middle, std=middle, background=(7, 7, 7))
    image = Image.new("RGB", (32, 16), (40, 40, 40))
    image.paste((200, 200, 200), (4, 0, 20, 12))
    pixels = preparation.to_uint8(image)
    assert (pixels[:, :4] == 40).all()
    assert (pixels[:, -4:] == 40).all()
    image.putalpha(0)
    assert (preparation.to_uint8(image) == 7).all()


def test_fit_is_recorded():
    preparation = Preparation((20, 30), resize="fit", fill=(1, 2, 3))
    plain = json.loads(json.dumps(preparation.as_dict()))
    assert (plain["resize"], plain["fill"]) == ("fit", [1, 2, 3])
    assert Preparation(**plain) == preparation
    assert preparation.with_size(64) == Preparation(64, resize="fit", fill=(1, 2, 3))


def test_the_two_halves_make_the_whole_also_for_a_batch():
    preparation = Preparation(image_size=20, mean=(0.1, 0.2, 0.3))
    images = [noise(40, 30), noise(41, 30)]
    pixels = torch.stack([preparation.to_uint8(image) for image in images])
    assert pixels.dtype == torch.uint8
    assert torch.equal(preparation.normalize(pixels), torch.stack([preparation(image) for image in images]))
    assert torch.equal(preparation.undo(preparation.normalize(pixels)), pixels)
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    grey = Preparation(channels=1, mean=[0.456], std=[0.224])
    assert torch.equal(grey.undo(grey.normalize(values)), values)


@pytest.mark.parametrize(("background", "shown"), [("white", 255), ((9, 9, 9), 9), ("#000000", 0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_pixels_show_the_background(background, shown, channels):
    middle = [0.5] * channels
    preparation = Preparation(8, background=background, channels=channels, mean=middle, std=middle)
    pixels = preparation.to_uint8(Image.new("RGBA", (10, 10), (200, 0, 0, 0)))
    assert pixels.shape == (channels, 8, 8)
    assert (pixels == shown).all()


def first_row(image, background):
    """The colours of the first row of an image that is not resized."""
    return Preparation(None, background=background).to_uint8(image)[:, 0].T.tolist()


def test_pixels_that_are_half_transparent_show_half_of_the_background():
    image = Image.new("RGBA", (3, 1), (255, 0, 0, 255))  # red: opaque, half and fully transparent
    image.putpixel((1, 0), (255, 0, 0, 128))
    image.putpixel((2, 0), (0, 0, 255, 0))
    assert first_row(image, "white") == [[255, 0, 0], [255, 127, 127], [255, 255, 255]]
    assert first_row(image, GREEN) == [[255, 0, 0], [128, 64, 0], GREEN]


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA"])
def test_modes_with_transparency_show_the_background(mode):
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    image = Image.new(mode, (2, 2)) if mode in ("La", "PA") else clear.convert(mode)  # Pillow 11 makes PA opaque
    assert image.mode == mode
    assert first_row(image, GREEN) == [GREEN] * 2


@pytest.mark.parametrize(("mode", "transparent"), [("1", 0), ("L", 0), ("RGB", (0, 0, 0)), ("P", 0), ("P", b"\0\xff")])
def test_a_transparent_colour_shows_the_background(tmp_path, mode, transparent):
    image = Image.new(mode, (2, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    image.putpixel((1, 0), (255, 255, 255) if mode == "RGB" else 1)
    image.save(tmp_path / "a.png", transparency=transparent)
    with Image.open(tmp_path / "a.png") as file:
        found = first_row(file, GREEN)
    assert found[0] == GREEN
    assert found[1] != GREEN


@pytest.mark.parametrize("name", Preparation.NAMES)
def test_settings_are_plain_data(name):
    preparation = dataclasses.replace(Preparation.named(name), background=(1, 2, 3), reduced_scale=True)
    plain = json.loads(json.dumps(preparation.as_dict()))
    assert yaml.safe_load(yaml.safe_dump(preparation.as_dict())) == plain
    assert Preparation(**plain) == preparation
    assert hash(preparation) == hash(Preparation(**plain))


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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures_of_all_kinds(folder)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("settings", "largest_difference"),
    [
        ({"image_size": 64}, 1),
        ({"image_size": (40, 30), "resize": (41, 45), "background": "#ff8000", "reduced_scale": True}, 1),
        ({"image_size": 48, "interpolation": "bicubic", "background": (1, 2, 3)}, 0),
        ({"image_size": (32, 24), "channels": 1, "mean": (0.2,), "std": (0.3,)}, 0),
        ({"image_size": (40, 30), "resize": "fit", "reduced_scale": True}, 1),
        ({"image_size": 48, "resize": "fit", "fill": "#ff8000", "interpolation": "bicubic"}, 0),
        ({"image_size": 32, "resize": "fit", "channels": 1, "mean": (0.2,), "std": (0.3,), "fill": (9, 90, 200)}, 0),
    ],
)
def test_the_preparation_without_torch_is_the_same(settings, largest_difference, pictures):
    """Only bilinear resizing of colour images differs, since that of tensors does not round as Pillow does."""
    preparation = Preparation(**settings)
    about = json.loads(json.dumps({"preparation": preparation.as_dict(), "input": "uint8"}))
    for path in pictures:
        with Image.open(path) as file:
            wanted = preparation.to_uint8(file)
        with Image.open(path) as file:
            found = prepare(file, about)
        with Image.open(path) as file:
            normalised = prepare(file, {**about, "input": "float"})
        assert (found.dtype, found.shape, normalised.dtype) == (np.uint8, tuple(wanted.shape), np.float32)
        assert np.abs(found.astype(int) - wanted.numpy()).max() <= largest_difference, path.name
        torch.testing.assert_close(torch.from_numpy(normalised), preparation.normalize(torch.from_numpy(found)))
