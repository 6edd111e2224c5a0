"""Prepares images for an exported model; needs only Pillow and NumPy, and `export` copies this file next to the model.

    import json

    import onnxruntime
    from exported.prepare import open_image, prepare

    session = onnxruntime.InferenceSession("exported/model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["lightning_retrieval"])
    images = prepare(open_image("query.jpg"), about)[None]
    (embeddings,) = session.run(None, {"images": images})

`Preparation` uses the same functions, so a service prepares images as the evaluation of the model did. The only
difference is bilinear resizing of colour images: `Preparation` resizes tensors, whose values differ by at most 1 of
255.

Colours are converted to 8-bit RGB; transparent pixels show a background. JPEGs may be decoded at a half, a quarter or
an eighth of their size, which libjpeg does much faster than at full size. libjpeg averages squares of pixels, almost
like a box filter, so the pixels after resizing differ from those at full size.
"""

import functools
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    IMAGELENGTH,
    IMAGEWIDTH,
    PHOTOMETRIC_INTERPRETATION,
    PLANAR_CONFIGURATION,
    SAMPLEFORMAT,
    TiffImageFile,
)

Size = tuple[int, int]  # height and width
Box = tuple[int, int, int, int]  # top, left, bottom and right
Resize = int | Sequence[int] | str | None  # the setting of `Preparation`
Fill = str | Sequence[int]  # the setting of `Preparation`

