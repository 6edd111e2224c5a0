"""The error for an unknown name lists those of torchvision and timm that are close to it."""

import sys

import pytest

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.backbone_request import timm_names


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "close"),
    [("resnet5", r".*'resnet50'.*'timm/resnet50'"), ("timm/vit_tini_patch16_224", r"'timm/vit_tiny_p")],
)
def test_invalid_name(name, close):
    pytest.importorskip("timm")
    hint = r"'hf/' and a Hugging Face hub id or a local folder \(hf/facebook/dinov2-small\)"
    with pytest.raises(
        ValueError, match=rf"Embedder: `backbone` must be .*{hint}.* got '{name}'; close names are {close}"
    ):
        Embedder(name)


def test_names_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert timm_names() == []
