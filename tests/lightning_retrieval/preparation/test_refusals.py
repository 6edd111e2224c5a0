"""Invalid preparations, transforms and folders of photographs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import ImageFolder, ImageIndex, ImageSet, training_transform
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.models import Preparation
from tests.datamodules.trees import write_image
from tests.datamodules.trees_more import write_folders
from tests.quiet_trainer import quiet_trainer
from tests.refusals import refusal_test

PIXELS = torch.zeros(3, 4, 4, dtype=torch.uint8)


def images(transform):
    """Read an image."""
    write_image(Path("a.png"))
    return ImageSet(ImageIndex(["a.png"], [0]), ".", transform)[0]


def predict(recorded, **settings):
    """Predict with a model that was evaluated with the recorded transform."""
    if isinstance(recorded, Preparation):
        recorded = {"preparation": recorded.as_dict()}
    write_folders(Path("photos"), ["a", "b"])
    module = RetrievalModule(torch.nn.Flatten(), SmoothAPLoss())
    module.preparation = recorded
    quiet_trainer().predict(module, ImageFolder("photos", **settings))


@pytest.fixture
def photos():
    """Photographs and a folder of other files, in the working directory."""

    def shrink(*arguments):
        write_image(Path("photos/1.jpg"), size=(20, 10))
        Path("full").mkdir()
        Path("full/mine.txt").write_text("")
        return arguments

    return shrink


TABLE = {
    "Preparation": [
        (lambda: Preparation((64, 64, 3)), InvalidValue, "image_size"),
        (lambda: Preparation(0), InvalidValue, "image_size"),
        (lambda: Preparation(resize=200), InvalidValue, "resize"),  # less than the image size
        (lambda: Preparation((8, 9), resize=(9, 8)), InvalidValue, "resize"),
        (lambda: Preparation(resize="crop"), InvalidType, "resize"),
        (lambda: Preparation(None, resize="fit"), InvalidValue, "image_size"),
        (lambda: Preparation(interpolation="linear"), InvalidValue, "interpolation"),
        (lambda: Preparation(channels=1), InvalidValue, "mean"),  # of three channels
        (lambda: Preparation(channels=2), InvalidValue, "channels"),
        (lambda: Preparation(mean=(123.7, 116.3, 103.5)), InvalidValue, "mean"),
        (lambda: Preparation(std=(0, 1, 1)), InvalidValue, "std"),
        (lambda: Preparation(background="whitish"), InvalidValue, "background"),
        (lambda: Preparation(background=(1, 2, 256)), InvalidValue, "background"),
        (lambda: Preparation(resize="fit", fill="no colour"), InvalidValue, "fill"),
        (lambda: Preparation(fill="white"), InvalidValue, "fill"),  # without padding
        (lambda: Preparation.named("plane"), InvalidValue, "name"),
        (lambda: Preparation()(np.zeros((4, 4, 3), np.uint8)), InvalidType, "image"),
        (lambda: Preparation()(torch.zeros(3, 4, 4)), InvalidType, "images"),
        (lambda: Preparation()(PIXELS.permute(1, 2, 0)), InvalidValue, "images"),
        (lambda: Preparation().normalize(torch.zeros(3, 4, 4)), InvalidType, "images"),
        (lambda: Preparation().undo(torch.zeros(1, 4, 4)), InvalidValue, "images"),
    ],
    "training_transform": [(lambda: training_transform("plane"), InvalidValue, "name")],
    "ImageSet": [(lambda: images(np.asarray), InvalidType, "transform")],
    "ImageFolder": [
        (lambda: ImageFolder(".", transform="plane"), InvalidValue, "transform"),
        (lambda: predict({"function": "a.b"}), InvalidValue, "eval_transform", "a.b"),
        (lambda: predict(Preparation(48), image_size=64), InvalidValue, "", "image_size=64"),
        (lambda: predict(Preparation(reduced_scale=True), reduced_scale=False), InvalidValue, "", "plain"),
        (lambda: predict(Preparation(resize="fit", fill="red"), fill="border"), InvalidValue, "", "border"),
    ],
    "shrink": [
        (lambda photos: photos("photos", "photos"), SystemExit, "OUTPUT", "photos"),
        (lambda photos: photos("photos", "."), SystemExit, "OUTPUT"),
        (lambda photos: photos("photos", "full"), SystemExit, "OUTPUT", "full"),  # of files that are not copies
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
