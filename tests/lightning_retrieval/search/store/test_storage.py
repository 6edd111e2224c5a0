"""A folder stays complete if a save fails, damage is found, nothing but an index is replaced, earlier ones are read."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval import files as files_module
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.store import faiss_index, storage
from tests.lightning_retrieval.search.store.vectors import built, vectors


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


def save_with_limits(rank, world_size, folder):
    """Save an index while no file may be longer than a limit; the messages."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    index, messages = built("IVF2,Flat", rows=120), []
    for limit in (500, 2048, 5000):  # the last write of ids, of paths, and of vectors fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        with pytest.raises(OSError, match=r"^RetrievalIndex: ") as error:
            index.save(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        messages.append(str(error.value))
    return messages


@pytest.mark.posix
def test_a_full_disk_leaves_the_old_index(folder, run_alone):
    before = contents(folder)
    messages = run_alone(save_with_limits, folder)
    for message in messages:
        assert " cannot be written (File too large); what was saved there before is unchanged" in message
    assert contents(folder) == before
    assert len(RetrievalIndex.load(folder)) == 50


@pytest.mark.parametrize("name", ["ids.npy", "manifest.json"])
def test_a_file_that_differs_from_what_was_written_is_not_sealed(name, folder, monkeypatch):
    before = contents(folder)
    real = files_module.flush

    def cuts(path):
        real(path)
        is_manifest = path.parent == folder
        if path.is_file() and is_manifest == (name == "manifest.json"):
            os.truncate(path, path.stat().st_size - 1)

    monkeypatch.setattr(files_module, "flush", cuts)
    with pytest.raises(OSError, match=rf"{name} cannot be written \(not all of it .*\); .* is unchanged"):
        built(rows=60).save(folder)
    assert len(RetrievalIndex.load(folder)) == 50
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("module", "name", "mapped"), [(storage, "_check_files", False), (faiss_index, "read_shard", True)]
)
def test_a_reader_takes_the_index_that_replaces_the_one_it_opens(module, name, mapped, folder, monkeypatch):
    real, saved = getattr(module, name), []

    def saves_first(*args):
        if len(saved) < 3:  # three saves meet this reader
            saved.append(60 + len(saved))
            built(rows=saved[-1]).save(folder)
        return real(*args)

    monkeypatch.setattr(module, name, saves_first)
    index = RetrievalIndex.load(folder, mapped=mapped)
    assert (saved, len(index)) == ([60, 61, 62], 62)
    assert index.search(vectors(1), 1)[1].tolist() == [[1000]]


def test_what_a_killed_process_left_takes_no_space_while_the_next_version_is_written(folder, tmp_path):
    for index in (folder, tmp_path / "first"):
        (index / "files-0badf00d").mkdir(parents=True)
        (index / ".0123456789abcdef.tmp").write_text("half of a manifest")
        before = {path.name for path in index.iterdir()} - {"files-0badf00d", ".0123456789abcdef.tmp"}
        with storage.new_version(index) as version:
            during = {path.name for path in index.iterdir()} - {"lock.held"}  # which is there on Windows
            assert during == before | {"lock", version.inner.name}
        assert {path.name for path in index.iterdir()} == before | {"lock"}


def test_a_save_replaces_what_was_there(folder):
    mapped = RetrievalIndex.load(folder, mapped=True)
    built(rows=60).save(folder)
    assert len(RetrievalIndex.load(folder)) == 60
    names = [re.sub(r"-\w{8}$", "", name) for name in os.listdir(folder)]
    old = [] if files_module.POSIX else ["files"]  # on Windows, they stay while they are mapped
    assert sorted(names) == [*old, "files", "lock", "manifest.json"]
    assert mapped.search(vectors(1), 1)[1].tolist() == [[1000]]  # a process with open files can still read them


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["vectors-1.faiss", "ids.npy", "paths.npy", "path-ends.npy"])
def test_damaged_files_raise(name, folder):
    (file,) = folder.glob(f"*/{name}")
    complete = file.read_bytes()
    for position in (0, len(complete) // 2, len(complete) - 1):
        damaged = bytearray(complete)
        damaged[position] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"RetrievalIndex: .*{name} is damaged, its checksum .*; build the index"):
            RetrievalIndex.load(folder)
    file.write_bytes(complete[:-1])
    with pytest.raises(ValueError, match=rf"{name} is damaged, it has {len(complete) - 1} bytes .* {len(complete)};"):
        RetrievalIndex.load(folder, verify=False)
    if name == "vectors-1.faiss":
        file.write_bytes(b"nope" + complete[4:])
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .*faiss cannot read .*; build the index again\.$"):
            RetrievalIndex.load(folder, verify=False)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"is damaged, files-\w+/{name} is missing"):
        RetrievalIndex.load(folder)


