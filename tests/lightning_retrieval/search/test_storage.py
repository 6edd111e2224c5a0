"""A folder stays complete if a save fails, damage is found, and nothing but an index is replaced."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import faiss
import pytest

from lightning_retrieval import RetrievalIndex
from lightning_retrieval import files as files_module
from lightning_retrieval.search import index as index_module
from lightning_retrieval.search import storage
from tests.lightning_retrieval.search.vectors import built, vectors

REPOSITORY = Path(__file__).parents[3]


def test_a_save_that_fails_leaves_the_old_index(tmp_path, monkeypatch):
    built(rows=50).save(tmp_path / "index")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    real, written = faiss.write_index, []

    def fails(part, path):
        written.append(path)
        if len(written) == 2:
            raise RuntimeError("no space left")
        real(part, path)

    monkeypatch.setattr(faiss, "write_index", fails)
    message = r"^RetrievalIndex: .*vectors-1\.faiss cannot be written \(no space left\); .* is unchanged"
    with pytest.raises(OSError, match=message):
        built(shards=2).save(tmp_path / "index")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert len(RetrievalIndex.load(tmp_path / "index")) == 50


SAVE_WITH_A_LIMIT = """
import resource, signal, sys
from tests.lightning_retrieval.search.vectors import built

index = built(sys.argv[2], rows=120)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    index.save(sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [500, 2048, 5000])  # the last write of ids, of paths, and of vectors fails
@pytest.mark.parametrize("factory", ["Flat", "IVF2,Flat"])
def test_a_full_disk_leaves_the_old_index(factory, limit, tmp_path):
    built(rows=50).save(tmp_path / "index")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    command = [sys.executable, "-c", SAVE_WITH_A_LIMIT, str(tmp_path / "index"), factory, str(limit)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    message = r"RetrievalIndex: .* cannot be written \(File too large\); what was saved there before is unchanged.*\n"
    assert re.fullmatch(message, done.stdout)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert len(RetrievalIndex.load(tmp_path / "index")) == 50


def test_a_file_that_differs_from_what_was_written_is_not_sealed(tmp_path, monkeypatch):
    built(rows=50).save(tmp_path)
    real = files_module.flush

    def cuts(path):
        real(path)
        if path.suffix == ".faiss":
            os.truncate(path, path.stat().st_size - 1)

    monkeypatch.setattr(files_module, "flush", cuts)
    with pytest.raises(OSError, match=r"vectors-0\.faiss was not written completely; .* is unchanged"):
        built(rows=60).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 50


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("when", ["files are listed", "vectors are read"])
def test_a_reader_takes_the_index_that_replaces_the_one_it_opens(when, mapped, tmp_path, monkeypatch):
    built(rows=50).save(tmp_path)
    module, name = {
        "files are listed": (storage, "_check_files"),
        "vectors are read": (index_module, "read_shard"),
    }[when]
    real, saved = getattr(module, name), []

    def saves_first(*args):
        if len(saved) < 3:  # three saves meet this reader
            saved.append(60 + len(saved))
            built(rows=saved[-1]).save(tmp_path)
        return real(*args)

    monkeypatch.setattr(module, name, saves_first)
    index = RetrievalIndex.load(tmp_path, mapped=mapped)
    assert (saved, len(index)) == ([60, 61, 62], 62)
    assert index.search(vectors(1), 1)[1].tolist() == [[1000]]


NAMES = ["files", "lock", "manifest.json"]


def test_an_incomplete_first_save_is_replaced(tmp_path):
    (tmp_path / "files-0badf00d").mkdir()
    (tmp_path / "files-0badf00d" / "vectors-0.faiss").write_bytes(b"half")
    (tmp_path / "lock").touch()
    built(rows=50).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 50
    assert len(os.listdir(tmp_path)) == 3
    (tmp_path / "manifest.json").write_text("damaged")
    built(rows=60).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 60


def test_a_save_deletes_what_a_killed_process_left(tmp_path):
    built(rows=50).save(tmp_path / "index")
    (tmp_path / "index" / "files-0badf00d").mkdir()
    mapped = RetrievalIndex.load(tmp_path / "index", mapped=True)
    built(rows=60).save(tmp_path / "index")
    assert len(RetrievalIndex.load(tmp_path / "index")) == 60
    assert sorted(re.sub(r"-\w{8}$", "", name) for name in os.listdir(tmp_path / "index")) == NAMES
    assert mapped.search(vectors(1), 1)[1].tolist() == [
        [1000]
    ]  # a process that has the old files open can still read them


FILES = ["vectors-0.faiss", "vectors-1.faiss", "ids.npy", "paths.npy", "path-ends.npy"]


@pytest.mark.refusal
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_raise(name, tmp_path):
    built(rows=50, shards=2).save(tmp_path)
    (file,) = tmp_path.glob(f"*/{name}")
    whole = file.read_bytes()
    for position in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"RetrievalIndex: .*{name} is damaged, its checksum .*; build the index"):
            RetrievalIndex.load(tmp_path)
    file.write_bytes(whole[:-1])
    short = rf"{name} is damaged, it has {len(whole) - 1} bytes instead of {len(whole)}; build the index again\.$"
    with pytest.raises(ValueError, match=short):
        RetrievalIndex.load(tmp_path, verify=False)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"is damaged, files-\w+/{name} is missing"):
        RetrievalIndex.load(tmp_path)


