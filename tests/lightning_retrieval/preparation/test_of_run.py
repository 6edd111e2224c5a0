"""Images are prepared as the arguments say, else as the model of the run wants; so are those in batches of uint8."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import ArgumentParser
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import ImageFolder, training_transform
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.of_run import UNNORMALIZED, normalized_batch
from lightning_retrieval.preparation.training_transforms import TrainingTransform
from tests.datamodules.pictures import TINY, as_it_is
from tests.datamodules.trees_more import write_folders

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Small(nn.Module):
    """An embedder that wants images of 24 x 20 pixels."""

    preparation = Preparation((24, 20))

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.shapes = set()

    def forward(self, images):
        self.shapes.add(tuple(images.shape[1:]))
        return self.linear(images.mean((2, 3)))


def run(stage, module, data, **settings):
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    getattr(trainer, stage)(module, datamodule=data, **settings)
    return trainer


def images_in(root, **settings):
    if not root.exists():
        write_folders(root, ["a", "b", "c", "d"])
    sizes = {"classes_per_batch": 2, "samples_per_class": 2, "eval_batch_size": 4, "test_fraction": 0.5}
    return ImageFolder(root, **sizes, **settings)


BICUBIC = Preparation(32, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
RECORDED = Preparation(48, background="black")


@pytest.mark.parametrize(
    ("settings", "of_embedder", "recorded", "wanted"),
    [
        ({}, None, None, Preparation()),
        ({}, BICUBIC, None, BICUBIC),
        ({}, BICUBIC, RECORDED, RECORDED),
        ({"image_size": 64}, BICUBIC, None, BICUBIC.with_size(64)),
        ({"image_size": 64, "resize": 64}, None, RECORDED, Preparation(64, 64, background="black")),
        ({"transform": "roadmap"}, BICUBIC, RECORDED, Preparation.named("roadmap")),
        ({"transform": "roadmap", "image_size": 112}, None, None, Preparation(112, (128, 128))),
        ({"eval_transform": BICUBIC, "image_size": 64}, None, RECORDED, BICUBIC),
    ],
)
def test_what_an_evaluation_does(tmp_path, settings, of_embedder, recorded, wanted):
    """As the arguments say, else as the model was evaluated, else as its embedder wants."""
    module = RetrievalModule(Small(), SmoothAPLoss())
    module.embedder.preparation = of_embedder
    module.preparation = None if recorded is None else {"preparation": recorded.as_dict()}
    data = images_in(tmp_path / "images", **settings)
    for _ in range(2):  # what a run records does not change the next one
        run("validate", module, data, verbose=False)
        assert data.preparation == wanted
        assert module.embedder.shapes == {(3, *wanted.crop_size)}


def test_a_prediction_is_made_with_the_transform_of_the_evaluation(tmp_path):
    module = RetrievalModule(Small(), SmoothAPLoss())
    run("fit", module, images_in(tmp_path / "images", eval_transform=Preparation(8)))
    module.embedder.shapes.clear()
    run("predict", module, images_in(tmp_path / "images"))
    assert module.embedder.shapes == {(3, 8, 8)}


def test_the_background_is_that_of_a_given_preparation_else_the_arguments(tmp_path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGBA", (4, 4)).save(tmp_path / name / f"{number}.png")
    by_function = images_in(tmp_path, eval_transform=as_it_is, background="red")
    assert by_function.test_set[0]["images"].unique(dim=0).flatten()[:3].tolist() == [255, 0, 0]
    grey = Preparation(4, mean=(0, 0, 0), std=(1, 1, 1), background="black")
    assert not images_in(tmp_path, eval_transform=grey, background="red").test_set[0]["images"].any()


@pytest.mark.refusal  # by the type checker
def test_a_run_takes_the_size_of_the_embedder_and_its_checkpoint_that_of_the_run(tmp_path):
    root = tmp_path / "images"
    data = images_in(root)
    assert data.train_set[0]["images"].shape == (3, 224, 224)  # before a model is known
    module = RetrievalModule(Small(), SmoothAPLoss())
    trainer = run("fit", module, data)
    assert module.embedder.shapes == {(3, 24, 20)}
    other = RetrievalModule(Small(), SmoothAPLoss())
    trainer = run("fit", other, images_in(root, image_size=16, background="black", reduced_scale=True))
    assert other.embedder.shapes == {(3, 16, 16)}
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    wanted = Preparation(16, background="black", reduced_scale=True)
    assert saved["preparation"] == {"preparation": wanted.as_dict()}

    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", embedder=Small())
    data = images_in(root)
    run("predict", loaded, data)
    assert data.preparation == wanted
    assert loaded.embedder.shapes == {(3, 16, 16)}
    fresh = RetrievalModule(Small(), SmoothAPLoss())
    run("validate", fresh, images_in(root), ckpt_path=tmp_path / "model.ckpt", verbose=False, weights_only=True)
    assert fresh.embedder.shapes == {(3, 16, 16)}


def test_a_run_with_loaders_records_nothing_of_the_data_module_of_an_earlier_call(tmp_path):
    module = RetrievalModule(Small(), SmoothAPLoss())
    trainer = run("validate", module, images_in(tmp_path / "images"), verbose=False)
    rows = [(image, label // 2) for label, image in enumerate(torch.rand(4, 3, 9, 9))]
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    assert module.preparation is None


@pytest.mark.refusal  # by the type checker
def test_a_run_with_padded_images_is_continued_with_them(tmp_path):
    root = tmp_path / "images"
    module = RetrievalModule(Small(), SmoothAPLoss())
    trainer = run("fit", module, images_in(root, image_size=16, resize="fit", fill=(9, 9, 9)))
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", embedder=Small())
    data = images_in(root)
    run("predict", loaded, data)
    assert data.preparation == Preparation(16, resize="fit", fill=(9, 9, 9))


def steps_of(package, *names_and_arguments):
    return [{"class_path": f"{package}.{name}", "init_args": arguments} for name, arguments in names_and_arguments]


TORCHVISION = {
    "class_path": "torchvision.transforms.v2.Compose",
    "init_args": {
        "transforms": steps_of(
            "torchvision.transforms.v2",
            ("Resize", {"size": [20, 20]}),
            ("ToImage", {}),
            ("ToDtype", {"dtype": "torch.float32", "scale": True}),
        )
    },
}


def without_annotations(image):
    return TINY(image)


@pytest.mark.parametrize(
    ("given", "shape", "name"),
    [
        (TORCHVISION, (3, 20, 20), None),
        (f"{__name__}.without_annotations", (3, 8, 8), f"{__name__}.without_annotations"),
    ],
)
def test_transforms_of_a_config(tmp_path, given, shape, name):
    write_folders(tmp_path / "images", ["a", "b", "c", "d"])
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=ImageFolder)
    settings = {"root": str(tmp_path / "images"), "train_transform": given, "eval_transform": given}
    config = parser.parse_string(
        yaml.safe_dump({"data": {"class_path": "ImageFolder", "init_args": {**settings, "image_size": [9, 7]}}})
    )
    data = parser.instantiate_classes(config).data
    assert data.train_set[0]["images"].shape == data.test_set[0]["images"].shape == shape
    assert data.serialised_preparation.get("function") == name
    assert data.preparation == Preparation((9, 7))
    assert "train_transform:" in parser.dump(config)


SETTINGS = {"image_size": 16, "mean": (0.1, 0.2, 0.3), "classes_per_batch": 2, "samples_per_class": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_folders(root, ["a", "b", "c", "d"], images=4)
    return root


class SeesBatches(RetrievalModule):
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


class WithHook(SeesBatches):
    """Also sees batches before they are sent to the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        assert batch["images"].is_floating_point()
        return batch


