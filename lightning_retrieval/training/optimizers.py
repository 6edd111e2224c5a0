"""Parameter groups with different learning rates, frozen parameters, and checks that each parameter is trained.

With `layer_decay`, the learning rate of a parameter depends on its depth in the backbone. Layer 0 is everything before
the first block, and layer i is the i-th block. Modules after the last block belong to the last layer, as in timm (Clark
et al., "ELECTRA", ICLR 2020; Bao et al., "BEiT", ICLR 2022).
"""

import functools
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_retrieval.checks import check_choice, check_integer, check_positive
from lightning_retrieval.distributed import rank
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses.combined import Schedule, WeightedSum
from lightning_retrieval.losses.third_party import original_loss
from lightning_retrieval.models.timm_backbones import TimmBackbone
from lightning_retrieval.training.full_sharding import is_sharded, sharded_modules

# Optimizers and types of devices for which torch updates all parameters in one loop. A subclass may update them in
# another way.
FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_DEVICES = ("cpu", "cuda")
FUSED_TYPES = (torch.float32, torch.float64)
FIRST_STEPS = 10  # in this many steps, each randomly dropped layer very likely gets a gradient at least once
MOST_NAMES = 5  # number of parameter names that a message lists
LAYER, REST, HEAD = range(3)  # parts of a network, in the order of their groups in the optimizer
FACTORS = "`head_lr_factor`, `layer_decay`, `query_lr_factor` or `loss_lr_factor`"  # factors of learning rates
PRETRAINING_ONLY = ("mask_token",)  # last parts of the names of DINOv2's parameters that no embedding depends on


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
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        head_lr_factor: float = 1.0,
        layer_decay: float = 1.0,
        freeze_backbone_epochs: int = 0,
        loss_lr_factor: float = 1.0,
    ) -> None:
        owner = type(self).__name__
        self.gradient_clip_val: float | None = None
        if gradient_clip_val is not None:
            self.gradient_clip_val = check_positive("gradient_clip_val", gradient_clip_val, owner=owner)
        self.gradient_clip_algorithm: Literal["norm", "value"] = check_choice(
            "gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"), owner=owner
        )
        self.head_lr_factor = check_positive("head_lr_factor", head_lr_factor, owner=owner)
        self.layer_decay = check_positive("layer_decay", layer_decay, least=0.01, most=1, owner=owner)
        self.freeze_backbone_epochs = check_integer(
            "freeze_backbone_epochs", freeze_backbone_epochs, least=0, owner=owner
        )
        self.loss_lr_factor = check_positive("loss_lr_factor", loss_lr_factor, owner=owner)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def check_backbone(name: str, embedders: Sequence[nn.Module]) -> None:
    """Raise if none of some embedders has a backbone.

    Args:
        name: the argument that needs a backbone.
        embedders: any modules.
    """
    if not any(isinstance(getattr(embedder, "backbone", None), nn.Module) for embedder in embedders):
        came = " and ".join(type(embedder).__name__ for embedder in embedders)
        raise InvalidValue("needs an embedder with a `backbone`, such as Embedder", argument=name, got=came)


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
        sharded_modules(embedder)
        parameters = dict(embedder.backbone.named_parameters())
        if epoch < self.epochs:
            self.names += [name for name, parameter in parameters.items() if parameter.requires_grad]
        for name in self.names:
            parameters[name].requires_grad = epoch >= self.epochs
        if epoch >= self.epochs:
            self.names = []


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
        elif depth > 0:
            depth = len(prefixes)
        depths[name] = depth
    numbers = {depth: number for number, depth in enumerate(sorted(set(depths.values())))}  # now consecutive
    return {name: numbers[depth] for name, depth in depths.items()}


