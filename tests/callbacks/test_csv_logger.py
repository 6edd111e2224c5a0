"""A run that is started several times continues one metrics.csv, from the newest checkpoint that is not damaged."""

import csv
import os

import pytest
import torch

from lightning_retrieval.callbacks import ResumableCSVLogger
from lightning_retrieval.callbacks.csv_logger import SameCheckpoint, newest_checkpoint
from lightning_retrieval.invalid import InvalidValue

# --- metrics.csv


def log_steps(folder, steps, validation_after=()):
    """Log some steps, and the metrics of a validation after some of them, as one start of a run that is then killed."""
    logger = ResumableCSVLogger(folder)
    for step in steps:
        logger.log_metrics({"train/loss": 1 / (step + 1), "epoch": step // 4}, step)
        if step in validation_after:
            logger.log_metrics({"val/mAP": step / 10, "epoch": step // 4}, step)
    return logger


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def once(tmp_path):
    """The rows of a run that is started once."""
    log_steps(tmp_path / "once", range(10), validation_after=(3, 7))
    return rows_of(tmp_path / "once")


def test_one_start_logs_what_lightning_logs(once):
    assert len(once) == 12
    assert once[4] == {"epoch": "0", "step": "3", "train/loss": "", "val/mAP": "0.3"}
    assert [row["step"] for row in once if row["train/loss"]] == [str(step) for step in range(10)]


@pytest.mark.parametrize(
    "starts",
    [*([range(9), range(begin, 10)] for begin in (1, 3, 4, 8, 9)), [range(6), range(2, 10), range(4, 6)]],
)
def test_a_later_start_replaces_the_rows_of_the_steps_that_it_repeats(starts, once, tmp_path):
    """The others stay: the last start may be killed before it reaches the steps of the one before."""
    folder = tmp_path / "run"
    for steps in starts:
        log_steps(folder, steps, validation_after=(3, 7))
    assert rows_of(folder) == once


def test_a_line_that_a_kill_has_cut_off_is_removed(once, tmp_path):
    folder = tmp_path / "run"
    log_steps(folder, range(6), validation_after=(3, 7))
    file = folder / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-4])
    log_steps(folder, range(5, 10), validation_after=(3, 7))
    assert rows_of(folder) == once


def test_a_row_that_is_written_before_its_checkpoint_is_not_written_twice(once, tmp_path):
    folder = tmp_path / "run"
    logger = ResumableCSVLogger(folder)
    for step in range(10):
        metrics = {"train/loss": 1 / (step + 1), "epoch": step // 4}
        logger.log_metrics(metrics, step)
        logger.experiment.expect_again()
        assert len([row for row in rows_of(folder) if row["train/loss"]]) == step + 1
        logger.log_metrics(metrics, step)
        if step in (3, 7):
            logger.log_metrics({"val/mAP": step / 10, "epoch": step // 4}, step)
    assert rows_of(folder) == once


def test_a_row_that_has_grown_since_is_replaced(tmp_path):
    logger = ResumableCSVLogger(tmp_path / "run")
    logger.log_metrics({"a": 1.0, "epoch": 0}, 0)
    logger.experiment.expect_again()
    logger.log_metrics({"a": 1.0, "b": 2.0, "epoch": 0}, 0)
    logger.log_metrics({"a": 3.0, "epoch": 0}, 1)
    assert rows_of(tmp_path / "run") == [
        {"a": "1.0", "b": "2.0", "epoch": "0", "step": "0"},
        {"a": "3.0", "b": "", "epoch": "0", "step": "1"},
    ]


@pytest.mark.posix
def test_a_run_goes_on_beside_the_logs_of_weights_and_biases(tmp_path):
    """Which are links to its cache."""
    (tmp_path / "run/wandb/logs").mkdir(parents=True)
    (tmp_path / "run/wandb/logs/core.log").symlink_to(tmp_path / "cache.log")
    assert ResumableCSVLogger(tmp_path / "run").log_dir == str(tmp_path / "run")


def test_all_rows_of_one_start_stay(tmp_path):
    """As of several tests, each of which Lightning logs at the last step; a later start replaces each row once."""
    logger = ResumableCSVLogger(tmp_path / "run")
    for value in (0.1, 0.2, 0.3):
        logger.log_metrics({"test/mAP": value}, 5)
    logger.log_metrics({"other": 1.0}, 5)
    assert [row.get("test/mAP") for row in rows_of(tmp_path / "run")] == ["0.1", "0.2", "0.3", ""]
    later = ResumableCSVLogger(tmp_path / "run")
    for value in (0.4, 0.5):
        later.log_metrics({"test/mAP": value}, 5)
    assert sorted(row["test/mAP"] for row in rows_of(tmp_path / "run")) == ["", "0.4", "0.5"]


def test_a_later_start_may_log_more_metrics_than_the_first(tmp_path):
    """Columns that are new do not hide the rows that are repeated."""
    folder = tmp_path / "run"
    log_steps(folder, range(4))
    log_steps(folder, range(1, 6), validation_after=(1,))
    rows = rows_of(folder)
    assert [row["step"] for row in rows if row["train/loss"]] == [str(step) for step in range(6)]
    assert [row["step"] for row in rows if row["val/mAP"]] == ["1"]


def test_a_file_without_rows(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_text("")
    log_steps(folder, range(2))
    assert [row["step"] for row in rows_of(folder)] == ["0", "1"]


# --- the newest checkpoint


def write(path, step, when):
    """A checkpoint that was written at some time."""
    path.parent.mkdir(exist_ok=True)
    torch.save({"step": torch.tensor([step])}, path)
    os.utime(path, (when, when))
    return path


def test_the_newest_of_all_folders_is_found(tmp_path):
    write(tmp_path / "a/last.ckpt", 5, when=200)
    newest = write(tmp_path / "b/step=7.ckpt", 7, when=300)
    write(tmp_path / "b/step=9.ckpt", 9, when=100)
    assert newest_checkpoint([tmp_path / "a", str(tmp_path / "b"), tmp_path / "none"]) == newest
    assert newest_checkpoint([tmp_path, tmp_path / "none"]) is None


def test_one_that_a_kill_has_left_half_written_is_skipped_unless_there_is_no_other(tmp_path):
    newer = write(tmp_path / "a/last.ckpt", 7, when=200)
    newer.write_bytes(newer.read_bytes()[:-30])
    damaged = pytest.warns(UserWarning, match=r"last\.ckpt, which is damaged")
    with damaged, pytest.raises(InvalidValue, match="checkpoints"):
        newest_checkpoint([tmp_path / "a"])
    older = write(tmp_path / "a/step=5.ckpt", 5, when=100)
    with damaged:
        assert newest_checkpoint([tmp_path / "a"]) == older


# --- the same checkpoint on all processes


def is_accepted(checkpoint, stage="fit"):
    """Whether the processes may continue from their checkpoints."""
    try:
        SameCheckpoint(checkpoint).setup(None, None, stage)
    except InvalidValue:
        return False
    return True


def in_each_process(rank, world, folder):
    first, second, copy = (folder / name for name in ("1/a.ckpt", "2/a.ckpt", "3/a.ckpt"))
    return {
        "same": is_accepted(first),
        "copies": is_accepted([first, copy][rank]),
        "different": is_accepted([first, second][rank]),
        "on one process": is_accepted([first, None][rank]),
        "new run": is_accepted(None),
        "test": is_accepted([first, second][rank], "test"),
    }


def test_processes_must_find_the_same(run_processes, tmp_path):
    for name, step in {"1": 5, "2": 6, "3": 5}.items():
        write(tmp_path / name / "a.ckpt", step, when=100)
    for found in run_processes(in_each_process, 2, tmp_path):
        assert {name for name, accepted in found.items() if not accepted} == {"different", "on one process"}
