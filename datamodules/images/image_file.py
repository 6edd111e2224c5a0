"""Image files: which suffixes they have, and how one is decoded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import EpsImagePlugin, Image, ImageFile

from lightning_retrieval.models.colours import WHITE, to_rgb

_ORIENTATION = 0x0112  # number of the EXIF tag
_ROTATIONS = {  # by value of the tag; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
IDENTIFIED_ONLY = {"MPEG"}  # formats whose size Pillow reads, but whose pixels it cannot decode


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
    box: NDArray[np.int32] | None = None,
    *,
    load_truncated: bool = False,
    boxes_before_rotation: bool = False,
    background: tuple[int, int, int] = WHITE,
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

    Raises:
        ValueError: if the box is outside of the image, or the range of the pixel values is unknown (see `to_rgb`).
        Exception: any error of Pillow, if the file cannot be decoded.
    """
    with truncated_images(load_truncated), Image.open(path) as file:
        image = to_rgb(file, background)
        rotation = _ROTATIONS.get(file.getexif().get(_ORIENTATION, 1))
    if box is not None and boxes_before_rotation:
        image = _crop(image, box)
    if rotation is not None:
        image = image.transpose(rotation)
    if box is not None and not boxes_before_rotation:
        image = _crop(image, box)
    return image


@contextlib.contextmanager
def truncated_images(load: bool) -> Iterator[None]:
    """Let Pillow decode truncated images within the context, if `load`; its setting is one for the whole process."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = load or before
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _crop(image: Image.Image, box: NDArray[np.int32]) -> Image.Image:
    left, top, right, bottom = box.tolist()
    inside = (max(0, left), max(0, top), min(image.width, right), min(image.height, bottom))
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(
            f"its box {[left, top, right, bottom]} is outside of its {image.width} x {image.height} pixels"
        )
    return image.crop(inside)
