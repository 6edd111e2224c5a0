"""Images for the tests of image files."""

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

TINY = v2.Compose([v2.Resize((8, 8)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def as_it_is(image):
    return torch.from_numpy(np.asarray(image).copy())


def picture(path, mode="RGB", size=(6, 4)):
    """Write an image whose red is the column and whose green is the row; return its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    grid[..., 0], grid[..., 1] = np.arange(size[0]) * 40, np.arange(size[1])[:, None] * 60
    image = Image.fromarray(grid).convert(mode)
    image.save(path)
    return grid


def scene(width, height, seed):
    """A picture of large patches of colour with noise."""
    random = np.random.default_rng(seed)
    patches = Image.fromarray(random.integers(0, 256, (5, 4, 3), dtype=np.uint8))
    pixels = np.asarray(patches.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    pixels += random.integers(-30, 31, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


SIZES = [(90, 60), (61, 95), (64, 64), (300, 7), (7, 300), (1, 1), (20, 30), (501, 333)]
MODES = {
    "png": ("L", "1", "P", "LA", "RGBA"),
    "jpg": ("L", "CMYK", "YCbCr"),
    "gif": ("P",),
    "webp": ("RGBA",),
    "tiff": ("CMYK", "LAB"),
}


def write_pictures_of_all_kinds(folder):
    """Write files of many sizes, formats, modes and EXIF orientations, some of them transparent, some of 16 bits."""
    seeds = iter(range(1000))
    for width, height in SIZES:
        for suffix in ("jpg", "png"):
            scene(width, height, next(seeds)).save(folder / f"{width}x{height}.{suffix}")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in ("jpg", "png", "webp", "tiff"):
            scene(80, 50, next(seeds)).save(folder / f"orientation-{orientation}.{suffix}", exif=exif)
    for suffix, modes in MODES.items():
        for mode in modes:
            image = scene(80, 70, next(seeds)).convert(mode)
            if mode in ("LA", "RGBA"):
                image.putalpha(scene(80, 70, next(seeds)).convert("L"))
            image.save(folder / f"{mode}.{suffix}")
    sixteen_bits = np.asarray(scene(80, 70, next(seeds)).convert("L")).astype(np.uint16) * 257
    for suffix in ("png", "tiff"):
        Image.fromarray(sixteen_bits).save(folder / f"16.{suffix}")
    scene(80, 70, next(seeds)).convert("P").save(folder / "transparent.gif", transparency=7)
    scene(80, 70, next(seeds)).save(folder / "transparent.png", transparency=(1, 2, 3))
