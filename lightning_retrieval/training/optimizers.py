"""Parameter groups with different learning rates, frozen parameters, and checks that each parameter is trained.

With `layer_decay`, the learning rate of a parameter depends on its depth in the backbone. Layer 0 is everything before
the first block, and layer i is the i-th block. Modules after the last block belong to the last layer, as in timm (Clark
et al., "ELECTRA", ICLR 2020; Bao et al., "BEiT", ICLR 2022).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_retrieval.arguments import NotNegativeInt, Positive, checked, numbers
from lightning_retrieval.checks import first_of
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses.third_party import original_loss
from lightning_retrieval.models.timm_backbones import TimmBackbone
from lightning_retrieval.training.full_sharding import is_sharded, sharded_modules

LAYER, REST, HEAD = range(3)  # parts of a network, in the order of their groups in the optimizer
FACTORS = "`head_lr_factor`, `layer_decay`, `query_lr_factor` or `loss_lr_factor`"  # factors of learning rates


class Updates:
    """How the parameters of a `RetrievalModule` are updated: clipping, and parts that learn slower, faster or later.

    `head_lr_factor`, `layer_decay` and `freeze_backbone_epochs` apply to `embedder` and, if there is one, to
    `query_embedder`, as far as these have a `backbone` or `head`.

    In all else, the parameters of a loss are updated as those of the network: the optimizer's `weight_decay` applies to
    them too, and the norm that is clipped includes their gradients.

    Args:
        gradient_clip_val: largest norm or value of gradients, > 0; None does not clip. In half precision, gradients are
            unscaled first.
        gradient_clip_algorithm: `"norm"` clips the norm of all gradients together; `"value"` clips each value.
        head_lr_factor: learning rate of the `head` of a network divided by that of the other parameters, > 0 (FastAP,
            CVPR 2019: 10).
        layer_decay: learning rate of each layer of the `backbone` of a network divided by that of the next layer, from
            0.01 to 1 (ELECTRA, BEiT: 0.65 to 0.9); the last layer has the base learning rate.
        freeze_backbone_epochs: number of epochs at the start in which the backbone is not trained, >= 0.
        loss_lr_factor: learning rate of the loss's own parameters, such as proxies, divided by that of the network, > 0
            (Proxy-Anchor, CVPR 2020: 100). If it is not 1, they are the last group of the optimizer.

    Raises:
        ValueError: if a number is out of its range, or `gradient_clip_algorithm` is neither.
        TypeError: if a number is of another type.

    Example:
        >>> from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, Updates
        >>> updates = Updates(gradient_clip_val=1.0, head_lr_factor=10)
        >>> module = RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss(), updates=updates)
        >>> module.updates.head_lr_factor
        10

    Relations:
        `TwoNetworks(query_lr_factor=...)` is the factor of a second network.
    """

    def __init__(
        self,
        *,
        gradient_clip_val: Positive | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        head_lr_factor: Positive = 1.0,
        layer_decay: Annotated[float, numbers(0.01, 1)] = 1.0,
        freeze_backbone_epochs: NotNegativeInt = 0,
        loss_lr_factor: Positive = 1.0,
    ) -> None:
        self.gradient_clip_val = checked(self, gradient_clip_val=gradient_clip_val)
        self.gradient_clip_algorithm = checked(self, gradient_clip_algorithm=gradient_clip_algorithm)
        self.head_lr_factor = checked(self, head_lr_factor=head_lr_factor)
        self.layer_decay = checked(self, layer_decay=layer_decay)
        self.freeze_backbone_epochs = checked(self, freeze_backbone_epochs=freeze_backbone_epochs)
        self.loss_lr_factor = checked(self, loss_lr_factor=loss_lr_factor)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def make_optimizer(
    module: nn.Module,
    make: Callable[[Iterable[Any]], Optimizer] | None,
    *,
    has_scaler: bool = False,
    query_embedder: nn.Module | None = None,
    head_lr_factor: float = 1.0,
    layer_decay: float = 1.0,
    query_lr_factor: float = 1.0,
    loss_lr_factor: float = 1.0,
) -> tuple[Optimizer, list[float]]:
    """Create one optimizer for the trainable parameters of a module, and the factors of its parameter groups.

    Args:
        module: owner of the parameters.
        make: class or function that creates the optimizer from the parameter groups; None for the default optimizer,
            which is torch's AdamW.
        has_scaler: whether losses are scaled, as in the precision 16-mixed.
        query_embedder: a second network of the module, or None. The factors of head and layers apply to its `head` and
            `backbone`, too, if it has them.
        head_lr_factor: learning rate of the head of a network divided by that of the other parameters.
        layer_decay: learning rate of each layer of the backbone divided by that of the next layer.
        query_lr_factor: learning rate of the second network divided by that of the first.
        loss_lr_factor: learning rate of the parameters of the module's `loss` divided by that of the first network.
            Parameters that a network shares belong to the network.

    Returns:
        The optimizer, and by which factor the learning rate of each of its groups was multiplied.

    Raises:
        ValueError: if `head_lr_factor` is not 1 but there is no head with parameters, if `layer_decay` is not 1 but
            there is no backbone, if `loss_lr_factor` is not 1 but no parameter of the loss is trainable, or if the
            optimizer puts parameters with different factors into one group.
    """
    networks = [(getattr(module, "embedder", module), 1.0)]
    if query_embedder is not None:
        networks.append((query_embedder, query_lr_factor))
    if layer_decay != 1:
        check_backbone("layer_decay", [network for network, _ in networks])
    places: dict[nn.Parameter, _Place] = {}
    for number, (network, factor) in enumerate(networks):
        for parameter, place in _places(network, head_lr_factor, layer_decay).items():
            places.setdefault(parameter, place._replace(network=number, factor=factor * place.factor))
    if loss_lr_factor != 1:
        of_loss = _Place(network=len(networks), factor=loss_lr_factor)
        places |= dict.fromkeys(_parameters_of_loss(module, loss_lr_factor, places), of_loss)
    groups: dict[_Place, list[nn.Parameter]] = {}
    for parameter in trainable_parameters(module):
        groups.setdefault(places.get(parameter, _Place()), []).append(parameter)
    if head_lr_factor != 1 and all(place.part != HEAD for place in groups):
        rule = f"is {head_lr_factor}, but the embedder has no `head` with parameters"
        cure = "name its last layers `head`, or keep the factor 1"
        raise InvalidValue(rule, argument="head_lr_factor", cure=cure)
    if make is None:
        make = torch.optim.AdamW
        if can_be_fused(module, has_scaler=has_scaler):
            make = functools.partial(torch.optim.AdamW, fused=True)
    optimizer = make([{"params": groups[place]} for place in sorted(groups)])
    if not has_scaler:
        # Lightning refuses to clip the gradients of a fused optimizer, which may be scaled. These are not.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer, _multiply_rates(optimizer, places)


class _Place(NamedTuple):
    """Where a parameter is in the networks, which decides its learning rate. Optimizer groups are sorted by place."""

    network: int = 0
    part: int = REST
    layer: int = 0
    factor: float = 1.0


def _places(network: nn.Module, head_lr_factor: float, layer_decay: float) -> dict[nn.Parameter, _Place]:
    """The place of each parameter of a network; a parameter of several parts belongs to the first of these.

    Args:
        network: the embedder.
        head_lr_factor: as for `make_optimizer`.
        layer_decay: as for `make_optimizer`.
    """
    places: dict[nn.Parameter, _Place] = {}
    head, backbone = getattr(network, "head", None), getattr(network, "backbone", None)
    if isinstance(head, nn.Module):
        places |= dict.fromkeys(head.parameters(), _Place(part=HEAD, factor=head_lr_factor))
    if layer_decay != 1 and isinstance(backbone, nn.Module):
        depths = layer_depths(backbone)
        last = max(depths.values())
        for name, parameter in backbone.named_parameters():
            depth = depths.get(name, last)
            places.setdefault(parameter, _Place(part=LAYER, layer=depth, factor=layer_decay ** (last - depth)))
    for parameter in network.parameters():
        places.setdefault(parameter, _Place())
    return places


def _parameters_of_loss(
    module: Any, loss_lr_factor: float, of_networks: Mapping[nn.Parameter, _Place]
) -> list[nn.Parameter]:
    """The parameters that only the loss of a module trains; raises if the factor applies to none."""
    parameters = [parameter for parameter in trainable_parameters(module.loss) if parameter not in of_networks]
    if not parameters:
        rule = f"is {loss_lr_factor}, but the loss has no parameter to train"
        cure = "give a loss that learns proxies or a temperature, or keep the factor 1"
        raise InvalidValue(rule, argument="loss_lr_factor", got=type(original_loss(module.loss)).__name__, cure=cure)
    return parameters


def _multiply_rates(optimizer: Optimizer, places: Mapping[nn.Parameter, _Place]) -> list[float]:
    """Multiply the rate of each group by the factor of its parameters, and return the factors of the groups.

    Args:
        optimizer: the optimizer, which may have split the groups that it was given.
        places: place of each parameter of the networks.
    """
    factors = []
    for group in optimizer.param_groups:
        of_group = {places.get(parameter, _Place()).factor for parameter in group["params"]}
        if len(of_group) > 1:
            rule = "must keep parameters with different learning rates in different groups"
            got = f"a group with the factors {sorted(of_group)} of {FACTORS}"
            cure = "pass the given groups on to the optimizer, or split them"
            raise InvalidValue(rule, argument="optimizer", got=got, cure=cure)
        factor = max(of_group, default=1.0)
        if factor != 1:
            group["lr"] = group["lr"] * factor  # not in place: groups may share a tensor
        factors.append(factor)
    return factors


def can_be_fused(module: nn.Module, *, has_scaler: bool) -> bool:
    """Whether torch's fused AdamW, which is one loop, updates the parameters of a module as the unfused AdamW does.

    Args:
        module: owner of the parameters, on their device.
        has_scaler: whether losses are scaled: Lightning does not unscale the gradients of fused optimizers before they
            are clipped.
    """
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    if has_scaler or any(part.sparse for part in embeddings):
        return False
    return all(map(_takes_fused_update, trainable_parameters(module)))


def _takes_fused_update(parameter: Tensor) -> bool:
    """Whether a parameter is on a device with fused loops, not of 16 bits, not sharded and not a slice."""
    is_precise = parameter.dtype in (torch.float32, torch.float64)
    if parameter.device.type not in ("cpu", "cuda") or not is_precise or is_sharded(parameter):
        return False
    # The loops go through the memory without gaps, so that they would update other elements than those of a slice.
    return parameter.stride() == torch.empty_like(parameter, device="meta").stride()


def match_states(optimizer: Optimizer) -> None:
    """Adapt the states of an optimizer, which a file may have given, to the parameters and the settings of this run.

    A fused loop reads the memory of a state as that of its parameter, and checks neither its size nor the order of its
    dimensions: with another order, such as a contiguous state of a parameter with channels last, the update would be
    wrong without an error. torch takes the setting `fused`, and with it the device of the counts of steps, from the
    file. Here both are those of the run, which may go on with other devices or with a sharded network.

    Args:
        optimizer: any optimizer of a run that begins.

    Raises:
        ValueError: if the optimizer has a fused loop, and a state other than the count of steps does not have the shape
            of its parameter.
    """
    has_fused_loop = "fused" in optimizer.defaults
    for group in optimizer.param_groups:
        if has_fused_loop:
            group["fused"] = optimizer.defaults["fused"]
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for name, value in tensors.items():
                if has_fused_loop and name != "step" and value.shape != parameter.shape:
                    rule = f"the state {name!r} of an optimizer must have the shape of its parameter"
                    got = f"{tuple(value.shape)} for {tuple(parameter.shape)}"
                    raise InvalidValue(rule, got=got, cure="take another checkpoint")
                if has_fused_loop and name == "step":
                    state[name] = value.to(parameter.device, torch.float32) if counts_on_device else value.cpu()
                elif value.shape == parameter.shape:
                    state[name] = _in_order_of(parameter, value)


def _in_order_of(parameter: Tensor, value: Tensor) -> Tensor:
    """The value itself if it has the memory order of the parameter, else a copy that has it."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def layer_depths(backbone: nn.Module) -> dict[str, int]:
    """The number of the layer of each parameter of a backbone, by the name of the parameter.

    For a backbone of timm, timm defines the blocks. For other backbones, the blocks are the elements of the list of
    layers (`nn.Sequential`, `nn.ModuleList`) that has the most parameters.

    Args:
        backbone: any network.

    Raises:
        ValueError: if the backbone has no list of layers.
    """
    if isinstance(backbone, TimmBackbone):
        from timm.models import group_parameters

        groups = group_parameters(backbone.model, backbone.model.group_matcher(coarse=False), reverse=True)
        return {f"model.{name}": int(number) for name, number in groups.items()}
    path, blocks = _largest_list(backbone)
    if blocks is None:
        rule = "must be 1 for a backbone without a list of layers (nn.Sequential or nn.ModuleList)"
        raise InvalidValue(rule, argument="layer_decay", got=f"a {type(backbone).__name__} without one")
    prefixes = [f"{path}{name}." for name, block in blocks.named_children() if _size(block) > 0]
    depths: dict[str, int] = {}
    depth = 0
    for name, _ in backbone.named_parameters():
        inside = [number for number, prefix in enumerate(prefixes) if name.startswith(prefix)]
        if inside:
            depth = inside[0] + 1
        elif depth > 0:  # after a block
            depth = len(prefixes)
        depths[name] = depth
    return depths


