"""Networks that PyTorch's FSDP2 (`fully_shard`) shards over the processes, with `ModelParallelStrategy`.

Each process keeps one shard of each parameter, of its gradient and of the optimizer's state. Each block of layers
gathers its parameters before its forward and its backward pass, and frees them afterwards. Each process adds up the
gradients of the chunks of a step. The last backward pass of the step sums these gradients over the processes, and each
process keeps its shard of the sum.

By default, FSDP2 divides the sum by the number of processes. In this library, the losses of the processes add up to the
loss, so the gradient is the sum, without a division. `check_trainer` raises before a run if a setting does not work
with such a network.

With `FSDP2Strategy(shard_size=8)`, each group of 8 processes holds one copy of the network (hybrid sharding, HSDP).
Weights are then gathered within a group only, and gradients are summed over the groups, too.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_retrieval.distributed import rank, sum_over_ranks
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.plain_data import unsharded_class

LISTS = (nn.Sequential, nn.ModuleList)
SMALLEST_BLOCK = 100_000  # in parameters; the time to gather a smaller block is mostly latency


def sharding_mesh(strategy: Any) -> Any:
    """The mesh over which a strategy shards networks. All processes must call this function.

    Args:
        strategy: a `ModelParallelStrategy` whose processes have been started.

    Returns:
        A `torch.distributed.DeviceMesh` of all processes. It has one dimension or, if several groups of processes hold
        a copy of the network each, the dimensions `"replicate"` and `"shard"`.
    """
    mesh = strategy.device_mesh["data_parallel"]
    shard_size = getattr(strategy, "shard_size", None)
    if shard_size in (None, mesh.size()):
        return mesh
    shape = (mesh.size() // shard_size, shard_size)
    return dist.device_mesh.init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is sharded over the processes (a `DTensor`)."""
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: Any) -> Tensor:
    """This process's shard of a tensor, or the whole tensor if it is not sharded."""
    if is_sharded(tensor):
        tensor = tensor.to_local()
    local: Tensor = tensor
    return local


def full_tensor(tensor: Any) -> Tensor:
    """The full tensor, gathered from all processes. All processes must call this function."""
    if is_sharded(tensor):
        tensor = tensor.full_tensor()
    full: Tensor = tensor
    return full


def copies_of(tensor: Any) -> int:
    """Number of groups of processes that each hold one copy of a tensor; 1 if the tensor is not sharded."""
    if not is_sharded(tensor):
        return 1
    copies = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements):
        if placement.is_replicate():
            copies *= size
    return copies


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether a parameter of a module is sharded over the processes."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks of a network, which are the elements of its outermost lists of layers.

    The parameters of a block are gathered together.

    Args:
        network: any network. A list of layers is an `nn.Sequential` or `nn.ModuleList`; lists within a list are
            searched too. An element with fewer than `SMALLEST_BLOCK` parameters is not a block.
    """
    blocks = []
    for child in network.children():
        if isinstance(child, LISTS) or not isinstance(network, LISTS):  # not an element of a list
            blocks += blocks_of(child)
        elif sum(parameter.numel() for parameter in child.parameters()) >= SMALLEST_BLOCK:
            blocks.append(child)
    return blocks


def shard_blocks(network: nn.Module, mesh: Any) -> None:
    """Shard a network over the processes of a mesh: each block separately, and the rest together.

    Args:
        network: the network, which is changed in place. Afterwards, it must be called as a whole. A parameter of shape
            () is not sharded.
        mesh: a mesh as returned by `sharding_mesh`.

    Raises:
        ValueError: if blocks share a parameter with each other or with the rest. The message names the parameter.
    """
    from torch.distributed.fsdp import fully_shard

    scalars = {parameter for parameter in network.parameters() if parameter.ndim == 0}
    blocks = list(dict.fromkeys(blocks_of(network)))  # a layer may be in several lists
    _check_nothing_is_shared(network, blocks, scalars)
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=scalars)
    # By default, the outermost module would keep its parameters gathered after an evaluation.
    fully_shard(network, mesh=mesh, ignored_params=scalars, reshard_after_forward=True)


def _check_nothing_is_shared(network: nn.Module, blocks: Sequence[nn.Module], scalars: Set[nn.Parameter]) -> None:
    """Raise if a parameter belongs to several of the modules that are sharded separately.

    If a layer is in two such modules, FSDP2 raises an error that does not name the layer. If two layers share a
    parameter, FSDP2 raises no error and would train two copies.
    """
    name_of = {module: name for name, module in network.named_modules()}
    # For each parameter, the number of the first module that holds it, and the parameter's name there.
    first: dict[nn.Parameter, tuple[int, str]] = {}
    sharded = set[nn.Module]()
    for number, part in enumerate([*blocks, network]):
        for module in _modules_outside(part, sharded):
            for local_name, parameter in module.named_parameters(recurse=False):
                first_part, name = first.setdefault(parameter, (number, f"{name_of[module]}.{local_name}"))
                if first_part != number and parameter not in scalars:
                    raise InvalidValue(
                        "FSDP2 must find each parameter in one block of layers only",
                        type(network).__name__,
                        got=f"`{name.lstrip('.')}` in several",
                        cure="train with strategy='ddp', or override `shard_network` of the module to shard these "
                        "blocks together",
                    )
        sharded.add(part)


def _modules_outside(part: nn.Module, sharded: Set[nn.Module]) -> Iterator[nn.Module]:
    """A module and its submodules, except modules that are already sharded and their submodules."""
    waiting, seen = [part], {*sharded}
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting += reversed([*module.children()])


def start_sharded(module: nn.Module, shard: Callable[[], None], device: torch.device) -> set[str]:
    """Shard a module, then fill it with the parameters and buffers of the first process, one tensor after the other.

    Only the first process needs memory for the whole module. In the others, tensors may be on the meta device, and get
    memory when they are sharded.

    Args:
        module: the module, which is changed in place.
        shard: shards the module.
        device: a device of this process that the process group can send from.

    Returns:
        The names of tensors that are on the meta device in the first process, too. Their values are NaN or undefined.

    """
    module.to(memory_format=torch.contiguous_format)  # FSDP2 shards no others
    names = list(_named_tensors(module))
    on_meta, full = [], {}
    for name, tensor in _named_tensors(module).items():
        on_meta.append(tensor.is_meta)
        if rank() == 0:
            full[name] = tensor.detach()  # `shard` would otherwise free the whole tensors
    on_meta_in_first = torch.tensor(on_meta, device=device)
    dist.broadcast(on_meta_in_first, 0)
    unfilled = set(itertools.compress(names, on_meta_in_first.tolist()))
    shard()
    if True in on_meta:
        _give_memory(module, device)
    with torch.no_grad():
        # By order, because `shard` may also compile or wrap layers, which renames their parameters.
        for name, tensor in zip(names, _named_tensors(module).values(), strict=True):
            if name not in unfilled:
                _fill(tensor, full.pop(name, None), device)
    return unfilled


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Allocate the parameters and buffers of a module that are on the meta device."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # or layers would no longer share a parameter
    try:
        module._apply(functools.partial(_with_memory, device=device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`, filled with NaN if it is floating point, in place of a tensor on the meta device."""
    if not tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device=device)
    if empty.is_floating_point():
        local_shard(empty).fill_(math.nan)
    return empty


