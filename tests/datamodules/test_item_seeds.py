"""Random transforms of any library give the same images in each run, for any workers, and after a resume."""

import functools
import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.datamodules.item_seeds import SeededIndex, own_generators, seeded_item
from lightning_retrieval.datamodules.loader import RetrievalDataLoader


def albumentations_transform():
    albumentations = pytest.importorskip("albumentations")
    to_tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2()
    return albumentations.Compose([albumentations.RandomCrop(16, 16), albumentations.GaussNoise(p=0.5), to_tensor])


def draws_from_each(image):
    """Draw from the generators of Python, NumPy and torch, as the transforms of timm and torchvision do."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]).reshape(3, 1, 1)


OF_MODULE = np.random.default_rng(0)


def draws_from_the_module(image):
    return torch.from_numpy(OF_MODULE.random((3, 1, 1)))


def draws_from(generator, image):
    return torch.full((3, 1, 1), generator.random())


class OwnsGenerators:
    """A transform with several generators, one of them of the class."""

    of_class = torch.Generator()

    def __init__(self):
        self.states = [np.random.RandomState(0), {"python": random.Random(0)}]

    def __call__(self, image):
        drawn = [self.states[0].rand(), self.states[1]["python"].random()]
        return torch.tensor([*drawn, torch.rand((), generator=self.of_class).item()]).reshape(3, 1, 1)


class CallsAlbumentations:
    def __init__(self):
        self.augment = albumentations_transform()

    def __call__(self, image):
        return self.augment(image=np.array(image))["image"]


def enclosing_function():
    generator = np.random.default_rng(0)
    return v2.Compose([v2.Lambda(lambda image: draws_from(generator, image))])


TRANSFORMS = {
    "albumentations": albumentations_transform,
    "own": lambda: draws_from_each,
    "variable of a module": lambda: draws_from_the_module,
    "attributes": OwnsGenerators,
    "method": lambda: OwnsGenerators().__call__,
    "partial": lambda: functools.partial(draws_from, np.random.default_rng(0)),
    "enclosing function": enclosing_function,
    "albumentations in a class": CallsAlbumentations,
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


def run(folder, name, workers, start=None):
    """The training images of two epochs, or of the first epoch from a batch on."""
    pl.seed_everything(7, workers=True, verbose=False)
    for _ in range(workers + 1 if start is None else 5):  # a run has drawn other numbers before
        draws_from_each(None)
    data = ImageFolder(
        folder,
        test_fraction=0.25,
        classes_per_batch=2,
        samples_per_class=2,
        num_workers=workers,
        train_transform=TRANSFORMS[name](),
        eval_transform=TRANSFORMS[name](),
    )
    if start is None:
        loader = data.train_dataloader()
    else:  # as after a kill
        settings = {"num_workers": workers, "collate_fn": data.train_set.collate}
        loader = RetrievalDataLoader(data.train_set, data.train_sampler(), start=start, **settings)
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
    assert all(map(torch.equal, run(folder, name, 2), images))
    resumed = run(folder, name, 0, start=1)
    assert len(resumed) == batches - 1
    assert all(map(torch.equal, resumed, images[1:]))


def test_the_global_generators_continue_as_if_nothing_had_happened():
    pl.seed_everything(3, verbose=False)
    expected = [draws_from_each(None) for _ in range(2)]
    pl.seed_everything(3, verbose=False)
    found = [draws_from_each(None)]
    with pytest.raises(KeyError), seeded_item(SeededIndex(0, seed=5)):
        raise KeyError(draws_from_each(None))
    with seeded_item(SeededIndex(0, seed=5)):
        first = draws_from_each(None)
    with seeded_item(SeededIndex(1, seed=5)):
        assert torch.equal(draws_from_each(None), first)
    found.append(draws_from_each(None))
    assert all(map(torch.equal, found, expected))
    with seeded_item(4):  # an index of an evaluation loader has no seed
        assert not torch.equal(draws_from_each(None), first)


def test_generators_of_a_transform_continue_as_if_nothing_had_happened():
    transform, untouched = OwnsGenerators(), OwnsGenerators()
    OwnsGenerators.of_class.manual_seed(1)
    with seeded_item(SeededIndex(0, seed=5), own_generators(transform)):
        first = transform(None)
    with seeded_item(SeededIndex(1, seed=5), own_generators(transform)):
        assert torch.equal(transform(None), first)
    assert len(set(first.flatten().tolist())) == 3  # each generator has a seed of its own
    found = transform(None)
    OwnsGenerators.of_class.manual_seed(1)
    assert torch.equal(found, untouched(None))


def test_the_search_for_generators_ends():
    parts = [list(range(100_000)), random.SystemRandom()]
    parts.append(parts)
    assert own_generators(functools.partial(draws_from, parts)) == []


def test_an_item_is_seeded_without_the_generators_of_gpus(monkeypatch):
    """Asking for these takes longer than an image; transforms run on the CPU."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda *_: pytest.fail("seeds GPUs"))
    before = torch.get_rng_state()
    with seeded_item(SeededIndex(0, seed=5)):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)
