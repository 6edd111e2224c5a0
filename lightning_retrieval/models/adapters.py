"""Optional additions to a backbone before training: low-rank adapters (LoRA) through peft, gradient checkpointing.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, eq. 3: W x becomes W x + (alpha / r) B A x,
with A (r, in) and B (out, r), and B = 0 at the start. The weights W are frozen.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.hugging_face_backbones import HuggingFaceBackbone
from lightning_retrieval.models.pretrained import is_rebuilding
from lightning_retrieval.models.timm_backbones import TimmBackbone
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data import IN_PYTHON

MOST_RANK = 4096
# Arguments of `peft.LoraConfig` that a file may set. Others import modules, read files or run over data.
OF_FILES = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias", "bias", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "init_lora_weights"),
)
ATTENTION = ("attn", "attention")
ADAPTER = "lora_"  # prefix of the names of the trained matrices


def check_lora(lora: Any) -> dict[str, Any] | None:
    """Validate `lora`, and return the arguments of `peft.LoraConfig`, or None without adapters.

    Args:
        lora: the rank r, arguments of `peft.LoraConfig`, or None.

    Raises:
        ValueError: if the rank is out of its range, or an argument names a module that peft would import.
        TypeError: if `lora` is neither an integer, a dict nor None.
    """
    if lora is None:
        return None
    if isinstance(lora, Mapping):
        check_integer("lora['r']", lora.get("r", 8), 1, MOST_RANK, owner="Embedder")
        if is_rebuilding():
            _check_arguments_of_file(lora)
        return dict(lora)
    rank = check_integer("lora", lora, 1, MOST_RANK, owner="Embedder")
    return {"r": rank, "lora_alpha": rank}


def _check_arguments_of_file(lora: Mapping[str, Any]) -> None:
    """Raise unless a file may set the arguments of adapters."""
    for name, value in lora.items():
        if name not in OF_FILES and value not in (None, False, [], {}):
            rule = f"of a file must have arguments among {', '.join(OF_FILES)}"
            raise InvalidValue(rule, "Embedder", "lora", got=f"{name}={short_repr(value)}", cure=IN_PYTHON)


def add_adapters(backbone: nn.Module, lora: Mapping[str, Any]) -> None:
    """Freeze a backbone and add adapters to linear layers, by default to the linear layers of its attention.

    Args:
        backbone: the backbone, which is changed in place.
        lora: arguments of `peft.LoraConfig`.

    Raises:
        ModuleNotFoundError: if peft is not installed.
        ValueError: if `target_modules` is not given and there is no attention.
        Exception: any error of peft, if an argument is invalid for it.
    """
    with optional_import("peft must be installed for `lora`: pip install 'lightning-retrieval[lora]'.", "Embedder"):
        import peft
    settings = {"target_modules": _attention_layers(backbone), **lora}
    if not settings["target_modules"]:
        rule = f"must name its `target_modules`, since {type(backbone).__name__} has no linear layers in an attention"
        raise InvalidValue(rule, "Embedder", "lora", got=short_repr(dict(lora)))
    backbone.requires_grad_(False)
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), backbone)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad = ADAPTER in name


def merge_adapters(backbone: nn.Module) -> None:
    """Merge the adapters into the weights and remove them, so that parameters have the names of the plain backbone.

    Args:
        backbone: the backbone, which is changed in place; all its parameters are trainable afterwards.
    """
    import peft

    for name, module in list(backbone.named_modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(backbone.get_submodule(parent), child, module.get_base_layer())
    backbone.requires_grad_(True)


def _attention_layers(backbone: nn.Module) -> list[str]:
    """The names of the linear layers of attention, except those in an `nn.MultiheadAttention`.

    `nn.MultiheadAttention` uses the weights of its layers without calling the layers, so their adapters would have no
    effect.
    """
    found = []
    hidden: tuple[str, ...] = ()
    for name, module in backbone.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            hidden = (*hidden, f"{name}.")
        is_attention = any(word in part for part in name.split(".") for word in ATTENTION)
        if isinstance(module, nn.Linear) and is_attention and not name.startswith(hidden):
            found.append(name)
    return found


def enable_gradient_checkpointing(name: str, backbone: nn.Module, *, frozen_norms: bool) -> None:
    """Enable gradient checkpointing: blocks store only their inputs and run again in the backward pass.

    Args:
        name: name of the backbone.
        backbone: a backbone of timm or Hugging Face.
        frozen_norms: whether the batch norms of the backbone are in eval mode.

    Raises:
        ValueError: if the backbone does not support gradient checkpointing, or batch norms would count each batch
            twice.
    """
    is_timm = isinstance(backbone, TimmBackbone) and hasattr(backbone.model, "set_grad_checkpointing")
    is_hugging_face = isinstance(backbone, HuggingFaceBackbone) and backbone.model.supports_gradient_checkpointing
    if not is_timm and not is_hugging_face:
        rule = f"must be False for {name}, which has no such option"
        cure = "take a transformer of timm or Hugging Face, or a smaller chunk_size of RetrievalModule"
        raise InvalidValue(rule, "Embedder", "gradient_checkpointing", got="True", cure=cure)
    if not frozen_norms and any(isinstance(module, _BatchNorm) for module in backbone.modules()):
        rule = f"runs the batch norms of {name} twice a batch, so that their statistics would count it twice"
        raise InvalidValue(rule, "Embedder", "gradient_checkpointing", cure="set freeze_batch_norm=True")
    model: Any = backbone.model
    settings = {"use_reentrant": False}
    if is_timm:
        model.set_grad_checkpointing(True)
    elif hasattr(model, "activation_checkpointing_enable"):  # the name of the method since transformers 5
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
