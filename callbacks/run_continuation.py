"""What `fit --run_folder` needs during a run: the same checkpoint on all processes, and rows before checkpoints."""

import zipfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from lightning_fabric.utilities.apply_func import convert_tensors_to_scalars

from lightning_retrieval.callbacks.csv_logger import ResumableCSVLogger
from lightning_retrieval.distributed import world_size


class SameCheckpoint(pl.Callback):
    """Raises on all processes if they would continue from different checkpoints, before any of them is loaded.

    Args:
        owner: prefix of the message.
        checkpoint: from which this process continues; None for a new run.
    """

    def __init__(self, owner: str, checkpoint: Path | None) -> None:
        self.owner = owner
        self.checkpoint = checkpoint

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare the checksums that the files contain of their records."""
        if stage != "fit" or world_size() == 1:
            return
        found: list[Any] = [None] * world_size()
        dist.all_gather_object(found, (str(self.checkpoint), _fingerprint(self.checkpoint)))
        if len({fingerprint for _, fingerprint in found}) > 1:
            paths = [path for path, _ in found]
            raise ValueError(
                f"{self.owner}: all processes must continue from the same checkpoint, got {paths} in rank order, which "
                "differ; put the folder of the run on a file system that all machines share."
            )


class RowsBeforeCheckpoints(pl.Callback):
    """Writes the metrics of a step before a checkpoint of it; Lightning logs them afterwards, which a kill may prevent.

    It must come before the callbacks that write checkpoints.

    Args:
        logger: that writes them.
    """

    def __init__(self, logger: ResumableCSVLogger) -> None:
        self.logger = logger

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the row that Lightning is about to log."""
        connector = trainer._logger_connector
        metrics = convert_tensors_to_scalars(connector.metrics["log"])
        if connector.should_update_logs and metrics:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self.logger.log_before_checkpoint({**metrics, "epoch": trainer.current_epoch}, step)


def _fingerprint(checkpoint: Path | None) -> tuple[tuple[str, int], ...]:
    """Names and checksums of the records of a checkpoint."""
    if checkpoint is None:
        return ()
    with zipfile.ZipFile(checkpoint) as archive:
        return tuple((record.filename, record.CRC) for record in archive.infolist())
