"""Image files: which suffixes they have, and how one is decoded, rotated and cropped to its box.

Pillow decodes all files, and torchvision decodes JPEGs to tensors in the same way: both use libjpeg-turbo, and give the
same pixels.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Int
from PIL import EpsImagePlugin, Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from lightning_retrieval.preparation.pixels import (
    ORIENTATION,
    TRANSPOSED,
    WHITE,
    Pixels,
    PixelsOfNewSize,
    Size,
    reduce_scale,
    to_pixels,
    to_rgb,
)

try:
    from torchvision.io import ImageReadMode, decode_image
except ImportError:  # deprecated in torchvision 0.29
    decode_image = None

Box = Int[np.ndarray, "4"]  # left, top, right and bottom in pixels

IDENTIFIED_ONLY = {"MPEG"}  # formats whose size Pillow reads, but whose pixels it cannot decode
JPEG_START = b"\xff\xd8\xff"

_ROTATIONS = {  # by value of the tag; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FLIPPED = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}  # the same dims of tensors (C, H, W)


def image_suffixes() -> frozenset[str]:
    """The suffixes, in lower case, of the files that Pillow can decode."""
    suffixes = set[str]()
    for suffix, kind in Image.registered_extensions().items():
        if _is_decoded(kind):
            suffixes.add(suffix)
    return frozenset(suffixes)


def _is_decoded(kind: str) -> bool:
    """Whether Pillow decodes files of a format, and does not only identify them."""
    if kind not in Image.OPEN or kind in IDENTIFIED_ONLY:
        return False
    if kind == "EPS":
        return bool(EpsImagePlugin.has_ghostscript())
    reader, _ = Image.OPEN[kind]
    is_stub = isinstance(reader, type) and issubclass(reader, ImageFile.StubImageFile)
    return not is_stub


def read_image(
    path: Path | BinaryIO,
    box: Box | None = None,
    *,
    load_truncated: bool = False,
    boxes_before_rotation: bool = False,
    background: tuple[int, int, int] = WHITE,
    least_size: Size | None = None,
) -> Image.Image:
    """Decode an image to RGB, rotate it as its EXIF orientation requires, and crop it to its box.

    Args:
        path: the file, or its content as a binary stream.
        box: left, top, right and bottom in pixels of the image; parts outside of the image are cut off. None for the
            whole image.
        load_truncated: whether an image whose file ends too early is decoded up to there, and the rest is grey.
        boxes_before_rotation: whether the box is in pixels of the file, before the rotation, and not of the upright
            image. Pillow rotates TIFF files itself, so for these there is no difference.
        background: red, green and blue of the colour that shows through transparent pixels.
        least_size: height and width of the upright image, or of its box, at which a JPEG may be decoded, see
            `reduce_scale`; the box is then rounded outwards to whole pixels. None for the full scale.

    Raises:
        ValueError: if the box is outside of the image, or the range of the pixel values is unknown (see `to_rgb`).
        Exception: any error of Pillow, if the file cannot be decoded.
    """
    with truncated_images(load_truncated), Image.open(path) as file:
        divisor = _reduce(file, box, least_size, boxes_before_rotation=boxes_before_rotation)
        image = to_rgb(file, background)
        rotation = _ROTATIONS.get(file.getexif().get(ORIENTATION, 1))
    box = _divided(box, divisor)
    if box is not None and boxes_before_rotation:
        image = _crop(image, box)
    if rotation is not None:
        image = image.transpose(rotation)
    if box is not None and not boxes_before_rotation:
        image = _crop(image, box)
    return image


def read_pixels(
    path: Path | BinaryIO,
    box: Box | None = None,
    *,
    load_truncated: bool = False,
    boxes_before_rotation: bool = False,
    background: tuple[int, int, int] = WHITE,
    least_size: Size | None = None,
) -> Pixels:
    """The pixels of the image that `read_image` gives.

    JPEGs in RGB or grey are decoded by torchvision, which is faster, but not at a reduced scale.

    Args:
        path: as for `read_image`, also all others.
        box: part of the image, or None.
        load_truncated: whether to decode truncated images.
        boxes_before_rotation: whether the box is in pixels of the file.
        background: of transparent pixels.
        least_size: at which a JPEG may be decoded.

    Raises:
        Exception: as `read_image`.
    """
    reduce = partial(_reduce, box=box, least_size=least_size, boxes_before_rotation=boxes_before_rotation)
    decoded = _decoded_jpeg(path, reduce)
    if decoded is None:
        image = read_image(
            path,
            box,
            load_truncated=load_truncated,
            boxes_before_rotation=boxes_before_rotation,
            background=background,
            least_size=least_size,
        )
        return to_pixels(image)
    pixels, orientation, divisor = decoded
    box = _divided(box, divisor)
    if box is not None and boxes_before_rotation:
        pixels = _cropped(pixels, box)
    if orientation in TRANSPOSED:
        pixels = pixels.transpose(1, 2)
    if orientation in _FLIPPED:
        pixels = pixels.flip(_FLIPPED[orientation])
    if box is not None and not boxes_before_rotation:
        pixels = _cropped(pixels, box)
    return pixels


def _decoded_jpeg(path: Path | BinaryIO, reduce: Callable[[Image.Image], int]) -> tuple[Pixels, int, int] | None:
    """The pixels of a JPEG, its orientation, and the divisor of its size.

    None if it is no JPEG, or one that `read_image` has to decode or report.

    Args:
        path: the file, or its content.
        reduce: lets Pillow decode an image at a reduced scale if it may be, and returns what its size is divided by.
    """
    if decode_image is None:
        return None
    data = _content_of_jpeg(path)
    if data is None:
        return None
    try:
        with Image.open(io.BytesIO(data)) as file:  # reads the header only
            if file.mode not in ("RGB", "L"):
                return None
            orientation = file.getexif().get(ORIENTATION, 1)
            divisor = reduce(file)
            if divisor > 1:
                return to_pixels(file.convert("RGB")), orientation, divisor
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_image(encoded, ImageReadMode.RGB), orientation, 1
    except Exception:  # of a damaged file, or of a torchvision without libjpeg
        return None


def _content_of_jpeg(path: Path | BinaryIO) -> bytes | None:
    """The content of a JPEG, None for any other file; a stream stays at its position."""
    if isinstance(path, (str, Path)):
        with open(path, "rb") as stream:
            return _content_of_jpeg(stream)
    position = path.tell()
    start = path.read(len(JPEG_START))
    data = None
    if start == JPEG_START:
        data = start + path.read()
    path.seek(position)
    return data


@contextlib.contextmanager
def truncated_images(load: bool) -> Iterator[None]:
    """Let Pillow decode truncated images within the context, if `load`; its setting is one for the whole process."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = load or before
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _reduce(file: Image.Image, box: Box | None, least_size: Size | None, *, boxes_before_rotation: bool) -> int:
    """Let Pillow decode a JPEG at a reduced scale if it may be; what its size is divided by."""
    if least_size is None or not isinstance(file, JpegImageFile):
        return 1
    is_transposed = file.getexif().get(ORIENTATION, 1) in TRANSPOSED
    if is_transposed:
        least_size = (least_size[1], least_size[0])  # in the file, before the rotation
    if box is None:
        return reduce_scale(file, least_size)
    if is_transposed and not boxes_before_rotation:  # the box is in pixels of the upright image
        left, top, right, bottom = _inside(box, file.height, file.width)
        return reduce_scale(file, least_size, (right - left, bottom - top))
    left, top, right, bottom = _inside(box, file.width, file.height)
    return reduce_scale(file, least_size, (bottom - top, right - left))


def _divided(box: Box | None, divisor: int) -> Box | None:
    """The box in pixels of an image whose size was divided, rounded outwards."""
    if box is None or divisor == 1:
        return box
    begin, end = box[:2] // divisor, -(-box[2:] // divisor)
    return np.concatenate([begin, end])


def _crop(image: Image.Image, box: Box) -> Image.Image:
    return image.crop(_inside(box, image.width, image.height))


def _cropped(pixels: Pixels, box: Box) -> PixelsOfNewSize:
    left, top, right, bottom = _inside(box, pixels.shape[2], pixels.shape[1])
    return pixels[:, top:bottom, left:right]


def _inside(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """The part of a box that is inside of its image."""
    left, top, right, bottom = box.tolist()
    inside = (max(0, left), max(0, top), min(width, right), min(height, bottom))
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(f"its box {[left, top, right, bottom]} is outside of its {width} x {height} pixels")
    return inside
