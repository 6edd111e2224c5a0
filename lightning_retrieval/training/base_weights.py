"""Checkpoints of adapters without the pretrained weights, which are loaded again from where they came from.

They are left out only where an `Embedder` has `lora` and names its `weights`; random ones would be lost.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import short_repr
from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.training.full_sharding import whole_tensor

BASE_WEIGHTS = "base_weights"  # key of a checkpoint: the mean absolute value of each of these parameters
STATES = ("state_dict", "current_model_state")  # the second one is that of Lightning's weight averaging


def remove_base_weights(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Leave the pretrained weights of adapters out of a checkpoint.

    Args:
        module: whose checkpoint it is.
        checkpoint: changed in place.
    """
    names = _base_names(module)
    if not names:
        return
    checkpoint[BASE_WEIGHTS] = _fingerprints(module, names)
    for key in STATES:
        if key in checkpoint:
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if name not in names}


def add_base_weights(owner: str, module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Complete a checkpoint of adapters by the pretrained weights of the module that will load it.

    Args:
        owner: prefix of error messages.
        module: with its pretrained weights.
        checkpoint: changed in place.

    Raises:
        ValueError: if the weights are others than those that the adapters were trained with, or the checkpoint does not
            say which these were.
    """
    if BASE_WEIGHTS not in checkpoint:
        return
    names = checkpoint[BASE_WEIGHTS]
    if not isinstance(names, dict) or not all(isinstance(value, float) for value in names.values()):
        raise ValueError(
            f"{owner}: the checkpoint must have numbers by the names of weights as {BASE_WEIGHTS}, got "
            f"{short_repr(names)}."
        )
    found = module.state_dict()
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"{owner}: the checkpoint is one of adapters for another backbone: its weights have {missing[0]}, which "
            "this module has not."
        )
    for name, value in _fingerprints(module, list(names)).items():
        if abs(value - names[name]) > 0.01 * abs(names[name]):
            raise ValueError(
                f"{owner}: the checkpoint must be loaded with the pretrained weights that its adapters were trained "
                f"with, got others (the mean absolute value of {name} is {value:.4g}, and was {names[name]:.4g})."
            )
    for key in STATES:
        if key in checkpoint:
            checkpoint[key] = {**{name: found[name] for name in names}, **checkpoint[key]}


def _base_names(module: nn.Module) -> list[str]:
    """The frozen parameters of backbones with adapters whose weights can be loaded again."""
    names = []
    for path, part in module.named_modules():
        if not isinstance(part, Embedder) or part.lora is None or part.weights is None:
            continue
        prefix = ".".join(filter(None, (path, "backbone")))
        names += [name for name, value in part.backbone.named_parameters(prefix) if not value.requires_grad]
    return names


def _fingerprints(module: nn.Module, names: list[str]) -> dict[str, float]:
    """The mean absolute value of each of these parameters."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    with torch.no_grad():
        means = [whole_tensor(found[name]).abs().float().mean().cpu() for name in names]
    return dict(zip(names, map(float, means)))
