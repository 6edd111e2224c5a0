"""An index and embeddings that an earlier commit (d0b5ff1) has written can be read and changed: `tests/checkpoints`."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search.embedding_folder import EmbeddingFolder

EARLIER = Path(__file__).parents[2] / "checkpoints"
ROWS = torch.arange(48.0).reshape(12, 4).sin()


@pytest.mark.parametrize("mapped", [False, True])
def test_an_index(mapped, tmp_path):
    shutil.copytree(EARLIER / "index", tmp_path / "i")
    index = RetrievalIndex.load(tmp_path / "i", mapped=mapped)
    assert repr(index) == (
        "RetrievalIndex(dim=4, factory='IVF2,Flat', parameters='nprobe=2', shards=2, rows=12, recall=1.000)"
    )
    assert index.about == {"checkpoint": "é.ckpt"}
    _, ids, paths = index.search_with_paths(ROWS, 1)
    assert ids[:, 0].tolist() == list(range(20, 8, -1))
    assert paths[3] == ["é/3.jpg"]
    if not mapped:
        index.save(tmp_path / "i")
        assert len(RetrievalIndex.load(tmp_path / "i")) == 12


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_embeddings(file_format, tmp_path):
    if file_format == "parquet":
        pytest.importorskip("pyarrow")
    shutil.copytree(EARLIER / f"embeddings-{file_format}", tmp_path / "e")
    folder = EmbeddingFolder.load("me", tmp_path / "e")
    assert EmbeddingFolder.create("me", tmp_path / "e", folder.manifest).missing() == []
    first, second = folder.read(0), folder.read(1)
    np.testing.assert_array_equal(first.embeddings, ROWS[[0, 2]])
    np.testing.assert_array_equal(second.embeddings, ROWS[3:5])
    assert (first.paths, first.labels) == (["é/0.jpg", "é/2.jpg"], ["class 0", None])
    assert second.ids.tolist() == [3, 4]
    assert folder.unreadable() == [("é/1.jpg", "truncated")]
    assert folder.changed(lambda positions: "after") == [0]
