"""The checkpoint from which a run continues: the newest that is whole."""

import os

import pytest
import torch

from lightning_retrieval.callbacks.csv_logger import newest_checkpoint

OWNER = "fit"


def write(path, step, when):
    """A checkpoint that was written at some time."""
    path.parent.mkdir(exist_ok=True)
    torch.save({"step": torch.tensor([step])}, path)
    os.utime(path, (when, when))
    return path


def damage(path):
    when = path.stat().st_mtime
    path.write_bytes(path.read_bytes()[:-30])
    os.utime(path, (when, when))


def test_the_newest_of_all_folders_is_found(tmp_path):
    write(tmp_path / "a/last.ckpt", 5, when=200)
    newest = write(tmp_path / "b/step=7.ckpt", 7, when=300)
    write(tmp_path / "b/step=9.ckpt", 9, when=100)
    assert newest_checkpoint(OWNER, [tmp_path / "a", str(tmp_path / "b"), tmp_path / "none"]) == newest


def test_there_is_none(tmp_path):
    assert newest_checkpoint(OWNER, [tmp_path, tmp_path / "none"]) is None


def test_one_that_a_kill_has_left_half_written_is_skipped(tmp_path):
    older = write(tmp_path / "a/step=5.ckpt", 5, when=100)
    damage(write(tmp_path / "a/last.ckpt", 7, when=200))
    with pytest.warns(UserWarning, match=r"^fit: skipped the checkpoint .*last.ckpt, which is damaged: "):
        assert newest_checkpoint(OWNER, [tmp_path / "a"]) == older


@pytest.mark.refusal
def test_damaged_ones_alone_raise(tmp_path):
    damage(write(tmp_path / "a/last.ckpt", 7, when=200))
    with (
        pytest.warns(UserWarning, match="skipped the checkpoint"),
        pytest.raises(ValueError, match=r"^fit: all 1 checkpoints in .*a are damaged; remove them to begin a new run"),
    ):
        newest_checkpoint(OWNER, [tmp_path / "a"])