@pytest.mark.refusal
def test_damaged_manifests_raise(folder):
    manifest = folder / "manifest.json"
    complete = manifest.read_text()
    for text, message in [
        (complete[:-5], "is damaged, it is not valid JSON"),
        (complete.replace('"dim": 16', '"dim": 17'), "is damaged, its checksum is not the one written in it"),
        (re.sub('"sha256": "[0-9a-f]+"', '"sha256": null', complete, count=1), "is damaged, its checksum is not"),
        (complete.replace("lightning-retrieval index", "another"), "must be a manifest of the format '.* index'"),
        (complete.replace('"version": 1', '"version": 2'), "has format version 2, but this release reads version 1"),
        (complete.replace('"about": {}', '"about": ' + "[" * 600 + "]" * 600), "is damaged, .*; build the index"),
        (complete.replace('"about": {}', '"about": ' + "[" * 100_000), "is damaged, .*; build the index again"),
    ]:
        assert text != complete
        manifest.write_text(text)
        with pytest.raises(ValueError, match=rf"^RetrievalIndex: .*{message}"):
            RetrievalIndex.load(folder)
    manifest.unlink()
    with pytest.raises(FileNotFoundError, match=r"RetrievalIndex: the index must be a folder with manifest\.json in"):
        RetrievalIndex.load(folder)
    with pytest.raises(ValueError, match=r"^RetrievalIndex: `folder` must have names of at most 255 bytes"):
        RetrievalIndex.load(folder / ("n" * 500))


def forge(manifest, **changes):
    """Change the settings or the files of a manifest, and renew its digest; None removes a value."""
    content = json.loads(manifest.read_text())
    values = {"files": content["files"], "settings": content["settings"]}
    for name, value in changes.items():
        target = values if name in values else values["settings"]
        target[name] = value
        if value is None:
            del target[name]
    manifest.write_bytes(storage.FORMAT.encode(values))


@pytest.mark.refusal
def test_forged_manifests_raise(saved, folder):
    outside, without_size = {"../a/ids.npy": {"bytes": 1, "sha256": ""}}, {"files-0badf00d/a": 1}
    forged = {
        "dim": (8, 17, 10**12, "16", True, [16], None),
        "recall": ("high", 2, None),
        "shards": (1, 3, 0, -1, 10**12, "2", None),
        "about": ("text", [1]),
        "factory": (7, "Flatt", None),
        "parameters": (7, "nprobe=0", "size=3", None),
        "settings": ([], "text", 7, {}),
        "files": ([], "text", outside, without_size, None),
        "more": (1,),
    }
    for name, values in forged.items():
        for value in values:
            shutil.copy(saved / "manifest.json", folder)
            forge(folder / "manifest.json", **{name: value})
            with pytest.raises(ValueError, match=rf"^RetrievalIndex: {re.escape(str(folder))}\S* is damaged, .*; bui"):
                RetrievalIndex.load(folder)
    for settings, reason in (({"dim": None}, "'dim' is missing"), ({"dim": "16"}, "`dim` is")):
        shutil.copy(saved / "manifest.json", folder)
        forge(folder / "manifest.json", **settings)
        with pytest.raises(ValueError, match=rf"do not fit \({reason}[^)]*\); build") as raised:
            RetrievalIndex.load(folder)
        assert ("is missing" in str(raised.value)) == (settings["dim"] is None)
    (folder / "manifest.json").write_text("damaged")
    built(rows=60).save(folder)  # in its place
    assert len(RetrievalIndex.load(folder)) == 60


@pytest.mark.refusal
def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    (tmp_path / "site" / "files-of-2024").mkdir(parents=True)
    manifest = tmp_path / "site" / "manifest.json"
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match=r"must be written to a new folder or over an index, got .*something else"):
            built(rows=50).save(path)
    for content in ('{"name": "extension"}', '{"files": {}, "format": "another"}', "[]", "no JSON"):
        manifest.write_text(content)
        with pytest.raises(ValueError, match="something else"):
            built(rows=50).save(tmp_path / "site")
        assert sorted(os.listdir(tmp_path / "site")) == ["files-of-2024", "manifest.json"]
        assert manifest.read_text() == content
    assert sorted(os.listdir(tmp_path)) == ["site", "thesis.tex"]


@pytest.mark.refusal
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


EARLIER = Path(__file__).parents[3] / "checkpoints"  # d0b5ff1 wrote the folders in it
ROWS = torch.arange(48.0).reshape(12, 4).sin()


@pytest.mark.parametrize("mapped", [False, True])
def test_an_index_that_an_earlier_commit_has_written(mapped, tmp_path):
    shutil.copytree(EARLIER / "index", tmp_path / "i")
    index = RetrievalIndex.load(tmp_path / "i", mapped=mapped)
    assert repr(index) == (
        "RetrievalIndex(dim=4, factory='IVF2,Flat', parameters='nprobe=2', shards=2, rows=12, recall=1.000)"
    )
    assert index.about == {"checkpoint": "é.ckpt"}
    _, ids, paths, _ = index.search_with_metadata(ROWS, index.request(1))
    assert ids[:, 0].tolist() == list(range(20, 8, -1))
    assert paths[3] == ["é/3.jpg"]
    if not mapped:
        index.save(tmp_path / "i")
        assert len(RetrievalIndex.load(tmp_path / "i")) == 12


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_embeddings_that_an_earlier_commit_has_written(file_format, tmp_path):
    shutil.copytree(EARLIER / f"embeddings-{file_format}", tmp_path / "e")
    folder = EmbeddingFolder.load(tmp_path / "e")
    assert EmbeddingFolder.create(tmp_path / "e", folder.manifest).missing() == []
    first, second = folder.read(0), folder.read(1)
    np.testing.assert_array_equal(first.embeddings, ROWS[[0, 2]])
    np.testing.assert_array_equal(second.embeddings, ROWS[3:5])
    assert (first.paths, first.labels) == (["é/0.jpg", "é/2.jpg"], ["class 0", None])
    assert second.ids.tolist() == [3, 4]
    assert folder.unreadable() == [("é/1.jpg", "truncated")]
    assert folder.changed(lambda positions: "after") == [0]
