"""Arrays that processes share: one copy in files, which the last process deletes, however the others have ended."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_retrieval.datamodules import shared_arrays
from lightning_retrieval.datamodules.shared_arrays import SharedArrays, digest_of_arrays, share_arrays

ARRAYS = {
    "numbers": np.arange(5000),
    "pairs": np.arange(12, dtype=np.int32).reshape(6, 2),
    "empty": np.zeros(0, np.uint8),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Sets the folder for temporary files; returns the folder in which arrays are shared."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"lightning-retrieval-{os.getuid()}"


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_arrays_are_shared_until_the_last_user_releases_them(temporary):
    calls = []
    first = share_arrays("X", "key", lambda: calls.append(1) or ARRAYS)
    second = share_arrays("X", "key", lambda: calls.append(1) or ARRAYS)
    assert (len(calls), names(temporary)) == (1, ["key"])
    assert temporary.stat().st_mode & 0o777 == 0o700
    for name, array in ARRAYS.items():
        assert second[name].dtype == array.dtype
        np.testing.assert_array_equal(second[name], array)
    assert type(second["numbers"]) is np.ndarray
    first["numbers"][0] = 7  # changes this process's page only
    assert (first["numbers"][0], second["numbers"][0]) == (7, 0)
    view = first["pairs"]
    del first
    assert names(temporary) == ["key"]
    del second
    assert names(temporary) == []
    assert view.sum() == 66  # what is mapped stays


def test_any_pickle_but_that_of_a_spawned_process_holds_the_arrays():
    copied = pickle.loads(pickle.dumps(share_arrays("X", "key", lambda: ARRAYS)))
    assert type(copied) is dict
    np.testing.assert_array_equal(copied["numbers"], ARRAYS["numbers"])


def test_the_digest_depends_on_names_types_shapes_and_values():
    digests = {
        digest_of_arrays(arrays)
        for arrays in (
            {"a": np.arange(4)},
            {"b": np.arange(4)},
            {"a": np.arange(4).reshape(2, 2)},
            {"a": np.arange(4, dtype=np.int32)},
            {"a": np.arange(1, 5)},
            {"a": np.arange(4), "b": np.zeros(0, np.int64)},
        )
    }
    assert len(digests) == 6
    columns = np.arange(8).reshape(4, 2)[:, 0]  # not contiguous
    assert digest_of_arrays({"a": columns}) == digest_of_arrays({"a": columns.copy()})


def hold(key, ready, seconds):
    arrays = share_arrays("X", key, lambda: ARRAYS)
    ready.set()
    time.sleep(seconds)
    del arrays


@pytest.fixture
def holder(temporary):
    """A forked process that shares the arrays `key` until it is killed."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=("key", ready, 60))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_what_a_killed_process_has_left_is_deleted_and_never_read(holder, temporary):
    mine = share_arrays("X", "key", lambda: pytest.fail("another process holds these arrays"))
    del mine
    assert names(temporary) == ["key"]
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert names(temporary) == ["key"]
    (temporary / "key" / "numbers.npy").write_bytes(b"half of a file")  # as after a crash of the machine
    other = share_arrays("X", "other", lambda: ARRAYS)
    assert names(temporary) == ["other"]
    again = share_arrays("X", "key", lambda: ARRAYS)
    np.testing.assert_array_equal(again["numbers"], ARRAYS["numbers"])
    del other, again
    assert names(temporary) == []


def write_slowly():
    calls.append(1)
    time.sleep(0.2)
    return ARRAYS


calls = []


def make_one_of_two(rank, world_size, folder):
    tempfile.tempdir = folder
    arrays = share_arrays("X", "key", write_slowly)
    time.sleep(0.3)  # the other one finds them
    return len(calls), int(arrays["numbers"].sum())


def test_one_of_several_processes_makes_the_arrays(run_processes, tmp_path):
    results = run_processes(make_one_of_two, 2, str(tmp_path), backend=None)
    assert sorted(made for made, _ in results) == [0, 1]
    assert {total for _, total in results} == {int(ARRAYS["numbers"].sum())}
    assert names(tmp_path / f"lightning-retrieval-{os.getuid()}") == []


def test_a_process_that_was_forked_does_not_delete_the_arrays_of_its_parent(temporary):
    arrays = share_arrays("X", "key", lambda: ARRAYS)
    child = os.fork()
    if child == 0:
        del arrays
        os._exit(0)
    os.waitpid(child, 0)
    assert names(temporary) == ["key"]
    assert SharedArrays(arrays.path)["pairs"].sum() == 66


@pytest.mark.parametrize("reason", ["file", "link", "owner", "full"])
def test_each_process_keeps_a_copy_if_there_is_no_place_for_files(reason, temporary, tmp_path, monkeypatch):
    sentence = (
        r"each process keeps its own copy of the list of images, because it cannot be written .*TMPDIR to a folder"
    )
    if reason == "file":
        temporary.touch()
    if reason == "link":
        (tmp_path / "elsewhere").mkdir()
        temporary.symlink_to(tmp_path / "elsewhere")
    if reason == "owner":
        temporary.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        temporary.rename(tmp_path / f"lightning-retrieval-{os.getuid()}")
    if reason == "full":

        def fails(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(shared_arrays.np, "save", fails)
        sentence = r"No space left on device"
    with pytest.warns(UserWarning, match=f"^X: .*{sentence}"):
        assert share_arrays("X", "key", lambda: ARRAYS) is None
    if reason == "full":
        assert names(temporary) == []


def test_an_error_of_the_arrays_themselves_is_not_hidden(temporary):
    with pytest.raises(ValueError, match=r"^no class$"):
        share_arrays("X", "key", lambda: raise_error())
    assert names(temporary) == []
    assert share_arrays("X", "key", lambda: ARRAYS) is not None  # the lock is free


def raise_error():
    raise ValueError("no class")


def test_no_file_is_left_by_a_process_that_ends(run_processes, tmp_path):
    run_processes(make_one_of_two, 1, str(tmp_path), backend=None)
    assert names(Path(tmp_path, f"lightning-retrieval-{os.getuid()}")) == []
