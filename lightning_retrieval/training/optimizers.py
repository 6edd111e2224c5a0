"""Parameter groups: the head of a network may learn at another rate than the rest."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def make_optimizer(
    module: nn.Module, head: Any, make: Callable[[Iterable[Any]], Optimizer], head_lr_factor: float
) -> Optimizer:
    """One optimizer over the trainable parameters of a module.

    Args:
        module: owner of the parameters; its class name is the prefix of error messages.
        head: the last layers of the network, or None.
        make: called with the parameter groups.
        head_lr_factor: ratio of the head's learning rate to that of the other parameters.

    Raises:
        ValueError: if there is nothing to train, or a factor without a head.
    """
    owner = type(module).__name__
    in_head: list[nn.Parameter] = []
    if isinstance(head, nn.Module):
        in_head = trainable_parameters(head)
    identities = set(map(id, in_head))
    rest = [parameter for parameter in trainable_parameters(module) if id(parameter) not in identities]

    if not in_head and not rest:
        parts = [f"`{name}`" for name, part in module.named_children() if not isinstance(part, Metric)]
        raise ValueError(
            f"{owner}: {' and '.join(parts)} must have a parameter to train, got none with requires_grad; call "
            "requires_grad_(True) on the layers that should learn."
        )
    if head_lr_factor != 1 and not in_head:
        raise ValueError(
            f"{owner}: `head_lr_factor` is {head_lr_factor}, but the embedder has no `head` with parameters; name its "
            "last layers `head`, or keep the factor 1."
        )
    groups = []
    if rest:
        groups.append({"params": rest})
    if in_head:
        groups.append({"params": in_head})
    optimizer = make(groups)
    if in_head:
        optimizer.param_groups[-1]["lr"] *= head_lr_factor
    return optimizer
