"""A run that was killed before or in a validation makes up for it when it is resumed.

`ModelCheckpoint(every_n_train_steps=16)` saves after the last step before a validation. If the run is killed in this
validation, Lightning goes on from the checkpoint as if the validation had been done, and at the end of an epoch also as
if the epoch had ended. So these weights could never be the best ones, and the last epoch was never validated. After a
checkpoint that was saved in a validation, Lightning validates only a part of the images.

Therefore such a checkpoint is written as one of a validation that has begun and has done nothing, which Lightning runs
from its beginning, with all hooks of callbacks and of the end of the epoch. The checkpoint also has the metrics that
callbacks saw, because a callback that monitors "train/loss" at the end of the epoch would raise without them.

If a checkpoint is saved after `fit` has ended an epoch, and the resumed run has a limit of steps only, Lightning would
take the batches of this epoch for those of the next one. So such a checkpoint is written as one before the first batch.
"""

from typing import Any

from lightning_retrieval.backend import pl

METRICS = "metrics_before_validation"  # name in a checkpoint: the metrics for callbacks, if the validation is missing
COUNTS = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # of a validation whose first batch has begun


class MissedValidation(pl.Callback):
    """Lets checkpoints say that a validation is missing, and lets the resumed run begin with this validation.

    A validation that was due at a time (`val_check_interval={"minutes": 10}`) is not made up for, because the resumed
    run begins to measure the time anew.
    """

    metrics: dict[str, Any] | None = None  # of the checkpoint of this run, if its validation is missing
    step = -1  # of this checkpoint

    @classmethod
    def install(cls, trainer: Any) -> None:
        """Add the callback to a Trainer that has none."""
        if not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks.append(cls())

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the position at which a resumed run begins: that of a validation that is missing, or of a new epoch."""
        progress = checkpoint["loops"]["fit_loop"]
        batches = progress["epoch_loop.batch_progress"]
        epochs = progress["epoch_progress"]["current"]
        if epochs["completed"] == epochs["ready"]:
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False
        if not _is_missing(trainer):
            return
        for counts in (batches["total"], batches["current"]):
            counts["completed"] = counts["processed"]
        progress["epoch_loop.val_loop.batch_progress"] = {
            "total": dict(COUNTS),
            "current": dict(COUNTS),
            "is_last_batch": False,
        }
        checkpoint[METRICS] = dict(trainer.callback_metrics)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin a run in which no validation is missing."""
        self.metrics, self.step = None, -1

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember what is missing."""
        if METRICS not in checkpoint:
            return
        self.metrics, self.step = checkpoint[METRICS], checkpoint["global_step"]
        if trainer.strategy.restore_checkpoint_after_setup:  # this hook then comes after `on_fit_start`
            self.on_fit_start(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Let a run begin that has done all its `max_steps`: Lightning would return at once."""
        if self.metrics is not None and trainer.max_steps == self.step:
            trainer.fit_loop.epoch_loop.max_steps += 0.5  # schedulers may be too short for another whole step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the metrics, or give up the validation if the Trainer no longer validates after this step."""
        if self.metrics is None:
            return
        fit_loop = trainer.fit_loop
        batches, validation = fit_loop.epoch_loop.batch_progress, fit_loop.epoch_loop.val_loop.batch_progress
        validation.reset()
        if _is_due(trainer):
            trainer.callback_metrics.update(self.metrics)
            return
        self._restore_max_steps(trainer)
        batches.total.completed -= 1
        batches.current.completed -= 1
        fit_loop.reset()  # to the position after this step and the validation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the run end after the validation if all its steps are done."""
        self._restore_max_steps(trainer)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        """Leave the limit as it was to a later run of the Trainer."""
        self._restore_max_steps(trainer)

    def _restore_max_steps(self, trainer: Any) -> None:
        if trainer.max_steps == self.step + 0.5:
            trainer.fit_loop.epoch_loop.max_steps = self.step


def _is_missing(trainer: Any) -> bool:
    """Whether a step has ended after which the Trainer validates, and the validation has not ended."""
    epochs = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    validation = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    is_after_step = epochs.processed < epochs.ready and 0 < batches.ready == batches.processed
    if not is_after_step or not _is_due(trainer):
        return False
    has_ended = validation.is_last_batch and validation.current.completed == validation.current.ready
    return batches.completed < batches.processed or not has_ended


def _is_due(trainer: Any) -> bool:
    """Whether the Trainer validates after the current step."""
    due: bool = trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    return due
