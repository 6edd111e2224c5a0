"""Backbones: the trunk of each family of torchvision, pretrained weights, and the shape of the features."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models import WeightsEnum

import lightning_retrieval.models
from lightning_retrieval.models import Embedder
from tests.lightning_retrieval.models.user_backbones import Backbone, as_list, feature_map, vectors

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


def test_features_of_a_vit_are_found_with_its_image_size():
    vit = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    vit.heads = nn.Identity()
    embedder = Embedder(vit, 4)
    assert embedder.feature_dim == 8
    assert embedder(torch.rand(2, 3, 32, 32)).shape == (2, 4)


class Noisy(Backbone):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), training=True)


def test_finding_the_feature_shape_changes_nothing():
    backbone = Noisy(feature_map, channels=1)
    backbone.conv.eval()  # a part that its user keeps in eval mode
    before = copy.deepcopy(backbone.state_dict())
    generator = torch.get_rng_state()
    assert Embedder(backbone, 5, feature_dim=6).feature_dim == 6
    after_head_alone = torch.get_rng_state()
    torch.set_rng_state(generator)
    assert Embedder(backbone, 5).feature_dim == 6
    assert torch.get_rng_state().equal(after_head_alone)
    assert (backbone.training, backbone.conv.training, backbone.norm.training) == (True, False, True)
    for key, value in backbone.state_dict().items():
        assert value.device.type == "cpu"
        assert value.equal(before[key])


def test_features_are_found_with_one_image_for_a_batch_norm_of_vectors():
    """In training mode, it raises on a single row."""
    assert Embedder(nn.Sequential(Backbone(vectors), nn.BatchNorm1d(6)), 5).feature_dim == 6


def test_the_mode_is_restored_after_a_failure():
    backbone = Backbone(as_list)
    with pytest.raises(ValueError, match="could not be run"):
        Embedder(backbone)
    assert backbone.training
    assert backbone.norm.training


@pytest.mark.parametrize(
    "path", sorted(Path(lightning_retrieval.models.__file__).parent.glob("*.py")), ids=lambda p: p.stem
)
def test_no_file_imports_torchvision_or_lightning_at_the_top(path):
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    assert names
    assert not {name.split(".")[0] for name in names} & {"torchvision", "lightning", "pytorch_lightning"}


@pytest.mark.refusal
def test_invalid_model_without_a_known_classifier(monkeypatch):
    monkeypatch.setattr(models, "get_model", lambda *args, **kwargs: nn.Sequential(nn.Conv2d(3, 4, 1)))
    with pytest.raises(ValueError, match="whose classifier can be found, got Sequential with the parts 0; build it"):
        Embedder("resnet18")
