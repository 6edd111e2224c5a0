"""Backbones of timm: any of its classification models, for the image size that is wanted.

`forward_features` returns tokens (N, T, C), feature maps (N, C, H, W) or, for Swin and a few others, maps with channels
last. Class token and registers are the first `num_prefix_tokens` tokens. The model's own pooling is what it returns
without a classifier: its class token, the average of its patch tokens, attention pooling.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_choice, check_path, short_repr
from lightning_retrieval.models.backbone_names import unknown_name
from lightning_retrieval.models.backbone_request import (
    ALL_POOLINGS,
    CLASS_TOKEN,
    MAP_POOLINGS,
    OWN,
    BackboneRequest,
    BuiltBackbone,
)
from lightning_retrieval.models.features import height_and_width, patch_map, returns_tokens
from lightning_retrieval.models.pretrained import (
    DEFAULT_WEIGHTS,
    are_skipped,
    hub_error,
    is_local_file,
    read_weights,
)
from lightning_retrieval.optional_packages import optional_import

# Arguments that let a transformer run with other sizes than that for which it was built, most first. A model that does
# not know one raises a TypeError before it builds anything.
FLEXIBLE_SIZES: tuple[tuple[str, ...], ...] = (
    ("img_size", "dynamic_img_size"),
    ("img_size", "strict_img_size"),
    ("img_size",),
    (),
)


class TimmBackbone(nn.Module):
    """A model of timm as a function from images to feature maps (N, C, H, W) or vectors (N, C).

    Args:
        model: built without a classifier.
        pooling: what the features are for: `"own"` returns the vectors that the model pools itself, `"class_token"` its
            class token, and all others its feature maps or patch tokens.
        image_size: height and width for which the model was built.
    """

    model: Any

    def __init__(self, model: Any, pooling: str, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.image_size = image_size
        self.prefix_tokens = _prefix_tokens(model)
        if pooling != OWN:
            self.model.reset_classifier(0, "")  # no pooling

    def forward(self, images: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch dim ..."]:
        if self.pooling == OWN:
            vectors: Tensor = self.model(images)
            return vectors
        features: Tensor = self.model.forward_features(images)
        if features.ndim == 3:
            return self._of_tokens(features)
        features = self.model.forward_head(features)  # what some models compute after their pooling, for each position
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":
            features = features.permute(0, 3, 1, 2)
        return features

    def _of_tokens(self, tokens: Float[Tensor, "batch token channel"]) -> Float[Tensor, "batch channel ..."]:
        norm = getattr(self.model, "fc_norm", None)  # the last layer norm of models that average first
        if isinstance(norm, nn.Module):
            tokens = norm(tokens)
        if self.pooling == CLASS_TOKEN:
            return tokens[:, 0]
        return patch_map(tokens, self.prefix_tokens)


def build_timm(request: BackboneRequest) -> BuiltBackbone:
    """A model of timm, without its classifier.

    Args:
        request: its name is timm's, with or without the tag of its weights; its weights are `"DEFAULT"`, a tag or a
            local file.

    Raises:
        ValueError: if the name, the weights or the pooling is unknown, the weights cannot be downloaded or are those of
            another model, or the arguments make it something else than a classification model.
        FileNotFoundError: if a file of weights does not exist.
        ModuleNotFoundError: if timm is not installed.
    """
    timm = _import_timm(request)
    if not timm.is_model(request.name):
        raise unknown_name(request.owner, f"timm/{request.name}")
    model = _create_model(timm, request)
    if not hasattr(model, "forward_features"):
        raise ValueError(
            f"{request.owner}: `backbone_args` must leave timm/{request.name} a classification model, got "
            f"{short_repr(dict(request.arguments))}, which makes it a {type(model).__name__}."
        )
    config = timm.data.resolve_model_data_config(model, args=_size_arguments(request.image_size))
    image_size = tuple(config["input_size"][1:])
    default = "gem"
    if returns_tokens(model.forward_features, model, image_size):
        default = OWN
    pooling = request.checked_pooling(default, _poolings(model))
    backbone = TimmBackbone(model, pooling, image_size)
    return BuiltBackbone(backbone.train(), pooling, _preparation(config), dict(request.arguments))


def _import_timm(request: BackboneRequest) -> Any:
    with optional_import(
        f"{request.owner}: timm must be installed for `backbone` timm/{request.name}: "
        "pip install 'lightning-retrieval[timm]'."
    ):
        import timm
        import timm.data
    return timm


def _create_model(timm: Any, request: BackboneRequest) -> Any:
    """The model with its weights, built so that it takes as many image sizes as it can."""
    name, weights = _name_and_weights(timm, request)
    file = weights.get("pretrained_cfg_overlay", {}).get("file")
    size = None
    if request.image_size is not None:
        size = height_and_width(request.image_size)
    values = {"img_size": size, "dynamic_img_size": True, "strict_img_size": False}
    for flexible in FLEXIBLE_SIZES:
        arguments = {"num_classes": 0, **{argument: values[argument] for argument in flexible}}
        model = _try_to_create(timm, request, name, {**arguments, **weights, **request.arguments}, flexible)
        if model is not None:
            break
    if file is not None:
        _check_loaded(request, timm.models.load_state_dict(file), model)
    return model


def _try_to_create(
    timm: Any, request: BackboneRequest, name: str, arguments: dict[str, Any], flexible: tuple[str, ...]
) -> Any:
    """A model, or None if it does not know one of the flexible arguments."""
    try:
        return timm.create_model(name, **arguments)
    except TypeError as error:
        if any(f"'{argument}'" in str(error) for argument in flexible):
            return None
        raise
    except (OSError, RuntimeError, ValueError) as error:
        if request.weights is None:
            raise
        raise hub_error(request.owner, "weights", f"{request.weights!r} of timm/{name}", error) from None


def _name_and_weights(timm: Any, request: BackboneRequest) -> tuple[str, dict[str, Any]]:
    """The name with the tag of the weights, and the arguments of `timm.create_model` that load them."""
    name, weights = request.name, request.weights
    if weights is None or (is_local_file(weights) and are_skipped()):
        return name, {}
    if is_local_file(weights):
        read_weights(request.owner, weights)  # a sentence for a file that cannot be read
        # Positions are resampled to the image size, which `checkpoint_path` does not do.
        file = str(check_path(request.owner, "weights", weights))
        return name, {"pretrained": True, "pretrained_cfg_overlay": {"file": file}}
    if weights != DEFAULT_WEIGHTS:
        plain_name = name.split(".")[0]
        tags = [other.split(".")[1] for other in timm.list_pretrained(f"{plain_name}.*")]
        check_choice(request.owner, "weights", weights, (DEFAULT_WEIGHTS, *tags))
        name = f"{plain_name}.{weights}"
    return name, {"pretrained": not are_skipped()}


def _check_loaded(request: BackboneRequest, in_file: Mapping[str, Any], model: nn.Module) -> None:
    """Raise if a model has no weights of a file: timm ignores those with other names, and keeps random ones.

    timm may rename and reshape weights. So they are compared by value, and without biases, many of which are all 0.
    """
    by_length: dict[int, list[Tensor]] = {}
    for value in in_file.values():
        if isinstance(value, Tensor) and value.ndim > 1:
            by_length.setdefault(value.numel(), []).append(value)
    for parameter in model.parameters():
        for value in by_length.get(parameter.numel(), ()):
            if parameter.ndim > 1 and torch.equal(parameter.flatten(), value.flatten().to(parameter.dtype)):
                return
    raise ValueError(
        f"{request.owner}: `weights` must be a file with the weights of timm/{request.name}, got {request.weights}, "
        "which has none of them."
    )


def _prefix_tokens(model: Any) -> int:
    """The number of tokens before those of the patches."""
    number = getattr(model, "num_prefix_tokens", None)
    if number is None:
        number = int(_has_class_token(model))
    return int(number)


def _has_class_token(model: Any) -> bool:
    return isinstance(getattr(model, "cls_token", None), Tensor)


def _poolings(model: nn.Module) -> tuple[str, ...]:
    """The poolings that a model has."""
    if _has_class_token(model):
        return ALL_POOLINGS
    return (*MAP_POOLINGS, OWN)


def _size_arguments(image_size: Any) -> dict[str, Any] | None:
    if image_size is None:
        return None
    return {"input_size": (3, *height_and_width(image_size))}


def _preparation(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Preparation` for timm's description of the images of a model."""
    channels, height, width = config["input_size"]
    crop = float(config["crop_pct"])
    resize: int | tuple[int, int] = (math.floor(height / crop), math.floor(width / crop))
    if height == width and config["crop_mode"] != "squash":
        resize = math.floor(height / crop)
    size: int | tuple[int, int] = (height, width)
    if height == width:
        size = height
    return {
        "image_size": size,
        "resize": resize,
        "interpolation": config["interpolation"].replace("random", "bilinear"),
        "mean": tuple(config["mean"])[:channels],
        "std": tuple(config["std"])[:channels],
    }
