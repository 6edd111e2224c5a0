"""Folders of embeddings: rows come back as they were written, a file that exists is complete, damage is named."""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from lightning_retrieval import RetrievalIndex, read_embeddings
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from lightning_retrieval.search.shared_folder import share_folder
from lightning_retrieval.search.store.rows import FolderRows
from tests.lightning_retrieval.search.store.vectors import memory

MANIFEST = EmbeddingManifest(
    images=5, images_sha256="list", model_sha256="model", preparation={"transform": "plain"}, dim=3, shard_size=2
)


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


def begun(path):
    """A folder without its second shard; the rows of the first."""
    folder = EmbeddingFolder.create(path / "e", MANIFEST)
    written = rows_of(folder, 0, unreadable=(1,))
    folder.write(0, written)
    folder.write(2, rows_of(folder, 2))
    return folder, written


def test_rows_come_back_exactly(tmp_path):
    folder, written = begun(tmp_path)
    folder.write(1, rows_of(folder, 1, unreadable=(2, 3)))
    loaded = EmbeddingFolder.load(tmp_path / "e")
    assert loaded.manifest == folder.manifest
    assert_same(loaded.read(0), written)
    assert_same(loaded.read(2), rows_of(folder, 2))
    assert loaded.read(1).embeddings.shape == (0, 3)
    assert loaded.unreadable() == [("1.jpg", "why\n"), ("2.jpg", "why\n"), ("3.jpg", "why\n")]
    stored = read_embeddings(str(tmp_path / "e"))
    np.testing.assert_array_equal(
        stored.embeddings, np.concatenate([written.embeddings, rows_of(folder, 2).embeddings])
    )
    assert (stored.ids.tolist(), stored.labels) == ([0, 4], ["class 0", None])
    assert stored.paths == ["ä 0.jpg", "ä 4.jpg"]


def test_a_failed_write_leaves_no_shard_and_missing_shards_are_those_without_a_file(tmp_path, monkeypatch):
    folder, _ = begun(tmp_path)
    assert [list(folder.positions(shard)) for shard in range(3)] == [[0, 1], [2, 3], [4]]
    assert EmbeddingFolder.create(tmp_path / "e", folder.manifest).missing() == [1]
    with pytest.raises(ValueError, match="1 of its 3 shards"):
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
    with folder.lock(), pytest.raises(ValueError, match="another process"):
        folder.lock().__enter__()
    assert not list(folder.path.glob(".*"))


def test_other_readers_see_one_table(tmp_path):
    folder, _ = begun(tmp_path)
    folder.write(1, rows_of(folder, 1))
    with folder.lock():
        table = pyarrow.parquet.read_table(folder.path)
    assert table.column("id").to_pylist() == [0, 2, 3, 4]
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[3]"
    assert table.column("label").to_pylist() == ["class 0", "class 2", "class 3", None]


def test_a_folder_of_other_embeddings_is_not_continued(tmp_path):
    EmbeddingFolder.create(tmp_path, MANIFEST)
    EmbeddingFolder.create(tmp_path, dataclasses.replace(MANIFEST, about={"checkpoint": "moved.ckpt"}))
    for changed in (
        {"model_sha256": "b"},
        {"preparation": {"transform": "roadmap"}},
        {"images_sha256": "b"},
        {"images": 6},
        {"shard_size": 3},
        {"dim": 4},
        {"dtype": "float16"},
    ):
        with pytest.raises(ValueError, match="`output`"):
            EmbeddingFolder.create(tmp_path, dataclasses.replace(MANIFEST, **changed))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="something else"):
            EmbeddingFolder.create(path, MANIFEST)
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(FileNotFoundError, match=r"_manifest\.json"):
        EmbeddingFolder.load(tmp_path)


def test_a_damaged_or_emptied_shard_is_named(tmp_path):
    folder, written = begun(tmp_path)
    folder.read(0)
    np.testing.assert_array_equal(folder.read_again(0), written.embeddings)
    file = tmp_path / "e" / "part-00000.parquet"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(written.embeddings.tobytes()[:4])] ^= 1
    file.write_bytes(damaged)
    os.utime(file, (0, 0))  # also where the clock of the file system is coarse
    with pytest.raises(ValueError, match=r"part-00000\.\w+ must not change while"):
        folder.read_again(0)
    with pytest.raises(ValueError, match=r"part-00000\.\w+ is damaged"):
        folder.read(0)
    for file in folder.path.glob("part-00002.*"):
        content = file.read_bytes()
        file.write_bytes(b"")
        for use in (lambda: folder.read(2), folder.unreadable, lambda: folder.changed(lambda positions: "")):
            with pytest.raises(ValueError, match=r"part-00002\.\w+ is damaged"):
                use()
        file.write_bytes(content)
    assert_same(folder.read(2), rows_of(folder, 2))


