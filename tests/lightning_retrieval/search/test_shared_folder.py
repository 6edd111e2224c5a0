"""Processes that fill one folder: each shard is dealt out once, and a mistake of one process is refused by all."""

import dataclasses
import re

import pytest

from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest
from lightning_retrieval.search.shared_folder import share_folder

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
    dealt = first.shards
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
    (folder / f"again-{rank}").touch()

    def fail_on_last_rank():
        if rank == world_size - 1:
            raise OSError("me: the disk of the last rank is gone.")
        return MANIFEST

    with pytest.raises(OSError, match=r"^me: the disk of the last rank is gone\.$"):
        share_folder("me", folder / "e", fail_on_last_rank)
    after = shared(folder / "e")  # no lock is left
    after.close()
    return dealt, after.missing, errors


def test_processes_share_a_folder_and_its_errors(tmp_path, run_processes):
    EmbeddingFolder.create("me", tmp_path / "e", dataclasses.replace(MANIFEST, dim=3))
    (tmp_path / "e" / "part-00001.npy").touch()
    EmbeddingFolder.create("me", tmp_path / "other", dataclasses.replace(MANIFEST, dim=3, model_sha256="b"))
    results = run_processes(share_on_rank, 2, tmp_path)
    assert [dealt for dealt, _, _ in results] == [[0, 3], [2, 4]]
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
