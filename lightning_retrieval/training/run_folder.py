"""The folder of a run."""

from pathlib import Path
from typing import Any


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
