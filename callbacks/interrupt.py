"""Saves a checkpoint when Ctrl-C ends training, so that training can be continued exactly, on one or more processes.

Several processes must save the checkpoint after the same step, but the signal may reach them in different steps, or
reach only one of them. They agree on the last step through the key-value store of their process group. If a process has
received the signal, it writes the number of the next step to the store, waits, and then begins this step. Since a step
is a collective operation, no process can complete a step before all processes have begun it. A process reads the store
after a step, unless it has read it less than `seconds_between_reads` ago. The wait is longer than that, so all
processes read the number in time, and the first process answers each of the others about once a second.
"""

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_retrieval.backend import pl, rank_zero_info

INTERRUPTED = "last-interrupted.ckpt"
EXIT_CODE = 130  # usual exit code after Ctrl-C
_KEY = "lightning_retrieval/last_step"


class Interrupted(SystemExit):
    """Ends a training after Ctrl-C, and the program with the usual exit code; Lightning's own would be 1."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class CheckpointOnInterrupt(pl.Callback):
    """Saves the checkpoint `last-interrupted.ckpt` when Ctrl-C ends training.

    A single process first completes the current step, so that the checkpoint lies between two steps. Several processes
    complete the current or the next step, and also a validation that lies between these two steps. A second Ctrl-C ends
    training immediately. The program ends with the exit code 130, unless it catches `SystemExit`.

    Args:
        option: what continues from the checkpoint, which the final message shows.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.callbacks import CheckpointOnInterrupt
        >>> trainer = pl.Trainer(callbacks=[CheckpointOnInterrupt()], logger=False)

    Relations:
        The command `fit` always has this callback. `ModelCheckpoint(filename="last")` saves a checkpoint after each
        validation, to the same folder.
    """

    seconds_between_reads = 1.0  # the least time between two reads of the store by one process

    def __init__(self, option: str = "trainer.fit(..., ckpt_path=PATH)") -> None:
        self.option = option
        self._requested = False
        self._in_step = False
        self._steps = 0  # number of steps completed in this run
        self._store: Any = None  # key-value store, if there are several processes
        self._read_at = -math.inf  # when this process began to read the store for the last time
        self._last_step: int | None = None  # the step on which the processes have agreed
        self._process: int | None = None  # id of this process while its signal handler is installed
        self._previous: Any = None

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handler of the signal before the validation that may precede the training."""
        self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handler of the signal of Ctrl-C."""
        if self._process is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        if trainer.world_size > 1:
            self._store = _get_default_store()
        self._process = os.getpid()
        self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """If this is one of several processes and has received the signal, make all processes stop after this step."""
        self._in_step = True
        if self._store is not None and self._requested:
            self._store.compare_set(_KEY, "", str(self._steps + 1))
            time.sleep(1.1 * self.seconds_between_reads)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """End training after this step if Ctrl-C was pressed."""
        self._in_step = False
        self._steps += 1
        if self._is_last_step():
            raise Interrupted

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save the checkpoint if training was interrupted after a step."""
        if not isinstance(exception, (Interrupted, KeyboardInterrupt)):
            self._restore()
            return
        if self._process is None:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends
        self._save(trainer)
        self._reset()
        if hasattr(trainer.strategy.launcher, "kill"):  # processes that this one has started, and that may wait for it
            trainer.strategy.launcher.kill(getattr(signal, "SIGKILL", signal.SIGTERM))

    def _save(self, trainer: Any) -> None:
        """Save the checkpoint, unless a step was interrupted, or nothing was trained."""
        if self._in_step or trainer.global_step == 0 or trainer.fast_dev_run:
            return
        self._read_at = -math.inf
        together = self._store is None or self._is_last_step()
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if not folder or not together:
            return
        path = Path(folder, INTERRUPTED)
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(f"Interrupted after step {trainer.global_step}; {self.option} continues from {path}.")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def _reset(self) -> None:
        self._process = None
        self._requested = self._in_step = False
        self._steps = 0
        self._store = None
        self._read_at = -math.inf
        self._last_step = None
        self._previous = None

    def _is_last_step(self) -> bool:
        if self._store is None:
            return self._requested
        now = time.monotonic()
        if self._last_step is None and now - self._read_at >= self.seconds_between_reads:
            self._read_at = now
            self._last_step = self._agreed_step()
        return self._steps == self._last_step

    def _agreed_step(self) -> int | None:
        """The step in the store, or None."""
        try:
            if self._store.check([_KEY]):
                return int(self._store.get(_KEY))
        except dist.DistNetworkError:  # the first process, which holds the store, has ended after the last step
            pass
        return None

    def _on_signal(self, *_: Any) -> None:
        if os.getpid() != self._process:  # a data-loader worker ignores the signal, since training still needs it
            return
        is_second = self._requested
        # If the exception below is raised while Python deletes an object, Python ignores it. In this case, training
        # ends after the next step because of the following flag.
        self._requested = True
        waits = self._in_step or self._store is not None
        if is_second or not waits:
            raise Interrupted

    def _restore(self) -> None:
        """Restore the previous signal handler, and forget this run."""
        if self._process is not None:
            signal.signal(signal.SIGINT, self._previous)
        self._reset()
