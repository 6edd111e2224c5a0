"""An index that is built on disk is, byte for byte, the one that is built in memory, and a failure leaves nothing."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from lightning_retrieval import RetrievalIndex, files, progress
from lightning_retrieval.invalid import NotWritten
from lightning_retrieval.search.store import disk_lists, faiss_index, rows, storage
from lightning_retrieval.search.store.disk_lists import help_build_on_disk
from tests.lightning_retrieval.search.store.vectors import DIM, ROWS, built, memory, newly_built, vectors
from tests.processes import start_processes

IDS, PATHS = 1000 - torch.arange(ROWS), [f"é/{i}.jpg" for i in range(ROWS)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 50 rows, so that 600 rows are many parts."""
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
    [("IVF4,Flat", 2, 50), ("IVF4,Flat", 1, 599), ("PCA8,IVF4,SQ8", 1, 10**9), ("PCA8,IVF4_HNSW8,PQ4x4", 3, 120)],
)
def test_files_and_results_are_those_of_an_index_in_memory(factory, shards, rows_in_memory, tmp_path):
    settings = {"shards": shards, "parameters": "nprobe=2", "about": {"checkpoint": "x.ckpt"}}
    expected = built(factory, **settings)
    expected.save(tmp_path / "memory")
    index = on_disk(tmp_path / "disk", factory, rows_in_memory=rows_in_memory, **settings)
    assert content(tmp_path / "disk") == content(tmp_path / "memory")
    loaded = RetrievalIndex.load(tmp_path / "disk", mapped=True)
    for found in (index, loaded):
        assert repr(found) == repr(expected)
        assert (found.about, found.recall, found.mapped) == (expected.about, expected.recall, True)
        for mine, its in zip(found.search(vectors(20, seed=1), 7), expected.search(vectors(20, seed=1), 7)):
            assert torch.equal(mine, its)
    assert sorted(re.sub(r"-\w{8}$", "", name) for name in os.listdir(tmp_path / "disk")) == [
        "files",
        "lock",
        "manifest.json",
    ]


def build_together(rank, folder, *settings, **more):
    """Do what a process of a group does to build an index."""
    if rank > 0:
        help_build_on_disk()
    else:
        on_disk(folder, *settings, launch=list, **more)


def search_in_built(rank, world_size, folder, factory, count, shards):
    """The results of a search in an index that all processes build."""
    set_block(50)
    build_together(rank, folder, factory, count, shards=shards)
    loaded = RetrievalIndex.load(folder, mapped=True)  # complete as soon as any process goes on
    return [x.tolist() for x in loaded.search(vectors(20, seed=1), 7)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("factory", "count", "shards", "processes"),
    [("IVF4,Flat", ROWS, 1, 2), ("PCA8,IVF4,SQ8", 590, 3, 3), ("IVF4,Flat", 60, 2, 3)],  # the last has 2 blocks
)
def test_files_and_results_do_not_depend_on_the_number_of_processes(
    factory, count, shards, processes, tmp_path, run_processes
):
    one = on_disk(tmp_path / "one", factory, count, shards=shards)
    expected = [x.tolist() for x in one.search(vectors(20, seed=1), 7)]
    assert run_processes(search_in_built, processes, tmp_path / "all", factory, count, shards) == [expected] * processes
    assert content(tmp_path / "all") == content(tmp_path / "one")


def fail_together(rank, world_size, folder, failing):
    """The error of a build in which the disk of one process is full, or the merge fails in the first process."""
    set_block(50)
    real = disk_lists.write_verified

    def fails(path, write):
        if path.name.startswith(failing):
            raise NotWritten(f"{path.name} cannot be written (No space left on device)")
        return real(path, write)

    disk_lists.write_verified = fails
    if failing == "vectors":
        storage.write_verified = fails
    with pytest.raises(OSError, match=f"^RetrievalIndex: {failing}.* cannot be written") as raised:
        build_together(rank, folder)
    return str(raised.value)


@pytest.mark.distributed
@pytest.mark.parametrize("failing", ["part-0-1-", "vectors"])
def test_an_error_of_one_process_ends_all_and_leaves_the_old_index(failing, tmp_path, run_processes):
    built(rows=50).save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    errors = run_processes(fail_together, 2, tmp_path, failing)
    assert errors[0] == errors[1]
    assert sorted(os.listdir(tmp_path)) == before
    assert len(RetrievalIndex.load(tmp_path)) == 50