@pytest.mark.refusal
def test_damaged_manifests_raise(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"RetrievalIndex: the index must be a folder with manifest\.json in it"
    ):
        RetrievalIndex.load(tmp_path)
    built(rows=50).save(tmp_path)
    manifest = tmp_path / "manifest.json"
    whole = manifest.read_text()
    for text, message in [
        (whole[:-5], "is damaged, it is not valid JSON"),
        (whole.replace('"dim": 16', '"dim": 17'), "is damaged, its checksum is not the one written in it"),
        (whole.replace("lightning-retrieval index", "another"), "is not the manifest of an index"),
        (json.dumps([1]), "is not the manifest of an index"),
        (whole.replace('"version": 1', '"version": 2'), "has format version 2, but this release reads version 1"),
    ]:
        assert text != whole
        manifest.write_text(text)
        with pytest.raises(ValueError, match=message):
            RetrievalIndex.load(tmp_path)


def forge(manifest, **changes):
    """Change the settings or the files of a manifest, and renew its digest; None removes a value."""
    content = json.loads(manifest.read_text())
    for name, value in changes.items():
        place = content if name in content else content["settings"]
        place[name] = value
        if value is None:
            del place[name]
    content["sha256"] = storage._digest({"files": content.get("files"), "settings": content.get("settings")})
    manifest.write_text(json.dumps(content))


@pytest.mark.refusal
@pytest.mark.parametrize(
    "changes",
    [
        *({"dim": value} for value in (8, 17, 10**12, "16", True, [16], None)),
        *({"recall": value} for value in ("high", 2, None)),
        *({"shards": value} for value in (1, 3, 0, -1, 10**12, "2", None)),
        *({"about": value} for value in ("text", [1])),
        *({"factory": value} for value in (7, "Flatt", None)),
        *({"parameters": value} for value in (7, "nprobe=0", "size=3", None)),
        *({"settings": value} for value in ([], "text", 7, {})),
        *(
            {"files": value}
            for value in ([], "text", {"../a/ids.npy": {"bytes": 1, "sha256": ""}}, {"files-0badf00d/a": 1})
        ),
        {"more": 1},
    ],
)
def test_forged_manifests_raise(changes, tmp_path):
    built(rows=50, shards=2).save(tmp_path)
    forge(tmp_path / "manifest.json", **changes)
    with pytest.raises(
        ValueError, match=rf"^RetrievalIndex: {re.escape(str(tmp_path))}\S* is damaged, .*; build the index"
    ):
        RetrievalIndex.load(tmp_path)
    built(rows=60).save(tmp_path)  # in its place
    assert len(RetrievalIndex.load(tmp_path)) == 60


@pytest.mark.refusal
@pytest.mark.parametrize("depth", [600, 100_000])
def test_nested_manifests_raise(depth, tmp_path):
    built(rows=50).save(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"about": {}', '"about": ' + "[" * depth + "]" * depth))
    with pytest.raises(ValueError, match=r"^RetrievalIndex: .*manifest\.json is damaged, .*; build the index again\.$"):
        RetrievalIndex.load(tmp_path)
    with pytest.raises(
        ValueError, match=r"^RetrievalIndex: `folder` must have names of at most 255 bytes, and 4095 in"
    ):
        RetrievalIndex.load(tmp_path / ("n" * 500))


@pytest.mark.refusal
def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=r"must be written to a new folder or over an index, got .*something else"):
        built(rows=50).save(tmp_path)
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(tmp_path / "thesis.tex")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.refusal
@pytest.mark.parametrize("manifest", ['{"name": "extension"}', '{"files": {}, "format": "another"}', "[]", "no JSON"])
@pytest.mark.parametrize("beside", ["", "files-of-2024", "files-0badf00d0"])
def test_a_folder_with_another_kind_of_manifest_is_not_replaced(manifest, beside, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / beside).mkdir(exist_ok=True)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "manifest.json").read_text() == manifest


@pytest.mark.refusal
def test_other_files_beside_an_index_are_kept(tmp_path):
    built(rows=50).save(tmp_path)
    for name in ("files-of-2024", "files-", "files-0badf00d0"):
        (tmp_path / name).mkdir()
    (tmp_path / "files-0badf00d").symlink_to(tmp_path / "files-of-2024", target_is_directory=True)
    before = {name for name in os.listdir(tmp_path) if (tmp_path / name / "ids.npy").exists() is False}
    built(rows=60).save(tmp_path)
    assert before <= set(os.listdir(tmp_path))
    assert len(os.listdir(tmp_path)) == len(before) + 1
    (tmp_path / "manifest.json").write_text("damaged")
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(tmp_path)
