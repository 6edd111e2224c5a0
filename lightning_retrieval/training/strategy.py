"""What a training step needs of Lightning's strategy and precision: buffers, gradients, and the loss scale."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytorch_lightning.strategies import ModelParallelStrategy, ParallelStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_retrieval.distributed import world_size
from lightning_retrieval.training.full_sharding import broadcast_buffers


def without_gradient_sync(trainer: Any) -> AbstractContextManager[None]:
    """Keep DDP from summing gradients in backward passes: a step sums them once, after its last chunk.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    if isinstance(trainer.strategy, ParallelStrategy):
        return trainer.strategy.block_backward_sync()
    return nullcontext()


def broadcast_buffers_before_forward(trainer: Any) -> None:
    """Give all ranks the buffers of rank 0: DDP does it at the next forward pass, `ModelParallelStrategy` never.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    if isinstance(trainer.model, DistributedDataParallel):
        trainer.model.require_forward_param_sync = True
    elif isinstance(trainer.strategy, ModelParallelStrategy) and world_size() > 1:
        broadcast_buffers(trainer.lightning_module)


def loss_scale(trainer: Any) -> float:
    """The scale of the loss in half precision, 0 if losses are not scaled. It falls when an optimizer step is skipped.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return 0.0
    return float(scaler.get_scale())
