"""What is saved takes the place of the old files when it is complete, and one process at a time saves into a folder."""

import errno
import os
import stat

import faiss
import pytest
import torch

from lightning_retrieval import Embedder, RetrievalIndex
from tests.lightning_retrieval.search.store.vectors import built


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_the_old_files_and_nothing_else(error, failing, tmp_path, monkeypatch):
    built(rows=50).save(tmp_path / "index")
    before = sorted(tmp_path.rglob("*"))

    def fails(*args):
        raise error

    index = built(rows=60)
    monkeypatch.setattr(os, failing, fails)
    with pytest.raises(type(error)):
        index.save(tmp_path / "index")
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == before
    assert len(RetrievalIndex.load(tmp_path / "index")) == 50


@pytest.mark.posix
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_two_writers_of_the_files_of_one_folder(moment, tmp_path, monkeypatch):
    """The slower one fails if the other one has replaced the folder in the meantime, and leaves its files."""
    folder, real = tmp_path / "model", getattr(os, moment)
    slow, fast = Embedder("glyph_net", 4), Embedder("glyph_net", 8)

    def after_the_other(*args):
        monkeypatch.setattr(os, moment, real)
        fast.save_pretrained(folder)
        return real(*args)

    monkeypatch.setattr(os, moment, after_the_other)
    with pytest.raises(OSError, match="cannot be written"):
        slow.save_pretrained(folder)
    assert Embedder.from_pretrained(folder).embedding_dim == 8


@pytest.mark.refusal
def test_one_save_at_a_time(tmp_path, monkeypatch):
    real, refused = faiss.write_index, []

    def amid(part, path):
        monkeypatch.setattr(faiss, "write_index", real)
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .* another process"):
            built(rows=60).save(tmp_path)
        refused.append(path)
        real(part, path)

    index = built(rows=50)  # before faiss is patched, since the first index of a kind is pickled, which writes it, too
    monkeypatch.setattr(faiss, "write_index", amid)
    index.save(tmp_path)
    assert len(refused) == 1
    assert len(RetrievalIndex.load(tmp_path)) == 50
    built(rows=60).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 60


@pytest.mark.posix
def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    import fcntl

    def fails(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fails)
    built(rows=50).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 50


@pytest.mark.posix
def test_all_files_are_on_the_disk_before_the_manifest_is_replaced(tmp_path, monkeypatch):
    """Promise 4: a cut of power leaves the old or the new index, which only the order of these calls can show."""
    flushed, at_replace, sync, replace = [], [], os.fsync, os.replace

    def fsync(descriptor):
        status = os.fstat(descriptor)
        flushed.append((status.st_ino, status.st_size))
        sync(descriptor)

    def replaces(source, target):
        at_replace.append((str(target), set(flushed)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaces)
    built(rows=50, shards=2).save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    last, before = at_replace[-1]
    assert last == str(tmp_path / "manifest.json")
    assert {(path.stat().st_ino, path.stat().st_size) for path in files} <= before
    folders = {path.stat().st_ino for path in (tmp_path, *tmp_path.glob("files-*"))}
    assert folders <= {inode for inode, _ in before}
    assert flushed[-1][0] == tmp_path.stat().st_ino


def test_a_file_system_may_be_unable_to_flush_folders(tmp_path, monkeypatch):
    """As those of SMB, which answer EINVAL."""
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    index = RetrievalIndex(2)
    index.add(torch.eye(2))
    for _ in range(2):
        index.save(tmp_path / "index")
        Embedder("glyph_net", 8).save_pretrained(tmp_path / "model")
    assert len(RetrievalIndex.load(tmp_path / "index")) == 2


@pytest.mark.refusal
@pytest.mark.posix
def test_the_lock_of_a_folder_is_not_written_through_a_link(tmp_path):
    built().save(tmp_path / "index")
    (tmp_path / "index" / "lock").unlink(missing_ok=True)
    (tmp_path / "index" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"):
        built().save(tmp_path / "index")
    assert not (tmp_path / "elsewhere").exists()