FIT = "fit"  # the value of `resize` with which images are padded instead of cropped
BORDER = "border"  # the value of `fill` that stands for the colour of the image's border
PROGRAMS = ("model.onnx", "model.int8.onnx", "model.pt2")  # files of an export that hold the values about it
WHITE = (255, 255, 255)
ORIENTATION = 0x0112  # number of the EXIF tag
TRANSPOSED = (5, 6, 7, 8)  # values of the EXIF tag for which height and width are swapped
ROTATIONS = {  # how to make an image upright, by the value of the EXIF tag; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MOST_RESIZED = 2**28  # pixels to which an image is enlarged at most: those of the largest `image_size`
DIVISORS = (8, 4, 2)  # possible divisors of the size of a JPEG
# The formats of Pillow's own readers that are opened. Its other readers start a program (Ghostscript for EPS, also for
# an EPS in an IPTC file), use a library of the system (WMF) or of another package (FPX, MIC), only identify a file, or
# take minutes and gigabytes for a small file (FITS).
FORMATS = (
    *("AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FLI", "FTEX", "GBR"),
    *("GIF", "ICNS", "ICO", "IM", "JPEG", "JPEG2000", "MPO", "MSP", "PCD", "PCX", "PIXAR"),
    *("PNG", "PPM", "PSD", "QOI", "SGI", "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM"),
)
# Tags of TIFF files, on which the photographs of cameras in their own formats are built.
SUBFILE_TYPE, SUB_FILES, DNG_VERSION = 254, 330, 50706
SMALLER = (1, 3, 5, 7)  # values of `SUBFILE_TYPE` for a smaller copy of another image in the file
WHITE_IS_ZERO, RGB, CMYK = 0, 2, 5  # values of `PHOTOMETRIC_INTERPRETATION`
SIGNED = 2  # value of `SAMPLEFORMAT`
CANON = b"CR"  # bytes 8 and 9 of Canon's files, CR2
# Factors by which Pillow scales the values of grey PNG files of 2 and 4 bits, but not the transparent one.
FACTORS = {"L;2": 85, "L;4": 17}
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The values in `preparation.json` in the folder of an export, with which all programs there were exported.

    Args:
        folder: the folder, with any of the programs.

    Raises:
        FileNotFoundError: if the folder has no `preparation.json`, because it is no export or not a complete one.
        ValueError: if a program in the folder is of another export.
    """
    about: dict[str, Any] = json.loads(Path(folder, "preparation.json").read_text(encoding="utf-8"))
    settings = json.dumps(about).encode()  # in the form in which the programs hold them
    for name in PROGRAMS:
        file = Path(folder, name)
        if file.exists() and settings not in file.read_bytes():
            raise ValueError(
                f"read_settings: {file} must be of the export that wrote preparation.json beside it, but is of another "
                "one; export the model again."
            )
    return about


def prepare(image: Image.Image, about: Mapping[str, Any]) -> NDArray[Any]:
    """The input of an exported model for one image: an array (channels, height, width) of uint8 or float32.

    Args:
        image: an image of any mode, as `open_image` returns it. A converted image keeps no EXIF orientation.
        about: what `read_settings` returns, which is also in the metadata of the ONNX file.

    Raises:
        ValueError: if the range of the pixel values is unknown (see `to_rgb`).
    """
    settings = about["preparation"]
    target = size_before_crop(settings["image_size"], settings["resize"])
    least_size = None
    if settings["reduced_scale"] and target is not None:
        least_size = pair(target)
    image = in_colours(image, settings["channels"], colour(settings["background"]), least_size)
    frame, is_padded = pair(settings["image_size"]), settings["resize"] == FIT
    if is_padded:
        size = fitted_size(image.height, image.width, frame)
    else:
        size = resized_size(image.height, image.width, target)
    image = resize_image(image, *size, settings["interpolation"])
    pixels: NDArray[np.uint8] = np.array(image).reshape(*size, settings["channels"])
    if is_padded:
        pixels = padded(pixels, frame, settings["fill"])
    else:
        top, left, bottom, right = centre_box(*size, frame)
        pixels = pixels[top:bottom, left:right]
    pixels = pixels.transpose(2, 0, 1)
    if about["input"] == "uint8":
        return np.ascontiguousarray(pixels)
    mean, std = (np.array(settings[name], np.float32)[:, None, None] for name in ("mean", "std"))
    normalised: NDArray[np.float32] = (pixels * np.float32(1 / 255) - mean) / std
    return normalised


def open_image(file: Any) -> ImageFile.ImageFile:
    """Open an image file as `PIL.Image.open` does, but only a regular file, and only in the formats of `image_formats`.

    The content decides the format, not the suffix.

    Args:
        file: path of the file, or its content as a binary stream.

    Raises:
        ValueError: if the path is a FIFO, a socket, a device or a folder, the image has more pixels than Pillow opens,
            or it is a TIFF file that Pillow would read wrongly, or of which it would read a thumbnail.
        OSError: if the file cannot be read, or its content has none of the formats.
    """
    if isinstance(file, (str, os.PathLike)) and not stat.S_ISREG(os.stat(file).st_mode):
        raise ValueError("it is not a regular file, but a folder, a FIFO, a socket or a device")
    try:
        image = Image.open(file, formats=image_formats())
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error}; set PIL.Image.MAX_IMAGE_PIXELS = None to read images of any size") from None
    if isinstance(image, TiffImageFile):
        image.filename = (
            ""  # Pillow maps a file with a name into memory, with the height and width of the upright image
        )
        try:
            _check_tiff(image)
        except Exception:
            image.close()
            raise
    for tile in image.tile:
        if tile[3] in FACTORS and "transparency" in image.info:
            image.info["transparency"] *= FACTORS[tile[3]]
    return image


def _check_tiff(image: TiffImageFile) -> None:
    """Raise for a file of which Pillow would give a thumbnail, or other pixels than those in it."""
    tags = image.tag_v2
    file: Any = image.fp
    position = file.tell()
    file.seek(8)
    is_of_canon = file.read(2) == CANON
    file.seek(position)
    if DNG_VERSION in tags or (SUB_FILES in tags and tags.get(SUBFILE_TYPE) in SMALLER) or is_of_canon:
        raise ValueError("it is a raw photograph, of which Pillow reads a thumbnail; convert it to JPEG or TIFF")
    bits, colours = tags.get(BITSPERSAMPLE, (1,)), tags.get(PHOTOMETRIC_INTERPRETATION)
    is_planar = len(bits) > 1 and tags.get(PLANAR_CONFIGURATION) == 2
    if (
        (is_planar and (max(bits) > 8 or colours not in (RGB, CMYK)))
        or (colours == WHITE_IS_ZERO and max(bits) > 8)
        or (max(bits) <= 16 and SIGNED in tags.get(SAMPLEFORMAT, ()))
        or 12 in bits
    ):
        raise ValueError("it is a TIFF file whose pixels would be read wrongly; save it as PNG")


def image_formats() -> list[str]:
    """The formats that are opened: `FORMATS`, and those of readers that another package has added to Pillow.

    The program that imports such a package, for example pillow_heif, has decided to trust it.
    """
    not_opened = _not_opened()
    return [kind for kind in Image.ID if kind not in not_opened]


@functools.cache  # asked for each image
def _not_opened() -> frozenset[str]:
    """The formats of Pillow's own readers that are not opened."""
    Image.init()
    of_pillow = [kind for kind, (reader, _) in Image.OPEN.items() if reader.__module__.startswith("PIL.")]
    return frozenset(of_pillow).difference(FORMATS)


def in_colours(image: Image.Image, channels: int, background: Sequence[int], least_size: Size | None) -> Image.Image:
    """The upright image in RGB, or in grey for one channel.

    Args:
        image: an image of any mode.
        channels: 3 for colour, 1 for grey.
        background: red, green and blue of the colour behind transparent pixels.
        least_size: as for `reduce_scale`, for the upright image.

    Raises:
        ValueError: as for `prepare`.
    """
    reduce_scale(image, least_size, upright_size(image))
    image = upright(image)
    if image.mode != "RGB" or "transparency" in image.info:
        image = to_rgb(image, background)
    return image.convert("L") if channels == 1 else image


def to_rgb(image: Image.Image, background: Sequence[int] = WHITE) -> Image.Image:
    """Convert an image to 8-bit RGB: 16-bit values are scaled to 8 bits, and transparent pixels show the background.

    Pillow's own conversion would clip values above 255, and show the hidden colour of transparent pixels, often black.

    Raises:
        ValueError: if the pixels are floating-point numbers, or 32-bit integers that are not obviously 16-bit values.
    """
    if image.mode == "F":
        raise ValueError("it holds floating-point numbers, whose range is unknown; save it in 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _in_8_bits(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        if image.mode == "La":  # Pillow can convert La only to LA
            image = image.convert("LA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image.convert("RGB")


def _in_8_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    low, high = values.min(), values.max()
    if image.mode == "I" and not (low >= 0 and 255 < high < 2**16):
        raise ValueError(f"it holds 32-bit integers from {low} to {high}, whose range is unknown; save it in 8 bits")
    scaled = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if "transparency" in image.info:
        scaled.putalpha(Image.fromarray(values != image.info["transparency"]))
    return scaled


def colour(value: str | Sequence[int]) -> Sequence[int]:
    """Red, green and blue of a colour, which is a name of Pillow or these three numbers.

    Args:
        value: the colour.
    """
    if isinstance(value, str):
        return ImageColor.getcolor(value, "RGB")  # type: ignore[return-value]
    return value


def reduce_scale(image: Image.Image, least_size: Size | None, part: Size) -> int:
    """Make Pillow decode a JPEG at the smallest scale at which the image is at least as large as `least_size`.

    Other formats, and images that are already decoded, do not change.

    Args:
        image: an image that Pillow has opened but not decoded; its size becomes the reduced size.
        least_size: minimum height and width; None for the full scale.
        part: height and width of the image, or of the part of it to which `least_size` applies.

    Returns:
        The divisor of the image size: 1, 2, 4 or 8. The reduced size is rounded up.
    """
    if least_size is None or not isinstance(image, JpegImageFile):
        return 1
    before = image.size
    for divisor in DIVISORS:
        if part[0] >= divisor * least_size[0] and part[1] >= divisor * least_size[1]:
            image.draft(None, (image.width // divisor, image.height // divisor))
            return divisor if image.size != before else 1  # 1 for an image that is already decoded
    return 1


def upright(image: Image.Image) -> Image.Image:
    """The image rotated according to its EXIF orientation, if it comes directly from `PIL.Image.open`.

    Converted or cropped images still have the orientation tag, but may already have been rotated.

    Args:
        image: an image of any mode.
    """
    if isinstance(image, ImageFile.ImageFile):
        image.load()  # some of Pillow's readers rotate the image by themselves
        rotation = ROTATIONS.get(orientation(image))
        if rotation is not None:
            return image.transpose(rotation)
    return image


def orientation(image: Image.Image) -> int:
    """The EXIF orientation of an image, from 1 to 8; 1, upright, if its EXIF block is malformed.

    Args:
        image: an image of any mode.
    """
    try:
        value = image.getexif().get(ORIENTATION)
    except OSError:  # the pixels, which precede the EXIF block of some formats, cannot be read
        raise
    except Exception:  # Pillow's parser raises errors of many types
        return 1
    return int(value) if value in ROTATIONS else 1


def upright_size(image: Image.Image) -> Size:
    """Height and width of the result of `upright`, without decoding the image.

    Args:
        image: an image of any mode.
    """
    if not isinstance(image, ImageFile.ImageFile) or orientation(image) not in TRANSPOSED:
        return image.height, image.width
    if isinstance(image, TiffImageFile):  # its size is the upright one, in older versions of Pillow once it is decoded
        width, height = image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
        return int(width), int(height)
    return image.width, image.height


def size_before_crop(image_size: int | Sequence[int] | None, resize: Resize) -> int | Sequence[int] | None:
    """The size that images are resized to: the short side, a pair of height and width, or None for no resizing.

    With `"fit"` it is the frame, whose height or width the resized image has.

    Args:
        image_size: setting of `Preparation`.
        resize: setting of `Preparation`.
    """
    if resize == FIT and image_size is not None:
        return pair(image_size)
    if resize is not None and not isinstance(resize, str):
        return resize
    if isinstance(image_size, int):
        return round(image_size * 256 / 224)
    return image_size


def resized_size(height: int, width: int, target: int | Sequence[int] | None) -> Size:
    """Height and width after resizing; if the target is the short side, the long side is rounded down.

    Args:
        height: original height.
        width: original width.
        target: as `size_before_crop` returns it.

    Raises:
        ValueError: if the image is so thin that resizing would enlarge it to more than `MOST_RESIZED` pixels.
    """
    if target is None:
        return height, width
    if not isinstance(target, int):
        return pair(target)
    size = target, int(target * width / height)
    if width <= height:
        size = int(target * height / width), target
    if size[0] * size[1] > max(MOST_RESIZED, height * width):
        raise ValueError(f"it has {width} x {height} pixels, too thin to be resized to {size[1]:,} x {size[0]:,}")
    return size


def fitted_size(height: int, width: int, frame: Size) -> Size:
    """Height and width after resizing to the largest size of the same shape that a frame holds.

    Args:
        height: original height.
        width: original width.
        frame: height and width of the frame.
    """
    frame_height, frame_width = frame
    if width * frame_height > height * frame_width:
        return max(1, round(height / width * frame_width)), frame_width
    return frame_height, max(1, round(width / height * frame_height))


def padded(pixels: NDArray[np.uint8], frame: Size, fill: Fill) -> NDArray[np.uint8]:
    """The image in the middle of a frame, the rest of which has one colour.

    Args:
        pixels: the image (height, width, channels), which is not larger than the frame.
        frame: height and width of the frame.
        fill: the colour, or `"border"` for the median of each channel along the border of the image.
    """
    height, width, channels = pixels.shape
    if (height, width) == frame:
        return pixels
    if fill == BORDER:
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        shown = np.sort(border, axis=0)[len(border) // 2]
    else:
        one_pixel = Image.new("RGB", (1, 1), tuple(colour(fill)))
        if channels == 1:
            one_pixel = one_pixel.convert("L")
        shown = np.array(one_pixel).reshape(channels)
    top, left, _, _ = centre_box(*frame, (height, width))
    framed = np.empty((*frame, channels), np.uint8)
    framed[:] = shown
    framed[top : top + height, left : left + width] = pixels
    return framed


def resize_image(image: Image.Image, height: int, width: int, interpolation: str) -> Image.Image:
    """Resize a PIL image by one of Pillow's filters.

    Args:
        image: the image.
        height: height of the result.
        width: width of the result.
        interpolation: name of the filter.
    """
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling[interpolation.upper()])


def pair(size: int | Sequence[int]) -> Size:
    """Height and width.

    Args:
        size: height and width, or one number for both.
    """
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def centre_box(height: int, width: int, crop: Size) -> Box:
    """Top, left, bottom and right of the centre crop of an image that is at least as large as the crop.

    Args:
        height: height of the image.
        width: width of the image.
        crop: height and width of the crop.
    """
    top = round((height - crop[0]) / 2)
    left = round((width - crop[1]) / 2)
    return top, left, top + crop[0], left + crop[1]
