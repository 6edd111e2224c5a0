"""Operations on the pixels of an image as a tensor, and checks of pixels, sizes and colours.

A tensor of an image has shape (channels, height, width) but the memory layout (height, width, channels). Decoders write
this layout, and torch resizes it fastest.

Resizing and cropping equal torchvision's, bit for bit. torchvision itself is not imported, because the import takes as
long as that of all models. On some processors, the oldest supported releases of torchvision resize uint8 in floating
point; their pixels differ.
"""

from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.preparation.prepare import Box, Fill, Size, colour, padded

Pixels = UInt8[Tensor, "channel height width"]
PixelsOfNewSize = UInt8[Tensor, "channel new_height new_width"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
MOST_PIXELS = 16384  # per side
UNNORMALIZED = "unnormalized"  # key of the batches of an `ImageSet` in uint8


def check_colour(name: str, value: Any) -> tuple[int, int, int]:
    """Red, green and blue of a colour; raise unless it is a colour name of Pillow or three integers from 0 to 255."""
    rule = "must be the name of a colour, such as 'white' or '#ff8000', or (red, green, blue)"
    if isinstance(value, str):
        try:
            return colour(value)  # type: ignore[return-value]
        except ValueError:
            raise InvalidValue(rule, argument=name, got=short_repr(value)) from None
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise InvalidValue(rule, argument=name, got=short_repr(value))
    red, green, blue = (check_integer(name, part, 0, 255) for part in value)
    return red, green, blue


def to_pixels(image: Image.Image) -> Pixels:
    """The pixels of a PIL image of mode RGB or L, copied to a tensor.

    Args:
        image: the image.
    """
    pixels = torch.from_numpy(np.array(image))
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1)


def to_image(pixels: Pixels) -> Image.Image:
    """Convert pixels to a PIL image of mode RGB.

    Args:
        pixels: pixels with 3 channels.
    """
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def resize_bilinear(pixels: Pixels, height: int, width: int) -> PixelsOfNewSize:
    """Resize an image with antialiasing; each value differs by at most 1 from Pillow's bilinear filter.

    Args:
        pixels: the image.
        height: height of the result.
        width: width of the result.
    """
    if pixels.shape[1:] == (height, width):
        return pixels
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # strides that torch recognises as channels last
    resized: Tensor = interpolate(batch, size=(height, width), mode="bilinear", antialias=True)
    return resized[0]


def cropped(pixels: Pixels, box: Box) -> PixelsOfNewSize:
    """The part of an image in a box.

    Args:
        pixels: the image.
        box: top, left, bottom and right of the box, inside the image.
    """
    top, left, bottom, right = box
    return pixels[:, top:bottom, left:right]


def padded_pixels(pixels: Pixels, frame: Size, fill: Fill) -> PixelsOfNewSize:
    """The image in the middle of a frame, see `padded`.

    Args:
        pixels: the image, not larger than the frame.
        frame: height and width of the frame.
        fill: as for `padded`.
    """
    framed = padded(pixels.permute(1, 2, 0).numpy(), frame, fill)
    return torch.from_numpy(framed).permute(2, 0, 1)


def check_size(name: str, value: Any) -> int | Size | None:
    """Check a size, which is a number of pixels, a pair or None, and return the size as plain data.

    Args:
        name: name of the argument.
        value: the size.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return check_integer(name, value, 1, MOST_PIXELS)
    if len(value) != 2:
        raise InvalidValue(
            "must be one number of pixels or a pair (height, width)", argument=name, got=short_repr(value)
        )
    height, width = (check_integer(name, side, 1, MOST_PIXELS) for side in value)
    return height, width