def _largest_list(backbone: nn.Module) -> tuple[str, nn.Module | None]:
    """Find the list of two or more layers with the most parameters (if equal, the outermost), and its name prefix."""
    largest, found, path = 0, None, ""
    for name, module in backbone.named_modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            continue
        layers = sum(_size(child) > 0 for child in module.children())
        if layers > 1 and _size(module) > largest:
            largest, found, path = _size(module), module, f"{name}." if name else ""
    return path, found


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check_backbone(name: str, embedders: Sequence[nn.Module]) -> None:
    """Raise if none of some embedders has a backbone.

    Args:
        name: the argument that needs a backbone.
        embedders: any modules.
    """
    if not any(isinstance(getattr(embedder, "backbone", None), nn.Module) for embedder in embedders):
        got = " and ".join(type(embedder).__name__ for embedder in embedders)
        raise InvalidValue("needs an embedder with a `backbone`, such as Embedder", argument=name, got=got)


class FrozenBackbone:
    """Freezes the trainable parameters of a backbone in the first epochs of a run, and trains them afterwards.

    The frozen parameters are in the optimizer from the start, but are not updated, because they have no gradient.
    Therefore a run that is resumed before or after the unfreezing has the same optimizer.

    Args:
        epochs: number of epochs with a frozen backbone, >= 0.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.names: list[str] = []  # names of the currently frozen parameters

    def set_epoch(self, embedder: Any, epoch: int) -> None:
        """Freeze or unfreeze the backbone for this epoch.

        Args:
            embedder: the embedder. If it has no `backbone`, nothing is frozen.
            epoch: index of the epoch, from 0.
        """
        if self.epochs == 0 or not isinstance(getattr(embedder, "backbone", None), nn.Module):
            return
        sharded_modules(embedder)  # shards the parameters again, which an evaluation may have left gathered
        parameters = dict(embedder.backbone.named_parameters())
        if epoch < self.epochs:
            self.names += [name for name, parameter in parameters.items() if parameter.requires_grad]
        for name in self.names:
            parameters[name].requires_grad = epoch >= self.epochs
        if epoch >= self.epochs:
            self.names = []


def check_optimized(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise if a parameter requires a gradient but is in no optimizer, so that it would never be trained.

    Args:
        module: owner of the parameters; its class name is the prefix of error messages.
        optimizers: the optimizers of the run.

    Raises:
        ValueError: if there are such parameters. The message names the parameters.
    """
    sharded_modules(module)  # shards the parameters again, which an evaluation may have left gathered
    optimized: set[Tensor] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            optimized.update(group["params"])
    names = [name for name, parameter in trained_parameters(module) if parameter not in optimized]
    if names:
        listed = first_of([f"`{name}`" for name in names])
        raise InvalidValue(
            f"each parameter that requires a gradient must be in an optimizer, but {listed} are in none",
            type(module).__name__,
            cure="create or unfreeze them before `configure_optimizers`, which must list them, add a parameter "
            "group for them, or call requires_grad_(False) on those that should not learn",
        )


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and values of the parameters that require a gradient. Parameters of metrics are left out."""
    from torchmetrics import Metric  # not at the top: a network that is only evaluated needs no metrics

    of_metrics: set[int] = set()
    for part in module.modules():
        if isinstance(part, Metric):
            of_metrics.update(map(id, part.parameters()))
    named = module.named_parameters()
    return [(name, value) for name, value in named if value.requires_grad and id(value) not in of_metrics]
