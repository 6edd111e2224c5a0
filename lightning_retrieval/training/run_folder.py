"""The folder of a run, and the checkpoint in it from which the run continues."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_retrieval.training.checkpoint_files import find_damage


def run_folder(trainer: Any) -> Path:
    """The folder of a run's logs, pictures and config. Call it on all ranks, which all get the same answer.

    A logger without a folder for each run (Weights & Biases) gets the one into which Lightning puts the checkpoints.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    logger = trainer.logger
    if logger is None or logger.log_dir is not None or logger.version is None:
        return folder
    version = f"version_{logger.version}"
    if isinstance(logger.version, str):
        version = logger.version
    return folder / str(logger.name) / version


def newest_checkpoint(owner: str, folders: Iterable[str | Path]) -> Path | None:
    """Find the newest checkpoint that is not damaged; a kill may leave one that is half written.

    Args:
        owner: prefix of messages.
        folders: that hold checkpoints; those that do not exist are skipped.

    Returns:
        The path; None if there is no checkpoint.

    Raises:
        ValueError: if all checkpoints are damaged.
    """
    checkpoints: list[Path] = []
    for folder in folders:
        checkpoints += Path(folder).glob("*.ckpt")
    checkpoints.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in checkpoints:
        damage = find_damage(path)
        if damage is None:
            return path
        warnings.warn(f"{owner}: skipped the checkpoint {path}, which is damaged: {damage}.", stacklevel=2)
    if checkpoints:
        raise ValueError(
            f"{owner}: all {len(checkpoints)} checkpoints in {checkpoints[0].parent} are damaged; remove them to begin "
            "a new run."
        )
    return None
