"""What a training step needs of Lightning's strategy and precision: buffers, gradients, results, the loss scale."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytorch_lightning.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_retrieval.checks import short_repr
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


class CheckedSteps:
    """Calls the training steps of a module in manual optimization in place of a strategy, and checks what they return.

    This is the first place that sees what the step of a subclass returns. Lightning then detaches it, so a loss that is
    returned as in automatic optimization would not be trained, and no hook would notice it.

    Args:
        owner: prefix of error messages.
        strategy: of a Trainer.
        module: a LightningModule.
    """

    def __init__(self, owner: str, strategy: Any, module: Any) -> None:
        self.owner = owner
        self.strategy = strategy
        self.module = module

    def install(self) -> None:
        """Let the strategy call this object in place of its own method."""
        self.strategy.training_step = self

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """What the training step returns.

        Raises:
            ValueError: if the module returns a loss with a graph.
        """
        output = type(self.strategy).training_step(self.strategy, *arguments, **settings)
        is_own = self.strategy.lightning_module is self.module  # the Trainer may train another module afterwards
        if is_own and not self.module.automatic_optimization:  # Lightning may be asked to back-propagate the output
            self._check(output)
        return output

    def _check(self, output: Any) -> None:
        loss = output
        if isinstance(output, Mapping):
            loss = output.get("loss")
        if isinstance(loss, Tensor) and loss.requires_grad:
            raise ValueError(
                f"{self.owner}: `training_step` must not return a loss that requires a gradient, because the step has "
                f"ended and nothing back-propagates what it returns, got {short_repr(loss)}; make it a term of `loss`, "
                "WeightedSum({'ap': (1.0, SmoothAPLoss()), 'extra': (0.5, ExtraLoss())}), or return its detach()."
            )


def loss_scale(trainer: Any) -> float:
    """The scale of the loss in half precision, 0 if losses are not scaled. It falls when an optimizer step is skipped.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return 0.0
    return float(scaler.get_scale())
