"""What Lightning leaves to a module in manual optimization: stepping, clipping, schedulers, logging."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_retrieval.training.full_sharding import is_sharded
from lightning_retrieval.training.gradient_clipping import clip_sharded_gradients
from lightning_retrieval.training.optimized_module import OptimizedModule
from lightning_retrieval.training.run_report import log_facts
from lightning_retrieval.training.schedulers import (
    check_plateau_schedulers,
    step_plateau_schedulers,
    step_schedulers,
)
from lightning_retrieval.training.strategy import CheckedSteps, broadcast_buffers_before_forward, loss_scale
from lightning_retrieval.training.throughput import Throughput
from lightning_retrieval.training.trainer_checks import check_trainer
from lightning_retrieval.training.whole_checkpoints import WholeCheckpoints


class ManualTraining(OptimizedModule):
    """The hooks of a run that are the same whatever is embedded and ranked. `RetrievalModule` builds on it."""

    gradient_clip_val: float | None
    gradient_clip_algorithm: str

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._is_first_step = True  # of a run
        self._throughput = Throughput()

    def _step_optimizers(self) -> bool:
        """Step all optimizers; False if half precision skipped the step, since gradients were infinite."""
        scale_before = loss_scale(self.trainer)
        optimizers = self.optimizers()
        if not isinstance(optimizers, list):
            optimizers = [optimizers]
        for optimizer in optimizers:
            optimizer.step()
        return loss_scale(self.trainer) >= scale_before

    def _step_due_schedulers(self, batch_idx: int, stepped: bool) -> None:
        """Step the schedulers that are due after a batch.

        Args:
            batch_idx: index of the batch in its epoch.
            stepped: whether the optimizers have stepped.
        """
        if stepped:
            step_schedulers(self, "step", batch_idx)
        if self.trainer.is_last_batch:
            step_schedulers(self, "epoch", self.current_epoch)

    def _log_step(self, terms: Mapping[str, Tensor], images: int) -> None:
        """Log the loss and its terms and, where somebody reads it, the throughput.

        Args:
            terms: values by the names under which they are logged.
            images: images of all processes in this step.
        """
        for name, value in terms.items():
            self.log(name, value, prog_bar=name == "train/loss")
        images_per_second = self._throughput.step(images)
        if images_per_second is not None and self._throughput_is_due():
            # A number would be copied to the device, for which the host would wait.
            self.log("train/images_per_second", torch.tensor(images_per_second), prog_bar=True)

    def _throughput_is_due(self) -> bool:
        """Whether loggers write at this step, or the progress bar has no value yet; a call of `log` takes 0.4 ms."""
        trainer: Any = self.trainer
        is_first = self._throughput.measured == 1
        return is_first or bool(trainer.fast_dev_run) or trainer._logger_connector.should_update_logs

    def configure_callbacks(self) -> Any:
        """Check the flags of the Trainer, at the first moment it is known."""
        owner, strategy = type(self).__name__, self.trainer.strategy
        check_trainer(owner, self.trainer)
        CheckedSteps(owner, strategy, self).install()
        if isinstance(strategy, ModelParallelStrategy):
            WholeCheckpoints(owner, strategy).install()
        # A step ends with its state complete, so a run can be resumed from a checkpoint that is written after it.
        warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization and every_n_train_steps")
        # `configure_model` is overridden, but does nothing under the strategies with which this callback works.
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides the")
        self._is_first_step = True
        return super().configure_callbacks()

    def on_train_start(self) -> None:
        """Check the schedulers, now that the number of batches is known."""
        check_plateau_schedulers(self)

    def on_train_epoch_start(self) -> None:
        """Exclude the time between epochs from the throughput."""
        self._throughput.restart()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check the optimizers, and give all ranks the buffers of rank 0."""
        super().on_train_batch_start(batch, batch_idx)
        broadcast_buffers_before_forward(self.trainer)
        _count_begun_epoch(self.trainer)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip gradients, here where half-precision gradients have been unscaled and not yet been used."""
        super().on_before_optimizer_step(optimizer)
        if self.gradient_clip_val is None:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(map(is_sharded, parameters)):
            clip_sharded_gradients(parameters, self.gradient_clip_val, self.gradient_clip_algorithm)
        else:
            self.clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)

    def on_validation_start(self) -> None:
        """Give all ranks the buffers of rank 0, and exclude the validation from the throughput."""
        broadcast_buffers_before_forward(self.trainer)
        self._throughput.restart()
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            log_facts(self.trainer, {})

    def on_test_start(self) -> None:
        """Log the settings of the test data."""
        if self._is_first_step:
            log_facts(self.trainer, {})

    def on_validation_epoch_end(self) -> None:
        """Step `ReduceLROnPlateau`, before a checkpoint is written."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            step_plateau_schedulers(self, self.lr_scheduler_monitor)

    def on_train_epoch_end(self) -> None:
        """Step `ReduceLROnPlateau` in a run without validation."""
        if not self.trainer.enable_validation:
            step_plateau_schedulers(self, self.lr_scheduler_monitor)


def _count_begun_epoch(trainer: Any) -> None:
    """Count the epoch that has begun if Lightning has not, so that its next checkpoint says where the run is.

    It does not count the epoch after a checkpoint that was written at the last batch of an epoch. A run that is resumed
    from a later checkpoint of that epoch would begin the epoch again.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    progress = trainer.fit_loop.epoch_progress
    if progress.current.ready <= progress.current.completed:
        progress.increment_ready()
        progress.increment_started()
