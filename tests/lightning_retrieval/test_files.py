"""Locks of a folder, and files that are on the disk before they are named."""

import fcntl
import os

import faiss
import pytest

from lightning_retrieval import RetrievalIndex
from tests.lightning_retrieval.search.vectors import built


@pytest.mark.refusal
def test_one_save_at_a_time(tmp_path, monkeypatch):
    real, refused = faiss.write_index, []

    def amid(part, path):
        monkeypatch.setattr(faiss, "write_index", real)
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .* is being written to by another process; wait"):
            built(rows=60).save(tmp_path)
        refused.append(path)
        real(part, path)

    monkeypatch.setattr(faiss, "write_index", amid)
    built(rows=50).save(tmp_path)
    assert len(refused) == 1
    assert len(RetrievalIndex.load(tmp_path)) == 50
    built(rows=60).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 60


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fails)
    built(rows=50).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 50


def test_all_files_are_on_the_disk_before_the_manifest_is_replaced(tmp_path, monkeypatch):
    flushed, at_replace, sync, replace = [], [], os.fsync, os.replace

    def fsync(descriptor):
        status = os.fstat(descriptor)
        flushed.append((status.st_ino, status.st_size))
        sync(descriptor)

    def replaces(*paths):
        at_replace.extend(flushed)
        replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaces)
    built(rows=50, shards=2).save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) == 6
    assert {(path.stat().st_ino, path.stat().st_size) for path in files} <= set(at_replace)
    folders = {path.stat().st_ino for path in (tmp_path, *tmp_path.glob("files-*"))}
    assert folders <= {inode for inode, _ in at_replace}
    assert len(flushed) == len(at_replace) + 1
    assert flushed[-1][0] == tmp_path.stat().st_ino
