"""Ctrl-C leaves a checkpoint from which a training continues exactly, with one process and with several.

Several processes must write it after the same step, but the signal may reach them in different steps, or only one of
them. They agree by the key-value store of their process group: whoever has received the signal writes there after which
step to stop, before it takes part in that step, and all look after each step. A step is a collective operation, so none
can complete it before the others have begun it. So all see the number in time.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch.distributed.distributed_c10d import _get_default_store

from lightning_retrieval.checks import check_string

INTERRUPTED = "last-interrupted.ckpt"
EXIT_CODE = 130  # of a program that Ctrl-C has ended
_KEY = "lightning_retrieval/last_step"


class CheckpointOnInterrupt(pl.Callback):
    """Writes the checkpoint `last-interrupted.ckpt` when Ctrl-C ends a training.

    One process completes the step that is being computed, so that the checkpoint is one between two steps. Several
    processes complete this step or the next one, and a validation in between. A second Ctrl-C ends the training at
    once.

    Args:
        option: the option of the program that continues from the checkpoint, which the message at the end names.

    Raises:
        TypeError: if `option` is not a string.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.callbacks import CheckpointOnInterrupt
        >>> trainer = pl.Trainer(callbacks=[CheckpointOnInterrupt("--resume")], logger=False)

    Relations:
        The command `fit` has it without being asked. `ModelCheckpoint(save_last=True)` saves as the training goes on;
        its folder is that of this checkpoint.
    """

    def __init__(self, option: str = "--ckpt_path last") -> None:
        self.option = check_string("CheckpointOnInterrupt", "option", option)
        self._requested = False
        self._in_step = False
        self._steps = 0  # completed in this run
        self._store: Any = None  # of several processes
        self._process: int | None = None  # while the signal is received
        self._previous: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Receive the signal of Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():
            return
        if trainer.world_size > 1:
            self._store = _get_default_store()
        self._process = os.getpid()
        self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """A step begins: several processes will stop after it if one of them has received the signal before."""
        self._in_step = True
        if self._store is not None and self._requested:
            self._store.compare_set(_KEY, "", str(self._steps + 1))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """A step is complete: end the training if Ctrl-C was pressed."""
        self._in_step = False
        self._steps += 1
        if self._is_last_step():
            raise KeyboardInterrupt

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the checkpoint, if the training was interrupted after a step."""
        if not isinstance(exception, KeyboardInterrupt):
            self._restore()
            return
        # Lightning ignores further signals from here on, and ends the process.
        receives = self._process is not None
        if not receives or self._in_step or trainer.global_step == 0 or trainer.fast_dev_run:
            return
        together = self._store is None or self._is_last_step()
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if not folder or not together:
            return
        path = Path(folder, INTERRUPTED)
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(f"Interrupted after step {trainer.global_step}; {self.option} continues from {path}.")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the handler of the signal that was there before, and forget this training."""
        self._restore()
        self._requested = False
        self._steps = 0
        self._store = None
        self._previous = None

    def _is_last_step(self) -> bool:
        if self._store is None:
            return self._requested
        return bool(self._store.check([_KEY])) and self._steps == int(self._store.get(_KEY))

    def _on_signal(self, *_: Any) -> None:
        if os.getpid() != self._process:  # a worker of a data loader, which the training needs until it ends
            return
        is_second = self._requested
        # Python drops an exception that is raised while it deletes an object; then the next step is the last one.
        self._requested = True
        waits = self._in_step or self._store is not None
        if is_second or not waits:
            raise KeyboardInterrupt

    def _restore(self) -> None:
        if self._process is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._process = None
