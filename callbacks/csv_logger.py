"""Support for runs that are continued: the run's folder, its newest checkpoint, and a single `metrics.csv`."""

import csv
import io
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_retrieval.backend import (
    CSVLogger,
    ExperimentWriter,
    Logger,
    convert_tensors_to_scalars,
    pl,
    rank_zero_only,
)
from lightning_retrieval.checkpoints import checkpoints_in, checksums_of, find_damage, saved_at
from lightning_retrieval.distributed import gather_objects
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.paths import check_own_entries, check_path


def run_folder(trainer: Any) -> Path:
    """Return the folder for a run's logs, figures and config. This is a collective call: all ranks get the same folder.

    If the logger has no folder for each run (Weights & Biases), the result is the folder with Lightning's checkpoints.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    logger = trainer.logger
    if logger is None or logger.log_dir is not None:
        return folder
    if logger.version is not None:
        version = f"version_{logger.version}"
        if isinstance(logger.version, str):
            version = logger.version
        folder = folder / str(logger.name) / version
    of_first_rank: Path = gather_objects(folder)[0]  # only its logger may know the id of the run
    return of_first_rank


def newest_checkpoint(folders: Iterable[str | Path]) -> Path | None:
    """Find the newest checkpoint that is not damaged. A killed run may leave a truncated checkpoint.

    Args:
        folders: folders with checkpoints; folders that do not exist are skipped.

    Returns:
        The path of the checkpoint; None if there is no checkpoint.

    Raises:
        ValueError: if all checkpoints are damaged.
    """
    checkpoints: list[Path] = []
    for folder in folders:
        checkpoints += checkpoints_in(Path(folder))
    checkpoints.sort(key=saved_at, reverse=True)
    for path in checkpoints:
        damage = find_damage(path)
        if damage is None:
            return path
        warnings.warn(f"fit: skipped the checkpoint {path}, which is damaged: {damage}.", stacklevel=2)
    if checkpoints:
        rule = f"all {len(checkpoints)} checkpoints in {checkpoints[0].parent} are damaged"
        raise InvalidValue(rule, cure="remove them to begin a new run")
    return None


_POSITION = ("step", "epoch")  # columns that are not metrics


class ResumableCSVLogger(CSVLogger):
    """Extends Lightning's `CSVLogger`: a continued run uses the folder of the run and appends to its `metrics.csv`.

    With Lightning's logger, a continued run gets a new folder or, with a fixed version, deletes the earlier rows. Here,
    a row stays until the same metrics are logged for the same step again. Each row is written immediately, so a killed
    run loses no row. If the kill has truncated a line, the line is removed when the run continues.

    Args:
        folder: folder of the run. Checkpoints are in its subfolder `checkpoints`, unless a `ModelCheckpoint` has a
            `dirpath`.
        prefix: prefix of the names of all metrics.

    Raises:
        ValueError: if `folder` is empty, the path of a file, or a folder with a link that leads out of it.

    Example:
        >>> from lightning_retrieval.callbacks import ResumableCSVLogger
        >>> logger = ResumableCSVLogger("runs/smooth-ap")  # for pl.Trainer(logger=logger)
        >>> logger.log_dir
        'runs/smooth-ap'

    Relations:
        `lightning-retrieval fit --run_folder FOLDER` uses this logger, and continues from the newest checkpoint. In
        Python, continue with `trainer.fit(module, data, ckpt_path="last")` and a `ModelCheckpoint(filename="last")`.
    """

    def __init__(self, folder: str | Path, prefix: str = "") -> None:
        path = check_path("folder", folder, owner="ResumableCSVLogger")
        if path.is_file():
            raise InvalidValue("must be the path of a folder", "ResumableCSVLogger", "folder", got=f"the file {path}")
        check_own_entries("folder", path, owner="ResumableCSVLogger")
        super().__init__(path.parent, name="", version=path.name, prefix=prefix, flush_logs_every_n_steps=1)

    @property
    def log_dir(self) -> str:
        """The folder of the run."""
        return str(Path(self.save_dir, str(self.version)))

    @property
    def experiment(self) -> Any:
        """The writer of the file on the first process; on all others, an object that does nothing."""
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self._experiment = _ContinuedFile(self.log_dir)
        return super().experiment


def other_loggers(configured: Any) -> list[Any]:
    """Return the configured loggers without Lightning's CSVLogger, which the logger for `--run_folder` replaces."""
    if not isinstance(configured, (list, tuple)):
        configured = [configured]
    return [logger for logger in configured if isinstance(logger, Logger) and not isinstance(logger, CSVLogger)]


