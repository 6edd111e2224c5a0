"""An index that is built on disk is, byte for byte, the one that is built in memory, and a failure leaves nothing.

Promise 1: blocks have 50 rows here, so that 600 rows are many parts; nothing else shows that the files do not depend on
them. Promise 4: one of several processes is killed at a given moment of a build, which is a function of the library.
"""

import os
import signal

import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search.store import disk_lists, rows
from lightning_retrieval.search.store.disk_lists import help_build_on_disk
from tests.lightning_retrieval.search.store.vectors import DIM, ROWS, built, vectors
from tests.processes import start_processes

IDS, PATHS = 1000 - torch.arange(ROWS), [f"é/{i}.jpg" for i in range(ROWS)]


@pytest.fixture
def expected(tmp_path):
    """The files of an index that is built in memory, by the settings of the index."""

    def files_of(**settings):
        built(**settings).save(tmp_path / "memory")
        return content(tmp_path / "memory")

    return files_of


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (rows, disk_lists):
        monkeypatch.setattr(module, "BLOCK", 50)


def set_block(size):
    """The same in a process of its own."""
    for module in (rows, disk_lists):
        module.BLOCK = size


def on_disk(folder, factory="IVF4,Flat", count=ROWS, rows_in_memory=120, launch=None, **settings):
    """The index that `built` makes, built on disk."""
    index = RetrievalIndex(DIM, factory, **settings)
    how = {"rows_in_memory": rows_in_memory, "launch": launch}
    index.build_on_disk(folder, vectors(count), IDS[:count], PATHS[:count], **how)
    return index


def content(folder):
    return {path.name: path.read_bytes() for path in folder.glob("files-*/*")}


@pytest.mark.parametrize(
    ("factory", "shards", "rows_in_memory"),
    [("IVF4,Flat", 2, 50), ("IVF4,Flat", 1, 599), ("PCA8,IVF4_HNSW8,PQ4x4", 3, 120)],
)
def test_files_and_results_are_those_of_an_index_in_memory(factory, shards, rows_in_memory, tmp_path, expected):
    settings = {"shards": shards, "parameters": "nprobe=2"}
    index = on_disk(tmp_path / "disk", factory, rows_in_memory=rows_in_memory, **settings)
    assert content(tmp_path / "disk") == expected(factory=factory, **settings)
    in_memory = RetrievalIndex.load(tmp_path / "memory")
    for found in (index, RetrievalIndex.load(tmp_path / "disk", mapped=True)):
        assert repr(found) == repr(in_memory)
        assert (found.recall, found.mapped) == (in_memory.recall, True)
        for mine, its in zip(found.search(vectors(20, seed=1), 7), in_memory.search(vectors(20, seed=1), 7)):
            assert torch.equal(mine, its)


def build_together(rank, world_size, folder, *settings):
    """Do what a process of a group does to build an index; its number of rows."""
    set_block(50)
    if rank > 0:
        help_build_on_disk()
    else:
        on_disk(folder, *settings, launch=list)
    return len(RetrievalIndex.load(folder, mapped=True))  # complete as soon as any process goes on


@pytest.mark.distributed
@pytest.mark.parametrize("count", [ROWS, 60])  # 60 rows have 2 blocks, for 3 processes
def test_files_do_not_depend_on_the_number_of_processes(count, tmp_path, run_processes):
    on_disk(tmp_path / "one", "IVF4,Flat", count)
    assert run_processes(build_together, 3, tmp_path / "all", "IVF4,Flat", count) == [count] * 3
    assert content(tmp_path / "all") == content(tmp_path / "one")


def build_until_one_is_killed(rank, world_size, folder, dying, name):
    """Build an index by all processes; one of them is killed when it calls this function."""
    if rank == dying:
        setattr(disk_lists, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    build_together(rank, world_size, folder)


@pytest.mark.distributed
@pytest.mark.parametrize(("dying", "name"), [(1, "move_to_disk"), (0, "merge")])
def test_a_kill_of_one_process_leaves_the_old_index_and_the_next_build_begins_anew(dying, name, tmp_path, expected):
    folder = tmp_path / "i"
    built(rows=50).save(folder)
    (tmp_path / "processes").mkdir()
    arguments = (build_until_one_is_killed, 2, folder, dying, name)
    started = start_processes(*arguments, folder=tmp_path / "processes", backend="gloo")
    try:
        codes = [one.wait(120) for one in started]
    finally:
        for one in started:
            one.end()
    assert codes[dying] == -signal.SIGKILL, started[dying].output()
    assert codes[1 - dying] == 1, started[1 - dying].output()
    assert len(RetrievalIndex.load(folder)) == 50
    on_disk(folder)
    assert len(list(folder.glob("files-*"))) == 1
    assert content(folder) == expected(factory="IVF4,Flat")


def test_a_build_that_fails_leaves_the_old_index(tmp_path):
    """It is interrupted when it has trained, and can be repeated."""
    built(rows=50).save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    index = RetrievalIndex(DIM, "IVF4,Flat")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.build_on_disk(tmp_path, vectors(), rows_in_memory=100, launch=interrupted)
    assert sorted(os.listdir(tmp_path)) == before
    assert len(RetrievalIndex.load(tmp_path)) == 50
    assert (len(index), index.mapped) == (0, False)
    index.build_on_disk(tmp_path, vectors(), rows_in_memory=100)
    assert len(index) == len(RetrievalIndex.load(tmp_path)) == ROWS
