"""Checkpoints of a network that is divided over the processes have the form of those of one process.

Such a checkpoint is one file, which the first process writes. It holds whole tensors, so any number of processes, and
one process without `ModelParallelStrategy`, continue from it, and the other way round. Lightning's own code would lose
the state that is neither a parameter nor a buffer, such as that of a memory, and would take the state of the optimizer
for that of other parameters if some of them are frozen.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_retrieval.distributed import rank
from lightning_retrieval.training.base_weights import add_base_weights
from lightning_retrieval.training.checkpoint_files import check_checkpoint
from lightning_retrieval.training.full_sharding import is_sharded, whole_tensor


class WholeCheckpoints:
    """Reads and writes checkpoints in place of a `ModelParallelStrategy`.

    Args:
        owner: prefix of error messages.
        strategy: the `ModelParallelStrategy` of a Trainer.
    """

    def __init__(self, owner: str, strategy: Any) -> None:
        self.owner = owner
        self.strategy = strategy

    def install(self) -> None:
        """Let the strategy call the methods of this object in place of its own."""
        self.strategy.lightning_module_state_dict = self.module_state
        self.strategy.optimizer_state = self.optimizer_state
        self.strategy.load_checkpoint = self.load_checkpoint

    def module_state(self) -> dict[str, Any]:
        """The state of the module for a checkpoint, whole on the first process."""
        state: dict[str, Any] = _whole(self.strategy.lightning_module.state_dict())
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer for a checkpoint, whole on the first process."""
        state: dict[str, Any] = _whole(optimizer.state_dict())
        return state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, and give each process its slices of the weights and of the optimizers' states.

        Args:
            checkpoint_path: of the file, which every process can read.
            weights_only: as for `torch.load`.

        Raises:
            ValueError: if the file is damaged, or it is a folder.
        """
        path = Path(checkpoint_path)
        if path.is_dir():
            raise ValueError(
                f"{self.owner}: a checkpoint must be one file, got the folder {path}; save it with "
                "ModelParallelStrategy(save_distributed_checkpoint=False)."
            )
        check_checkpoint(self.owner, path)
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        module = self.strategy.lightning_module
        add_base_weights(self.owner, module, checkpoint)
        current = module.state_dict()
        divided = {}
        for name, value in checkpoint["state_dict"].items():
            divided[name] = _divided_as(current.get(name), value)
        module.load_state_dict(divided, strict=module.strict_loading)
        for optimizer, saved in zip(self.strategy.optimizers, checkpoint.get("optimizer_states", ())):
            self._load_optimizer(optimizer, saved)
        return checkpoint

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Load the state of an optimizer; parameters have the order of its groups, as in one process."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        state = dict(saved["state"])
        for number, parameter in zip(numbers, parameters):
            if number in state:
                state[number] = self._divided_state(state[number], parameter)
        optimizer.load_state_dict({**saved, "state": state})

    def _divided_state(self, state: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
        """The state of one parameter, of which tensors of its shape are divided as it is."""
        divided = {}
        for name, value in state.items():
            is_number = not isinstance(value, Tensor) or value.ndim == 0
            if is_sharded(parameter) and not is_number and value.shape != parameter.shape:
                raise ValueError(
                    f"{self.owner}: the optimizer's state of a divided parameter must have the shape of the parameter, "
                    f"{tuple(parameter.shape)}, got {tuple(value.shape)} for {name!r}; use another optimizer, or DDP."
                )
            divided[name] = value if is_number else _divided_as(parameter, value)
        return divided


def _whole(state: Any) -> Any:
    """A nested state whose tensors are whole on the first process, and empty on the others where they are divided."""
    if isinstance(state, dict):
        whole = copy.copy(state)  # also the versions of modules, which are an attribute
        for key, value in state.items():
            whole[key] = _whole(value)
        return whole
    if type(state) in (list, tuple):
        return type(state)(map(_whole, state))
    if not is_sharded(state):
        return state
    tensor = whole_tensor(state)
    if rank() > 0:
        return tensor.new_empty(0)
    return tensor.cpu()


def _divided_as(like: Any, value: Any) -> Any:
    """This process's slice of a whole tensor, if `like` is divided."""
    if not is_sharded(like) or not isinstance(value, Tensor) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
