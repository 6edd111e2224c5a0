"""Backbones of Hugging Face's transformers: any of its vision models, from the hub, a local folder or a config.

`last_hidden_state` holds tokens (N, T, C) or, for convolutional networks, feature maps (N, C, H, W). The tokens before
the patch tokens are the class token, the distillation token and registers. The config is stored as plain data, so that
a model can be rebuilt from a checkpoint without a network connection.
"""

import inspect
import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.files import leaves_root
from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models import pretrained
from lightning_retrieval.models.backbone_request import (
    CLASS_TOKEN,
    OWN,
    BackboneRequest,
    BuiltBackbone,
    poolings_of_network,
)
from lightning_retrieval.models.features import default_pooling, height_and_width, patch_map
from lightning_retrieval.models.weight_files import (
    THIS_BACKBONE,
    check_loaded,
    check_unknown,
    other_weights,
    read_weights,
    tensors_of_network,
)
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data import check_plain_data, named_values, names_kernels
from lightning_retrieval.preparation.of_model import preparation_of_processor
from lightning_retrieval.preparation.preparation import DEFAULT_IMAGE_SIZE

CLASS_TOKENS = ("cls_token", "class_embedding")
PREFIX_TOKENS = (*CLASS_TOKENS, "distillation_token", "register_tokens")
# Layers of a classifier: the first parts of their names in a file.
CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier", "pooler")
MASK_TOKEN = "mask_token"  # some weights lack this parameter, which only pretraining uses
# Entries of a config that do not describe the network.
NOT_KEPT = ("_name_or_path", "architectures", "auto_map", "id2label", "label2id", "transformers_version")
# Entries at the top of a config file that change no network: neither transformers nor timm acts on them.
FOR_READERS = (*NOT_KEPT, "label_names", "pretrained_cfg")
# Entries of a config whose value, if it is a string, is the name of a model that transformers looks up on the hub.
OTHER_MODELS = ("backbone", "base_model_name_or_path")
TYPE_ARGUMENTS = ("dtype", "torch_dtype")
KERNELS = re.compile(r"\b(get_kernel|lazy_load_kernel)\(|cpp_extension")  # in the code of a network
AS_MODULE = "if you trust it, build the model with transformers and give the module as `backbone`"  # a cure
NO_CODE = {"trust_remote_code": False}  # transformers must not run code of a repository, and not ask at the terminal