def test_every_part_of_a_manifest_counts(tmp_path):
    about = {"checkpoint": "é\udcff.ckpt", "scale": 1e-05}
    manifest = dataclasses.replace(MANIFEST, about=about, preparation={"a": [1.5, None]})
    EmbeddingFolder.create(tmp_path, manifest)
    assert EmbeddingFolder.create(tmp_path, manifest).manifest == manifest
    file = tmp_path / "_manifest.json"
    complete = file.read_bytes()
    for bit in range(0, 8 * len(complete), 23):
        damaged = bytearray(complete)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with suppress(ValueError):
            if json.loads(damaged) == json.loads(complete):  # 1e-05 is 1E-05
                continue
        with pytest.raises(ValueError, match=str(tmp_path)):
            EmbeddingFolder.load(tmp_path)


SIZES = (1000, 0, 1000, 1000, 1000, 1000, 300)  # no image of the second file could be read


@pytest.mark.parametrize(("factory", "dtype"), [("Flat", "float32"), ("IVF2,Flat", "float16")])
def test_an_index_of_a_folder_is_that_of_one_tensor(tmp_path, factory, dtype):
    """Of files that do not divide the rows as the index does when it reads them."""
    manifest = dataclasses.replace(MANIFEST, images=7000, dim=5, shard_size=1000, dtype=dtype)
    folder = EmbeddingFolder.create(tmp_path, manifest)
    parts, ids = [], []
    for shard, size in enumerate(SIZES):
        values = np.random.default_rng(shard).normal(size=(size, 5)).astype(np.float32)
        ids.append(np.array(folder.positions(shard))[:size])
        folder.write(shard, ShardRows(ids[-1], values, [f"{id_}.jpg" for id_ in ids[-1]], [None] * size))
        parts.append(torch.from_numpy(values.astype(dtype)).float())
    rows = FolderRows(folder)
    found, expected = RetrievalIndex(5, factory), RetrievalIndex(5, factory)
    found.add(rows, rows.ids, rows.paths)
    expected.add(torch.cat(parts), torch.from_numpy(np.concatenate(ids)))
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.embeddings(), expected.embeddings())
    assert found.paths(found.ids[::700]) == [f"{id_}.jpg" for id_ in found.ids[::700].tolist()]
    assert found.recall == expected.recall


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_an_exact_index_takes_the_memory_of_its_rows_and_a_block(tmp_path):
    """The peak of a build of 100 MiB of vectors in blocks of 32 MiB and files of 4 MiB."""
    manifest = dataclasses.replace(MANIFEST, images=204_800, dim=128, shard_size=8192)
    folder = EmbeddingFolder.create(tmp_path, manifest)
    values = np.random.default_rng(0).normal(size=(8192, 128)).astype(np.float32)
    for shard in range(len(folder)):
        ids = np.array(folder.positions(shard))
        folder.write(shard, ShardRows(ids, values, [f"a/folder/{id_:09d}.jpg" for id_ in ids], [None] * len(ids)))
    RetrievalIndex(128).add(torch.randn(4096, 128))  # allocates what the first build of a process needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory("VmRSS")
    rows = FolderRows(folder)
    index = RetrievalIndex(128)
    index.add(rows, rows.ids, rows.paths)
    added = (memory("VmHWM") - before) / 2**20
    assert len(index) == 204_800
    assert added < 185  # 220 if faiss doubled its memory whenever it is full


SHARED = dataclasses.replace(MANIFEST, images=9, dim=0)


def shared(path, **changed):
    return share_folder(path, lambda: dataclasses.replace(SHARED, **changed), lambda positions: "")


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
        share_folder(folder / "e", fail_on_last_rank, lambda positions: "")
    after = shared(folder / "e")  # no lock is left
    after.close()
    return shards, after.missing, errors


def test_processes_share_a_folder_and_its_errors(tmp_path, run_processes):
    begun = EmbeddingFolder.create(tmp_path / "e", dataclasses.replace(SHARED, dim=3))
    begun.write(1, rows_of(begun, 1))
    EmbeddingFolder.create(tmp_path / "other", dataclasses.replace(SHARED, dim=3, model_sha256="b"))
    results = run_processes(share_on_rank, 2, tmp_path)
    assert [shards for shards, _, _ in results] == [[0, 3], [2, 4]]
    assert [missing for _, missing, _ in results] == [[0, 2, 3, 4]] * 2
    assert results[0][2] == results[1][2]
    named = ["another process", "list of images", "another model", "preparation", "which rank 1 does not see", "other"]
    assert [word for word, error in zip(named, results[0][2], strict=True) if word not in error] == []
