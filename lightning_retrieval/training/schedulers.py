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
