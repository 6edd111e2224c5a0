"""Decoding of JPEGs at a half, a quarter or an eighth of their size, which libjpeg does much faster than in full.

libjpeg takes the mean of each square of pixels nearly as a box filter would, so the pixels after resizing are others.
"""

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

Size = tuple[int, int]  # height and width

DIVISORS = (8, 4, 2)


def reduce_scale(image: Image.Image, least_size: Size | None, part: Size | None = None) -> int:
    """Let Pillow decode a JPEG at the smallest scale at which it is not smaller than a size.

    Images of other formats, and those that are decoded already, are left as they are.

    Args:
        image: that Pillow has opened, and decodes later; its size becomes the reduced one.
        least_size: height and width that it must keep; None for the full scale.
        part: height and width of that part of the image which must keep them; None for the whole image.

    Returns:
        What the size was divided by, and rounded up: 1, 2, 4 or 8.
    """
    if least_size is None or not isinstance(image, JpegImageFile):
        return 1
    if part is None:
        part = (image.height, image.width)
    before = image.size
    for divisor in DIVISORS:
        if part[0] >= divisor * least_size[0] and part[1] >= divisor * least_size[1]:
            image.draft(None, (image.width // divisor, image.height // divisor))
            return divisor if image.size != before else 1  # as for an image that is decoded already
    return 1
