"""Where a run's files lie."""

from pathlib import Path
from typing import Any


def run_folder(trainer: Any) -> Path:
    """The folder of the run's logs, pictures and configuration; asked for on all ranks, which get one answer.

    Of loggers without a folder for each run (Weights & Biases) that in which Lightning puts the run's checkpoints.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    folder, logger = Path(trainer.log_dir or trainer.default_root_dir), trainer.logger
    if logger is None or logger.log_dir is not None or logger.version is None:
        return folder
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return folder / str(logger.name) / version
