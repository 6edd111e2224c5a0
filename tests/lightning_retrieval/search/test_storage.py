"""A folder stays complete if a save fails, damage is found, and nothing but an index is replaced."""

import json
import os
import re
import resource
import shutil
import signal

import faiss
import pytest

from lightning_retrieval import RetrievalIndex
from lightning_retrieval import files as files_module
from lightning_retrieval.search import faiss_index, storage
from tests.lightning_retrieval.search.vectors import built, vectors


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


def test_a_save_that_fails_leaves_the_old_index(folder, monkeypatch):
    before, new = contents(folder), built(shards=2)
    real, written = faiss.write_index, []

    def fails(part, path):
        written.append(path)
        if len(written) == 2:
            raise RuntimeError("no space left")
        real(part, path)

    monkeypatch.setattr(faiss, "write_index", fails)
    message = r"^RetrievalIndex: .*vectors-1\.faiss cannot be written \(no space left\); .* is unchanged"
    with pytest.raises(OSError, match=message):
        new.save(folder)
    assert contents(folder) == before
    assert len(RetrievalIndex.load(folder)) == 50


def save_with_limits(rank, world_size, folder):
    """Save indexes while no file may be longer than a limit; the messages."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    for factory in ("Flat", "IVF2,Flat"):
        index = built(factory, rows=120)
        for limit in (500, 2048, 5000):  # the last write of ids, of paths, and of vectors fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
            try:
                index.save(folder)
            except OSError as error:
                messages.append(str(error))
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return messages


def test_a_full_disk_leaves_the_old_index(folder, run_alone):
    before = contents(folder)
    messages = run_alone(save_with_limits, folder)
    assert len(messages) == 6
    for message in messages:
        pattern = r"RetrievalIndex: .* cannot be written \(File too large\); what was saved there before is unchanged.*"
        assert re.fullmatch(pattern, message)
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


def test_a_save_replaces_what_is_incomplete_and_deletes_what_a_killed_process_left(folder, tmp_path):
    mapped = RetrievalIndex.load(folder, mapped=True)
    for index in (folder, tmp_path / "first"):
        (index / "files-0badf00d").mkdir(parents=True)
        (index / "files-0badf00d" / "vectors-0.faiss").write_bytes(b"half")
        (index / ".0123456789abcdef.tmp").write_text("half of a manifest")
        built(rows=60).save(index)
        assert len(RetrievalIndex.load(index)) == 60
        names = [re.sub(r"-\w{8}$", "", name) for name in os.listdir(index)]
        assert sorted(names) == ["files", "lock", "manifest.json"]
    assert mapped.search(vectors(1), 1)[1].tolist() == [[1000]]  # a process with open files can still read them
    (folder / "manifest.json").write_text("damaged")
    built(rows=70).save(folder)
    assert len(RetrievalIndex.load(folder)) == 70


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
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"is damaged, files-\w+/{name} is missing"):
        RetrievalIndex.load(folder)


@pytest.mark.refusal
def test_a_file_that_faiss_cannot_read_raises_without_checksums_too(folder):
    (file,) = folder.glob("*/vectors-0.faiss")
    file.write_bytes(b"nope" + file.read_bytes()[4:])
    with pytest.raises(ValueError, match=r"faiss cannot read .*; build the index again\.$"):
        RetrievalIndex.load(folder, verify=False)


@pytest.mark.refusal
def test_damaged_manifests_raise(folder):
    manifest = folder / "manifest.json"
    complete = manifest.read_text()
    for text, message in [
        (complete[:-5], "is damaged, it is not valid JSON"),
        (complete.replace('"dim": 16', '"dim": 17'), "is damaged, its checksum is not the one written in it"),
        (re.sub('"sha256": "[0-9a-f]+"', '"sha256": null', complete, count=1), "is damaged, its checksum is not"),
        (
            complete.replace("lightning-retrieval index", "another"),
            "must be a manifest of the format '.* index', which",
        ),
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
            with pytest.raises(
                ValueError, match=rf"^RetrievalIndex: {re.escape(str(folder))}\S* is damaged, .*; build the index"
            ):
                RetrievalIndex.load(folder)
    built(rows=60).save(folder)  # in its place
    assert len(RetrievalIndex.load(folder)) == 60


@pytest.mark.refusal
def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match=r"must be written to a new folder or over an index, got .*something else"):
            built(rows=50).save(path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.refusal
@pytest.mark.parametrize("beside", ["", "files-of-2024", "files-0badf00d0"])
def test_a_folder_with_another_kind_of_manifest_is_not_replaced(beside, tmp_path):
    (tmp_path / beside).mkdir(exist_ok=True)
    for manifest in ('{"name": "extension"}', '{"files": {}, "format": "another"}', "[]", "no JSON"):
        (tmp_path / "manifest.json").write_text(manifest)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(ValueError, match="something else"):
            built(rows=50).save(tmp_path)
        assert sorted(os.listdir(tmp_path)) == before
        assert (tmp_path / "manifest.json").read_text() == manifest


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