def images_of_run(folder, module, **settings):
    """The images of a run."""
    data = ImageFolder(folder, **SETTINGS)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, **settings)
    trainer.fit(module, data)
    dtypes = [loader.dataset[0]["images"].dtype for loader in (trainer.train_dataloader, trainer.val_dataloaders)]
    trainer.predict(module, data)
    return {name: torch.cat(images) for name, images in module.images.items()}, dtypes, data


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_a_run_gets_the_images_that_are_normalised_by_the_data_set(folder, precision):
    images, dtypes, data = images_of_run(folder, SeesBatches(), precision=precision)
    assert dtypes == [torch.uint8, torch.uint8]
    dtype = {"64-true": torch.float64}.get(precision, torch.float32)
    wanted = torch.stack([data.test_set[position]["images"] for position in range(len(data.test_set))])
    assert wanted.dtype == torch.float32
    assert torch.equal(images["val"][-len(wanted) :], wanted.to(dtype))
    assert torch.equal(images["predict"], wanted.to(dtype))
    batches = [batch["images"] for batch in ImageFolder(folder, **SETTINGS).train_dataloader()]
    assert torch.equal(images["train"], torch.cat(batches).to(dtype))


def test_a_hook_before_the_transfer_sees_normalised_images(folder):
    images, dtypes, _ = images_of_run(folder, SeesBatches())
    with_hook, dtypes_with_hook, _ = images_of_run(folder, WithHook())
    assert dtypes == [torch.uint8, torch.uint8]
    assert dtypes_with_hook == [torch.float32, torch.float32]
    for name, seen in images.items():
        assert torch.equal(seen, with_hook[name])


def test_a_transform_of_the_user_that_gives_uint8_is_left_alone(folder):
    def pixels(image):
        assert isinstance(image, Image.Image)
        return torch.from_numpy(np.array(image.resize((16, 16)))).permute(2, 0, 1)

    class OfBytes(SeesBatches):
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
        (ImageFolder, {"train_transform": RANDOM_OTHER, "eval_transform": RESIZED_OTHER}),
        (OfAnotherPreparation, {}),
    ],
)
def test_images_of_another_preparation_are_normalised_by_their_own(folder, data_module, settings):
    """The wanted images are those of loaders outside of a run, which normalise them in the data set."""
    settings = {"classes_per_batch": 2, "samples_per_class": 2, "image_size": 16, **settings}
    module = SeesBatches()
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
    assert sorted(found[0]) == ["images", "labels"]
    images = [found[0]["images"], found[1]["a"][0]["images"], found[1]["a"][1]["images"]]
    assert [values.tolist() for values in images] == [[2, 2], [2, 2], [1, 1]]
    assert found[2] == "text"
    assert UNNORMALIZED in ours
