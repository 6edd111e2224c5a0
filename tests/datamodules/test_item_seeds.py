"""Random transforms of any library give the same images in each run, for any workers, and after a resume."""

import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lightning_retrieval.datamodules import ImageFolder, RetrievalDataLoader


def albumentations_transform():
    albumentations = pytest.importorskip("albumentations")
    to_tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2()
    return albumentations.Compose([albumentations.RandomCrop(16, 16), albumentations.GaussNoise(p=0.5), to_tensor])


def draws_from_each(image):
    """Draw from the generators of Python, NumPy and torch, as the transforms of timm and torchvision do."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]).reshape(3, 1, 1)


def draws_and_fails(image):
    raise KeyError(draws_from_each(image))


TRANSFORMS = {
    "albumentations": albumentations_transform,
    "global generators": lambda: draws_from_each,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four classes of three images, large enough for different crops."""
    root = tmp_path_factory.mktemp("noise")
    generator = np.random.default_rng(0)
    for number in range(12):
        path = root / "abcd"[number % 4] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
    return root


def data_of(folder, transform, workers=0):
    batches = {"test_fraction": 0.25, "classes_per_batch": 2, "samples_per_class": 2, "num_workers": workers}
    return ImageFolder(folder, train_transform=transform, eval_transform=transform, **batches)


def run(folder, name, workers, start=None):
    """The training images of two epochs, or of the first epoch from a batch on."""
    pl.seed_everything(7, workers=True, verbose=False)
    for _ in range(workers + 1 if start is None else 5):  # a run has drawn other numbers before
        draws_from_each(None)
    data = data_of(folder, TRANSFORMS[name](), workers)
    if start is None:
        loader = data.train_dataloader()
    else:  # as after a kill
        loader = RetrievalDataLoader(
            data.train_set, data.train_sampler(), start=start, num_workers=workers, collate_fn=data.train_set.collate
        )
    images = [batch["images"] for batch in loader]
    if start is None:
        loader.set_epoch(1)
        images += [batch["images"] for batch in loader]
    return images


@pytest.mark.parametrize("name", TRANSFORMS)
def test_training_images_are_a_function_of_seed_epoch_and_batch(name, folder):
    images = run(folder, name, 0)
    batches = len(images) // 2
    assert not torch.equal(images[0], images[batches])  # another epoch
    assert len({image.double().sum().item() for batch in images for image in batch}) > 3 * len(images)
    assert all(map(torch.equal, run(folder, name, 2), images))
    resumed = run(folder, name, 0, start=1)
    assert len(resumed) == batches - 1
    assert all(map(torch.equal, resumed, images[1:]))


def test_the_global_generators_continue_as_if_no_image_had_been_transformed(folder):
    pl.seed_everything(3, verbose=False)
    expected = [draws_from_each(None) for _ in range(2)]
    data, failing = data_of(folder, draws_from_each), data_of(folder, draws_and_fails)
    loader = data.train_dataloader()
    index = next(iter(loader.batch_sampler))[0]
    pl.seed_everything(3, verbose=False)
    found = [draws_from_each(None)]
    first = data.train_set[index]["images"]
    assert torch.equal(data.train_set[index]["images"], first)
    with pytest.raises(KeyError):
        failing.train_set[index]
    found.append(draws_from_each(None))
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(data.train_set[int(index)]["images"], first)  # in evaluation, an index has no seed
