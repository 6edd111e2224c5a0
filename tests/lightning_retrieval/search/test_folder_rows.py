"""The rows of a folder are those of one tensor, whichever are asked for, and one file of them is in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search import rows as rows_of_index
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from lightning_retrieval.search.rows import FolderRows
from tests.lightning_retrieval.search.vectors import memory

SIZES = (7, 0, 7, 3)  # no image of the second file could be read


def new_folder(path, dtype="float32"):
    """A folder, and all of its rows as one tensor."""
    what = {"images_sha256": "list", "model_sha256": "model", "preparation": {}, "file_format": "npy", "dtype": dtype}
    folder = EmbeddingFolder.create("me", path, EmbeddingManifest(images=24, dim=5, shard_size=7, **what))
    parts = []
    for shard, size in enumerate(SIZES):
        values = np.random.default_rng(shard).normal(size=(size, 5)).astype(np.float32)
        ids = np.array(folder.positions(shard))[:size]
        folder.write(shard, ShardRows(ids, values, [f"{id_}.jpg" for id_ in ids], [None] * size))
        parts.append(torch.from_numpy(values.astype(dtype)).float())
    return folder, torch.cat(parts)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_those_of_one_tensor(tmp_path, dtype):
    folder, expected = new_folder(tmp_path, dtype)
    found = FolderRows(folder)
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


@pytest.mark.refusal
def test_rows_of_another_length_are_refused(tmp_path):
    rows = FolderRows(new_folder(tmp_path)[0])
    with pytest.raises(
        ValueError, match=r"^RetrievalIndex: `embeddings` must have shape \(rows, 4\), .* got \(17, 5\)"
    ):
        RetrievalIndex(4).add(rows, rows.ids)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_an_exact_index_takes_the_memory_of_its_rows_and_a_block(tmp_path, monkeypatch):
    """The peak of a build of 40 MiB of vectors in blocks of 2 MiB and files of 1 MiB."""
    monkeypatch.setattr(rows_of_index, "BLOCK", 2048)
    what = {"images_sha256": "list", "model_sha256": "model", "preparation": {}, "file_format": "npy"}
    folder = EmbeddingFolder.create("me", tmp_path, EmbeddingManifest(images=40_960, dim=256, shard_size=1024, **what))
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
