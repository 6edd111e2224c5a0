"""Backbones of torchvision: the trunk of each family, pretrained weights, image sizes."""

import copy

import PIL.Image
import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models import WeightsEnum

from lightning_retrieval.models import Embedder, Preparation
from lightning_retrieval.models.pretrained import without_pretrained_weights

# One model of each family that torchvision lists.
FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "vgg11_bn",
    "vit_b_32",
]


@pytest.fixture(autouse=True)
def one_thread():
    """The operations are small: on a busy machine, waiting threads make them ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pooling_input(model, images):
    """The input of the model's own pooling or classifier in its own forward."""
    inputs = []
    name = next(name for name in ("avgpool", "classifier", "fc", "heads") if hasattr(model, name))
    getattr(model, name).register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    with torch.no_grad():
        model.eval()(images)
    return inputs[0]


def assert_same_features(features, expected):
    if features.ndim > expected.ndim:  # the model pools by a function call
        features = features.mean((2, 3))
    scale = expected.std()  # far below the default tolerance in some models with random weights
    assert scale > 0
    torch.testing.assert_close(features / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_backbone_returns_the_input_of_the_model_s_own_pooling(name, monkeypatch):
    build, built = models.get_model, []

    def keep(*args, **kwargs):
        built.append(build(*args, **kwargs))
        return copy.deepcopy(built[0])

    monkeypatch.setattr(models, "get_model", keep)
    embedder = Embedder(name, 8).eval()
    expected_keys = {key for key in built[0].state_dict() if not key.startswith(("fc", "classifier", "head"))}
    assert set(embedder.backbone.state_dict()) == expected_keys
    images = torch.randn(1, 3, 224, 224) if name in ("vit_b_32", "maxvit_t") else torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        features, embeddings = embedder.backbone(images), embedder(images)
    assert_same_features(features, pooling_input(built[0], images))
    assert features.shape[1] == embedder.feature_dim
    assert features.ndim == (2 if name == "vit_b_32" else 4)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(len(images)))


def test_every_family_of_torchvision_is_tested():
    def families(names):
        return {models.get_model_builder(name).__module__ for name in names}

    assert families(models.list_models(module=models)) == families(FAMILIES)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3"])
def test_pretrained_weights_are_loaded_into_the_backbone(name, monkeypatch):
    """With weights, Inception and GoogLeNet have auxiliary classifiers and transform their input."""
    inception = name != "resnet18"
    settings = {"aux_logits": True, "init_weights": False, "transform_input": True} if inception else {}
    model = models.get_model(name, **settings)
    requested = []

    def get_state_dict(self, *args, **kwargs):
        requested.append(self.name)
        return model.state_dict()

    monkeypatch.setattr(WeightsEnum, "get_state_dict", get_state_dict)
    embedder = Embedder(name, 8, weights="IMAGENET1K_V1").eval()
    assert requested == ["IMAGENET1K_V1"]
    assert embedder.init_args()["weights"] == "IMAGENET1K_V1"
    assert not any("aux" in key.lower() for key in embedder.state_dict())
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert_same_features(embedder.backbone(images), pooling_input(model, images))


@pytest.mark.refusal
def test_invalid_model_without_a_known_classifier(monkeypatch):
    monkeypatch.setattr(models, "get_model", lambda *args, **kwargs: nn.Sequential(nn.Conv2d(3, 4, 1)))
    with pytest.raises(ValueError, match="whose classifier can be found, got Sequential with the parts 0; build it"):
        Embedder("resnet18")


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_while_a_checkpoint_is_loaded_no_weights_are_downloaded(name, monkeypatch):
    """GoogLeNet's weights also change what is done to images, which no weight of the checkpoint holds."""
    model = models.get_model(name, **({"init_weights": False} if name == "googlenet" else {}))
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *args, **kwargs: model.state_dict())
    embedder = Embedder(name, 8, weights="DEFAULT").eval()
    monkeypatch.setattr(WeightsEnum, "get_state_dict", None)
    with without_pretrained_weights():
        twin = Embedder(**embedder.init_args()).eval()
    twin.load_state_dict(embedder.state_dict())
    images = torch.rand(2, 3, 96, 96)
    assert twin(images).equal(embedder(images))


def test_a_local_file_of_weights(tmp_path):
    model = models.resnet18(num_classes=3)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "own.pth")
    embedder = Embedder("resnet18", 8, weights=str(tmp_path / "own.pth")).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert_same_features(embedder.backbone(images), pooling_input(model, images))
    assert embedder.init_args()["weights"] is None


def test_preparation_is_that_of_the_weights(monkeypatch):
    model = models.get_model("mobilenet_v2")
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *args, **kwargs: model.state_dict())
    assert Embedder("mobilenet_v2", 8).preparation == Preparation()
    of_weights = models.MobileNet_V2_Weights.IMAGENET1K_V2.transforms()
    embedder = Embedder("mobilenet_v2", 8, weights="IMAGENET1K_V2")
    image = PIL.Image.effect_mandelbrot((300, 280), (-2, -1.5, 1, 1.5), 40).convert("RGB")
    assert embedder.preparation == Preparation(image_size=224, resize=232)
    one_grey_level = 1.01 / 255 / torch.tensor(of_weights.std)[:, None, None]
    assert ((embedder.preparation(image) - of_weights(image)).abs() <= one_grey_level).all()  # of Pillow's resizing


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "vit_b_32",
            {"image_size": 65},
            r"a size that vit_b_32 with weights None takes, got 65 \(Input shape indivisible",
        ),
        (
            "vit_b_32",
            {"image_size": 64, "weights": "DEFAULT"},
            r"with weights 'DEFAULT' takes, got 64 \(.*; leave it out",
        ),
        ("maxvit_t", {"image_size": 64}, r"Embedder: `image_size` must be a size that maxvit_t .* is not divisible"),
    ],
)
def test_invalid_image_size(name, settings, message):
    with pytest.raises(ValueError, match=message):
        Embedder(name, 8, **settings)


@pytest.mark.refusal
def test_invalid_images_of_another_size_than_that_for_which_a_transformer_is_built():
    embedder = Embedder("vit_b_32", 8, image_size=64).eval()
    assert embedder(torch.rand(1, 3, 64, 64)).shape == (1, 8)
    message = r"`images` must have a size that vit_b_32, built for \(64, 64\), takes, got \(96, 64\) \(AssertionError: "
    with pytest.raises(ValueError, match=message):
        embedder(torch.rand(1, 3, 96, 64))