def _fill(tensor: Tensor, full: Tensor | None, device: torch.device) -> None:
    """Send a full tensor from the first process to all others, and copy it, or the shard of it, to `tensor`."""
    if full is None:
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        sent = full.to(device).contiguous()
    dist.broadcast(sent, 0)
    local_shard(tensor).copy_(local_shard(sharded_like(tensor, sent)))


def sharded_like(like: Any, value: Any) -> Any:
    """This process's shard of a full tensor, if `like` is sharded."""
    if not is_sharded(like) or not isinstance(value, Tensor) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def broadcast_buffers(module: nn.Module) -> None:
    """Copy the buffers from the first process to all others, in one collective per dtype."""
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        of_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in of_dtype.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(flat, 0)
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(part.view_as(buffer))


def sharded_modules(module: nn.Module) -> list[Any]:
    """Find the modules, among a module and its submodules, to which `fully_shard` has been applied.

    After an evaluation, their parameters may still be gathered: as tensors that the optimizer does not have. Therefore
    this function also shards the parameters again.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    sharded: list[Any] = [part for part in module.modules() if unsharded_class(part) is not type(part)]
    for part in sharded:
        part.reshard()
    return sharded


class ShardedParts:
    """The modules of a network that FSDP2 shards, in the steps of a run, which sum the gradients by themselves.

    Args:
        module: the module that is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = sharded_modules(module)
        for part in self.parts:
            part.set_gradient_divide_factor(1.0)  # set for each module, because submodules do not inherit it
            part.set_force_sum_reduction_for_comms(True)  # gloo can only sum
            part.set_requires_gradient_sync(False, recurse=False)

    def reshard(self) -> None:
        """Shard the parameters again, which may still be gathered after an evaluation."""
        for part in self.parts:
            part.reshard()

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Context whose backward pass sums the gradients of the step over the processes."""
        for part in self.parts:
            part.set_requires_gradient_sync(True, recurse=False)
        try:
            yield
        finally:
            for part in self.parts:
                part.set_requires_gradient_sync(False, recurse=False)


def clip_sharded_gradients(parameters: Sequence[Any], limit: float, algorithm: str) -> None:
    """Clip gradients in place, like the functions of `torch.nn.utils` with one process.

    Args:
        parameters: parameters of the network. Some may be sharded over all processes; the others are the same on all
            processes.
        limit: the largest norm or the largest value.
        algorithm: `"norm"` clips the norm of all gradients together; `"value"` clips each value.
    """
    gradients, full = [], []
    sharded: dict[int, list[Tensor]] = defaultdict(list)  # by the number of copies
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local_shard(parameter.grad)
        gradients.append(gradient)
        if is_sharded(parameter.grad):
            sharded[copies_of(parameter.grad)].append(gradient)
        else:
            full.append(gradient)
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-limit, limit)
        return
    squared_norm = _squared_norm(full)
    for copies, of_copies in sorted(sharded.items()):
        squared_norm = squared_norm + sum_over_ranks(_squared_norm(of_copies)) / copies
    factor = (limit / (squared_norm.sqrt() + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient))


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, in float32 or better."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
