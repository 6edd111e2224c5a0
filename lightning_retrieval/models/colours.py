"""Colours of image files: conversion to RGB with 8 bits, where transparent pixels show a background."""

from typing import Any

import numpy as np
from PIL import Image, ImageColor

from lightning_retrieval.checks import check_integer, short_repr

WHITE = (255, 255, 255)
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def check_colour(owner: str, name: str, value: Any) -> tuple[int, int, int]:
    """Red, green and blue of a colour; raise unless it is a name of Pillow's or three integers from 0 to 255."""
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
    """Convert an image to RGB with 8 bits; 16 bits are scaled to 8, and transparent pixels show the background.

    Pillow's own conversion would clip all values above 255, and show what is hidden under transparent pixels, which is
    mostly black.

    Raises:
        ValueError: if the pixels are floating-point numbers, or 32-bit integers that are not obviously 16-bit values.
    """
    if image.mode == "F":
        raise ValueError("it holds floating-point numbers, whose range is unknown; save it in 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _16_bits_to_rgb(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return _compose(image, background)
    return image.convert("RGB")


def _compose(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """The image on a background of this colour."""
    if image.mode == "La":  # which Pillow converts to LA only
        image = image.convert("LA")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


def _16_bits_to_rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if image.mode == "I" and not (low >= 0 and 255 < high < 2**16):
        raise ValueError(f"it holds 32-bit integers from {low} to {high}, whose range is unknown; save it in 8 bits")
    scaled = (values + 128) // 257
    return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
