"""Gradient checkpointing of a backbone: its blocks keep only their inputs, and run again in the backward pass."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_retrieval.models.hugging_face_backbones import HuggingFaceBackbone
from lightning_retrieval.models.timm_backbones import TimmBackbone


def enable_gradient_checkpointing(owner: str, name: str, backbone: nn.Module, *, frozen_norms: bool) -> None:
    """Let the blocks of a backbone run again in the backward pass.

    Args:
        owner: prefix of error messages.
        name: of the backbone.
        backbone: of timm or Hugging Face.
        frozen_norms: whether its batch norms are in eval mode.

    Raises:
        ValueError: if the backbone has no such option, or batch norms would count each batch twice.
    """
    if isinstance(backbone, TimmBackbone) and hasattr(backbone.model, "set_grad_checkpointing"):
        _check_norms(owner, name, backbone, frozen_norms)
        backbone.model.set_grad_checkpointing(True)
        return
    if isinstance(backbone, HuggingFaceBackbone) and backbone.model.supports_gradient_checkpointing:
        _check_norms(owner, name, backbone, frozen_norms)
        _enable_hugging_face(backbone.model)
        return
    raise ValueError(
        f"{owner}: `gradient_checkpointing` must be False for {name}, which has no such option, got True; take a "
        "transformer of timm or Hugging Face, or a smaller chunk_size of RetrievalModule."
    )


def _enable_hugging_face(model: Any) -> None:
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _check_norms(owner: str, name: str, backbone: nn.Module, frozen_norms: bool) -> None:
    has_norms = any(isinstance(module, _BatchNorm) for module in backbone.modules())
    if has_norms and not frozen_norms:
        raise ValueError(
            f"{owner}: `gradient_checkpointing` runs the batch norms of {name} twice a batch, so that their statistics "
            "would count it twice; set freeze_batch_norm=True."
        )
