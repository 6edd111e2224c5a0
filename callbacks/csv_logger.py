"""A run that is started several times: its folder, the checkpoint it continues from, and one `metrics.csv`."""

import csv
import io
import os
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.apply_func import convert_tensors_to_scalars
from pytorch_lightning.loggers.csv_logs import CSVLogger, ExperimentWriter
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from lightning_retrieval.checks import check_path, check_string
from lightning_retrieval.distributed import gather_objects
from lightning_retrieval.files import new_file
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


_POSITION = ("step", "epoch")  # columns with the time of a row, not with metrics


class ResumableCSVLogger(CSVLogger):
    """Lightning's `CSVLogger` with one folder for all starts of a run, whose `metrics.csv` is continued.

    Lightning's logger gives each start a new folder or, with a fixed version, deletes the rows of the start before.
    Here a row stays until the same metrics are logged for the same step again. Each row is written at once, so
    that a kill loses none; a line that a kill has cut off is removed by the next start.

    Args:
        folder: of the run. Checkpoints are in its folder `checkpoints`, unless a `ModelCheckpoint` has a `dirpath`.
        prefix: of the names of all metrics.

    Raises:
        ValueError: if `folder` is empty, or the path of a file.
        TypeError: if `folder` is not a path, or `prefix` not a string.

    Example:
        >>> from lightning_retrieval.callbacks import ResumableCSVLogger
        >>> logger = ResumableCSVLogger("runs/smooth-ap")  # for pl.Trainer(logger=logger)
        >>> logger.log_dir
        'runs/smooth-ap'

    Relations:
        `lightning-retrieval fit --run_folder FOLDER` uses it, and continues from the newest checkpoint. In Python,
        `trainer.fit(module, data, ckpt_path="last")` does, with a `ModelCheckpoint(save_last=True)`.
    """

    def __init__(self, folder: str | Path, prefix: str = "") -> None:
        path = check_path("ResumableCSVLogger", "folder", folder)
        if path.is_file():
            raise ValueError(f"ResumableCSVLogger: `folder` must be the path of a folder, got the file {path}.")
        check_string("ResumableCSVLogger", "prefix", prefix)
        super().__init__(path.parent, name="", version=path.name, prefix=prefix, flush_logs_every_n_steps=1)

    @property
    def log_dir(self) -> str:
        """The folder of the run."""
        return str(Path(self.save_dir, str(self.version)))

    @rank_zero_only
    def log_before_checkpoint(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a row that Lightning will log again after the checkpoint of this step; it is written only once."""
        self.experiment.log_early(dict(metrics), step)

    @property
    def experiment(self) -> Any:
        """What writes the file, on the first process; Lightning's other processes get an object that does nothing."""
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self._experiment = _ContinuedFile(self.log_dir)
        return super().experiment


def other_loggers(configured: Any) -> list[Any]:
    """The configured loggers except Lightning's CSVLogger, which the logger of `--run_folder` replaces."""
    if not isinstance(configured, (list, tuple)):
        configured = [configured]
    return [logger for logger in configured if isinstance(logger, Logger) and not isinstance(logger, CSVLogger)]


class _ContinuedFile(ExperimentWriter):
    """Writes rows into `metrics.csv`, in place of those with the same metrics of the same steps."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._file = Path(self.metrics_file_path)
        self._replaceable: dict[str, list[set[str]]] = {}  # metrics of rows that may be logged again, by step
        self._written_early: dict[str, Any] | None = None  # a row that Lightning has yet to log
        if self._file.exists():
            self._read_earlier()

    def _check_log_dir_exists(self) -> None:
        """Leave the files of earlier starts where they are."""

    def _read_earlier(self) -> None:
        content = self._file.read_bytes()
        end_of_last_line = content.rfind(b"\n") + 1
        if end_of_last_line < len(content):
            os.truncate(self._file, end_of_last_line)
        self.metrics_keys, rows = _read(self._file)
        for row in rows:
            self._replaceable.setdefault(row["step"], []).append(_metrics_of(row))

    def log_early(self, metrics: dict[str, float], step: int) -> None:
        """Write a row that Lightning will log again."""
        self.log_metrics(metrics, step)
        early = self.metrics[-1]
        self.save()
        self._written_early = early

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Keep a row until it is saved; one that was written early is skipped or, if it has grown, replaced."""
        super().log_metrics(metrics_dict, step)
        early, self._written_early = self._written_early, None
        if early is None:
            return
        if self.metrics[-1] == early:
            self.metrics.pop()
        else:
            self._replaceable.setdefault(str(early["step"]), []).append(_metrics_of(early))

    def save(self) -> None:
        """Write the rows that were logged since the last call."""
        if not self.metrics:
            return
        replaces = any(self._replaces(row) for row in self.metrics)
        new_columns = self._record_new_keys()
        if replaces or new_columns or not self._file.exists():
            self._rewrite()
        else:
            with self._file.open("a", newline="") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    def _replaces(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the file holds a metric of this row for the same step."""
        replaceable = self._replaceable.get(str(row["step"]), [])
        return any(metrics & _metrics_of(row) for metrics in replaceable)

    def _rewrite(self) -> None:
        """Write all rows to a new file, which then takes the place of the old one."""
        rows: list[Mapping[str, Any]] = []
        if self._file.exists():
            rows += _read(self._file)[1]
        for row in self.metrics:
            _put(rows, row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        with new_file(self._file) as file:
            file.write(text.getvalue().encode())


def _put(rows: list[Mapping[str, Any]], new: Mapping[str, Any]) -> None:
    """Put a row at the place of those with a metric of it for the same step, else at the end."""
    replaced = []
    for position, row in enumerate(rows):
        if str(row["step"]) == str(new["step"]) and _metrics_of(row) & _metrics_of(new):
            replaced.append(position)
    for position in reversed(replaced):
        del rows[position]
    rows.insert(replaced[0] if replaced else len(rows), new)


def _metrics_of(row: Mapping[str, Any]) -> set[str]:
    """The names of the metrics of a row."""
    return {name for name, value in row.items() if value != "" and name not in _POSITION}


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a file."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or []), rows


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
        if stage != "fit":
            return
        found = gather_objects((str(self.checkpoint), _fingerprint(self.checkpoint)))
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