def _largest_list(backbone: nn.Module) -> tuple[str, nn.Module | None]:
    """Find the list of two or more layers with the most parameters (if equal, the outermost), and its name prefix."""
    largest, found, path = 0, None, ""
    for name, module in backbone.named_modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            continue
        layers = sum(_size(child) > 0 for child in module.children())
        if layers > 1 and _size(module) > largest:
            largest, found, path = _size(module), module, f"{name}." * bool(name)
    return path, found


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def make_optimizer(
    module: nn.Module,
    make: Callable[[Iterable[Any]], Optimizer],
    *,
    head: Any = None,
    head_lr_factor: float = 1.0,
    layer_decay: float = 1.0,
    query_embedder: nn.Module | None = None,
    query_lr_factor: float = 1.0,
    loss_lr_factor: float = 1.0,
    may_fuse: bool = True,
) -> tuple[Optimizer, list[float]]:
    """Create one optimizer for the trainable parameters of a module, and the factors of its parameter groups.

    Args:
        module: owner of the parameters; its class name is the prefix of error messages.
        make: class or function that creates the optimizer from the parameter groups.
        head: the last layers of the network, or None.
        head_lr_factor: learning rate of the head divided by that of the other parameters.
        layer_decay: learning rate of each layer of the backbone divided by that of the next layer.
        query_embedder: a second network of the module, or None. The factors of head and layers apply to its `head` and
            `backbone`, too, if it has them.
        query_lr_factor: learning rate of the second network divided by that of the first.
        loss_lr_factor: learning rate of the parameters of the module's `loss` divided by that of the first network.
            Parameters that a network shares belong to the network.
        may_fuse: whether the optimizer may update its parameters in one fused loop, if its settings leave that open.

    Returns:
        The optimizer, and by which factor the learning rate of each of its groups was multiplied.

    Raises:
        ValueError: if no parameter is trainable, if `head_lr_factor` is not 1 but there is no head with parameters, if
            `layer_decay` is not 1 but there is no backbone, if `loss_lr_factor` is not 1 but no parameter of the loss
            is trainable, or if the optimizer has other groups than it was given.
    """
    networks = [(getattr(module, "embedder", module), head, 1.0)]
    if query_embedder is not None:
        networks.append((query_embedder, getattr(query_embedder, "head", None), query_lr_factor))
    if layer_decay != 1:
        check_backbone("layer_decay", [network for network, _, _ in networks])
    places = _places_in(networks, head_lr_factor, layer_decay)
    if loss_lr_factor != 1:
        of_loss = _Place(network=len(networks), factor=loss_lr_factor)
        places |= dict.fromkeys(_parameters_of_loss(module, loss_lr_factor, places), of_loss)
    groups: dict[_Place, list[nn.Parameter]] = {}
    for parameter in trainable_parameters(module):
        groups.setdefault(places.get(parameter, _Place()), []).append(parameter)
    if not groups:
        raise _nothing_to_train(module)
    if head_lr_factor != 1 and all(place.part != HEAD for place in groups):
        rule = f"is {head_lr_factor}, but the embedder has no `head` with parameters"
        cure = "name its last layers `head`, or keep the factor 1"
        raise InvalidValue(rule, argument="head_lr_factor", cure=cure)
    sorted_groups = [{"params": groups[place]} for place in sorted(groups)]
    optimizer = _make_fused(make, sorted_groups, module) if may_fuse else make(sorted_groups)
    optimizer.register_load_state_dict_pre_hook(functools.partial(_check_groups, type(module).__name__))
    return optimizer, _multiply_rates(optimizer, places)


