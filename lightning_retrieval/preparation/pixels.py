"""Operations on the pixels of images: colours, orientation, sizes.

A tensor of an image has shape (channels, height, width) but the memory layout (height, width, channels). Decoders write
this layout, and torch resizes it fastest.

Colours are converted to 8-bit RGB; transparent pixels show a background. JPEGs may be decoded at a half, a quarter or
an eighth of their size, which libjpeg does much faster than at full size. libjpeg averages squares of pixels, almost
like a box filter, so the pixels after resizing differ from those at full size.

Resizing and cropping equal torchvision's, bit for bit. torchvision itself is not imported, because the import takes as
long as that of all models. On some processors, the oldest supported releases of torchvision resize uint8 in floating
point; their pixels differ.
"""

from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageColor, ImageFile, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_retrieval.checks import check_float, check_integer, check_tensor, short_repr

Size = tuple[int, int]  # height and width
Pixels = UInt8[Tensor, "channel height width"]
PixelsOfNewSize = UInt8[Tensor, "channel new_height new_width"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
WHITE = (255, 255, 255)
MOST_PIXELS = 16384  # per side
ORIENTATION = 0x0112  # number of the EXIF tag
TRANSPOSED = (5, 6, 7, 8)  # values of the EXIF tag for which height and width are swapped
DIVISORS = (8, 4, 2)  # possible divisors of the size of a JPEG
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def check_colour(owner: str, name: str, value: Any) -> tuple[int, int, int]:
    """Red, green and blue of a colour; raise unless it is a colour name of Pillow or three integers from 0 to 255."""
    rule = f"{owner}: `{name}` must be the name of a colour, such as 'white' or '#ff8000', or (red, green, blue)"
    if isinstance(value, str):
        try:
            return ImageColor.getcolor(value, "RGB")  # type: ignore[return-value]
        except ValueError:
            raise ValueError(f"{rule}, got {short_repr(value)}.") from None
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{rule}, got {short_repr(value)} ({type(value).__name__}).")
    if len(value) != 3:
        raise ValueError(f"{rule}, got {short_repr(value)}.")
    red, green, blue = (check_integer(owner, name, part, 0, 255) for part in value)
    return red, green, blue


def to_rgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Convert an image to 8-bit RGB: 16-bit values are scaled to 8 bits, and transparent pixels show the background.

    Pillow's own conversion would clip values above 255, and show the hidden colour of transparent pixels, often black.

    Raises:
        ValueError: if the pixels are floating-point numbers, or 32-bit integers that are not obviously 16-bit values.
    """
    if image.mode == "F":
        raise ValueError("it holds floating-point numbers, whose range is unknown; save it in 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _16_bits_to_rgb(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        if image.mode == "La":  # Pillow can convert La only to LA
            image = image.convert("LA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image.convert("RGB")


def _16_bits_to_rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if image.mode == "I" and not (low >= 0 and 255 < high < 2**16):
        raise ValueError(f"it holds 32-bit integers from {low} to {high}, whose range is unknown; save it in 8 bits")
    scaled = (values + 128) // 257
    return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")


def reduce_scale(image: Image.Image, least_size: Size | None, part: Size | None = None) -> int:
    """Make Pillow decode a JPEG at the smallest scale at which the image is at least as large as `least_size`.

    Other formats, and images that are already decoded, do not change.

    Args:
        image: an image that Pillow has opened but not decoded; its size becomes the reduced size.
        least_size: minimum height and width; None for the full scale.
        part: height and width of the part of the image to which `least_size` applies; None for the whole image.

    Returns:
        The divisor of the image size: 1, 2, 4 or 8. The reduced size is rounded up.
    """
    if least_size is None or not isinstance(image, JpegImageFile):
        return 1
    if part is None:
        part = (image.height, image.width)
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
        return ImageOps.exif_transpose(image)
    return image


def upright_size(image: Image.Image) -> Size:
    """Height and width of the result of `upright`, without decoding the image.

    Args:
        image: an image of any mode.
    """
    if isinstance(image, ImageFile.ImageFile) and image.getexif().get(ORIENTATION, 1) in TRANSPOSED:
        return image.width, image.height
    return image.height, image.width


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


def resize_image(image: Image.Image, height: int, width: int, interpolation: Interpolation) -> Image.Image:
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


def size_with_short_side(height: int, width: int, target: int) -> Size:
    """Height and width after resizing the short side to `target`; the long side is rounded down.

    Args:
        height: original height.
        width: original width.
        target: new length of the short side.
    """
    if width <= height:
        return int(target * height / width), target
    return target, int(target * width / height)


def centre_crop(pixels: Pixels, height: int, width: int) -> PixelsOfNewSize:
    """The centre of an image that is at least as large as the crop.

    Args:
        pixels: the image.
        height: height of the result.
        width: width of the result.
    """
    top = round((pixels.shape[1] - height) / 2)
    left = round((pixels.shape[2] - width) / 2)
    return pixels[:, top : top + height, left : left + width]


def check_pixels(owner: str, name: str, pixels: Any) -> None:
    """Raise unless a tensor holds the pixels of one colour image.

    Args:
        owner: prefix of error messages.
        name: name of the argument.
        pixels: a tensor.
    """
    check_tensor(owner, name, pixels)
    if pixels.dtype != torch.uint8:
        raise TypeError(f"{owner}: `{name}` must be a PIL image or a tensor of uint8, got {pixels.dtype}.")
    if pixels.ndim != 3 or len(pixels) != 3:
        raise ValueError(f"{owner}: `{name}` must have shape (3, height, width), got {tuple(pixels.shape)}.")


def check_normalized(owner: str, images: Tensor) -> None:
    """Raise unless images are floating point; images of uint8 have not been normalised.

    Args:
        owner: prefix of error messages.
        images: a batch.
    """
    if images.dtype == torch.uint8:
        raise TypeError(
            f"{owner}: `images` must be floating point, got torch.uint8; normalise them, as "
            "`Preparation.normalize` does."
        )
    check_float(owner, "images", images, may_be_meta=True)


def check_size(owner: str, name: str, value: Any) -> int | Size | None:
    """Check a size, which is a number of pixels, a pair or None, and return the size as plain data.

    Args:
        owner: prefix of error messages.
        name: name of the argument.
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
    height, width = (check_integer(owner, name, side, 1, MOST_PIXELS) for side in value)
    return height, width
