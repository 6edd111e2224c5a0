"""Parameter groups: the head of a network and the layers of its backbone may learn at other rates than the rest."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_retrieval.models.layer_depths import layer_depths
from lightning_retrieval.training.frozen_backbone import check_backbone


@dataclass(frozen=True)
class NetworkParts:
    """The parts of a network that learn at another rate than the rest.

    Args:
        head: the last layers of the network, or None.
        head_lr_factor: ratio of the head's learning rate to that of the other parameters.
        backbone: the first layers of the network, or None.
        layer_decay: ratio of the learning rate of each layer of the backbone to that of the next one.
    """

    head: Any = None
    head_lr_factor: float = 1.0
    backbone: Any = None
    layer_decay: float = 1.0


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def make_optimizer(module: nn.Module, make: Callable[[Iterable[Any]], Optimizer], parts: NetworkParts) -> Optimizer:
    """One optimizer over the trainable parameters of a module.

    Args:
        module: owner of the parameters; its class name is the prefix of error messages.
        make: called with the parameter groups.
        parts: that learn at another rate.

    Raises:
        ValueError: if there is nothing to train, or a factor without a head or a backbone.
    """
    owner = type(module).__name__
    in_head: list[nn.Parameter] = []
    if isinstance(parts.head, nn.Module):
        in_head = trainable_parameters(parts.head)
    groups = _layers(owner, module, parts)
    grouped = {id(parameter) for group, _ in groups for parameter in group}
    grouped.update(map(id, in_head))
    rest = [parameter for parameter in trainable_parameters(module) if id(parameter) not in grouped]

    groups += [(rest, 1.0), (in_head, parts.head_lr_factor)]
    groups = [(parameters, factor) for parameters, factor in groups if parameters]
    if not groups:
        raise _nothing_to_train(owner, module)
    if parts.head_lr_factor != 1 and not in_head:
        raise ValueError(
            f"{owner}: `head_lr_factor` is {parts.head_lr_factor}, but the embedder has no `head` with parameters; "
            "name its last layers `head`, or keep the factor 1."
        )
    optimizer = make([{"params": parameters} for parameters, _ in groups])
    for group, (_, factor) in zip(optimizer.param_groups, groups):
        group["lr"] *= factor
    return optimizer


def _nothing_to_train(owner: str, module: nn.Module) -> ValueError:
    parts = [f"`{name}`" for name, part in module.named_children() if not isinstance(part, Metric)]
    return ValueError(
        f"{owner}: {' and '.join(parts)} must have a parameter to train, got none with requires_grad; call "
        "requires_grad_(True) on the layers that should learn."
    )


def _layers(owner: str, module: nn.Module, parts: NetworkParts) -> list[tuple[list[nn.Parameter], float]]:
    """The trainable parameters of each layer of the backbone, and the factor of its learning rate."""
    if parts.layer_decay == 1:
        return []
    backbone = check_backbone(owner, "layer_decay", getattr(module, "embedder", module))
    depths = layer_depths(owner, backbone)
    last = max(depths.values())
    layers: dict[int, list[nn.Parameter]] = {}
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(depths.get(name, last), []).append(parameter)
    return [(layers[depth], parts.layer_decay ** (last - depth)) for depth in sorted(layers)]
