"""Images as tensors of uint8, which are resized and cropped before the network.

A tensor of an image has shape (channels, height, width), and its memory is that of (height, width, channels), as the
decoders write it and as torch resizes it fastest.
"""

from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageFile, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_retrieval.checks import check_float_type, check_integer, check_tensor, short_repr

MOST_PIXELS = 16384  # of a side
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}

_ORIENTATION = 0x0112  # number of the EXIF tag, whose values above 4 exchange height and width

Pixels = UInt8[Tensor, "channel height width"]
PixelsOfNewSize = UInt8[Tensor, "channel new_height new_width"]


def upright(image: Image.Image) -> Image.Image:
    """The image rotated as the EXIF orientation of its file says, if it comes straight from `PIL.Image.open`.

    Pillow leaves the orientation in images that were converted or cropped since, which may have been rotated already.

    Args:
        image: of any mode.
    """
    if isinstance(image, ImageFile.ImageFile):
        return ImageOps.exif_transpose(image)
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of what `upright` returns.

    Args:
        image: of any mode, which is not decoded.
    """
    is_transposed = isinstance(image, ImageFile.ImageFile) and image.getexif().get(_ORIENTATION, 1) > 4
    if is_transposed:
        return image.width, image.height
    return image.height, image.width


def to_pixels(image: Image.Image) -> Pixels:
    """The pixels of a PIL image of the mode RGB or L.

    Args:
        image: to be copied.
    """
    pixels = torch.from_numpy(np.array(image))
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1)


def to_image(pixels: Pixels) -> Image.Image:
    """The PIL image of these pixels, of the mode RGB.

    Args:
        pixels: with 3 channels.
    """
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def resize_bilinear(pixels: Pixels, height: int, width: int) -> PixelsOfNewSize:
    """Resize an image with antialiasing; each value differs by at most 1 from that of Pillow's bilinear filter.

    Args:
        pixels: the image.
        height: of the result.
        width: of the result.
    """
    if pixels.shape[1:] == (height, width):
        return pixels
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # strides by which torch sees that channels are last
    resized: Tensor = interpolate(batch, size=(height, width), mode="bilinear", antialias=True)
    return resized[0]


def resize_image(image: Image.Image, height: int, width: int, interpolation: Interpolation) -> Image.Image:
    """Resize a PIL image by one of Pillow's filters.

    Args:
        image: the image.
        height: of the result.
        width: of the result.
        interpolation: name of the filter.
    """
    if image.size == (width, height):
        return image
    return image.resize((width, height), INTERPOLATIONS[interpolation])


def size_with_short_side(height: int, width: int, length: int) -> tuple[int, int]:
    """Height and width after resizing the short side to `length`; the long side is rounded down.

    Args:
        height: before.
        width: before.
        length: of the short side.
    """
    short, long = sorted((height, width))
    long_length = int(length * long / short)
    if width <= height:
        return long_length, length
    return length, long_length


def centre_crop(pixels: Pixels, height: int, width: int) -> PixelsOfNewSize:
    """The centre of an image, which must be at least as large.

    Args:
        pixels: the image.
        height: of the result.
        width: of the result.
    """
    top = round((pixels.shape[1] - height) / 2)
    left = round((pixels.shape[2] - width) / 2)
    return pixels[:, top : top + height, left : left + width]


def check_pixels(owner: str, name: str, pixels: Any) -> None:
    """Raise unless a tensor holds the pixels of one image in colour.

    Args:
        owner: prefix of error messages.
        name: of the argument.
        pixels: a tensor.
    """
    check_tensor(owner, name, pixels)
    if pixels.dtype != torch.uint8:
        raise TypeError(f"{owner}: `{name}` must be a PIL image or a tensor of uint8, got {pixels.dtype}.")
    if pixels.ndim != 3 or len(pixels) != 3:
        raise ValueError(f"{owner}: `{name}` must have shape (3, height, width), got {tuple(pixels.shape)}.")


def check_normalized(owner: str, images: Tensor) -> None:
    """Raise unless images are floating point, as those that were normalised are.

    Args:
        owner: prefix of error messages.
        images: a batch.
    """
    if images.dtype == torch.uint8:
        raise TypeError(
            f"{owner}: `images` must be floating point, got torch.uint8; normalise them, as "
            "`Preparation.normalize` does."
        )
    check_float_type(owner, "images", images)


def check_size(owner: str, name: str, value: Any) -> int | tuple[int, int] | None:
    """One number of pixels or a pair of them, as plain data; None stays None.

    Args:
        owner: prefix of error messages.
        name: of the argument.
        value: the size.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return check_integer(owner, name, value, 1, MOST_PIXELS)
    if len(value) != 2:
        raise ValueError(
            f"{owner}: `{name}` must be one number of pixels or a pair (height, width), got {short_repr(value)}."
        )
    height, width = (check_integer(owner, name, length, 1, MOST_PIXELS) for length in value)
    return height, width
