"""A folder stays complete while it is replaced, damage is found, and nothing but an index is replaced."""

import os
import re
import shutil
import stat
import threading

import faiss
import pytest

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.files import POSIX
from tests.lightning_retrieval.search.store.vectors import DIM, built, vectors


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with an index of 50 rows in two shards."""
    folder = tmp_path_factory.mktemp("saved") / "index"
    built(rows=50, shards=2).save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of that folder, which a test may damage."""
    shutil.copytree(saved, tmp_path / "index")
    return tmp_path / "index"


def contents(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.posix
@pytest.mark.parametrize("cut_manifest", [False, True])
def test_a_file_that_differs_from_what_was_written_is_not_sealed(cut_manifest, folder, monkeypatch):
    """A file that a disk does not keep whole is found before the old index is replaced."""
    before, sync = contents(folder), os.fsync

    def cuts(descriptor):
        sync(descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and (os.pread(descriptor, 1, 0) == b"{") == cut_manifest:
            os.ftruncate(descriptor, status.st_size - 1)

    monkeypatch.setattr(os, "fsync", cuts)
    with pytest.raises(OSError, match="cannot be written"):
        built(rows=60).save(folder)
    assert len(RetrievalIndex.load(folder)) == 50
    assert contents(folder) == before


@pytest.mark.posix  # on Windows, the writer waits while the manifest is read
@pytest.mark.parametrize("mapped", [False, True])
def test_a_reader_finds_a_complete_index_while_others_replace_it(mapped, folder):
    errors = []

    def save_again_and_again():
        try:
            for rows in range(60, 75):
                built(rows=rows).save(folder)
        except Exception as error:
            errors.append(error)

    writer = threading.Thread(target=save_again_and_again)
    writer.start()
    found = []
    while writer.is_alive():
        index = RetrievalIndex.load(folder, mapped=mapped)
        found.append(len(index))
        assert index.search(vectors(1), 1)[1].tolist() == [[1000]]
    writer.join()
    assert errors == []
    assert found == sorted(found)
    assert len(set(found)) > 5, "the index was hardly ever read between two saves"
    assert len(RetrievalIndex.load(folder)) == 74


def test_a_save_replaces_what_was_there_and_what_a_killed_process_left(folder):
    (folder / "files-0badf00d").mkdir()
    (folder / ".0123456789abcdef.tmp").write_text("half of a manifest")
    mapped = RetrievalIndex.load(folder, mapped=True)
    built(rows=60).save(folder)
    assert len(RetrievalIndex.load(folder)) == 60
    names = [re.sub(r"-\w{8}$", "", name) for name in os.listdir(folder)]
    old = [] if POSIX else ["files"]  # on Windows, they stay while they are mapped
    assert sorted(names) == [*old, "files", "lock", "manifest.json"]
    assert mapped.search(vectors(1), 1)[1].tolist() == [[1000]]  # a process with open files can still read them


def test_damaged_files_raise(folder):
    """By checksums; without them, by their sizes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) > 2
    for file in files:
        complete = file.read_bytes()
        for position in (0, len(complete) // 2, len(complete) - 2):
            damaged = bytearray(complete)
            damaged[position] ^= 4
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"RetrievalIndex: .*(is damaged|must be a manifest)"):
                RetrievalIndex.load(folder)
        file.write_bytes(complete[:-2])
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .* is damaged"):
            RetrievalIndex.load(folder, verify=file.name == "manifest.json")
        file.unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            RetrievalIndex.load(folder)
        file.write_bytes(complete)
    assert len(RetrievalIndex.load(folder)) == 50
    (folder / "manifest.json").write_text("damaged")
    built(rows=60).save(folder)  # in its place
    assert len(RetrievalIndex.load(folder)) == 60


def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    (tmp_path / "site" / "files-of-2024").mkdir(parents=True)
    manifest = tmp_path / "site" / "manifest.json"
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="something else"):
            built(rows=50).save(path)
    for content in ('{"name": "extension"}', '{"files": {}, "format": "another"}', "no JSON"):
        manifest.write_text(content)
        with pytest.raises(ValueError, match="something else"):
            built(rows=50).save(tmp_path / "site")
        assert sorted(os.listdir(tmp_path / "site")) == ["files-of-2024", "manifest.json"]
        assert manifest.read_text() == content
    assert sorted(os.listdir(tmp_path)) == ["site", "thesis.tex"]


def test_other_files_beside_an_index_are_kept(folder):
    others = {"files-of-2024", "files-", "files-0badf00d0", "files-0badf00d", ".notes.tmp"}
    for name in sorted(others - {"files-0badf00d"}):
        (folder / name).mkdir()
    (folder / "files-0badf00d").symlink_to(folder / "files-of-2024", target_is_directory=True)
    built(rows=60).save(folder)
    assert others < set(os.listdir(folder))
    assert len(os.listdir(folder)) == len(others) + 3
    (folder / "manifest.json").write_text("damaged")
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(folder)


def lists_in(file):
    """An IVF index of faiss whose lists are in another file."""
    index = faiss.index_factory(DIM, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors(200).numpy())
    lists = faiss.OnDiskInvertedLists(4, index.code_size, str(file))
    index.replace_invlists(lists, True)
    lists.this.disown()
    index.add(vectors(4).numpy())
    return index


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_faiss_file_that_names_another_file_is_not_opened(hidden, mapped, tmp_path):
    """Also not if the other file holds the rows of the centroids of the lists."""
    folder, victim = tmp_path / "index", tmp_path / "victim"
    index = RetrievalIndex(DIM, "IVF4,Flat")
    index.add(vectors(200))
    made = lists_in(victim)
    if hidden:
        made = faiss.IndexIVFFlat(made, DIM, 4, faiss.METRIC_INNER_PRODUCT)
    made.ntotal = 200
    index.faiss_indexes = [made]
    index.save(folder)
    del made, index
    content = b"the user's" * 1000
    victim.write_bytes(content)
    with pytest.raises(ValueError, match=r"^RetrievalIndex: .*is damaged"):
        RetrievalIndex.load(folder, mapped=mapped, verify=False)
    assert victim.read_bytes() == content
