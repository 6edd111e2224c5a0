"""What cannot be done with a network that Lightning's `ModelParallelStrategy` divides over the processes."""

from typing import Any

import torch
from pytorch_lightning.callbacks import BaseFinetuning, ModelPruning, OnExceptionCheckpoint, WeightAveraging
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn

# Callbacks that would fail or wait forever, and why.
_WHOLE = "needs whole parameters, which ModelParallelStrategy does not keep"
WRONG_CALLBACKS = {
    BaseFinetuning: _WHOLE,
    ModelPruning: _WHOLE,
    WeightAveraging: _WHOLE,
    OnExceptionCheckpoint: "saves with all processes, but one of them may have failed alone",
}


def check_model_parallel(owner: str, trainer: Any) -> None:
    """Raise if a run with `ModelParallelStrategy` would fail, wait forever or train something else.

    Args:
        owner: name of the module's class.
        trainer: a `pytorch_lightning.Trainer` with this strategy.

    Raises:
        ValueError: the message names the setting, and what to use instead.
    """
    from torch.distributed.fsdp import FSDPModule

    _check_arguments(owner, trainer.strategy)
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ValueError(
            f"{owner}: ModelParallelStrategy needs a newer torch, in which gradients can be summed instead of averaged "
            f"(FSDPModule.set_force_sum_reduction_for_comms), got torch {torch.__version__}; update torch, or use DDP."
        )
    for callback in trainer.callbacks:
        _check_callback(owner, callback)
    if trainer.state.fn == TrainerFn.PREDICTING and trainer.world_size > 1:
        raise ValueError(
            f"{owner}: in predict the processes may have unequal numbers of batches, but with ModelParallelStrategy "
            "they embed each batch together; predict with Trainer(strategy='ddp') from a checkpoint."
        )


def _check_callback(owner: str, callback: Any) -> None:
    for kind, reason in WRONG_CALLBACKS.items():
        if isinstance(callback, kind):
            raise ValueError(
                f"{owner}: the callback {type(callback).__name__} of Lightning {reason}; leave it out, or use "
                "Trainer(strategy='ddp')."
            )


def _check_arguments(owner: str, strategy: ModelParallelStrategy) -> None:
    """Raise unless the network is divided over all processes, and checkpoints are files."""
    tensor_parallel_size = strategy._tensor_parallel_size
    if tensor_parallel_size == "auto":
        tensor_parallel_size = strategy.num_processes
    if tensor_parallel_size != 1 or strategy._save_distributed_checkpoint:
        processes = strategy.num_processes * strategy.num_nodes
        raise ValueError(
            f"{owner}: all processes must share the data, and a checkpoint must be one file, got "
            f"ModelParallelStrategy(tensor_parallel_size={strategy._tensor_parallel_size!r}, "
            f"save_distributed_checkpoint={strategy._save_distributed_checkpoint}); use ModelParallelStrategy("
            f"data_parallel_size={processes}, tensor_parallel_size=1, save_distributed_checkpoint=False)."
        )
