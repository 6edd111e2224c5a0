"""The optimizer of a module and its learning-rate scheduler, as its constructor was given them."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_retrieval.checks import check_choice, check_integer, check_string
from lightning_retrieval.plain_data import rebuild_factory
from lightning_retrieval.training.checkpointed_module import CheckpointedModule
from lightning_retrieval.training.optimizers import GradientWatch, NetworkParts, check_optimized, make_optimizer
from lightning_retrieval.training.trainer_checks import keeps_parameters


class OptimizedModule(CheckpointedModule):
    """A module with one optimizer over its trainable parameters, and a learning-rate scheduler or none.

    A parameter that requires a gradient and is in no optimizer is an error at the first step of each epoch, since
    callbacks unfreeze layers between epochs. Parameters without a gradient in the first steps of a run are a warning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch_of_check: int | None = None  # in which the optimizers were last checked
        self._gradient_watch = GradientWatch()

    def _set_optimizer(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        lr_scheduler: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None,
        *,
        interval: Literal["epoch", "step"],
        frequency: int,
        monitor: str,
    ) -> None:
        """Check these arguments of the constructor and keep them as attributes.

        Args:
            optimizer: called with the parameter groups.
            lr_scheduler: called with the optimizer, or None.
            interval: the argument `lr_scheduler_interval`.
            frequency: the argument `lr_scheduler_frequency`.
            monitor: the argument `lr_scheduler_monitor`.
        """
        owner = type(self).__name__
        self.optimizer = rebuild_factory(owner, "optimizer", optimizer, Optimizer)
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is not None:
            schedulers = (LRScheduler, ReduceLROnPlateau)
            self.lr_scheduler = rebuild_factory(owner, "lr_scheduler", lr_scheduler, schedulers)
        self.lr_scheduler_interval = check_choice(owner, "lr_scheduler_interval", interval, ("epoch", "step"))
        self.lr_scheduler_frequency = check_integer(owner, "lr_scheduler_frequency", frequency, least=1)
        self.lr_scheduler_monitor = check_string(owner, "lr_scheduler_monitor", monitor)

    def _make_optimizer(self, parts: NetworkParts = NetworkParts(), **scheduler_settings: Any) -> Any:  # noqa: B008
        """What `configure_optimizers` returns: the optimizer and, if there is one, its scheduler.

        Args:
            parts: of the network that learn at another rate than the rest.
            scheduler_settings: further entries of Lightning's description of the scheduler.
        """
        optimizer = make_optimizer(self, self.optimizer, parts)
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {
            "scheduler": self.lr_scheduler(optimizer),
            "interval": self.lr_scheduler_interval,
            "frequency": self.lr_scheduler_frequency,
            **scheduler_settings,
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_callbacks(self) -> Any:
        """Begin a run without what was seen in another."""
        self._epoch_of_check = None
        self._gradient_watch = GradientWatch()
        return super().configure_callbacks()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check that each parameter is trained, after all callbacks have prepared an epoch."""
        if self._epoch_of_check != self.current_epoch and keeps_parameters(self.trainer.strategy):
            check_optimized(self, self.trainer.optimizers)
            self._epoch_of_check = self.current_epoch

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Look for parameters without a gradient, in the first steps of a run."""
        if optimizer is self.trainer.optimizers[0]:
            self._gradient_watch.see(self)

    def on_train_end(self) -> None:
        """Warn of parameters without a gradient in a run of few steps."""
        self._gradient_watch.report(self)
