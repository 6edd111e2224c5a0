"""Decoding images: colours, orientation, boxes and pixels of more than 8 bits."""

import os
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile

from lightning_retrieval.datamodules import ImageIndex, ImageSet
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation import decoding
from lightning_retrieval.preparation.decoding import decode, image_files, read_image
from lightning_retrieval.preparation.prepare import open_image, prepare
from tests.datamodules.pictures import as_it_is, picture
from tests.datamodules.trees import truncate

read_pixels = partial(decode, as_pixels=True)


def test_images_are_rgb_and_cropped(tmp_path):
    grid = picture(tmp_path / "a.png")
    picture(tmp_path / "grey.png", "L")
    picture(tmp_path / "cmyk.JPG", "CMYK")
    picture(tmp_path / "palette.png", "P")
    names = ["a.png", "grey.png", "cmyk.JPG", "palette.png"]
    images = ImageSet(ImageIndex(names, range(4)), tmp_path, as_it_is)
    assert [tuple(images[i]["images"].shape) for i in range(4)] == [(4, 6, 3)] * 4
    assert np.array_equal(images[0]["images"], grid)
    assert (images[1]["images"][..., 0] == images[1]["images"][..., 2]).all()
    boxes = ImageSet(ImageIndex(["a.png"] * 2, range(2), boxes=[[1, 2, 3, 4], [-5, -5, 2, 99]]), tmp_path, as_it_is)
    assert np.array_equal(boxes[0]["images"], grid[2:4, 1:3])
    assert np.array_equal(boxes[1]["images"], grid[:, :2])


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def iptc_field(record, dataset, data):
    return struct.pack(">BBBH", 0x1C, record, dataset, len(data)) + data


# Pillow's reader of IPTC opens the content as an image in any format.
IPTC = b"".join(
    [
        iptc_field(3, 60, b"\x01\x00"),
        iptc_field(3, 20, b"\x08"),
        iptc_field(3, 30, b"\x08"),
        iptc_field(3, 120, b"\x05"),
        iptc_field(8, 10, EPS),
    ]
)
NOT_OPENED = {
    "eps": EPS,
    "eps_with_a_preview": b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(EPS)) + bytes(20) + EPS,
    "iptc": IPTC,
    "emf": b"\x01\0\0\0" + bytes(36) + b" EMF" + bytes(100),
    "wmf": b"\xd7\xcd\xc6\x9a\0\0" + bytes(100),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "ole": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
    "fits": b"SIMPLE  =                    T".ljust(80) + bytes(2800),
    "pdf": b"%PDF-1.4\n%%EOF\n",
}


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.parametrize(("kind", "suffix"), [*((kind, "jpg") for kind in NOT_OPENED), ("eps", "eps"), ("iptc", "png")])
def test_formats_that_start_a_program_or_need_a_library_are_never_decoded(tmp_path, monkeypatch, kind, suffix):
    """The fixture `users_folder` fails if a program starts. Ghostscript is looked for once in a process."""
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    path = tmp_path / f"cat.{suffix}"
    path.write_bytes(NOT_OPENED[kind])
    for transform in (as_it_is, Preparation(8)):
        with pytest.raises(ValueError, match=path.name):
            ImageSet(ImageIndex([path.name], [0]), tmp_path, transform)[0]
    with pytest.raises((ValueError, OSError)):
        open_image(path)


def test_the_content_decides_the_format(tmp_path):
    image = Image.new("RGB", (8, 8), (250, 10, 10))
    for kind in ("png", "jpeg", "webp", "bmp", "gif", "tiff", "tga", "ppm"):
        image.save(tmp_path / "a.jpg", format=kind)
        assert np.abs(np.asarray(read_image(tmp_path / "a.jpg"))[0, 0].astype(int) - (250, 10, 10)).max() < 8, kind


