"""The best value of each metric of a training run, and where each logger keeps it."""

import math
from collections.abc import Mapping

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger


def is_count(name: str) -> bool:
    """Return whether a metric is a number of skipped queries, so that its highest value is not its best."""
    return "skipped_queries" in name.split("/")


def update_best(best: dict[str, float], results: Mapping[str, float]) -> None:
    """Replace the best value of each metric by the current one if that is higher; NaN and counts are ignored."""
    for name, value in results.items():
        if math.isnan(value) or is_count(name):
            continue
        best[name] = max(value, best.get(name, value))


def log_best(trainer: pl.Trainer, best: Mapping[str, float]) -> None:
    """Log the best values as hyperparameters (CSV), metrics (TensorBoard) or summary (Weights & Biases)."""
    if not best:
        return
    named = {f"best/{name}": value for name, value in best.items()}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            _log_best_to_tensorboard(trainer, logger, named)
        elif isinstance(logger, CSVLogger):
            logger.log_hyperparams({"best": dict(best)})
            logger.save()
        elif isinstance(logger, WandbLogger) and trainer.is_global_zero:
            logger.experiment.summary.update(named)


def _log_best_to_tensorboard(trainer: pl.Trainer, logger: TensorBoardLogger, named: dict[str, float]) -> None:
    values = dict(named)
    score = getattr(trainer.checkpoint_callback, "best_model_score", None)
    if score is not None:
        values["hp_metric"] = float(score)  # TensorBoard's table of hyperparameters has a column for it
    logger.log_metrics(values, trainer.global_step)
