"""The tiles of a gallery have the colours of the image files."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_retrieval.callbacks.gallery import as_image, load_image
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.models import Preparation
from tests.datamodules.trees_more import write_folders

TEAL = (0, 128, 120)
NORMALIZE = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def picture():
    """A picture with little contrast, whose colours a stretch would change."""
    values = np.full((8, 8, 3), TEAL, np.uint8)
    values[2:4] += 30
    return Image.fromarray(values)


@pytest.mark.parametrize(
    "transform",
    [
        Preparation(8, 8),
        Preparation(8, 8, mean=(0.9, 0.1, 0.5), std=(0.1, 0.2, 3.0)),
        v2.Compose([*TO_TENSOR, NORMALIZE]),
        v2.Compose(TO_TENSOR),
        v2.PILToTensor(),
    ],
)
def test_colours_are_those_of_the_file(transform):
    assert np.array_equal(np.asarray(as_image(transform(picture()), transform)), np.asarray(picture()))


def test_grey_images_are_grey():
    grey = Preparation(8, 8, channels=1, mean=[0.3], std=[0.2])
    shown = np.asarray(as_image(grey(picture()), grey))
    assert np.array_equal(shown, np.asarray(picture().convert("L").convert("RGB")))


def test_other_values_are_stretched():
    values = torch.tensor([[[-1.0, 0.0, 3.0]]])
    assert np.asarray(as_image(values))[0, :, 0].tolist() == [0, 63, 255]


def test_a_data_set_of_image_files_says_what_normalised_its_images(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    images = ImageFolder(tmp_path, image_size=(16, 16)).test_set
    shown = as_image(images[0]["images"], images.transform)
    wanted = np.asarray(images.read(0).resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert abs(np.asarray(shown) - wanted).max() <= 1  # the difference of torch's filter to Pillow's


@pytest.mark.parametrize("form", ["pair", "triple", "dict"])
def test_a_module_without_unpack_batch_has_batches_of_the_usual_forms(form):
    pixels = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    item = {"pair": (pixels, 5), "triple": (pixels, 5, 0), "dict": {"labels": 5, "ids": 0, "images": pixels}}[form]
    image = load_image(pl.LightningModule(), [item], 0)
    assert torch.equal(torch.from_numpy(np.array(image)).permute(2, 0, 1), pixels)