def test_a_format_that_another_package_adds_is_read(tmp_path, monkeypatch):
    class Reader(ImageFile.ImageFile):
        format = "RED"

        def _open(self):
            self._size, self._mode = (2, 2), "RGB"
            self.tile = [("raw", (0, 0, 2, 2), 4, ("RGB", 0, 1))]

    (tmp_path / "a.red").write_bytes(b"RED!" + bytes([255, 0, 0]) * 4)
    monkeypatch.setattr(Image, "ID", [*Image.ID, "RED"])
    monkeypatch.setitem(Image.OPEN, "RED", (Reader, lambda start: start.startswith(b"RED!")))
    monkeypatch.setitem(Image.EXTENSION, ".red", "RED")
    assert image_files(tmp_path).paths == ["a.red"]
    assert np.asarray(read_image(tmp_path / "a.red"))[1, 1].tolist() == [255, 0, 0]


def tiff(pixels, photometric=2, planar=1, signed=False, start=b"\0\0", **tags):
    """An uncompressed TIFF file of an array (height, width, samples), or (samples, height, width) if it is planar."""
    height, width, samples = np.moveaxis(pixels, 0, -1).shape if planar == 2 else pixels.shape
    data, bits = pixels.tobytes(), [8 * pixels.dtype.itemsize] * samples
    strips = samples if planar == 2 else 1
    first = 1000
    offsets = [first + strip * len(data) // strips for strip in range(strips)]
    entries = {256: [width], 257: [height], 258: bits, 259: [1], 262: [photometric], 273: offsets, 277: [samples]}
    entries |= {278: [height], 279: [len(data) // strips] * strips, 284: [planar], 339: [1 + signed] * samples}
    entries |= {int(tag[1:]): [value] for tag, value in tags.items()}
    file, later = b"II*\0" + struct.pack("<I", 10) + start + struct.pack("<H", len(entries)), b""
    for tag, values in sorted(entries.items()):
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            later, packed = later + packed, struct.pack("<I", 500 + len(later))
        file += struct.pack("<HHI", tag, 4, len(values)) + packed
    return (file.ljust(500, b"\0") + later).ljust(first, b"\0") + data


DEEP = np.arange(5 * 7 * 3, dtype=np.uint16).reshape(5, 7, 3) * 600
PLANES = np.moveaxis(DEEP, -1, 0)
READ = {
    "16 bits": (tiff(DEEP), DEEP // 256),
    "planes of 8 bits": (tiff((PLANES // 256).astype(np.uint8), planar=2), DEEP // 256),
    "a smaller copy": (tiff(DEEP, t254=0, t330=8), DEEP // 256),
}
WRONGLY_READ = {
    "planes of 16 bits": tiff(PLANES, planar=2),
    "planes of 16 bits, CMYK": tiff(np.concatenate([PLANES, PLANES[:1]]), 5, planar=2),
    "planes of other colours": tiff((PLANES // 256).astype(np.uint8), 6, planar=2),
    "white is zero": tiff(DEEP[..., :1], 0),
    "signed": tiff((DEEP[..., :1] // 512).astype(np.int8), 1, signed=True),
    "raw, as Nikon, Sony and Samsung": tiff(DEEP, t254=1, t330=8),
    "raw, as Adobe": tiff(DEEP, t50706=1),
    "raw, as Canon": tiff(DEEP, start=b"CR"),
}


@pytest.mark.parametrize("name", READ)
def test_a_tiff_file_has_its_pixels(name, tmp_path):
    content, pixels = READ[name]
    (tmp_path / "a.tif").write_bytes(content)
    assert np.abs(np.asarray(read_image(tmp_path / "a.tif")).astype(int) - pixels).max() <= 1


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_a_tiff_file_that_is_not_compressed_is_upright(tmp_path, mode):
    """Pillow maps it into memory."""
    grey = Image.fromarray(DEEP[..., 0] if mode == "I;16" else (DEEP[..., 0] // 256).astype(np.uint8))
    image = grey if grey.mode == mode else grey.convert(mode)
    image.save(tmp_path / "a.tif")
    lying = np.asarray(read_image(tmp_path / "a.tif"))
    turned = [lying, lying[:, ::-1], lying[::-1, ::-1], lying[::-1]]
    turned += [pixels.transpose(1, 0, 2) for pixels in (lying, lying[::-1], lying[::-1, ::-1], lying[:, ::-1])]
    for orientation, wanted in enumerate(turned, 1):
        image.save(tmp_path / "a.tif", tiffinfo={0x0112: orientation})
        assert np.array_equal(np.asarray(read_image(tmp_path / "a.tif")), wanted)


@pytest.mark.refusal
@pytest.mark.parametrize("name", WRONGLY_READ)
def test_a_tiff_file_is_refused_if_other_pixels_would_be_read(name, tmp_path):
    """Some kinds are read wrongly in silence, and of a raw photograph the thumbnail is read."""
    (tmp_path / "a.tif").write_bytes(WRONGLY_READ[name])
    assert Image.open(tmp_path / "a.tif").load() is not None
    with pytest.raises(ValueError, match="it is a"):
        open_image(tmp_path / "a.tif")


@pytest.mark.refusal
def test_an_image_of_more_pixels_than_pillow_opens_says_which_setting_reads_it(tmp_path, monkeypatch):
    picture(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match="MAX_IMAGE_PIXELS = None"):
        read_image(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert read_image(tmp_path / "a.png").size


@pytest.mark.posix
def test_only_regular_files_are_opened(tmp_path):
    """Reading a FIFO or a device need never end, and Pillow opens no documents."""
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    for name in ("fifo.jpg", "device.jpg"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_image(tmp_path / name)
    picture(tmp_path / "folder.jpg" / "a.PNG")
    (tmp_path / "folder.jpg" / "b.pdf").write_text("no image")
    (tmp_path / "gone.png").symlink_to("nowhere.png")  # whoever reads it reports it
    found = image_files(tmp_path)
    assert found.paths == ["device.jpg", "fifo.jpg", "folder.jpg/a.PNG", "gone.png"]
    assert found.others == ["folder.jpg/b.pdf"]


def test_links_to_folders_are_followed_but_no_folder_is_listed_twice(tmp_path):
    """A link may lead to a folder outside, to one of the folder itself, to the folder, or around it."""
    top = tmp_path / "photos"
    for path in (top / "cats" / "a.png", top / "cats" / "deep" / "b.png", tmp_path / "elsewhere" / "dogs" / "c.png"):
        picture(path)
    (top / "dogs").symlink_to(tmp_path / "elsewhere" / "dogs")
    (top / "dogs again").symlink_to("dogs")
    (top / "cats" / "loop").symlink_to(top)
    (top / "cats" / "around").symlink_to(tmp_path)
    (top / "a link to cats").symlink_to("cats")
    (top / ".hidden").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "dogs" / "back").symlink_to(top)
    (tmp_path / "elsewhere" / "dogs" / "other").symlink_to(tmp_path / "elsewhere")
    paths = image_files(top).paths
    assert [path for path in paths if path.startswith("cats/")] == ["cats/a.png", "cats/deep/b.png"]
    assert sorted(os.path.basename(path) for path in paths) == ["a.png", "b.png", "c.png"]
    (tmp_path / "photos too").symlink_to("photos")
    assert image_files(tmp_path / "photos too").paths == paths


@pytest.mark.refusal
def test_a_folder_that_cannot_be_listed_is_not_skipped(tmp_path, as_another_user):
    picture(tmp_path / "photos" / "cats" / "a.png")
    (tmp_path / "photos" / "cats").chmod(0)
    with (
        as_another_user(),
        pytest.raises(OSError, match="photos/cats"),
    ):
        image_files(Path("photos"))
    (tmp_path / "photos" / "cats").chmod(0o755)


@pytest.mark.refusal
def test_a_link_to_a_folder_that_is_gone_is_not_skipped(tmp_path):
    picture(tmp_path / "cats" / "a.png")
    (tmp_path / "dogs").symlink_to("disk/dogs")
    with pytest.raises(FileNotFoundError, match="dogs"):
        image_files(tmp_path)


MALFORMED_EXIF = {
    "text": b"Exif\0\0not a TIFF header",
    "no_header": b"garbage",
    "version": b"Exif\0\0II\x2b\0\x08\0\0\0",
    "offset": b"Exif\0\0MM\0\x2a\xff\xff\xff\xff",
    "type": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\0a\0\0\0\0\0\0\0",
    "number": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",
}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about the metadata
@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, "jpg") for name in MALFORMED_EXIF), ("offset", "png"), ("type", "webp"), ("", "tif")]
)
def test_an_image_with_a_malformed_exif_block_is_upright(tmp_path, name, suffix):
    path = tmp_path / f"a.{suffix}"
    image = Image.new("RGB", (9, 5), "red")
    if suffix == "tif":  # the block is part of the file's own directory
        image.save(path, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0")
    else:
        image.save(path, exif=MALFORMED_EXIF[name])
    assert read_image(path).size == (9, 5)
    assert read_pixels(path).shape == (3, 5, 9)
    assert read_pixels(path, np.array([1, 1, 8, 4])).shape == (3, 3, 7)
    about = {"preparation": Preparation((5, 9)).as_dict(), "input": "uint8"}
    assert prepare(open_image(path), about).shape == (3, 5, 9)


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    """Values are divided by 257 and rounded, so that the largest number is white."""
    ramp = (np.arange(256, dtype=np.int64).reshape(16, 16) * 257).clip(max=65535)
    shades = ramp + np.arange(16) * 8  # up to half a step away
    shades[-1, -1] = 65535
    files = {"a.png": (np.uint16, "I;16"), "b.tif": (">u2", "I;16B"), "c.tif": (np.int32, "I")}
    for name, (dtype, mode) in files.items():
        Image.fromarray(shades.astype(dtype)).save(tmp_path / name)
        with Image.open(tmp_path / name) as file:
            assert file.mode == mode
    (tmp_path / "d.pgm").write_bytes(b"P5 16 16 65535\n" + shades.astype(">u2").tobytes())
    images = ImageSet(ImageIndex([*files, "d.pgm"], range(4)), tmp_path, as_it_is)
    wanted = np.array([[min(int(value / 257 + 0.5), 255) for value in row] for row in shades.tolist()])
    for position in range(4):
        found = images[position]["images"].numpy()
        assert found.shape == (16, 16, 3)
        assert all(np.array_equal(found[..., channel], wanted) for channel in range(3))


def grey_png(bits, values, transparent):
    """The content of a PNG file of one row of grey values, of which one is transparent."""
    row = int("".join(f"{value:0{bits}b}" for value in values).ljust(64, "0"), 2).to_bytes(8)
    header = struct.pack(">IIBBBBB", len(values), 1, bits, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    pixels = zlib.compress(b"\0" + row[: -(-bits * len(values) // 8)])
    for kind, data in ((b"IHDR", header), (b"tRNS", struct.pack(">H", transparent)), (b"IDAT", pixels), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a_transparent_grey_shows_the_background(tmp_path, bits):
    """PNG files hold it in their own number of bits."""
    most = 2**bits - 1
    values = [0, 1, most // 3 * 2, most]
    shades = [[round(value * 255 / most)] * 3 for value in values]
    for position, value in enumerate(values):
        (tmp_path / "a.png").write_bytes(grey_png(bits, values, value))
        wanted = [*shades[:position], [9, 200, 9], *shades[position + 1 :]]
        assert np.asarray(read_image(tmp_path / "a.png", background=(9, 200, 9)))[0].tolist() == wanted


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("values", "boxes"),
    [
        (np.full((4, 4), 0.5, np.float32), None),
        (np.full((4, 4), 65536, np.int32), None),
        (np.full((4, 4), 200, np.int32), None),
        (np.zeros((4, 4), np.uint8), [[9, 9, 12, 12]]),
    ],
)
def test_pixels_of_unknown_range_and_boxes_outside_of_the_image_are_not_guessed(tmp_path, values, boxes):
    Image.fromarray(values).save(tmp_path / "a.tif")
    images = ImageSet(ImageIndex(["a.tif"], [0], boxes=boxes), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=r"a\.tif"):
        images[0]


def test_an_interrupt_is_not_skipped_as_a_damaged_image(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    picture(tmp_path / "a.png")
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, as_it_is, on_error="skip")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", interrupted)
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


@pytest.mark.parametrize(
    ("orientation", "suffix"), [*((orientation, "png") for orientation in UPRIGHT), (6, "tif"), (5, "webp")]
)
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


ENCODINGS = {
    "grey.jpg": ("L", {}),
    "cmyk.jpg": ("CMYK", {}),
    "4_2_0.jpg": ("RGB", {"quality": 90}),
    "4_2_2.jpg": ("RGB", {"quality": 75, "subsampling": 1}),
    "4_4_4.jpg": ("RGB", {"quality": 100, "subsampling": 0}),
    "progressive.jpg": ("RGB", {"quality": 50, "progressive": True}),
    "rotated.jpg": ("RGB", {"exif": 6}),
    "transparent.png": ("RGBA", {}),
    "palette.png": ("P", {}),
    "lossy.webp": ("RGB", {}),
    "named_png.bmp": ("RGB", {}),
}
REDUCED = {name: settings for name, settings in ENCODINGS.items() if name.endswith(".jpg")}


def noise(path, mode, size=(61, 47), exif=None, **settings):
    """Write an image of smooth noise, with an orientation."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 4), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size).convert("RGB" if mode == "CMYK" else "RGBA").convert(mode)
    if exif is not None:
        settings["exif"] = Image.Exif()
        settings["exif"][0x0112] = exif
    image.save(path, **settings)
    return path


def content(pixels):
    """The shape and the bytes of an image."""
    return pixels.shape, pixels.tobytes()


def result(read, *args, **settings):
    """The pixels, or the type of the error."""
    try:
        image = read(*args, **settings)
    except Exception as error:
        return type(error)
    if not isinstance(image, Image.Image):
        image = image.permute(1, 2, 0)
    return content(np.asarray(image))


def assert_same_pixels(path, *args, **settings):
    assert result(read_pixels, path, *args, **settings) == result(read_image, path, *args, **settings)


@pytest.mark.parametrize("name", ENCODINGS)
def test_pixels_are_those_of_pillow(tmp_path, name):
    mode, settings = ENCODINGS[name]
    path = noise(tmp_path / name, mode, **settings)
    assert_same_pixels(path)
    assert_same_pixels(path, np.array([3, 5, 40, 99]))
    if name not in REDUCED:
        assert result(read_pixels, path, least_size=(1, 1)) == result(read_image, path)
    with path.open("rb") as stream:
        assert_same_pixels(stream)


def test_pixels_of_a_picture_of_two_images_are_those_of_the_first(tmp_path):
    first, second = (Image.new("RGB", (32, 16), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[second])
    assert_same_pixels(tmp_path / "a.jpg")


@pytest.mark.parametrize("orientation", range(10))
def test_pixels_are_rotated_and_cropped_as_pillow_does(tmp_path, orientation):
    path = noise(tmp_path / "a.jpg", "RGB", exif=orientation)
    assert_same_pixels(path)
    for before in (False, True):
        assert_same_pixels(path, np.array([-2, 7, 30, 41]), boxes_before_rotation=before)


def test_pillow_decodes_jpegs_for_a_torchvision_without_decoders(tmp_path, monkeypatch):
    """Promise 7: some builds of torchvision have none, and only one of them is installed."""
    path = noise(tmp_path / "a.jpg", "RGB")
    wanted = result(read_pixels, path)
    monkeypatch.setattr(decoding, "decode_image", None)
    assert result(read_pixels, path) == wanted


@pytest.mark.parametrize("progressive", [False, True])
def test_files_that_end_too_early_raise_as_with_pillow(tmp_path, progressive):
    path = noise(tmp_path / "whole.jpg", "RGB", size=(40, 32), progressive=progressive)
    data = path.read_bytes()
    results = []
    for length in [*range(0, len(data), 97), *range(len(data) - 12, len(data) + 1)]:
        path.write_bytes(data[:length])
        assert_same_pixels(path, load_truncated=True)
        assert_same_pixels(path)
        results.append(result(read_pixels, path))
    assert {type(found) for found in results} == {type, tuple}  # errors and pixels


@pytest.mark.parametrize("name", REDUCED)
def test_pixels_at_a_reduced_scale_are_those_of_pillow(tmp_path, name):
    mode, settings = REDUCED[name]
    path = noise(tmp_path / name, mode, (160, 130), **settings)
    assert_same_pixels(path, least_size=(40, 32))
    assert_same_pixels(path, np.array([3, 5, 120, 199]), least_size=(20, 30))
    with Image.open(path) as image:
        image.draft(None, (40, 32))
        wanted = np.asarray(image.convert("RGB"))
    assert wanted.shape[:2] == (33, 40)
    least_size = (32, 40)
    if "exif" in settings:  # 6: to be rotated by 90 degrees, clockwise
        wanted, least_size = np.rot90(wanted, -1), (40, 32)
    for read in (read_image, read_pixels):
        assert result(read, path, least_size=least_size) == content(wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("before", "least_size"), [(False, (20, 30)), (True, (15, 9))])
def test_boxes_are_the_same_part_at_a_reduced_scale(tmp_path, orientation, before, least_size):
    """Smooth pictures, so that the part of the full image, resized, must be close to the part of the reduced one."""
    path = noise(tmp_path / "a.jpg", "RGB", size=(240, 200), exif=orientation, quality=95)
    box = np.array([-9, 16, 120, 176])
    full = read_image(path, box, boxes_before_rotation=before)
    settings = {"boxes_before_rotation": before, "least_size": least_size}
    assert_same_pixels(path, box, **settings)
    reduced = read_image(path, box, **settings)
    divisors = [d for d in (2, 4, 8) if full.height >= d * least_size[0] and full.width >= d * least_size[1]]
    assert reduced.size == (-(-full.width // divisors[-1]), -(-full.height // divisors[-1]))
    assert reduced.height >= least_size[0]
    assert reduced.width >= least_size[1]
    difference = np.asarray(full.resize(reduced.size, Image.Resampling.BOX), int) - np.asarray(reduced)
    assert np.abs(difference).mean() < 3


@pytest.mark.parametrize("read", [read_image, read_pixels])
def test_a_box_is_rounded_outwards_at_a_reduced_scale(tmp_path, read):
    """The box from 9, 23 to 119, 151 of a quarter of the image has the pixels from 2, 5 to 30, 38."""
    path = noise(tmp_path / "a.jpg", "RGB", size=(240, 200))
    with Image.open(path) as image:
        image.draft(None, (60, 50))
        quarter = np.asarray(image)
    found = result(read, path, np.array([9, 23, 119, 151]), least_size=(30, 26))
    assert found == content(quarter[5:38, 2:30])


@pytest.mark.parametrize("least_size", [None, (32, 32)])
def test_truncated_images_are_decoded_if_wanted(tmp_path, least_size):
    path = noise(tmp_path / "a.jpg", "RGB", size=(320, 256))
    whole = np.asarray(read_image(path, least_size=least_size))
    truncate(path, 0.7)
    found = np.asarray(read_image(path, least_size=least_size, load_truncated=True))
    assert found.shape == whole.shape
    assert np.array_equal(found[:4], whole[:4])
    assert not np.array_equal(found, whole)
    assert_same_pixels(path, least_size=least_size, load_truncated=True)
    # Pillow's setting is as before, so that nobody else decodes truncated images.
    assert_same_pixels(path, least_size=least_size)
    assert issubclass(result(read_pixels, path, least_size=least_size), OSError)
