"""Small images for the tests of image files."""

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
