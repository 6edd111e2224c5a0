"""Images are prepared as the arguments say, else as the model of the run wants."""

from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import ArgumentParser
from PIL import Image
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import ImageFolder, training_transform
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.of_run import RunPreparation
from lightning_retrieval.preparation.serialised import serialise_transform
from tests.datamodules.pictures import TINY
from tests.datamodules.trees import write_image
from tests.datamodules.trees_more import write_folders

GREY = Preparation(32, channels=1, mean=(0.5,), std=(0.5,))


def of_settings(paper=None, train_transform=None, eval_transform=None, **settings):
    return RunPreparation("Data", paper, settings, train_transform=train_transform, eval_transform=eval_transform)


def model(embedder=None, recorded=None):
    return SimpleNamespace(preparation=recorded, embedder=SimpleNamespace(preparation=embedder))


RECORDED = serialise_transform(Preparation(48, background="black"))


@pytest.mark.parametrize(
    ("settings", "module", "wanted"),
    [
        ({}, None, Preparation()),
        ({}, model(), Preparation()),
        ({}, model(GREY), GREY),
        ({}, model(GREY, RECORDED), Preparation(48, background="black")),
        ({"image_size": 64}, model(GREY), Preparation(64, channels=1, mean=(0.5,), std=(0.5,))),
        ({"image_size": 64, "resize": 64}, model(None, RECORDED), Preparation(64, 64, background="black")),
        ({"paper": "roadmap"}, model(GREY, RECORDED), Preparation.named("roadmap")),
        ({"paper": "roadmap", "image_size": 112}, None, Preparation(112, (128, 128))),
        ({"eval_transform": GREY, "image_size": 64}, model(None, RECORDED), GREY),
    ],
)
def test_what_evaluation_does(settings, module, wanted):
    transforms = of_settings(**settings)
    transforms.follow(module)
    assert transforms.evaluation.current == wanted
    assert transforms.preparation == wanted
    assert transforms.train.background == transforms.evaluation.background == wanted.background


def test_transforms_that_were_given_stay():
    transforms = of_settings(train_transform=len, eval_transform=repr)
    transforms.follow(model(GREY, RECORDED))
    assert (transforms.train.current, transforms.evaluation.current) == (len, repr)


def test_a_transform_that_was_given_keeps_its_background():
    black, blue = Preparation(48, background="black"), training_transform("plain", Preparation(48, background="blue"))
    transforms = of_settings(train_transform=blue, eval_transform=black, background="red")
    assert (transforms.train.background, transforms.evaluation.background) == ("blue", "black")
    transforms = of_settings(train_transform=len, eval_transform=repr, background="red")
    assert (transforms.train.background, transforms.evaluation.background) == ("red", "red")


@pytest.mark.refusal
def test_a_prediction_is_made_as_the_model_was_evaluated():
    same = of_settings(image_size=48, background="black")
    same.follow(model(None, RECORDED), predicts=True)
    other = of_settings(image_size=64)
    other.follow(model(None, RECORDED))  # an evaluation may measure another size
    with pytest.raises(
        ValueError,
        match=r"^Data: images must be prepared as the model was evaluated, with Preparation\(image_size=48, .*, got "
        r"Preparation\(image_size=64, background=black\); leave out the arguments that differ\.$",
    ):
        other.follow(model(None, RECORDED), predicts=True)


@pytest.mark.refusal
def test_a_model_that_was_evaluated_with_a_function_needs_it():
    transforms = of_settings()
    with pytest.raises(
        ValueError, match=r"^Data: `eval_transform` must be given, .* evaluated with a\.b, whose code a"
    ):
        transforms.follow(model(None, {"function": "a.b"}))


@pytest.mark.refusal
def test_errors_name_the_data_module():
    with pytest.raises(ValueError, match=r"^ImageFolder: `image_size` must be an integer >= 1, got -3\.$"):
        ImageFolder("images", image_size=-3)
    with pytest.raises(ValueError, match=r"^ImageFolder: `resize` must be at least `image_size`, 64, .* got 32\.$"):
        ImageFolder("images", image_size=64, resize=32)


