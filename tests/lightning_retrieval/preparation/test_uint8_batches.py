"""Batches of uint8, which are normalised on the device: a run gets the same images as without them."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import ImageFolder, training_transform
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.of_run import UNNORMALIZED, normalized_batch
from lightning_retrieval.preparation.training_transforms import TrainingTransform

SETTINGS = {"image_size": 16, "mean": (0.1, 0.2, 0.3), "classes_per_batch": 2, "samples_per_class": 2}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for label in "abcd":
        (tmp_path / label).mkdir()
        for number in range(4):
            pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.jpg")
    return tmp_path


class Seen(RetrievalModule):
    """Keeps the images of its steps."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), SmoothAPLoss())
        self.images = {"train": [], "val": [], "predict": []}

    def training_step(self, batch, batch_idx):
        assert UNNORMALIZED not in batch
        self.images["train"].append(batch["images"])
        super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        stage = "predict" if self.trainer.predicting else "val"
        self.images[stage].append(batch["images"])
        return super().validation_step(batch, batch_idx)


class WithHook(Seen):
    """Also sees batches before they are sent to the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        assert batch["images"].is_floating_point()
        return batch


class Moving(Seen):
    """Moves batches itself."""

    moved = 0

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.moved += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def run(folder, module, **settings):
    """The images of a run."""
    data = ImageFolder(folder, **SETTINGS)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, **settings)
    trainer.fit(module, data)
    dtypes = [loader.dataset[0]["images"].dtype for loader in (trainer.train_dataloader, trainer.val_dataloaders)]
    trainer.predict(module, data)
    return {name: torch.cat(images) for name, images in module.images.items()}, dtypes, data


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_a_run_gets_the_images_that_are_normalised_by_the_data_set(folder, precision):
    images, dtypes, data = run(folder, Seen(), precision=precision)
    assert dtypes == [torch.uint8, torch.uint8]
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    wanted = torch.stack([data.test_set[position]["images"] for position in range(len(data.test_set))])
    assert wanted.dtype == torch.float32
    assert torch.equal(images["val"][-len(wanted) :], wanted.to(dtype))
    assert torch.equal(images["predict"], wanted.to(dtype))
    batches = [batch["images"] for batch in ImageFolder(folder, **SETTINGS).train_dataloader()]
    assert torch.equal(images["train"], torch.cat(batches).to(dtype))


def test_a_hook_before_the_transfer_sees_normalised_images(folder):
    images, dtypes, _ = run(folder, Seen())
    with_hook, dtypes_with_hook, _ = run(folder, WithHook())
    assert dtypes == [torch.uint8, torch.uint8]
    assert dtypes_with_hook == [torch.float32, torch.float32]
    for name, seen in images.items():
        assert torch.equal(seen, with_hook[name])


def test_the_module_may_move_batches_itself(folder):
    module = Moving()
    images, _, _ = run(folder, module)
    assert module.moved > 0
    assert torch.equal(images["train"], run(folder, Seen())[0]["train"])


def test_a_transform_of_the_user_that_gives_uint8_is_left_alone(folder):
    def pixels(image):
        assert isinstance(image, Image.Image)
        return torch.from_numpy(np.array(image.resize((16, 16)))).permute(2, 0, 1)

    class OfBytes(Seen):
        def forward(self, images):
            assert images.dtype == torch.uint8
            return super().forward(images.float())

        def embed(self, images):
            return self(images)

    module = OfBytes()
    data = ImageFolder(folder, classes_per_batch=2, samples_per_class=2, train_transform=pixels, eval_transform=pixels)
    pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(module, data)
    assert {images.dtype for images in module.images["train"]} == {torch.uint8}


OTHER = Preparation(image_size=16, mean=(0.4, 0.5, 0.6), std=(0.7, 0.8, 0.9))
RANDOM_OTHER = training_transform("plain", OTHER)
RESIZED_OTHER = TrainingTransform([v2.Resize((16, 16))], OTHER, takes_pixels=True)


class OfAnotherPreparation(ImageFolder):
    """Evaluates images that are prepared in another way than those of training."""

    def evaluation_set(self, name, index):
        return self.image_set(index, OTHER)


@pytest.mark.parametrize(
    ("data_module", "settings"),
    [
        (ImageFolder, {"train_transform": RANDOM_OTHER}),
        (ImageFolder, {"eval_transform": OTHER}),
        (ImageFolder, {"train_transform": RANDOM_OTHER, "eval_transform": OTHER}),
        (ImageFolder, {"train_transform": RANDOM_OTHER, "eval_transform": RESIZED_OTHER}),
        (OfAnotherPreparation, {}),
    ],
)
def test_images_of_another_preparation_are_normalised_by_their_own(folder, data_module, settings):
    """The wanted images are those of loaders outside of a run, which normalise them in the data set."""
    settings = {"classes_per_batch": 2, "samples_per_class": 2, "image_size": 16, **settings}
    module = Seen()
    pl.Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, **QUIET).fit(
        module, data_module(folder, **settings)
    )
    outside = data_module(folder, **settings)
    for name, loader in (("train", outside.train_dataloader()), ("val", outside.val_dataloader())):
        assert torch.equal(torch.cat(module.images[name]), torch.cat([batch["images"] for batch in loader]))


def test_batches_of_several_loaders_are_normalised():
    ours = {"images": torch.ones(2), UNNORMALIZED: torch.tensor([True, True]), "labels": 3}
    other = {"images": torch.ones(2)}
    found = normalized_batch([ours, {"a": (ours, other)}, "text"], lambda images: images + 1)
    normalized = found[0]
    assert (sorted(normalized), normalized["images"].tolist(), normalized["labels"]) == (
        ["images", "labels"],
        [2, 2],
        3,
    )
    assert found[1]["a"][0]["images"].tolist() == [2, 2]
    assert found[1]["a"][1]["images"].tolist() == [1, 1]
    assert found[2] == "text"
    assert UNNORMALIZED in ours
