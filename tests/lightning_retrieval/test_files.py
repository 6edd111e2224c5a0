"""One atomic writer, locks of a folder, and files that are on the disk before they are named."""

import errno
import os

import faiss
import pytest

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.files import is_system_error, new_file, new_files, write_verified
from tests.lightning_retrieval.search.store.vectors import built


def test_a_new_file_takes_the_place_of_the_old_one_when_it_is_complete(tmp_path):
    path = tmp_path / ("n" * 255)
    for content in (b"old", b"new"):
        with new_file(path) as file:
            file.write(content)
            assert path.exists() == (content == b"new")
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("failing", ["fsync", "replace", "getpid"])  # the last one in the block
def test_a_failure_leaves_the_old_file_and_nothing_else(error, failing, tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def fails(*args):
        raise error

    monkeypatch.setattr(os, failing, fails)
    with pytest.raises(type(error)), new_file(tmp_path / "a") as file:
        file.write(str(os.getpid()).encode())
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.posix
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_two_writers_of_the_files_of_one_folder(moment, tmp_path, monkeypatch):
    """The slower one fails if the other one has replaced the folder in the meantime, and leaves its files."""
    folder, real = tmp_path / "model", getattr(os, moment)

    def write(letter):
        with new_files(folder, ("a", "b")) as new:
            for name in ("a", "b"):
                (new / name).write_text(letter)

    def after_the_other(*args):
        monkeypatch.setattr(os, moment, real)
        write("fast")
        return real(*args)

    monkeypatch.setattr(os, moment, after_the_other)
    with pytest.raises(FileNotFoundError):
        write("slow")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "fast", "b": "fast"}


@pytest.mark.refusal
def test_one_save_at_a_time(tmp_path, monkeypatch):
    real, refused = faiss.write_index, []

    def amid(part, path):
        monkeypatch.setattr(faiss, "write_index", real)
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .* is being written to by another process; wait"):
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
    assert len(files) == 6
    last, before = at_replace[-1]
    assert last == str(tmp_path / "manifest.json")
    assert {(path.stat().st_ino, path.stat().st_size) for path in files} <= before
    folders = {path.stat().st_ino for path in (tmp_path, *tmp_path.glob("files-*"))}
    assert folders <= {inode for inode, _ in before}
    assert flushed[-1][0] == tmp_path.stat().st_ino


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("number", "is_full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False), (errno.EROFS, False), (errno.EIO, False)],
)
def test_only_a_full_disk_is_answered_by_freeing_space(number, is_full, tmp_path):
    def write(stream):
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=r"^/.*a cannot be written .* was saved there before is unchanged") as found:
        write_verified(tmp_path / "a", write)
    assert ("free space" in str(found.value)) == is_full


@pytest.mark.refusal
def test_a_damaged_file_is_not_what_the_system_refuses_to_read():
    damaged = [
        OSError("Couldn't deserialize thrift"),
        OSError(errno.EINVAL, "Invalid argument"),
        ValueError("x"),
        EOFError(),
    ]
    of_system = [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "I/O error"), MemoryError()]
    assert [is_system_error(error) for error in (*damaged, *of_system)] == [False] * 4 + [True] * 3