def test_a_build_shows_the_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BEFORE_LINES", 0)
    newly_built("IVF4,Flat")
    begun = [f"Indexing: {rows} of 600 rows" for rows in (100, 150, 200, 250, 300, 400, 450, 500, 550, 600)]
    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == begun
    on_disk(tmp_path)
    printed = [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()]
    assert printed[:10] == begun
    assert printed[-1] == "Merging: 600 of 600 rows"


def test_most_lists_may_be_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 2)
    monkeypatch.setattr(disk_lists, "BLOCK", 2)
    trained = built("IVF64,Flat", parameters="nprobe=64")
    trained.remove(trained.ids)
    expected = RetrievalIndex(DIM, "IVF64,Flat", parameters="nprobe=64")
    expected.faiss_indexes = trained.faiss_indexes
    expected.build_on_disk(tmp_path, vectors(5), rows_in_memory=2)
    assert expected.search(vectors(5), 1)[1][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(expected.ids, torch.arange(5))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_memory_is_that_of_a_part(run_alone, tmp_path):
    parts, on_disk, in_memory = run_alone(added_memory, tmp_path)  # no memory that another test has freed is used
    assert parts == 30
    # All rows have 117 MiB, a part 4 MiB. Allocators may keep several parts.
    assert on_disk < 50 << 20 < in_memory


def added_memory(rank, world_size, folder):
    """The number of parts of a build on disk, and how many bytes its parts and a build in memory add.

    Memory is read before each part is moved to disk. After the build, allocators keep any amount of what it has freed.
    """
    set_block(1000)
    faiss_index.ROWS_PER_CENTROID = 4
    torch.randn(60_000, 512).numpy().tofile(folder / "rows")
    embeddings = torch.from_file(str(folder / "rows"), size=60_000 * 512).view(-1, 512)  # 117 MiB
    first = RetrievalIndex(512, "IVF4,Flat")  # allocates what the first build of a process needs
    first.build_on_disk(folder / "first", embeddings[:4000], rows_in_memory=2000)
    used = []
    original = disk_lists.move_to_disk

    def recorded(*args):
        used.append(memory("RssAnon"))
        return original(*args)

    disk_lists.move_to_disk = recorded
    before = memory("RssAnon")
    index = RetrievalIndex(512, "IVF4,Flat")
    index.build_on_disk(folder / "i", embeddings, rows_in_memory=2000)
    parts = len(used)
    on_disk = max(used) - before
    in_memory = RetrievalIndex(512, "IVF4,Flat")
    before = memory("RssAnon")
    in_memory.add(embeddings)
    return parts, on_disk, memory("RssAnon") - before


def test_a_build_that_fails_leaves_the_old_index(tmp_path, monkeypatch):
    built(rows=50).save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    real = files.flush

    def fails(path):
        if len(list(tmp_path.glob("files-*/part-*"))) == 2:
            raise OSError(28, "No space left on device")
        real(path)

    index = RetrievalIndex(DIM, "IVF4,Flat")
    monkeypatch.setattr(files, "flush", fails)
    with pytest.raises(OSError, match=r"^RetrievalIndex: .*part-0-0-2 cannot be written \(No space left on device\); "):
        index.build_on_disk(tmp_path, vectors(), rows_in_memory=100)
    monkeypatch.setattr(files, "flush", real)
    assert sorted(os.listdir(tmp_path)) == before
    assert len(RetrievalIndex.load(tmp_path)) == 50
    assert (len(index), index.mapped) == (0, False)
    index.build_on_disk(tmp_path, vectors(), rows_in_memory=100)
    assert len(index) == len(RetrievalIndex.load(tmp_path)) == ROWS


@pytest.mark.parametrize("length", [1000, 0])
def test_a_part_that_is_cut_is_not_merged(length, tmp_path, monkeypatch):
    original = disk_lists.merge

    def cuts(index, parts, stream):
        os.truncate(parts[1].path, length)
        original(index, parts, stream)

    monkeypatch.setattr(disk_lists, "merge", cuts)
    with pytest.raises(OSError, match=r"^RetrievalIndex: .*vectors-0.faiss cannot be written \(.*part-0-0-1.*smaller"):
        on_disk(tmp_path)
    assert os.listdir(tmp_path) == ["lock"]


def build_until_killed(rank, world_size, folder, name):
    """Build an index on disk; the process is killed when it calls this function for the second time."""
    set_block(50)
    calls = [0]
    original = getattr(disk_lists, name)

    def killed(*args):
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(disk_lists, name, killed)
    on_disk(folder, shards=2)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "old"), [("move_to_disk", False), ("merge", True)])
