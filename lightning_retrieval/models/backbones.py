"""Backbones by name: networks from images to feature maps (N, C, H, W) or vectors (N, C), one builder per family.

| name | family | builder |
| --- | --- | --- |
| `"glyph_net"` | `GlyphNet` | here |
| `"resnet50"`, `"vit_b_16"` | torchvision | `torchvision_backbones.py` |
| `"timm/vit_small_patch14_dinov2.lvd142m"` | timm | `timm_backbones.py` |
| `"hf/facebook/dinov2-small"`, `"hf/path/of/a/folder"` | transformers | `hugging_face_backbones.py` |

A family is added here: a prefix, and a builder from `BackboneRequest` to `BuiltBackbone`.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from lightning_retrieval.checks import short_repr
from lightning_retrieval.models.backbone_names import GLYPH_NET
from lightning_retrieval.models.backbone_request import MAP_POOLINGS, BackboneRequest, BuiltBackbone
from lightning_retrieval.models.glyph_net import GlyphNet
from lightning_retrieval.models.hugging_face_backbones import build_hugging_face
from lightning_retrieval.models.preparation import Preparation
from lightning_retrieval.models.pretrained import is_rebuilding
from lightning_retrieval.models.timm_backbones import build_timm
from lightning_retrieval.models.torchvision_backbones import build_torchvision
from lightning_retrieval.plain_data import check_plain_data

FAMILIES: dict[str, Callable[[BackboneRequest], BuiltBackbone]] = {
    "timm/": build_timm,
    "hf/": build_hugging_face,
}


def build_backbone(request: BackboneRequest) -> BuiltBackbone:
    """The backbone of a name, without its classifier.

    Args:
        request: name, weights, pooling, image size and further arguments.

    Raises:
        ValueError: if the name, the weights or the pooling is unknown, the backbone has no weights, or it is rebuilt
            from a file with arguments that would fetch something or run code.
        ModuleNotFoundError: if the package of the family is not installed.
    """
    if is_rebuilding():
        check_plain_data(request.owner, "backbone_args", dict(request.arguments))
    build: Callable[[BackboneRequest], BuiltBackbone] = build_torchvision
    if request.name == GLYPH_NET:
        build = _build_glyph_net
    for prefix, of_family in FAMILIES.items():
        if request.name.startswith(prefix):
            build = of_family
            request = replace(request, name=request.name.removeprefix(prefix))
    try:
        return build(request)
    except TypeError as error:
        if not request.arguments:
            raise
        raise TypeError(
            f"{request.owner}: `backbone_args` must be arguments that {request.name} takes, got "
            f"{short_repr(dict(request.arguments))} ({error})."
        ) from None


def of_module(request: BackboneRequest, module: nn.Module) -> BuiltBackbone:
    """A module of the user's as a backbone.

    Args:
        request: without weights and further arguments.
        module: from images to feature maps or vectors.
    """
    check_no_weights(request.owner, request.weights, f"a module ({request.name})")
    if request.arguments:
        raise ValueError(
            f"{request.owner}: `backbone_args` must be empty unless `backbone` is a name, got "
            f"{short_repr(dict(request.arguments))} for a module ({request.name})."
        )
    preparation = {}
    size = getattr(module, "image_size", None)
    if isinstance(size, int):
        preparation["image_size"] = size
    return BuiltBackbone(module, request.checked_pooling("gem", MAP_POOLINGS), preparation, {})


def check_no_weights(owner: str, weights: str | None, backbone: str) -> None:
    """Raise if pretrained weights are named for a backbone that has none."""
    if weights is not None:
        raise ValueError(
            f"{owner}: `weights` must be None unless `backbone` is the name of a torchvision, timm or Hugging Face "
            f"model, got {short_repr(weights)} for {backbone}."
        )


def _build_glyph_net(request: BackboneRequest) -> BuiltBackbone:
    check_no_weights(request.owner, request.weights, repr(request.name))
    pooling = request.checked_pooling("gem", MAP_POOLINGS)
    network = GlyphNet(**request.arguments)
    preparation = Preparation.named("glyphs").as_dict()
    if network.in_channels == 3:
        preparation |= {"channels": 3, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return BuiltBackbone(network, pooling, preparation, dict(request.arguments))
