"""`fit --ckpt_path last`: the newest checkpoint of an earlier run of the same config, and one that Ctrl-C leaves.

Lightning looks for the last checkpoint in the folder of the run, but a logger gives each run a new folder, which is
empty. So the folders beside it are searched for runs whose saved config has the same model and data.
"""

import signal
import threading
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

INTERRUPTED = "last-interrupted.ckpt"
CONFIG = "config.yaml"
COMPARED = ("model", "data")  # parts of a config that an earlier run must share


def find_last_checkpoint(owner: str, trainer: Any, config: str) -> Path | None:
    """Find the newest checkpoint of the earlier runs of a config.

    Args:
        owner: prefix of error messages.
        trainer: the `pytorch_lightning.Trainer` of the new run, which has not begun.
        config: of the new run, as it is saved in the folder of a run.

    Returns:
        The path; None if a `ModelCheckpoint` has its own `dirpath`, where Lightning itself finds the last checkpoint.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
    """
    callbacks: list[Any] = trainer.checkpoint_callbacks
    if any(getattr(callback, "dirpath", None) for callback in callbacks):
        return None
    folder, runs = _runs(trainer)
    same = [run for run in runs if _is_same_config(run / CONFIG, config)]
    checkpoints: list[Path] = []
    for run in same:
        checkpoints += (run / "checkpoints").glob("*.ckpt")
    if not checkpoints:
        raise FileNotFoundError(
            f"{owner}: `--ckpt_path last` must have a checkpoint of an earlier run of this config, but {folder} has "
            f"{len(runs)} runs, {len(same)} of them with the same model and data, and none of these has a checkpoint; "
            "leave out the option to begin a new run, or give the path of a checkpoint."
        )
    return max(checkpoints, key=_time)


class CheckpointOnInterrupt(pl.Callback):
    """Writes a checkpoint when Ctrl-C ends a training of one process.

    A step that is being computed is completed first, so that the checkpoint is one between two steps, from which the
    run continues exactly. A second Ctrl-C ends the training at once. Several processes may receive the signal in
    different steps, so there the run ends at once and is resumed from the checkpoint before.
    """

    def __init__(self) -> None:
        self._requested = False
        self._in_step = False
        self._previous: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Receive the signal of Ctrl-C."""
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """A step begins."""
        self._in_step = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """A step is complete: end the training if Ctrl-C was pressed in it."""
        self._in_step = False
        if self._requested:
            raise KeyboardInterrupt

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the checkpoint, if the training was interrupted after a step."""
        interrupted = self._previous is not None and isinstance(exception, KeyboardInterrupt)
        self._restore()
        if not interrupted or self._in_step or trainer.global_step == 0 or trainer.fast_dev_run:
            return
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if not folder:
            return
        path = Path(folder, INTERRUPTED)
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(f"Interrupted after step {trainer.global_step}; --ckpt_path last continues from {path}.")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the signal to others again."""
        self._restore()

    def _on_signal(self, *_: Any) -> None:
        if self._requested or not self._in_step:
            raise KeyboardInterrupt
        self._requested = True

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


def _runs(trainer: Any) -> tuple[Path, list[Path]]:
    """The folder that holds the folders of the runs, and these; without a logger there is a single one."""
    logger = trainer.logger
    root = Path(trainer.default_root_dir)
    if logger is None:
        return root, [root]
    folder = Path(logger.save_dir or root) / str(logger.name)
    return folder, [path.parent for path in folder.glob(f"*/{CONFIG}")]


def _is_same_config(path: Path, config: str) -> bool:
    """Whether a saved config has the same model and data."""
    try:
        saved = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return all(_section(saved, name) == _section(config, name) for name in COMPARED)


def _section(config: str, name: str) -> list[str]:
    """The lines of one part of a config, which the command line writes as indented YAML."""
    lines: list[str] = []
    inside = False
    for line in config.splitlines():
        if line[:1] not in ("", " "):
            inside = line.startswith(f"{name}:")
        if inside:
            lines.append(line)
    return lines


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns
