"""Folders of embeddings: rows come back as they were written, a file that exists is complete, damage is named.

`FolderRows` are those of one tensor, whichever are asked for, and one file of them is in memory.
"""

import dataclasses
import json
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from lightning_retrieval import RetrievalIndex, progress
from lightning_retrieval.search.embedding_folder import (
    FORMAT,
    EmbeddingFolder,
    EmbeddingManifest,
    ShardRows,
    digest_of_list,
)
from lightning_retrieval.search.shared_folder import ShardCollector, share_folder
from lightning_retrieval.search.store import rows as rows_of_index
from lightning_retrieval.search.store.rows import FolderRows
from tests.lightning_retrieval.search.store.vectors import memory

MANIFEST = EmbeddingManifest(
    images=5, images_sha256="list", model_sha256="model", preparation={"transform": "plain"}, dim=3, shard_size=2
)
INVALID = r"^/.* (is damaged, |must be (a|the) manifest of |has format version )"
FORMATS = pytest.mark.parametrize("file_format", ["parquet", "npy"])


def rows_of(folder, shard, unreadable=()):
    ids = np.array([position for position in folder.positions(shard) if position not in unreadable], dtype=np.int64)
    embeddings = np.random.default_rng(shard).normal(size=(len(ids), 3)).astype(np.float32)
    paths = [f"ä {position}.jpg" for position in ids]
    labels = [None if position == 4 else f"class {position}" for position in ids.tolist()]
    return ShardRows(ids, embeddings, paths, labels, [(f"{position}.jpg", "why\n") for position in unreadable])


def assert_same(found, expected):
    np.testing.assert_array_equal(found.embeddings, expected.embeddings)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert found.embeddings.dtype == np.float32
    assert (found.paths, found.labels, found.unreadable) == (expected.paths, expected.labels, expected.unreadable)


def begun(path, file_format):
    """A folder without its second shard; the rows of the first."""
    folder = EmbeddingFolder.create(path / "e", dataclasses.replace(MANIFEST, file_format=file_format))
    written = rows_of(folder, 0, unreadable=(1,))
    folder.write(0, written)
    folder.write(2, rows_of(folder, 2))
    return folder, written


@FORMATS
def test_rows_come_back_exactly(tmp_path, file_format):
    folder, written = begun(tmp_path, file_format)
    folder.write(1, rows_of(folder, 1, unreadable=(2, 3)))
    loaded = EmbeddingFolder.load(tmp_path / "e")
    assert loaded.manifest == folder.manifest
    assert_same(loaded.read(0), written)
    assert_same(loaded.read(2), rows_of(folder, 2))
    assert loaded.read(1).embeddings.shape == (0, 3)
    assert loaded.unreadable() == [("1.jpg", "why\n"), ("2.jpg", "why\n"), ("3.jpg", "why\n")]


@FORMATS
def test_a_failed_write_leaves_no_shard_and_missing_shards_are_those_without_a_file(tmp_path, file_format, monkeypatch):
    folder, _ = begun(tmp_path, file_format)
    assert [list(folder.positions(shard)) for shard in range(3)] == [[0, 1], [2, 3], [4]]
    assert EmbeddingFolder.create(tmp_path / "e", folder.manifest).missing() == [1]
    with pytest.raises(ValueError, match=r"^/.* but 1 of its 3 shards are missing \(part-00001\.\w+\)"):
        EmbeddingFolder.load(tmp_path / "e")

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    rows = rows_of(folder, 1)
    with pytest.raises(KeyboardInterrupt):
        folder.write(1, rows)
    assert folder.missing() == [1]
    assert not list(folder.path.glob(".*"))
    (folder.path / ".0123456789abcdef.tmp").touch()  # of a process that was killed
    with folder.lock(), pytest.raises(ValueError, match=r"^/.* is being written to by another process; wait"):
        folder.lock().__enter__()
    assert not list(folder.path.glob(".*"))


@pytest.mark.refusal
def test_numbers_that_are_too_large_for_the_type_raise(tmp_path):
    manifest = dataclasses.replace(MANIFEST, file_format="npy", dtype="float16")
    folder = EmbeddingFolder.create(tmp_path, manifest)
    rows = rows_of(folder, 0)
    with pytest.raises(ValueError, match=r"^`dtype` must be .*, got float16 for numbers up to .*; use float32\.$"):
        folder.write(0, dataclasses.replace(rows, embeddings=rows.embeddings * 1e6))
    assert folder.missing() == [0, 1, 2]


def test_other_readers_see_one_table(tmp_path):
    folder, _ = begun(tmp_path, "parquet")
    folder.write(1, rows_of(folder, 1))
    with folder.lock():
        table = pyarrow.parquet.read_table(folder.path)
    assert table.column("id").to_pylist() == [0, 2, 3, 4]
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[3]"
    assert table.column("label").to_pylist() == ["class 0", "class 2", "class 3", None]


@pytest.mark.refusal
def test_a_folder_of_something_else_is_not_continued(tmp_path):
    EmbeddingFolder.create(tmp_path, MANIFEST)
    EmbeddingFolder.create(tmp_path, dataclasses.replace(MANIFEST, about={"checkpoint": "moved.ckpt"}))
    for changed, what in [
        ({"model_sha256": "b"}, "of another model;"),
        ({"preparation": {"transform": "roadmap"}}, "of images that were prepared otherwise "),
        ({"images_sha256": "b"}, r"of another list of images \(5 then, 5 now\)"),
        ({"images": 6}, r"of another list of images \(5 then, 6 now\)"),
        ({"shard_size": 3}, "with shard_size=2, not 3"),
        ({"file_format": "npy"}, "with file_format=parquet, not npy"),
        ({"dim": 4}, "with dim=3, not 4"),
    ]:
        with pytest.raises(ValueError, match=rf"^`output` must be a new folder or .* holds embeddings {what}"):
            EmbeddingFolder.create(tmp_path, dataclasses.replace(MANIFEST, **changed))


@pytest.mark.refusal
def test_folders_that_hold_no_embeddings_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match=r"^`output` must be a new folder, .* which is something else; give"):
            EmbeddingFolder.create(path, MANIFEST)
    with pytest.raises(FileNotFoundError, match=r"^the embeddings must be a folder with _manifest.json in it, got"):
        EmbeddingFolder.load(tmp_path)


@pytest.mark.refusal
@FORMATS
def test_a_shard_that_is_read_again_must_not_have_changed(tmp_path, file_format):
    folder, written = begun(tmp_path, file_format)
    folder.read(0)
    again = folder.read_again(0)
    np.testing.assert_array_equal(again, written.embeddings)
    assert (again.dtype, again.flags.writeable) == (np.float32, True)
    file = folder.path / f"part-00000.{file_format}"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(written.embeddings.tobytes()[:4])] ^= 1
    file.write_bytes(damaged)
    os.utime(file, (0, 0))  # also where the clock of the file system is coarse
    with pytest.raises(ValueError, match=r"^/.*part-00000\.\w+ must not change while .*; run the command again"):
        folder.read_again(0)
    file.unlink()
    with pytest.raises(ValueError, match="removed or replaced"):
        folder.read_again(0)


@pytest.mark.refusal
@FORMATS
def test_a_damaged_or_emptied_shard_is_named(tmp_path, file_format):
    folder, written = begun(tmp_path, file_format)
    file = tmp_path / "e" / f"part-00000.{file_format}"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(written.embeddings.tobytes()[:4])] ^= 1
    file.write_bytes(damaged)
    message = r"^/.*part-0000\d\.\w+ is damaged \(.+\); delete it, and run the command"
    with pytest.raises(ValueError, match=message):
        folder.read(0)
    for file in folder.path.glob("part-00002.*"):
        content = file.read_bytes()
        file.write_bytes(b"")
        for use in (lambda: folder.read(2), folder.unreadable, lambda: folder.changed(lambda positions: "")):
            with pytest.raises(ValueError, match=message):
                use()
        file.write_bytes(content)
    assert_same(folder.read(2), rows_of(folder, 2))


def test_the_digest_of_a_list_depends_on_order_paths_labels_and_boxes():
    lists = [[["a", None], ["b", "x"]], [["b", "x"], ["a", None]], [["a", "x"], ["b", None]], [["a", None], ["b", [1]]]]
    assert len({digest_of_list(fields) for fields in lists}) == 4


@pytest.mark.refusal
def test_every_bit_of_a_manifest_counts(tmp_path):
    about = {"checkpoint": "é\udcff.ckpt", "scale": 1e-05}
    manifest = dataclasses.replace(MANIFEST, about=about, preparation={"a": [1.5, None]})
    EmbeddingFolder.create(tmp_path, manifest)
    file = tmp_path / "_manifest.json"
    complete = file.read_bytes()
    assert EmbeddingFolder(tmp_path, manifest).check_begun()
    for bit in range(0, 8 * len(complete), 7):  # in each byte
        damaged = bytearray(complete)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with suppress(ValueError):
            if json.loads(damaged) == json.loads(complete):  # 1e-05 is 1E-05
                continue
        with pytest.raises(ValueError, match=INVALID):
            EmbeddingFolder.load(tmp_path)


@pytest.mark.refusal
def test_a_forged_manifest_is_invalid(tmp_path):
    EmbeddingFolder.create(tmp_path, MANIFEST)
    file = tmp_path / "_manifest.json"
    values = FORMAT.read(tmp_path)
    changes = [{name: 0} for name in ("shard_size", "dtype", "about", "model_sha256")]
    forged = [FORMAT.encode({**values, **change}) for change in (*changes, {"images": "5"})]
    other_version = b'{"format": "lightning-retrieval embeddings", "version": 7}'
    for content in (b"{", b"[1]", b"[" * 100_000, other_version, *forged):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=INVALID):
            EmbeddingFolder.load(tmp_path)


def test_a_manifest_of_an_earlier_release_opens(tmp_path):
    folder, written = begun(tmp_path, "npy")
    for file in (folder.path / "_manifest.json", *folder.path.glob("part-*.json")):
        content = json.loads(file.read_text())
        content.pop("image_files", None)
        if file.name == "_manifest.json":
            del content["sha256"]
        file.write_text(json.dumps(content))
    again = EmbeddingFolder.create(folder.path, folder.manifest)
    assert (again.missing(), again.changed(lambda positions: "another")) == ([1], [])
    assert_same(again.read(0), written)


SIZES = (7, 0, 7, 3)  # no image of the second file could be read


def new_folder(path, dtype="float32"):
    """A folder, and all of its rows as one tensor."""
    manifest = dataclasses.replace(MANIFEST, images=24, dim=5, shard_size=7, file_format="npy", dtype=dtype)
    folder = EmbeddingFolder.create(path, manifest)
    parts = []
    for shard, size in enumerate(SIZES):
        values = np.random.default_rng(shard).normal(size=(size, 5)).astype(np.float32)
        ids = np.array(folder.positions(shard))[:size]
        folder.write(shard, ShardRows(ids, values, [f"{id_}.jpg" for id_ in ids], [None] * size))
        parts.append(torch.from_numpy(values.astype(dtype)).float())
    return folder, torch.cat(parts)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_those_of_one_tensor(tmp_path, dtype, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BEFORE_LINES", 0)
    folder, expected = new_folder(tmp_path, dtype)
    found = FolderRows(folder)
    assert f"Reading embeddings: {len(folder)} of {len(folder)} files (100 %)" in capsys.readouterr().err
    assert (len(found), found.shape) == (17, (17, 5))
    assert found.ids.tolist() == [*range(7), *range(14, 24)]
    assert list(found.paths) == [f"{id_}.jpg" for id_ in found.ids.tolist()]
    for part in (slice(0, 17), slice(5, 9), slice(7, 7), slice(3, 100)):
        assert torch.equal(found[part], expected[part])
    some = torch.tensor([0, 6, 7, 13, 14, 16])
    assert torch.equal(found[some], expected[some])
    assert found[some].dtype == torch.float32


@pytest.mark.parametrize("factory", ["Flat", "IVF2,Flat"])
def test_an_index_of_them_is_that_of_the_tensor(tmp_path, factory, monkeypatch):
    monkeypatch.setattr(rows_of_index, "BLOCK", 4)
    folder, tensor = new_folder(tmp_path)
    rows = FolderRows(folder)
    found, expected = RetrievalIndex(5, factory), RetrievalIndex(5, factory)
    found.add(rows, rows.ids, rows.paths)
    expected.add(tensor, rows.ids, list(rows.paths))
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.embeddings(), expected.embeddings())
    assert found.paths(found.ids) == expected.paths(found.ids)
    assert found.recall == expected.recall
    with pytest.raises(ValueError, match=r"^RetrievalIndex: `embeddings` must .* \(rows, 4\), .* got \(17, 5\)"):
        RetrievalIndex(4).add(rows, rows.ids)


def test_a_row_that_is_not_finite_is_named(tmp_path):
    folder, _ = new_folder(tmp_path)
    rows = folder.read(3)
    rows.embeddings[1, 2] = np.nan
    folder.write(3, rows)
    bad = FolderRows(folder)
    with pytest.raises(ValueError, match=r"`embeddings` must be finite, .* 1 of 17 rows: id 22 '22\.jpg'"):
        RetrievalIndex(5).add(bad, bad.ids, bad.paths)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_an_exact_index_takes_the_memory_of_its_rows_and_a_block(tmp_path, monkeypatch):
    """The peak of a build of 40 MiB of vectors in blocks of 2 MiB and files of 1 MiB."""
    monkeypatch.setattr(rows_of_index, "BLOCK", 2048)
    manifest = dataclasses.replace(MANIFEST, images=40_960, dim=256, shard_size=1024, file_format="npy")
    folder = EmbeddingFolder.create(tmp_path, manifest)
    for shard in range(len(folder)):
        values = np.random.default_rng(shard).normal(size=(1024, 256)).astype(np.float32)
        ids = np.array(folder.positions(shard))
        folder.write(shard, ShardRows(ids, values, [f"a/folder/{id_:09d}.jpg" for id_ in ids], [None] * len(ids)))
    RetrievalIndex(256).add(torch.randn(4096, 256))  # allocates what the first build of a process needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory("VmRSS")
    rows = FolderRows(folder)
    index = RetrievalIndex(256)
    index.add(rows, rows.ids, rows.paths)
    added = (memory("VmHWM") - before) / 2**20
    assert len(index) == 40_960
    assert added < 70  # 81 if faiss doubled its memory whenever it is full


SHARED = dataclasses.replace(MANIFEST, images=9, dim=0, file_format="npy")


def shared(path, **changed):
    return share_folder(path, lambda: dataclasses.replace(SHARED, **changed))


def error_of(path, **changed):
    with pytest.raises(ValueError, match=r"^(`output` must|/.* is being|all processes must) ") as error:
        shared(path, **changed)
    return str(error.value)


def share_on_rank(rank, world_size, folder):
    first = shared(folder / "e", about={"images": f"where rank {rank} has them"})
    shards = first.shards
    locked = error_of(folder / "e")
    first.close()
    errors = [
        locked,
        error_of(folder / "e", images_sha256=f"list {rank}", images=9 + rank),
        error_of(folder / "e", model_sha256=f"model {rank}"),
        error_of(folder / "e", preparation={"rank": rank}),
        error_of(folder / f"local-{rank}"),
        error_of(folder / "other"),
    ]

    def fail_on_last_rank():
        if rank == world_size - 1:
            raise OSError("me: the disk of the last rank is gone.")
        return SHARED

    with pytest.raises(OSError, match=r"^me: the disk of the last rank is gone\.$"):
        share_folder(folder / "e", fail_on_last_rank)
    after = shared(folder / "e")  # no lock is left
    after.close()
    return shards, after.missing, errors


def test_processes_share_a_folder_and_its_errors(tmp_path, run_processes):
    EmbeddingFolder.create(tmp_path / "e", dataclasses.replace(SHARED, dim=3))
    (tmp_path / "e" / "part-00001.npy").touch()
    EmbeddingFolder.create(tmp_path / "other", dataclasses.replace(SHARED, dim=3, model_sha256="b"))
    results = run_processes(share_on_rank, 2, tmp_path)
    assert [shards for shards, _, _ in results] == [[0, 3], [2, 4]]
    assert [missing for _, missing, _ in results] == [[0, 2, 3, 4]] * 2
    assert results[0][2] == results[1][2]
    patterns = [
        r"is being written to by another process; wait",
        r"but rank 1 has another list of images \(9 on rank 0, 10 on rank 1\); give each the same files\.$",
        r"but rank 1 has another model; give",
        r"but rank 1 prepares images in another way; give",
        r"`output` must be on a file system that all processes share, got .*, which rank 1 does not see",
        r"which holds embeddings of another model; give another path\.$",
    ]
    for pattern, error in zip(patterns, results[0][2], strict=True):
        assert re.search(pattern, error), error


@pytest.mark.parametrize("complete", [range(0), range(4), range(5)])
def test_one_process_fills_all_that_is_missing(tmp_path, complete):
    (tmp_path / "e").mkdir()
    folder = EmbeddingFolder.create(tmp_path / "e", dataclasses.replace(SHARED, dim=3))
    for number in complete:
        (tmp_path / "e" / f"part-{number:05d}.npy").touch()
    share = shared(tmp_path / "e")
    assert share.shards == [number for number in range(5) if number not in complete]
    assert list(share.ranges) == [folder.positions(number) for number in share.shards]
    assert share.every_rank_has_images == (len(complete) < 5)
    assert share.begin(3).manifest == folder.manifest
    share.close()


EMBEDDINGS = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))


def folder_to_collect(path):
    return EmbeddingFolder.create(path, dataclasses.replace(SHARED, images=10, dim=2, shard_size=4))


def collect(collector, positions):
    ids = list(positions)
    paths = [f"{i}.jpg" for i in ids]
    collector.add(ids, ShardRows(np.array(ids), EMBEDDINGS[ids].numpy(), paths, [None] * len(ids)))


def test_batches_need_not_fit_the_shards(tmp_path):
    folder = folder_to_collect(tmp_path)
    collector = ShardCollector(folder)
    collect(collector, range(3))
    assert folder.missing() == [0, 1, 2]
    collect(collector, range(3, 5))
    assert folder.missing() == [1, 2]
    collector.add_unreadable(5, "5.jpg", "why")
    collect(collector, range(6, 8))
    collector.add_unreadable(8, "8.jpg", "why")
    assert folder.missing() == [2]
    collector.add_unreadable(9, "9.jpg", "why")
    assert folder.missing() == []  # written as soon as it is complete, for it may take long until the end
    collector.finish()
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("part-*"))]
    collect(ShardCollector(folder), range(10))  # shards that are there are not written again
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("part-*"))] == before
    shards = [folder.read(shard) for shard in range(3)]
    assert [shard.ids.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 6, 7], []]
    assert shards[2].unreadable == [("8.jpg", "why"), ("9.jpg", "why")]
    assert torch.equal(torch.from_numpy(shards[1].embeddings), EMBEDDINGS[[4, 6, 7]])
    assert shards[1].paths == ["4.jpg", "6.jpg", "7.jpg"]


@pytest.mark.refusal
def test_ids_must_ascend(tmp_path):
    collector = ShardCollector(folder_to_collect(tmp_path))
    collect(collector, range(2))
    with pytest.raises(ValueError, match=r"^images must come in the order of their ids, got 1 after 1; use a loa"):
        collect(collector, [1])
    assert collector.folder.missing() == [0, 1, 2]  # the shard that was begun is not taken for complete
