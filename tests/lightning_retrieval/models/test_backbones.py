"""Backbones by name: the choice of a family, and what holds for all of them."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_retrieval.models
from lightning_retrieval.models import Embedder, Preparation


@pytest.mark.parametrize(
    "path", sorted(Path(lightning_retrieval.models.__file__).parent.glob("*.py")), ids=lambda p: p.stem
)
def test_no_file_imports_a_library_of_backbones_or_lightning_at_the_top(path):
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    assert names
    assert not {name.split(".")[0] for name in names} & {
        "timm",
        "torchvision",
        "transformers",
        "lightning",
        "pytorch_lightning",
    }


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
@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("timm/resnet18", "timm", "timm"), ("hf/facebook/dinov2-small", "transformers", "hf")],
)
def test_invalid_name_of_a_library_that_is_not_installed(name, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    message = (
        rf"Embedder: {package} must be installed for `backbone` {name}: pip install 'lightning-retrieval\[{extra}\]'"
    )
    with pytest.raises(ModuleNotFoundError, match=message):
        Embedder(name)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"backbone": "glyph_net", "backbone_args": {"depth": 3}},
            TypeError,
            r"`backbone_args` must be arguments that glyph_net takes, got \{'depth': 3\} \(",
        ),
        (
            {"backbone": nn.Identity(), "backbone_args": {"depth": 3}},
            ValueError,
            r"`backbone_args` must be empty unless `backbone` is a name, got \{'depth': 3\} for a module \(Identity\)",
        ),
        ({"backbone": "glyph_net", "backbone_args": 3}, TypeError, "`backbone_args` must be a"),
        ({"backbone": "glyph_net", "pooling": "own"}, ValueError, "must be one of 'gem', 'avg', 'max', got 'own'"),
    ],
)
def test_invalid_arguments_of_a_backbone(settings, error, message):
    with pytest.raises(error, match=message):
        Embedder(**settings)
