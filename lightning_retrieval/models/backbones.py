"""Backbones: networks from images to feature maps (N, C, H, W) or vectors (N, C), built by name.

`build_backbone` chooses a builder function by the name; for models of another library, add a builder function to it.
`feature_shape` finds out what any backbone returns, without arithmetic.
"""

import difflib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from lightning_retrieval.checks import check_choice, short_repr
from lightning_retrieval.models.glyph_net import GlyphNet

GLYPH_NET = "glyph_net"
DEFAULT_IMAGE_SIZE = 224
POOLING_AND_CLASSIFIER = ("avgpool", "classifier", "fc")
AUXILIARY_CLASSIFIERS = ("aux1", "aux2", "AuxLogits")


def build_backbone(owner: str, name: str, weights: str | None) -> nn.Module:
    """The backbone of this name, without its classifier.

    Args:
        owner: prefix of error messages.
        name: `"glyph_net"` or the name of a torchvision classification model.
        weights: torchvision's name of pretrained weights; None for random ones.

    Raises:
        ValueError: if the name or the weights are unknown, or the backbone has no weights.
    """
    if name == GLYPH_NET:
        check_no_weights(owner, weights, repr(name))
        return GlyphNet()
    return _build_torchvision(owner, name, weights)


def check_no_weights(owner: str, weights: str | None, backbone: str) -> None:
    """Raise if pretrained weights are named for a backbone that has none."""
    if weights is not None:
        raise ValueError(
            f"{owner}: `weights` must be None unless `backbone` is the name of a torchvision model, got "
            f"{short_repr(weights)} for {backbone}."
        )


def feature_shape(owner: str, backbone: nn.Module) -> tuple[int, ...]:
    """The shape of the features of one image, found in eval mode on meta tensors, which hold no numbers.

    Neither the random state nor any parameter, buffer or training mode of the backbone changes.

    Raises:
        ValueError: if the backbone fails on meta tensors, or the features are neither maps nor vectors.
        TypeError: if the backbone does not return a tensor.
    """
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    meta_tensors = {name: value.to("meta") for name, value in tensors.items()}
    images = _meta_image(backbone, tuple(tensors.values()))
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        with torch.no_grad():
            features = functional_call(backbone, meta_tensors, (images,))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{owner}: `backbone` {type(backbone).__name__} could not be run on a meta tensor of shape "
            f"{tuple(images.shape)} ({type(error).__name__}: {reason}); give `feature_dim`, the length of its features."
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode
    check_features(owner, features, tuple(images.shape))
    return tuple(features.shape)


def check_features(owner: str, features: Any, images: tuple[int, ...]) -> None:
    """Raise unless the features are a tensor of feature maps or vectors; `images` is the shape of the images."""
    if not isinstance(features, Tensor):
        raise TypeError(f"{owner}: `backbone` must return a tensor, got {type(features).__name__}.")
    if features.ndim not in (2, 4):
        raise ValueError(
            f"{owner}: `backbone` must return feature maps (N, C, H, W) or vectors (N, C), got "
            f"{tuple(features.shape)} for images of shape {images}."
        )


def _meta_image(backbone: nn.Module, tensors: tuple[Tensor, ...]) -> Tensor:
    """A meta tensor of one image with the size, the channels and the dtype that the backbone expects."""
    size = getattr(backbone, "image_size", None)  # a ViT accepts no other size
    if not isinstance(size, int):
        size = DEFAULT_IMAGE_SIZE
    channels = 3
    for part in backbone.modules():
        if isinstance(part, nn.Conv2d):
            channels = part.in_channels
            break
    dtype = torch.get_default_dtype()
    for value in tensors:
        if value.is_floating_point():
            dtype = value.dtype
            break
    return torch.empty(1, channels, size, size, dtype=dtype, device="meta")


def _build_torchvision(owner: str, name: str, weights: str | None) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise ValueError(
            f"{owner}: `backbone` must be the name of a torchvision classification model, 'glyph_net' or a module, got "
            f"{name!r}; {_close_names(name, [*names, GLYPH_NET])}."
        )
    if weights is not None:
        check_choice(owner, "weights", weights, tuple(models.get_model_weights(name).__members__))
    settings = {}
    if name in ("googlenet", "inception_v3") and weights is None:
        # With weights, torchvision chooses these two settings itself and does not accept them as arguments.
        settings = {"aux_logits": False, "init_weights": True}
    return _without_classifier(owner, models.get_model(name, weights=weights, **settings))


def _close_names(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if not close:
        return "no name is close"
    return "close names are " + ", ".join(map(repr, close))


def _without_classifier(owner: str, model: nn.Module) -> nn.Module:
    """A torchvision model up to its last feature map or, for ViT, up to its class token.

    torchvision registers the parts of a model in the order in which its forward calls them. So the trunk is everything
    before the pooling or, if the pooling is a function call, before the classifier, and it keeps its names in the state
    dict. What a forward does besides calling its parts is added here; a test compares each family with its forward.
    """
    from torchvision.models import DenseNet, VisionTransformer

    if isinstance(model, VisionTransformer):
        vit: nn.Module = model
        vit.heads = nn.Identity()
        return vit
    trunk: OrderedDict[str, nn.Module] = OrderedDict()
    if getattr(model, "transform_input", False):
        trunk["transform_input"] = _InceptionInput()
    trunk.update(_parts_before_pooling(owner, model))
    if isinstance(model, DenseNet):
        trunk["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(trunk)


def _parts_before_pooling(owner: str, model: nn.Module) -> OrderedDict[str, nn.Module]:
    """The children of a model before its pooling or classifier, without auxiliary classifiers."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in model.named_children():
        if name in POOLING_AND_CLASSIFIER:
            return parts
        if name in AUXILIARY_CLASSIFIERS:
            continue
        if isinstance(part, nn.ModuleList):  # called in order
            part = nn.Sequential(*part)
        parts[name] = part
    raise ValueError(
        f"{owner}: `backbone` must be a model whose classifier can be found, got {type(model).__name__} with the "
        f"parts {', '.join(parts)}; build it, remove its classifier and give the module."
    )


class _InceptionInput(nn.Module):
    """Changes ImageNet's mean and standard deviation to 0.5 each, which Inception's and GoogLeNet's weights expect."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
        self.register_buffer("scale", std / 0.5, persistent=False)
        self.register_buffer("shift", (mean - 0.5) / 0.5, persistent=False)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 3 height width"]:
        return images * self.scale + self.shift
