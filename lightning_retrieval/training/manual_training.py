"""What Lightning leaves to a module in manual optimization: stepping, clipping, schedulers, logging, checkpoints."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.cloud_io import _load
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.model_helpers import _restricted_classmethod
from torch import Tensor
from torch.optim import Optimizer

from lightning_retrieval.checks import check_flag
from lightning_retrieval.training.checkpoint_files import check_checkpoint, verify_checkpoints
from lightning_retrieval.training.finetuning import TRAINABLE, has_finetuning, unfreeze
from lightning_retrieval.training.hyperparameters import check_command_line_hyperparameters, describe
from lightning_retrieval.training.run_report import log_facts
from lightning_retrieval.training.schedulers import (
    check_plateau_schedulers,
    step_plateau_schedulers,
    step_schedulers,
)
from lightning_retrieval.training.strategy import broadcast_buffers_at_next_forward, loss_scale
from lightning_retrieval.training.throughput import Throughput
from lightning_retrieval.training.trainer_checks import check_trainer


class ManualTraining(pl.LightningModule):
    """The hooks of a run that are the same whatever is embedded and ranked. `RetrievalModule` builds on it."""

    gradient_clip_val: float | None
    gradient_clip_algorithm: str
    lr_scheduler_monitor: str

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
        """Log the loss, its terms and the throughput.

        Args:
            terms: values by the names under which they are logged.
            images: images of all processes in this step.
        """
        for name, value in terms.items():
            self.log(name, value, prog_bar=name == "train/loss")
        images_per_second = self._throughput.step(images)
        if images_per_second is not None:
            self.log("train/images_per_second", images_per_second, prog_bar=True)

    def configure_callbacks(self) -> Any:
        """Check the flags of the Trainer, at the first moment it is known."""
        check_trainer(type(self).__name__, self.trainer)
        verify_checkpoints(type(self).__name__, self.trainer.strategy)
        # A step ends with its state complete, so a run can be resumed from a checkpoint that is written after it.
        warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization and every_n_train_steps")
        self._is_first_step = True
        return super().configure_callbacks()

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:  # not Self, which a run-time type checker cannot resolve in a decorated method
        """Rebuild a module from a checkpoint, as Lightning does, after its checksums and class paths have been checked.

        Args:
            checkpoint_path: a path, an address or a stream.
            map_location: device, or function of `torch.load`.
            hparams_file: YAML or CSV file of hyperparameters that replace those of the checkpoint.
            strict: whether the names of the weights must be those of the module.
            weights_only: False also unpickles what can run code.
            kwargs: constructor arguments that replace those of the checkpoint.

        Raises:
            ValueError: if the file is damaged, or names a class whose module is neither imported nor in one of
                `class_paths.TRUSTED_PACKAGES`.
            TypeError: if `strict` or `weights_only` is not True, False or None.
        """
        check_flag(cls.__name__, "strict", strict)
        check_flag(cls.__name__, "weights_only", weights_only)
        check_checkpoint(cls.__name__, checkpoint_path)
        if hparams_file is None:
            _check_class_paths(cls, checkpoint_path, weights_only, kwargs)
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert to the run's precision before the weights are loaded; Lightning does so afterwards."""
        if self._trainer is not None:
            self.trainer.precision_plugin.convert_module(self)
        unfreeze(self, checkpoint.get(TRAINABLE, ()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep hyperparameters plain, even if a subclass has called `save_hyperparameters` itself."""
        if has_finetuning(self):
            checkpoint[TRAINABLE] = [name for name, value in self.named_parameters() if value.requires_grad]
        if self.CHECKPOINT_HYPER_PARAMS_KEY in checkpoint:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = describe(dict(checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]))

    def on_train_start(self) -> None:
        """Check the schedulers, now that the number of batches is known."""
        check_plateau_schedulers(self)

    def on_train_epoch_start(self) -> None:
        """Exclude the time between epochs from the throughput."""
        self._throughput.restart()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let DDP copy the buffers of rank 0 to all ranks."""
        broadcast_buffers_at_next_forward(self.trainer)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip gradients, here where half-precision gradients have been unscaled and not yet been used."""
        if self.gradient_clip_val is not None:
            self.clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)

    def on_validation_start(self) -> None:
        """Let DDP copy the buffers of rank 0 to all ranks, and exclude the validation from the throughput."""
        broadcast_buffers_at_next_forward(self.trainer)
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


def _check_class_paths(
    cls: type[pl.LightningModule], checkpoint_path: Any, weights_only: bool | None, replaced: Mapping[str, Any]
) -> None:
    """Raise if rebuilding the module of a checkpoint would import modules that the user has not imported.

    Args:
        cls: class of the module.
        checkpoint_path: path, URL or binary stream, which is left at its position.
        weights_only: as for `load_from_checkpoint`.
        replaced: hyperparameters that the checkpoint does not determine.
    """
    is_stream = hasattr(checkpoint_path, "seek")
    if is_stream:
        position = checkpoint_path.tell()
    saved = _load(checkpoint_path, map_location="meta", weights_only=weights_only)
    if is_stream:
        checkpoint_path.seek(position)
    hyperparameters = saved.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    if "_instantiator" in hyperparameters:  # otherwise the constructor looks the classes up
        used = {name: value for name, value in hyperparameters.items() if name not in replaced}
        check_command_line_hyperparameters(cls.__name__, used)
