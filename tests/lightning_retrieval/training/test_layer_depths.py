"""The layer of each parameter: that of timm, and for other backbones that of their longest list of layers."""

import pytest
from torch import nn

from lightning_retrieval.models import Embedder
from lightning_retrieval.training.optimizers import layer_depths
from tests.lightning_retrieval.models.hugging_face_folders import SMALL

VIT = {"depth": 2, "embed_dim": 24, "num_heads": 2}


def depths_of(embedder):
    """{layer: first part of the names of its parameters that has a meaning}."""
    found = {}
    for name, depth in layer_depths("Owner", embedder.backbone).items():
        found.setdefault(depth, []).append(name)
    return found


def test_depths_of_timm_are_its_own():
    optim = pytest.importorskip("timm.optim")
    embedder = Embedder("timm/vit_tiny_patch16_224", 8, backbone_args=VIT)
    groups = optim.param_groups_layer_decay(embedder.backbone.model, weight_decay=0.0, layer_decay=0.5)
    expected = {}
    for group in groups:
        expected.update({id(parameter): group["lr_scale"] for parameter in group["params"]})
    depths = layer_depths("Owner", embedder.backbone)
    parameters = dict(embedder.backbone.named_parameters())
    assert set(depths) == set(parameters)
    assert set(expected.values()) == {1.0, 0.5, 0.25}
    for name, parameter in parameters.items():
        assert expected[id(parameter)] == 0.5 ** (2 - depths[name]), name


def test_depths_of_hugging_face():
    pytest.importorskip("transformers")
    depths = depths_of(Embedder("hf/any", 8, backbone_args={"model_type": "dinov2", **SMALL}))
    assert sorted(depths) == [0, 1, 2]
    assert all(".embeddings." in name for name in depths[0])
    assert all(".0." in name for name in depths[1])
    assert all(".1." in name or name.startswith("model.layernorm") for name in depths[2])
    assert "model.layernorm.weight" in depths[2]


def test_depths_of_torchvision():
    depths = depths_of(Embedder("resnet18", 8))
    first_parts = {depth: {name.split(".")[0] for name in names} for depth, names in depths.items()}
    assert first_parts == {0: {"conv1"}, 1: {"bn1"}, **{layer + 1: {f"layer{layer}"} for layer in (1, 2, 3, 4)}}


@pytest.mark.refusal
def test_invalid_backbone_without_a_list_of_layers():
    with pytest.raises(
        ValueError, match=r"Owner: `layer_decay` must be 1 for a backbone without a list .* got a Conv2d"
    ):
        layer_depths("Owner", nn.Conv2d(3, 4, 3))