def _check_groups(module_name: str, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raise unless a state that is loaded into an optimizer has as many parameters in each of as many groups."""
    saved, present = _group_sizes(state["param_groups"]), _group_sizes(optimizer.param_groups)
    if saved != present:
        raise InvalidValue(
            "a run must be continued with the parameter groups that it began with",
            module_name,
            got=f"groups of {present} parameters, but {saved} in the checkpoint",
            cure=f"train the same parameters, and keep {FACTORS} as they were; or load the weights only: "
            f"{module_name}.load_from_checkpoint(path)",
        )


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _parameters_of_loss(module: Any, loss_lr_factor: float, of_networks: Container[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that only the loss of a module trains; raises if the factor applies to none."""
    parameters = [parameter for parameter in trainable_parameters(module.loss) if parameter not in of_networks]
    if not parameters:
        rule = f"is {loss_lr_factor}, but the loss has no parameter to train"
        cure = "give a loss that learns proxies or a temperature, or keep the factor 1"
        raise InvalidValue(rule, argument="loss_lr_factor", got=type(original_loss(module.loss)).__name__, cure=cure)
    return parameters


def _make_fused(make: Callable[..., Optimizer], groups: list[dict[str, Any]], module: nn.Module) -> Optimizer:
    """Create an optimizer, with a fused loop if it has one, and its settings leave open how it updates parameters.

    Args:
        make: a class of optimizers, a partial of one, or any function.
        groups: the parameter groups.
        module: owner of the parameters.
    """
    if not (_leaves_update_open(make) and _can_be_fused(module)):
        return make(groups)
    optimizer = make(groups, fused=True)
    # Else Lightning refuses to clip gradients with bf16-mixed. Nothing is scaled there.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    optimizer.register_state_dict_post_hook(_leave_update_open)
    optimizer.register_load_state_dict_pre_hook(_as_fused)
    return optimizer


def _leave_update_open(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Write into a file that the update is open: a run that continues from it may have a sharded network."""
    for group in state["param_groups"]:
        group["fused"] = None


def _as_fused(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Read a state as that of a fused optimizer, which has its counts of steps on the device."""
    return {**state, "param_groups": [{**group, "fused": True} for group in state["param_groups"]]}


def _leaves_update_open(make: Any) -> bool:
    """Whether an optimizer offers a fused loop, and the user has not chosen one or another."""
    settings: Mapping[str, Any] = {}
    if isinstance(make, functools.partial):
        make, settings = make.func, make.keywords
    chosen = [settings.get("fused") is not None, settings.get("foreach") is not None, settings.get("differentiable")]
    return make in FUSED_OPTIMIZERS and not any(chosen)


def _can_be_fused(module: nn.Module) -> bool:
    """Whether torch's fused loops update all parameters of a module as its other loops do: on one device, dense, with a
    dense gradient, and not in half precision, in which some versions of torch round otherwise.
    """
    parameters = trainable_parameters(module)
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    if any(part.sparse for part in embeddings) or any(map(is_sharded, parameters)):
        return False
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or devices.pop().type not in FUSED_DEVICES:
        return False
    return all(parameter.dtype in FUSED_TYPES and _is_dense(parameter) for parameter in parameters)


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether the values fill their memory, in any order of the dimensions; those of a slice may not."""
    filled = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _order(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions with more than one entry, which say how the values lie in memory."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def match_memory_orders(optimizer: Optimizer) -> None:
    """Give gradients and states the memory order of their parameters, if an optimizer updates these in a fused loop.

    The fused loops of torch read all of them in the order of their memory, and do not check that it is the same. A
    state of a file may have another order than a parameter with channels last, and so may a gradient that a callback
    has set; then the update would be wrong without an error.

    Args:
        optimizer: any optimizer, before its step.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            parameter.grad = _in_order_of(parameter, parameter.grad)
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[name] = _in_order_of(parameter, value)


def _in_order_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value itself if it has the memory order of the parameter, else a copy that has it."""
    if _order(value) == _order(parameter):
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _multiply_rates(optimizer: Optimizer, places: dict[nn.Parameter, "_Place"]) -> list[float]:
    """Multiply the rate of each group by the factor of its parameters, and return the factors of the groups.

    Args:
        optimizer: the optimizer, which may have split the groups that it was given.
        places: place of each parameter of the networks.
    """
    factors = []
    for group in optimizer.param_groups:
        factors.append(_factor_of_group(group, places))
        if factors[-1] != 1:
            group["lr"] = group["lr"] * factors[-1]  # not in place: groups may share a tensor
    return factors


def _factor_of_group(group: dict[str, Any], places: dict[nn.Parameter, "_Place"]) -> float:
    factors = {places.get(parameter, _Place()).factor for parameter in group["params"]}
    if len(factors) > 1:
        rule = "must keep parameters with different learning rates in different groups"
        got = f"a group with the factors {sorted(factors)} of {FACTORS}"
        cure = "pass the given groups on to the optimizer, or split them"
        raise InvalidValue(rule, argument="optimizer", got=got, cure=cure)
    if factors not in ({1.0}, set()) and group.get("lr") is None:
        rule = f"must have a learning rate if {FACTORS} is not 1"
        raise InvalidValue(rule, argument="optimizer", got=f"lr={group.get('lr')!r}", cure="give it `lr`")
    return next(iter(factors), 1.0)


class _Place(NamedTuple):
    """Where a parameter is in the networks, which decides its learning rate. Optimizer groups are sorted by place."""

    network: int = 0
    part: int = REST
    layer: int = 0
    factor: float = 1.0


def _places_in(
    networks: Sequence[tuple[nn.Module, Any, float]], head_lr_factor: float, layer_decay: float
) -> dict[nn.Parameter, _Place]:
    """The place of each parameter of some networks.

    Args:
        networks: each with its last layers or None, and the factor of its learning rate.
        head_lr_factor: as for `make_optimizer`.
        layer_decay: as for `make_optimizer`.
    """
    places: dict[nn.Parameter, _Place] = {}
    for number, (network, head, factor) in enumerate(networks):
        for parameter, place in _places(network, head, layer_decay):
            rate = factor
            if place.part == HEAD:
                rate *= head_lr_factor
            places.setdefault(parameter, place._replace(network=number, factor=rate * place.factor))
    return places


def _places(network: nn.Module, head: Any, layer_decay: float) -> Iterator[tuple[nn.Parameter, _Place]]:
    """The parameters of a network, each with its place; the first place of a parameter counts.

    Args:
        network: the embedder.
        head: the last layers of the embedder, or None.
        layer_decay: as for `make_optimizer`.
    """
    if isinstance(head, nn.Module):
        for parameter in head.parameters():
            yield parameter, _Place(part=HEAD)
    backbone = getattr(network, "backbone", None)
    if layer_decay != 1 and isinstance(backbone, nn.Module):
        depths = layer_depths(backbone)
        last = max(depths.values())
        for name, parameter in backbone.named_parameters():
            depth = depths.get(name, last)
            yield parameter, _Place(part=LAYER, layer=depth, factor=layer_decay ** (last - depth))
    for parameter in network.parameters():
        yield parameter, _Place()


def _nothing_to_train(module: nn.Module) -> ValueError:
    from torchmetrics import Metric

    parts = [f"`{name}`" for name, part in module.named_children() if not isinstance(part, Metric)]
    return InvalidValue(
        f"{' and '.join(parts)} must have a parameter to train",
        type(module).__name__,
        got="none with requires_grad",
        cure="call requires_grad_(True) on the layers that should learn",
    )


def check_optimized(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise if a parameter requires a gradient but is in no optimizer, so that it would never be trained.

    Args:
        module: owner of the parameters; its class name is the prefix of error messages.
        optimizers: the optimizers of the run.

    Raises:
        ValueError: if there are such parameters. The message names the parameters.
    """
    sharded_modules(module)
    optimized: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            optimized.update(map(id, group["params"]))
    names = [name for name, parameter in trained_parameters(module) if id(parameter) not in optimized]
    if names:
        raise InvalidValue(
            f"each parameter that requires a gradient must be in an optimizer, but {_listed(names)} are in none",
            type(module).__name__,
            cure="create or unfreeze them before `configure_optimizers`, which must list them, add a parameter "
            "group for them, or call requires_grad_(False) on those that should not learn",
        )


class GradientWatch:
    """Finds parameters that require a gradient but have none in the first steps of a run."""

    def __init__(self) -> None:
        self._steps = 0
        self._without: dict[str, nn.Parameter] = {}  # the parameters without a gradient so far, by name

    def see(self, module: nn.Module) -> None:
        """Look for gradients after a backward pass, without waiting for the device; after the first steps, call
        `report`.

        Args:
            module: owner of the parameters.
        """
        if self._steps >= FIRST_STEPS:
            return
        if self._steps == 0:
            self._without = _trained_now(module)
        self._steps += 1
        for name, parameter in list(self._without.items()):
            if parameter.grad is not None or not parameter.requires_grad:
                del self._without[name]
        if self._steps == FIRST_STEPS:
            self.report(module)

    def report(self, module: nn.Module) -> None:
        """Warn of the parameters without a gradient, once, on the first process.

        Args:
            module: owner of the parameters; its class name is the prefix of the warning.
        """
        names, self._without = list(self._without), {}
        names = [name for name in names if name.rpartition(".")[2] not in PRETRAINING_ONLY]
        if names and rank() == 0:
            warnings.warn(
                f"{type(module).__name__}: {_listed(names)} have had no gradient in the first {self._steps} steps, so "
                "they do not learn; use these parameters in `forward` or in a term of `loss`, or call "
                "requires_grad_(False) on them (layers that are rarely used need neither).",
                stacklevel=2,
            )


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and values of the parameters that require a gradient. Parameters of metrics are left out."""
    from torchmetrics import Metric  # not at the top: a network that is only evaluated needs no metrics

    of_metrics: set[int] = set()
    for part in module.modules():
        if isinstance(part, Metric):
            of_metrics.update(map(id, part.parameters()))
    named = module.named_parameters()
    return [(name, value) for name, value in named if value.requires_grad and id(value) not in of_metrics]


def _trained_now(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to train by name, without those of terms whose weights change, which may have no gradient yet."""
    later: set[int] = set()
    for part in module.modules():
        if isinstance(part, WeightedSum):
            for name, weight in part.weights.items():
                if isinstance(weight, Schedule):
                    later.update(map(id, part.parts[name].parameters()))
    return {name: value for name, value in trained_parameters(module) if id(value) not in later}


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        listed += f" and {len(names) - MOST_NAMES} other parameters"
    return listed