def test_a_kill_leaves_the_old_index_and_the_next_build_its_space(name, old, tmp_path):
    folder = tmp_path / "i"
    if old:
        built(rows=50).save(folder)
    (tmp_path / "processes").mkdir()
    (started,) = start_processes(build_until_killed, 1, folder, name, folder=tmp_path / "processes")
    assert started.wait(120) == -signal.SIGKILL, started.output()
    left = [path for path in folder.glob("files-*") if any(path.glob("part-*"))]
    assert len(left) == 1
    if old:
        assert len(RetrievalIndex.load(folder)) == 50
    else:
        with pytest.raises(FileNotFoundError, match="the index must be a folder with manifest"):
            RetrievalIndex.load(folder)
    on_disk(folder, shards=2)
    assert len(list(folder.glob("files-*"))) == 1
    built("IVF4,Flat", shards=2).save(tmp_path / "memory")
    assert content(folder) == content(tmp_path / "memory")


def build_until_one_is_killed(rank, world_size, folder, dying, name):
    """Build an index by all processes; one of them is killed when it calls this function."""
    set_block(50)
    if rank == dying:
        setattr(disk_lists, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    build_together(rank, folder, shards=2)


@pytest.mark.distributed
@pytest.mark.parametrize(("dying", "name"), [(1, "move_to_disk"), (0, "merge")])
def test_a_kill_of_one_process_leaves_the_old_index_and_the_next_build_begins_anew(dying, name, tmp_path):
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
    assert "Unreachable: RetrievalIndex: all processes must run until the" in started[1 - dying].output()
    assert len(RetrievalIndex.load(folder)) == 50
    on_disk(folder, shards=2)
    assert len(list(folder.glob("files-*"))) == 1
    built("IVF4,Flat", shards=2).save(tmp_path / "memory")
    assert content(folder) == content(tmp_path / "memory")


@pytest.mark.refusal
def test_other_kinds_of_index_are_invalid(tmp_path):
    for factory in ("Flat", "HNSW8", "PQ4x4", "IVF4,PQ4x4,RFlat", "IVF4,FlatDedup", "IVF4,PQ4x4fs", "PCA8,Flat"):
        with pytest.raises(ValueError, match=rf"^RetrievalIndex: `factory` must be IVF with .*, got '{factory}'"):
            on_disk(tmp_path / "i", factory)
    assert os.listdir(tmp_path) == []


@pytest.mark.refusal
def test_invalid_input_raises_before_a_file_is_written(tmp_path, monkeypatch):
    index = RetrievalIndex(DIM, "IVF4,Flat")
    with_nan = vectors().index_put((torch.tensor([3]),), torch.tensor(torch.nan))
    for built_index, embeddings, rows_in_memory, message in (
        (index, vectors(), 49, "`rows_in_memory` must be an integer >= 50, got 49"),
        (index, vectors(2, 8), 200, r"`embeddings` must have shape \(rows, 16\).*got \(2, 8\)"),
        (index, with_nan, 200, "`embeddings` .*NaN or inf in 1 of 600 rows: id 3"),
        (index, vectors(3), 200, "`factory` 'IVF4,Flat' must be trained, for which 3 rows are not enough"),
        (built("IVF4,Flat"), vectors(), 200, "an index must be empty to be built on disk, got one of 600 rows; make"),
    ):
        with pytest.raises(ValueError, match=f"^RetrievalIndex: {message}"):
            built_index.build_on_disk(tmp_path / "i", embeddings, rows_in_memory=rows_in_memory)
    index.build_on_disk(tmp_path / "i", vectors(), rows_in_memory=200)
    assert len(index) == ROWS
    for change in (lambda: index.add(vectors(1)), lambda: index.build_on_disk(tmp_path / "j", vectors())):
        with pytest.raises(ValueError, match=r"cannot add to an index whose files are mapped .* mapped=False\.$"):
            change()
    assert sorted(os.listdir(tmp_path)) == ["i"]


def rows_built_with_few_open_files(rank, world, folder):
    import resource

    set_block(50)
    index = RetrievalIndex(DIM, "IVF4,Flat")  # loads faiss
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, most))
    index.build_on_disk(folder / "i", vectors(5000), rows_in_memory=50)
    return len(index)


def test_there_may_be_more_parts_than_files_that_may_be_open(run_alone, tmp_path):
    assert run_alone(rows_built_with_few_open_files, tmp_path) == 5000