class Small(nn.Module):
    """An embedder that wants images of 24 x 20 pixels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.preparation = Preparation((24, 20))
        self.shapes = set()

    def forward(self, images):
        self.shapes.add(tuple(images.shape[1:]))
        return self.linear(images.mean((2, 3)))


def run(stage, module, data, **settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)
    getattr(trainer, stage)(module, datamodule=data, **settings)
    return trainer


def images_in(root, **settings):
    if not root.exists():
        write_folders(root, ["a", "b", "c", "d"])
    sizes = {"classes_per_batch": 2, "samples_per_class": 2, "eval_batch_size": 4, "test_fraction": 0.5}
    return ImageFolder(root, **sizes, **settings)


def test_a_run_takes_the_size_of_the_embedder_and_its_checkpoint_that_of_the_run(tmp_path):
    root = tmp_path / "images"
    data = images_in(root)
    assert data.train_set[0]["images"].shape == (3, 224, 224)  # before a model is known
    module = RetrievalModule(Small(), SmoothAPLoss())
    trainer = run("fit", module, data)
    assert module.embedder.shapes == {(3, 24, 20)}
    other = RetrievalModule(Small(), SmoothAPLoss())
    trainer = run("fit", other, images_in(root, image_size=16, background="black"))
    assert other.embedder.shapes == {(3, 16, 16)}
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert saved["preparation"] == serialise_transform(Preparation(16, background="black"))

    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", embedder=Small())
    run("predict", loaded, images_in(root))
    assert loaded.embedder.shapes == {(3, 16, 16)}
    fresh = RetrievalModule(Small(), SmoothAPLoss())
    run("validate", fresh, images_in(root), ckpt_path=tmp_path / "model.ckpt", verbose=False, weights_only=True)
    assert fresh.embedder.shapes == {(3, 16, 16)}
    with pytest.raises(ValueError, match=r"^ImageFolder: images must be prepared as the model was evaluated"):
        run("predict", loaded, images_in(root, image_size=24))


def test_a_given_transform_is_recorded(tmp_path):
    module = RetrievalModule(Small(), SmoothAPLoss())
    run("fit", module, images_in(tmp_path / "images", train_transform=TINY, eval_transform=TINY))
    assert module.embedder.shapes == {(3, 8, 8)}
    assert module.preparation == serialise_transform(TINY)
    assert "function" not in module.preparation


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


def test_albumentations_in_a_config(tmp_path):
    pytest.importorskip("albumentations")
    write_folders(tmp_path / "images", ["a", "b", "c", "d"])
    steps = steps_of("albumentations", ("Resize", {"height": 12, "width": 10}), ("Normalize", {}))
    compose = {"transforms": [*steps, *steps_of("albumentations.pytorch", ("ToTensorV2", {}))]}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=ImageFolder)
    transform = {"class_path": "albumentations.Compose", "init_args": compose}
    settings = {"root": str(tmp_path / "images"), "eval_transform": transform}
    config = parser.parse_string(yaml.safe_dump({"data": {"class_path": "ImageFolder", "init_args": settings}}))
    data = parser.instantiate_classes(config).data
    assert data.test_set[0]["images"].shape == (3, 12, 10)
    assert "albumentations" in data.serialised_preparation


@pytest.mark.refusal
def test_a_transform_that_gives_arrays(tmp_path):
    data = images_in(tmp_path / "images", eval_transform=np.asarray)
    with pytest.raises(
        TypeError, match=r"^ImageSet: `transform` must return a tensor .* got ndarray; end it with v2\.ToImage\(\) and"
    ):
        data.test_set[0]


def test_all_runs_of_a_model_decode_at_the_scale_at_which_it_was_evaluated(tmp_path):
    root, seen = tmp_path / "images", []
    for number in range(16):
        write_image(root / str(number % 4) / f"{number}.jpg", size=(170, 130), seed=number)

    class Seen(Small):
        def forward(self, images):
            seen.append((self.training, images.detach().clone()))
            return super().forward(images)

    trainer = run("fit", RetrievalModule(Seen(), SmoothAPLoss()), images_in(root, image_size=16, reduced_scale=True))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    preparation = Preparation(16, reduced_scale=True)
    assert torch.load(tmp_path / "model.ckpt", weights_only=True)["preparation"] == serialise_transform(preparation)

    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", embedder=Seen())
    seen.clear()
    data = images_in(root)
    run("predict", loaded, data)
    wanted = []
    for path in data.test_set.index.paths:
        with Image.open(root / path) as image:
            image.draft("RGB", (42, 32))  # a quarter; the short side is resized to 18
            wanted.append(Preparation(16)(image.convert("RGB")))
    assert torch.equal(torch.cat([images for _, images in seen]), torch.stack(wanted))
    with pytest.raises(ValueError, match=r"^ImageFolder: .* Preparation\(image_size=16, reduced_scale=True\), got"):
        run("predict", loaded, images_in(root, reduced_scale=False))
