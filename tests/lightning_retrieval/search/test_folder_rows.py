"""The rows of a folder are those of one tensor, whichever are asked for, and one file of them is in memory."""

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search import rows as rows_of_index
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest
from lightning_retrieval.search.embedding_shards import ShardRows
from lightning_retrieval.search.folder_rows import FolderRows

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