class HuggingFaceBackbone(nn.Module):
    """A vision model of transformers as a function from images to feature maps (N, C, H, W) or vectors (N, C).

    Args:
        model: a model whose output has `last_hidden_state`.
        pooling: decides what is returned. `"own"`: the vectors that the model pools itself or, if it has none, its
            class token or the average of its tokens; `"class_token"`: the class token; any other pooling: feature maps
            or patch tokens, which are pooled afterwards.
        image_size: height and width for which the model was built.
    """

    model: Any

    def __init__(self, model: Any, pooling: str, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.image_size = image_size
        self.prefix_tokens = sum(_prefix_tokens(model).values())
        self.settings: dict[str, Any] = {}
        if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
            self.settings["interpolate_pos_encoding"] = True

    def forward(self, images: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch dim ..."]:
        dtype = self.model.dtype
        if dtype == images.dtype:
            return self._features(self.model(images, **self.settings))
        # The user has chosen a `dtype` of the model, while the layers after it have that of the images.
        return self._features(self.model(images.to(dtype), **self.settings)).to(images.dtype)

    def _features(self, output: Any) -> Float[Tensor, "batch dim ..."]:
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        if self.pooling == OWN and pooled is not None:
            return pooled.flatten(1)  # (batch, dim, 1, 1) for some convolutional networks
        features: Tensor = output.last_hidden_state
        if features.ndim == 4:
            return features
        if self.pooling == CLASS_TOKEN or (self.pooling == OWN and self.prefix_tokens > 0):
            return features[:, 0]
        if self.pooling == OWN:
            return features.mean(1)
        return patch_map(features, self.prefix_tokens)


def build_hugging_face(request: BackboneRequest) -> BuiltBackbone:
    """Build a vision model of transformers.

    Args:
        request: the name is a hub id or a local folder; the weights are `"DEFAULT"`, a revision on the hub or a local
            file. If the arguments contain `model_type`, they are the whole config and the name is not looked up.

    Raises:
        ValueError: if there is no such model, the model is not a vision model, or the pooling is unknown.
        FileNotFoundError: if a file of weights does not exist.
        ModuleNotFoundError: if transformers is not installed.
    """
    request = replace(request, name=os.path.expanduser(request.name))
    transformers = load_transformers(request)
    with hub_of(request):
        config = _config(transformers, request, "vision_config")
        model = _model(transformers, request, config)
        recorded = _folder_preparation(transformers, request)
    image_size = _image_size(config)
    main_input = getattr(model, "main_input_name", "pixel_values")
    if main_input != "pixel_values":
        got = f"hf/{request.name}, a {type(model).__name__}, which takes {main_input}"
        raise InvalidValue("must be a model of images", argument="backbone", got=got)
    size = height_and_width(image_size)
    default = default_pooling(lambda images: model(images).last_hidden_state, model, size)
    has_class_token = not _prefix_tokens(model).keys().isdisjoint(CLASS_TOKENS)
    pooling = request.checked_pooling(default, poolings_of_network(has_class_token))
    backbone = HuggingFaceBackbone(model, pooling, size)
    preparation = {"image_size": image_size, **recorded}
    return BuiltBackbone(backbone.train(), pooling, preparation, _kept(config))


def build_text_model(request: BackboneRequest) -> tuple[Any, dict[str, Any]]:
    """Build a model of texts of transformers; the text model, if the model is one of images and texts.

    Args:
        request: as for `build_hugging_face`.

    Returns:
        The model, and the arguments from which it can be built again.

    Raises:
        ValueError: if there is no such model, or the model is not an encoder of texts.
        FileNotFoundError: if a file of weights does not exist.
        ModuleNotFoundError: if transformers is not installed.
    """
    transformers = load_transformers(request)
    with hub_of(request):
        config = _config(transformers, request, "text_config")
        model = _model(transformers, request, config)
    if getattr(model, "main_input_name", "") != "input_ids" or config.is_encoder_decoder:
        rule = "must be an encoder of texts"
        raise InvalidValue(rule, argument="backbone", got=f"hf/{request.name}, a {type(model).__name__}")
    return model.train(), _kept(config)


def load_transformers(request: BackboneRequest) -> Any:
    """Import and return transformers."""
    with optional_import(
        f"transformers must be installed for `backbone` hf/{request.name}: pip install 'lightning-retrieval[hf]'."
    ):
        import transformers
    return transformers


def _kept(config: Any) -> dict[str, Any]:
    """The config as plain data with the model type, from which `AutoConfig.for_model` can rebuild it."""
    return {name: value for name, value in config.to_dict().items() if name not in NOT_KEPT}


def _config(transformers: Any, request: BackboneRequest, part: Literal["vision_config", "text_config"]) -> Any:
    """The config of the network, from the arguments if they are a whole config, else looked up by name.

    Args:
        transformers: the library.
        request: name, weights and arguments.
        part: the part that is taken of the config of a model of images and texts.
    """
    arguments = {name: value for name, value in request.arguments.items() if name not in (*NO_CODE, *TYPE_ARGUMENTS)}
    if pretrained.is_rebuilding():
        _check_config_of_file(request, "backbone_args", arguments)
    if "model_type" in arguments:
        whole = transformers.AutoConfig.for_model(**arguments)
    else:
        whole = _config_by_name(transformers, request, arguments)
    config = getattr(whole, part, whole)
    config.dtype = _dtype(request, config.dtype)
    return config


def _config_by_name(transformers: Any, request: BackboneRequest, arguments: Mapping[str, Any]) -> Any:
    """The config in a folder or on the hub, which is checked before transformers acts on anything in it."""
    source = source_of(request)
    in_file: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # which `AutoConfig` raises again
        in_file, _ = transformers.PretrainedConfig.get_config_dict(request.name, **source)
    entries = {name: value for name, value in in_file.items() if name not in FOR_READERS}
    _check_config_of_file(request, "backbone", entries)
    if "auto_map" in in_file and in_file.get("model_type") not in transformers.CONFIG_MAPPING:
        got = f"hf/{request.name}, whose config names code of its own (auto_map)"
        rule = "must be a model whose code is part of transformers"
        raise InvalidValue(rule, argument="backbone", got=got, cure=AS_MODULE)
    try:
        return transformers.AutoConfig.from_pretrained(request.name, **source, **NO_CODE, **arguments)
    except (OSError, ValueError) as error:
        what = f"the Hugging Face hub id {request.name!r} (which is no local folder)"
        raise not_loaded(request, "backbone", what, error) from None


def not_loaded(request: BackboneRequest, argument: str, what: str, error: Exception) -> ValueError:
    """The error for a model that cannot be loaded from its folder or from the hub.

    Args:
        request: the request, whose name is that of the folder or the model.
        argument: the argument that requested the download from the hub.
        what: a description of what the hub was asked for.
        error: the error of transformers, or of the library that reads the file.
    """
    if Path(request.name).is_dir():
        rule = "must be 'hf/' and the folder of a model that transformers can load"
        got = request.name
        if request.arguments:
            got += f" with {short_repr(dict(request.arguments))}"
        return InvalidValue(rule, argument="backbone", got=f"{got} ({first_line(error)})")
    return pretrained.hub_error(argument, what, error)


def _check_config_of_file(request: BackboneRequest, argument: str, config: Mapping[str, Any]) -> None:
    """Raise if the config in a file would run code, or make transformers read or download something else.

    Args:
        request: the request, for error messages.
        argument: the argument that the config belongs to.
        config: the entries of the config.

    Raises:
        ValueError: if the config names kernels, another model, a quantisation or an address, at any depth.
    """
    for name, value in named_values(argument, config):
        names_model = name in OTHER_MODELS and isinstance(value, str)
        has_kernels = names_kernels(name, value) or (name == "model_type" and _fetches_kernels(value))
        if names_model or has_kernels or (name == "quantization_config" and value):
            rule = "must be a model whose config names no kernels, no other model and no quantisation"
            got = f"hf/{request.name} with {name}={short_repr(value)}"
            raise InvalidValue(rule, argument=argument, got=got, cure=AS_MODULE)
    check_plain_data(argument, config)


def _fetches_kernels(model_type: Any) -> bool:
    """Whether transformers fetches or compiles native code for a type of models by itself where there is a GPU."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(str(model_type))
    code = resources.files("transformers") / "models" / module / f"modeling_{module}.py"
    return module.isidentifier() and code.is_file() and KERNELS.search(code.read_text(encoding="utf-8")) is not None


def _dtype(request: BackboneRequest, saved: torch.dtype | None) -> torch.dtype:
    """The type of the parameters: PyTorch's default type, unless the arguments ask for another one.

    transformers would take the type in which the weights were saved, since its release 5.

    Args:
        request: its arguments may have `dtype` or, as in older releases, `torch_dtype`; `"auto"` is the saved type.
        saved: the type in the config.
    """
    wanted: Any = None
    for name in TYPE_ARGUMENTS:
        wanted = wanted or request.arguments.get(name)
    if wanted == "auto":
        wanted = saved
    if wanted is None:
        return torch.get_default_dtype()
    dtype: torch.dtype = getattr(torch, str(wanted).removeprefix("torch."))
    return dtype


def _model(transformers: Any, request: BackboneRequest, config: Any) -> Any:
    """The network, with pretrained or random weights, without a pooling layer that pretraining has not trained."""
    try:
        return _load(transformers, request, config, {"add_pooling_layer": False})
    except TypeError as error:
        if "add_pooling_layer" not in str(error):
            raise
    return _load(transformers, request, config, {})


def _load(transformers: Any, request: BackboneRequest, config: Any, settings: dict[str, Any]) -> Any:
    has_file = is_local_file(request.weights)
    kind = _class_of_model(transformers, config)
    if request.weights is None or has_file or pretrained.are_skipped():
        if kind is transformers.AutoModel:
            model: Any = kind.from_config(config, **NO_CODE, **settings)
        else:
            model = kind(config, **settings)
        model.to(config.dtype)
        if has_file and not pretrained.are_skipped():
            return _with_local_file(str(request.weights), model.to("meta"), settings)  # without its random values
        return model
    what = f"{request.weights!r} of hf/{request.name}"
    _check_reads_only(transformers, request)
    try:
        loaded = kind.from_pretrained(
            request.name,
            config=config,
            dtype=config.dtype,
            output_loading_info=True,
            **source_of(request),
            **NO_CODE,
            **settings,
        )
    except TypeError:  # of an argument
        raise
    except Exception as error:  # damaged files raise errors of many types
        raise not_loaded(request, "weights", what, error) from None
    model, loading = loaded
    missing = [name for name in loading["missing_keys"] if not name.startswith(CLASSIFIERS)]
    trained = [name for name in missing if name.rpartition(".")[2] != MASK_TOKEN]
    check_loaded(what, f"hf/{request.name}", model, trained)
    return model


def _with_local_file(path: str, network: Any, settings: dict[str, Any]) -> Any:
    """A network like the given one, with all weights of a local file, whose names transformers converts.

    Args:
        path: path of the file.
        network: the network, which may be on the meta device.
        settings: the arguments of its constructor besides the config.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, or its names or shapes do not match the network.
    """
    tensors = read_weights(path)
    own = tensors_of_network(path, tensors, network)
    own = {name: value for name, value in own.items() if not name.startswith(CLASSIFIERS)}
    try:
        loaded = type(network).from_pretrained(
            None, config=network.config, dtype=network.dtype, state_dict=own, output_loading_info=True, **settings
        )
    except RuntimeError as error:  # other shapes
        raise other_weights(path, THIS_BACKBONE, error) from None
    model, loading = loaded
    check_loaded(path, THIS_BACKBONE, model, loading["missing_keys"], tensors)
    check_unknown(path, own, loading["unexpected_keys"])
    return model


def _check_reads_only(transformers: Any, request: BackboneRequest) -> None:
    """Raise if a folder, or a model on the hub, would make transformers read weights that are elsewhere.

    The config of adapters names the model below them, and the index of weights in several files names these files.
    """
    file = None
    with suppress(OSError, ValueError):  # which loading the weights raises again
        file = transformers.utils.find_adapter_config_file(request.name, **source_of(request))
    if file is not None:
        rule = "must be a model with its own weights"
        got = f"hf/{request.name}, which has the adapters of another model ({Path(file).name})"
        raise InvalidValue(rule, argument="backbone", got=got, cure="merge them into the weights and save the model")
    for index in sorted(Path(request.name).glob("*.index*.json")):
        names: Any = ()
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            names = json.loads(index.read_bytes())["weight_map"].values()  # transformers reports other content
        outside = list(filter(leaves_root, map(str, names)))
        if outside:
            rule = "must be a folder whose files of weights are in it"
            got = f"hf/{request.name}, whose {index.name} names {short_repr(outside[0])}"
            raise InvalidValue(rule, argument="backbone", got=got)


def _class_of_model(transformers: Any, config: Any) -> Any:
    """The class that builds the model of a config: `AutoModel`, except for the text part of SigLIP."""
    name = type(config).__name__.removesuffix("Config")
    if type(config) in transformers.MODEL_MAPPING or not hasattr(transformers, f"{name}Model"):
        return transformers.AutoModel
    return getattr(transformers, f"{name}Model")


def hub_of(request: BackboneRequest) -> AbstractContextManager[None]:
    """Context in which a backbone is read. A folder, a whole config or a loaded file lets nothing be downloaded."""
    is_whole = "model_type" in request.arguments and (request.weights is None or is_local_file(request.weights))
    is_local = is_whole or Path(request.name).is_dir()
    return pretrained.hub_access(allowed=not (is_local or pretrained.is_rebuilding() or pretrained.are_skipped()))


def source_of(request: BackboneRequest) -> dict[str, Any]:
    """The arguments that tell transformers which revision to load, and whether to look only on disk.

    While a file is loaded, nothing is downloaded: the file may name any model of the hub.
    """
    source: dict[str, Any] = {}
    weights = request.weights
    if weights is not None and weights != pretrained.DEFAULT_WEIGHTS and not is_local_file(weights):
        source["revision"] = weights
    if pretrained.are_skipped() or pretrained.is_rebuilding():
        source["local_files_only"] = True
    return source


def _image_size(config: Any) -> int | tuple[int, int]:
    """The image size for which the network is built."""
    size = getattr(config, "image_size", DEFAULT_IMAGE_SIZE)
    if isinstance(size, (list, tuple)):
        return size[0], size[1]
    return int(size)


def _prefix_tokens(model: nn.Module) -> dict[str, int]:
    """Map the name of each parameter with tokens before the patch tokens to the number of its tokens."""
    found = {}
    for name, parameter in model.named_parameters():
        *path, last = name.split(".")
        if last in PREFIX_TOKENS and "embeddings" in path:
            found[last] = parameter.shape[:-1].numel()  # the shape is (C,), (1, C) or (1, tokens, C)
    return found


def _folder_preparation(transformers: Any, request: BackboneRequest) -> dict[str, Any]:
    """The arguments of `Preparation` for the image processor in the folder or on the hub; empty if there is none."""
    if "model_type" in request.arguments:
        return {}
    kind = transformers.image_processing_utils.ImageProcessingMixin
    try:
        settings, _ = kind.get_image_processor_dict(request.name, **source_of(request))
    except (OSError, ValueError):
        return {}
    return preparation_of_processor(settings)
