"""Processes that fill one folder: each shard is written once, when it is complete; a mistake of one raises in all."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from lightning_retrieval.search.shared_folder import ShardCollector, share_folder

MANIFEST = EmbeddingManifest(
    images=9, images_sha256="list", model_sha256="model", preparation={}, dim=0, shard_size=2, file_format="npy"
)


def shared(path, **changed):
    return share_folder("me", path, lambda: dataclasses.replace(MANIFEST, **changed))


def error_of(path, **changed):
    with pytest.raises(ValueError, match=r"^me: ") as error:
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
        return MANIFEST

    with pytest.raises(OSError, match=r"^me: the disk of the last rank is gone\.$"):
        share_folder("me", folder / "e", fail_on_last_rank)
    after = shared(folder / "e")  # no lock is left
    after.close()
    return shards, after.missing, errors


def test_processes_share_a_folder_and_its_errors(tmp_path, run_processes):
    EmbeddingFolder.create("me", tmp_path / "e", dataclasses.replace(MANIFEST, dim=3))
    (tmp_path / "e" / "part-00001.npy").touch()
    EmbeddingFolder.create("me", tmp_path / "other", dataclasses.replace(MANIFEST, dim=3, model_sha256="b"))
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
    folder = EmbeddingFolder.create("me", tmp_path / "e", dataclasses.replace(MANIFEST, dim=3))
    for number in complete:
        (tmp_path / "e" / f"part-{number:05d}.npy").touch()
    share = shared(tmp_path / "e")
    assert share.shards == [number for number in range(5) if number not in complete]
    assert list(share.ranges) == [folder.positions(number) for number in share.shards]
    assert share.every_rank_has_images == (len(complete) < 5)
    assert share.begin(3).manifest == folder.manifest
    share.close()


EMBEDDINGS = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))


def new_folder(path):
    return EmbeddingFolder.create("me", path, dataclasses.replace(MANIFEST, images=10, dim=2, shard_size=4))


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
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("part-*"))]
    add(ShardCollector(folder), range(10))  # shards that are there are not written again
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("part-*"))] == before
    shards = [folder.read(shard) for shard in range(3)]
    assert [shard.ids.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 6, 7], []]
    assert shards[2].unreadable == [("8.jpg", "why"), ("9.jpg", "why")]
    assert torch.equal(torch.from_numpy(shards[1].embeddings), EMBEDDINGS[[4, 6, 7]])
    assert shards[1].paths == ["4.jpg", "6.jpg", "7.jpg"]


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
