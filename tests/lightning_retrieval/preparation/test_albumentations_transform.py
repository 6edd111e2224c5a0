"""Transforms of albumentations as functions of PIL images."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.preparation.serialised import AlbumentationsTransform, of_pil_images
from tests.datamodules.trees_more import QUICK, write_folders


def random_crop():
    albumentations = pytest.importorskip("albumentations")
    to_tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2()
    return albumentations.Compose([albumentations.RandomCrop(8, 8), albumentations.Normalize(), to_tensor])


def noise():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))


def test_others_are_left_as_they_are():
    assert of_pil_images(noise) is noise
    assert of_pil_images(None) is None


def test_random_numbers_are_those_of_torchs_seed():
    transform = of_pil_images(random_crop())
    crops = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        crops.append(transform(noise()))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(crops[0], crops[2])
    assert not torch.equal(crops[0], crops[1])


def test_training_images_do_not_depend_on_the_number_of_workers(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    batches = []
    for workers in (0, 2):
        settings = {**QUICK, "train_transform": random_crop(), "num_workers": workers}
        batches.append(next(iter(ImageFolder(tmp_path, test_fraction=0.5, **settings).train_dataloader())))
    assert torch.equal(batches[0]["images"], batches[1]["images"])


@pytest.mark.refusal
def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"^index: .* albumentations, which is not installed; install it: pip"
    ):
        AlbumentationsTransform.from_dict("index", {"albumentations": {}})


REBUILT = """
import socket, sys
asked = []
socket.getaddrinfo = lambda *address, **_: asked.append(address) or []
from lightning_retrieval.preparation.serialised import AlbumentationsTransform
assert "albumentations" not in sys.modules
described = {"__version__": "2.0.8", "transform": {"__class_fullname__": "ToGray", "p": 1}}
AlbumentationsTransform.from_dict("Test", {"albumentations": described})
assert not asked, asked
"""


def test_a_file_that_names_transforms_opens_no_connection():
    """The import of albumentations would ask PyPI for a newer version."""
    pytest.importorskip("albumentations")
    environment = {name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"}
    done = subprocess.run([sys.executable, "-c", REBUILT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
