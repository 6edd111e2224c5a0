"""Stepping of learning rate schedulers, which Lightning leaves to the module in manual optimization."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


def step_schedulers(module: Any, interval: str, index: int) -> None:
    """Step the schedulers of an interval that are due; `ReduceLROnPlateau` has a function of its own.

    Args:
        module: a LightningModule in a run.
        interval: `"step"` or `"epoch"`, what has just ended.
        index: index of the batch or of the epoch.
    """
    for config in module.trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ReduceLROnPlateau) or config.interval != interval:
            continue
        if (index + 1) % config.frequency == 0:
            module.lr_scheduler_step(config.scheduler, None)


def check_plateau_schedulers(module: Any) -> None:
    """Raise if a `ReduceLROnPlateau` of the interval `"epoch"` waits for validations that are not at the end of epochs.

    Args:
        module: a LightningModule at the start of its training, whose class name is the prefix of the message.

    Raises:
        ValueError: the message names the flags of the Trainer, and what to use instead.
    """
    trainer = module.trainer
    if not trainer.enable_validation or _validates_after_last_batch(trainer):
        return
    interval = getattr(trainer, "val_check_interval", "a time")
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ReduceLROnPlateau) and config.interval == "epoch":
            raise ValueError(
                f"{type(module).__name__}: ReduceLROnPlateau with the interval 'epoch' needs a validation after the "
                f"last batch of an epoch, but val_check_interval={interval!r} with "
                f"check_val_every_n_epoch={trainer.check_val_every_n_epoch!r} puts it elsewhere; use the interval "
                "'step', which steps it after each validation."
            )


def _validates_after_last_batch(trainer: Any) -> bool:
    """Whether the epochs that are followed by a validation have it after their last batch."""
    interval, batches = trainer.val_check_batch, trainer.num_training_batches
    if interval is None:  # by the clock
        return False
    if interval == float("inf") or batches % interval == 0:
        return True
    return trainer.check_val_every_n_epoch is None and interval % batches == 0


def step_plateau_schedulers(module: Any, monitor: str) -> None:
    """Step each `ReduceLROnPlateau` that is due with the logged metric `monitor`.

    Args:
        module: a LightningModule in a run, whose class name is the prefix of error messages.
        monitor: name of the metric.

    Raises:
        ValueError: if the metric was not logged.
    """
    trainer = module.trainer
    for config in trainer.lr_scheduler_configs:
        if not isinstance(config.scheduler, ReduceLROnPlateau):
            continue
        epoch_is_due = trainer.is_last_batch and (module.current_epoch + 1) % config.frequency == 0
        if not epoch_is_due and config.interval != "step":
            continue
        value = trainer.callback_metrics.get(monitor)
        if value is None:
            raise ValueError(
                f"{type(module).__name__}: ReduceLROnPlateau needs `lr_scheduler_monitor`, got {monitor!r}, which was "
                f"not logged; logged are {sorted(trainer.callback_metrics)}."
            )
        module.lr_scheduler_step(config.scheduler, value)
