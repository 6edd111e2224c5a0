"""Backbones by name: the choice of a family, what holds for all of them, and GlyphNet."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_retrieval.models
from lightning_retrieval.models import Embedder, GlyphNet, Preparation
from lightning_retrieval.models.backbone_request import timm_names


def test_no_file_imports_torchvision_at_the_top():
    for path in Path(lightning_retrieval.models.__file__).parent.glob("*.py"):
        assert not re.search(r"^(import|from) torchvision", path.read_text(), flags=re.MULTILINE), path


def test_glyph_net_and_its_preparation():
    embedder = Embedder("glyph_net", 8, backbone_args={"width": 4, "in_channels": 3})
    assert embedder.backbone.width == 4
    assert embedder(torch.rand(2, 3, 32, 32)).shape == (2, 8)
    assert (embedder.preparation.channels, embedder.image_size) == (3, 32)
    assert Embedder("glyph_net", 8).preparation == Preparation.named("glyphs")


def test_the_size_of_a_module_is_that_of_its_preparation():
    module = nn.Conv2d(3, 4, 3)
    assert Embedder(module).preparation == Preparation()
    module.image_size = 48
    assert Embedder(module).preparation.image_size == 48


@pytest.mark.refusal
def test_invalid_name_of_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"^Embedder: transformers .* hf/a: pip .*lightning-retrieval\[hf\]'"):
        Embedder("hf/a")


@pytest.mark.refusal
def test_invalid_arguments_of_a_backbone():
    arguments = {"depth": 3}
    with pytest.raises(TypeError, match=r"^Embedder: `backbone_args` .* glyph_net takes, got \{'depth': 3\} \("):
        Embedder("glyph_net", backbone_args=arguments)
    with pytest.raises(
        ValueError, match=r"^Embedder: `backbone_args` .*, got \{'depth': 3\} for a module \(Identity\)"
    ):
        Embedder(nn.Identity(), backbone_args=arguments)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("resnet5", r".*'resnet50'.*'timm/resnet50'"),
        ("RESNET18", r"'resnet18'"),
        ("glyphnet", r"'glyph_net'"),
        ("timm/vit_tini_patch16_224", r"'timm/vit_tiny_p"),
    ],
)
def test_invalid_name(name, close):
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=rf"^Embedder: `backbone` must be .* got '{name}'; close names are {close}"):
        Embedder(name)


def test_names_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert timm_names() == []


def test_feature_map_has_an_eighth_of_the_size():
    assert GlyphNet()(torch.rand(2, 1, 32, 32)).shape == (2, 256, 4, 4)
    net = GlyphNet(width=8, in_channels=3)
    assert net(torch.rand(2, 3, 64, 48)).shape == (2, 64, 8, 6)
    assert (net.width, net.in_channels) == (8, 3)
    assert Embedder(net).feature_dim == 64
