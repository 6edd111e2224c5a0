"""How deep in a backbone each of its parameters is, for learning rates that differ from layer to layer.

Layer 0 is what comes before the first block, and layer i the i-th block. What comes after the last block belongs to it,
as in timm (Clark et al., "ELECTRA", ICLR 2020; Bao et al., "BEiT", ICLR 2022).
"""

from torch import nn

from lightning_retrieval.models.timm_backbones import TimmBackbone


def layer_depths(owner: str, backbone: nn.Module) -> dict[str, int]:
    """The layer of each parameter of a backbone, by its name.

    The blocks are those that timm names, and else the list of layers (`nn.Sequential`, `nn.ModuleList`) that holds the
    most parameters.

    Args:
        owner: prefix of error messages.
        backbone: any.

    Raises:
        ValueError: if the backbone has no list of layers.
    """
    if isinstance(backbone, TimmBackbone):
        return _depths_of_timm(backbone)
    path, blocks = _largest_list(backbone)
    if blocks is None:
        raise ValueError(
            f"{owner}: `layer_decay` must be 1 for a backbone without a list of layers (nn.Sequential or "
            f"nn.ModuleList), got a {type(backbone).__name__} without one."
        )
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
    return _without_gap(depths)


def _depths_of_timm(backbone: TimmBackbone) -> dict[str, int]:
    """The layers that timm uses for learning rates."""
    from timm.models import group_parameters

    groups = group_parameters(backbone.model, backbone.model.group_matcher(coarse=False), reverse=True)
    return {f"model.{name}": int(number) for name, number in groups.items()}


def _largest_list(backbone: nn.Module) -> tuple[str, nn.Module | None]:
    """The list of at least two layers with the most parameters, the outermost of equal ones, and its prefix."""
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


def _without_gap(depths: dict[str, int]) -> dict[str, int]:
    """The same order of layers, numbered from 0."""
    numbers = {depth: number for number, depth in enumerate(sorted(set(depths.values())))}
    return {name: numbers[depth] for name, depth in depths.items()}
