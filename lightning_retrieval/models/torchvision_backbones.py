"""Backbones of torchvision: its classification models, without pooling and classifier."""

from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_choice
from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.backbone_request import (
    ALL_POOLINGS,
    MAP_POOLINGS,
    BackboneRequest,
    BuiltBackbone,
    unknown_name,
)
from lightning_retrieval.models.features import height_and_width
from lightning_retrieval.models.pretrained import are_skipped, check_cached, hub_error
from lightning_retrieval.models.weight_files import load_local_file

POOLING_AND_CLASSIFIER = ("avgpool", "classifier", "fc")
AUXILIARY_CLASSIFIERS = ("aux1", "aux2", "AuxLogits")
CLASSIFIERS = ("classifier", "fc", "heads", "head", *AUXILIARY_CLASSIFIERS)  # first parts of names in a state dict


def build_torchvision(request: BackboneRequest) -> BuiltBackbone:
    """Build a classification model of torchvision without its classifier.

    Args:
        request: the name is torchvision's; the weights are torchvision's name of weights or a local file.

    Raises:
        ValueError: if the name, the weights or the pooling is unknown.
        FileNotFoundError: if a file of weights does not exist.
    """
    from torchvision import models

    if request.name not in models.list_models(module=models):
        raise unknown_name(request.name)
    has_file = is_local_file(request.weights)
    weights = None
    if request.weights is not None and not has_file:
        kinds = models.get_model_weights(request.name)
        weights = kinds[check_choice("weights", request.weights, tuple(kinds.__members__), owner="Embedder")]
    backbone = _without_classifier(_get_model(request, weights))
    if has_file and not are_skipped():
        load_local_file(str(request.weights), backbone, optional=CLASSIFIERS)
    poolings: tuple[str, ...] = MAP_POOLINGS
    if isinstance(backbone, models.VisionTransformer):  # a ViT always returns its class token
        poolings = ALL_POOLINGS
    pooling = request.checked_pooling("gem", poolings)
    return BuiltBackbone(backbone, pooling, _preparation(backbone, weights), dict(request.arguments))


def _get_model(request: BackboneRequest, weights: Any) -> nn.Module:
    """A model of torchvision."""
    from torchvision import models

    loaded = weights
    if are_skipped():
        loaded = None
    if loaded is not None:
        check_cached(f"{request.weights!r} of {request.name}", loaded.url)
    try:
        model: nn.Module = models.get_model(request.name, weights=loaded, **_arguments(request, weights))
    except OSError as error:
        raise hub_error("weights", f"{request.weights!r} of {request.name}", error) from None
    return model


def _arguments(request: BackboneRequest, weights: Any) -> dict[str, Any]:
    """The keyword arguments of torchvision's builder."""
    arguments = dict(request.arguments)
    if request.name in ("googlenet", "inception_v3"):
        if weights is None:
            # With weights, torchvision chooses these two settings itself and does not accept them as arguments.
            arguments = {"aux_logits": False, "init_weights": True, **arguments}
        elif are_skipped():
            arguments = {"aux_logits": False, "init_weights": False, "transform_input": True, **arguments}
    if request.image_size is not None:
        if request.name.startswith("vit_"):
            arguments.setdefault("image_size", request.image_size)
        if request.name.startswith("maxvit_"):
            arguments.setdefault("input_size", height_and_width(request.image_size))
    return arguments


def _preparation(backbone: nn.Module, weights: Any) -> dict[str, Any]:
    """The arguments of `Preparation` for the weights; without weights, only the image size of a ViT."""
    if weights is None:
        size = getattr(backbone, "image_size", None)
        if isinstance(size, int):
            return {"image_size": size}
        return {}
    preset = weights.transforms()
    return {
        "image_size": preset.crop_size[0],
        "resize": preset.resize_size[0],
        "interpolation": preset.interpolation.value,
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
    }


def _without_classifier(model: nn.Module) -> nn.Module:
    """A torchvision model up to its last feature map or, for ViT, up to its class token.

    torchvision registers the children of a model in the order in which `forward` calls them. So the trunk consists of
    the children before the pooling or, if the pooling is a function call, before the classifier; names in the state
    dict do not change. Anything that `forward` does besides calling the children is added here; a test compares each
    family with its `forward`.
    """
    from torchvision.models import DenseNet, VisionTransformer

    if isinstance(model, VisionTransformer):
        vit: nn.Module = model
        vit.heads = nn.Identity()
        return vit
    trunk: OrderedDict[str, nn.Module] = OrderedDict()
    if getattr(model, "transform_input", False):
        trunk["transform_input"] = _InceptionInput()
    trunk.update(_parts_before_pooling(model))
    if isinstance(model, DenseNet):
        trunk["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(trunk)


def _parts_before_pooling(model: nn.Module) -> OrderedDict[str, nn.Module]:
    """The children of a model before its pooling or classifier, without auxiliary classifiers."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in model.named_children():
        if name in POOLING_AND_CLASSIFIER:
            return parts
        if name in AUXILIARY_CLASSIFIERS:
            continue
        if isinstance(part, nn.ModuleList):  # its parts are called in order
            part = nn.Sequential(*part)
        parts[name] = part
    rule = "must be a model whose classifier can be found"
    raise InvalidValue(rule, "Embedder", "backbone", got=type(model).__name__)


class _InceptionInput(nn.Module):
    """Converts images from ImageNet's mean and std to mean 0.5 and std 0.5, as Inception and GoogLeNet expect."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
        self.register_buffer("scale", std / 0.5, persistent=False)
        self.register_buffer("shift", (mean - 0.5) / 0.5, persistent=False)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 3 height width"]:
        return images * self.scale + self.shift