class _ContinuedFile(ExperimentWriter):
    """Appends rows to `metrics.csv`.

    A row replaces those of the same step that share a metric with it and are of an earlier start, or of
    `RowsBeforeCheckpoints`.
    """

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._file = Path(self.metrics_file_path)
        self._replaceable: dict[str, list[set[str]]] = {}  # by step, the metrics of each row that may be replaced
        self._last: Mapping[str, Any] = {}  # the row that was written last
        self._early: Mapping[str, Any] = {}  # the row of `RowsBeforeCheckpoints` that Lightning has not logged yet
        if self._file.exists():
            self._read_earlier()

    def _check_log_dir_exists(self) -> None:
        """Override Lightning's method, which would delete an earlier file."""

    def _read_earlier(self) -> None:
        content = self._file.read_bytes()
        end_of_last_line = content.rfind(b"\n") + 1
        if end_of_last_line < len(content):
            os.truncate(self._file, end_of_last_line)
        self.metrics_keys, rows = _read(self._file)
        for row in rows:
            self._replaceable.setdefault(str(row["step"]), []).append(_metrics_of(row))

    def expect_again(self) -> None:
        """Let Lightning log the row that was written last again, with the same metrics or more."""
        self._early = self._last
        self._replaceable.setdefault(str(self._early["step"]), []).append(_metrics_of(self._early))

    def save(self) -> None:
        """Write the rows that were logged since the last call."""
        if not self.metrics:
            return
        rows = [row for row in self.metrics if row != self._early]
        new_columns = self._record_new_keys()
        with owned_by("ResumableCSVLogger"), writing(self._file):
            if new_columns or any(map(self._replaced_by, rows)) or not self._file.exists():
                self._rewrite(rows)
            else:
                with self._file.open("a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, self.metrics_keys).writerows(rows)
        if self._early:
            with suppress(ValueError):  # a row has replaced it
                self._replaceable[str(self._early["step"])].remove(_metrics_of(self._early))
        self._early, self._last, self.metrics = {}, self.metrics[-1], []

    def _replaced_by(self, row: Mapping[str, Any]) -> list[set[str]]:
        """The metrics of each row that a new row replaces."""
        return [metrics for metrics in self._replaceable.get(str(row["step"]), []) if metrics & _metrics_of(row)]

    def _rewrite(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Write all rows to a new file, which then replaces the old file."""
        rows: list[Mapping[str, Any]] = []
        if self._file.exists():
            rows += _read(self._file)[1]
        for row in new:
            self._put(rows, row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        with new_file(self._file) as file:
            file.write(text.getvalue().encode())

    def _put(self, rows: list[Mapping[str, Any]], new: Mapping[str, Any]) -> None:
        """Put a new row in the place of those that it replaces; append it if there are none."""
        step = str(new["step"])
        place = len(rows)
        for metrics in self._replaced_by(new):
            self._replaceable[step].remove(metrics)
            for position, row in enumerate(rows):
                if str(row["step"]) == step and _metrics_of(row) == metrics:
                    del rows[position]
                    place = min(place, position)
                    break
        rows.insert(place, new)


def _metrics_of(row: Mapping[str, Any]) -> set[str]:
    """The names of the metrics of a row."""
    return {name for name, value in row.items() if value != "" and name not in _POSITION}


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or []), rows


class SameCheckpoint(pl.Callback):
    """Raises an error on all processes if two processes would continue from different checkpoints.

    The error is raised before a checkpoint is loaded.

    Args:
        checkpoint: the checkpoint from which this process continues; None for a new run.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare the checksums in the checkpoints."""
        if stage != "fit":
            return
        checksums = None
        if self.checkpoint is not None:
            checksums = checksums_of(self.checkpoint)
        found = gather_objects((str(self.checkpoint), checksums))
        if any(checksums != other for _, other in found):
            paths = [path for path, _ in found]
            rule = "all processes must continue from the same checkpoint"
            cure = "put the folder of the run on a file system that all machines share"
            raise InvalidValue(rule, got=f"{paths} in rank order, which differ", cure=cure)


class RowsBeforeCheckpoints(pl.Callback):
    """Writes the metrics of a step before its checkpoint.

    Lightning logs the metrics after the checkpoint, so a run that is killed between the two would lose the metrics.
    This callback must come before the callbacks that write checkpoints.

    Args:
        logger: the logger that writes the metrics.
    """

    def __init__(self, logger: ResumableCSVLogger) -> None:
        self.logger = logger

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the metrics that Lightning is about to log."""
        connector = trainer._logger_connector
        metrics = convert_tensors_to_scalars(connector.metrics["log"])
        if connector.should_update_logs and metrics:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self.logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step)
            self.logger.experiment.expect_again()
