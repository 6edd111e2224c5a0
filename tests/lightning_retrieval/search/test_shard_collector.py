"""Rows that arrive in batches of any size are written in shards, each as soon as it is complete."""

import numpy as np
import pytest
import torch

from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from lightning_retrieval.search.shared_folder import ShardCollector

EMBEDDINGS = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))


def new_folder(path):
    manifest = EmbeddingManifest(10, "list", "model", {}, dim=2, shard_size=4, file_format="npy")
    return EmbeddingFolder.create("me", path, manifest)


def add(collector, positions):
    ids = list(positions)
    paths = [f"{i}.jpg" for i in ids]
    collector.add(ids, ShardRows(np.array(ids), EMBEDDINGS[ids].numpy(), paths, [None] * len(ids)))


def test_batches_need_not_fit_the_shards(tmp_path):
    folder = new_folder(tmp_path)
    collector = ShardCollector(folder)
    add(collector, range(3))
    assert folder.missing() == [0, 1, 2]
    add(collector, range(3, 5))
    assert folder.missing() == [1, 2]
    collector.add_unreadable(5, "5.jpg", "why")
    add(collector, range(6, 8))
    collector.add_unreadable(8, "8.jpg", "why")
    assert folder.missing() == [2]
    collector.add_unreadable(9, "9.jpg", "why")
    assert folder.missing() == []  # written as soon as it is complete, for it may take long until the end
    collector.finish()
    shards = [folder.read(shard) for shard in range(3)]
    assert [shard.ids.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 6, 7], []]
    assert shards[2].unreadable == [("8.jpg", "why"), ("9.jpg", "why")]
    assert torch.equal(torch.from_numpy(shards[1].embeddings), EMBEDDINGS[[4, 6, 7]])
    assert shards[1].paths == ["4.jpg", "6.jpg", "7.jpg"]


def test_shards_that_are_there_are_not_written_again(tmp_path):
    folder = new_folder(tmp_path)
    add(ShardCollector(folder), range(5))  # the first shard
    before = (tmp_path / "part-00000.npy").stat().st_mtime_ns
    collector = ShardCollector(folder)
    add(collector, range(10))
    collector.finish()
    assert folder.missing() == []
    assert (tmp_path / "part-00000.npy").stat().st_mtime_ns == before


@pytest.mark.refusal
def test_ids_must_ascend(tmp_path):
    collector = ShardCollector(new_folder(tmp_path))
    add(collector, range(2))
    with pytest.raises(ValueError, match=r"^me: images must come in the order of their ids, got 1 after 1; use a loa"):
        add(collector, [1])
    add(collector, range(2, 6))
    with pytest.raises(ValueError, match=r"^me: images must come in the order of their ids, got 0 after 5; use a loa"):
        add(collector, [0])
    assert collector.folder.missing() == [1, 2]  # the shard that was begun is not taken for complete
