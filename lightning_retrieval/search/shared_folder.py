"""Lets several processes fill a folder of embeddings: each writes different shards, so no image is embedded twice.

Rank 0 finds the missing shards and sends the list to all ranks, so a run can be continued with any number of processes.
All processes of a run share the folder's lock until the last process has finished. Until then, no other run can begin.
Each process collects the embeddings in the order of the images, and writes a shard as soon as it is complete.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
from torch.utils.data import Sampler

from lightning_retrieval.distributed import rank, together, world_size
from lightning_retrieval.files import delete, folder_lock, temporary_path, writing
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.search.embedding_folder import (
    LOCK,
    EmbeddingFolder,
    EmbeddingManifest,
    ShardRows,
    check_output,
)


class RangeBatches(Sampler[list[int]]):
    """Yields batches of positions.

    Args:
        ranges: positions, in loading order.
        batch_size: number of images per batch; the last batch of a range may have fewer.
    """

    def __init__(self, ranges: Sequence[Sequence[int]], batch_size: int) -> None:
        self.ranges = ranges
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(-(-len(positions) // self.batch_size) for positions in self.ranges)

    def __iter__(self) -> Iterator[list[int]]:
        for positions in self.ranges:
            for begin in range(0, len(positions), self.batch_size):
                yield list(positions[begin : begin + self.batch_size])


class ShardCollector:
    """Collects the rows of one shard at a time, so that memory does not grow with the number of rows.

    Args:
        folder: the folder that shards are written to.
        image_files: for each shard number, the digest of its image files, which is stored with the shard.
    """

    def __init__(self, folder: EmbeddingFolder, image_files: Mapping[int, str]) -> None:
        self.folder = folder
        self._image_files = image_files
        self._batches: list[ShardRows] = []
        self._shard = 0  # number of the shard that the batches belong to

    def add(self, position: int, batch: ShardRows) -> None:
        """Add the rows of a batch, which belong to the shard of the image at a position.

        A shard is written when it has a row, or the reason why there is none, for each of its images.
        """
        shard = position // self.folder.manifest.shard_size
        if shard != self._shard:
            self.finish()
        self._shard = shard
        self._batches.append(batch)
        images = sum(len(rows.ids) + len(rows.unreadable) for rows in self._batches)
        if images == len(self.folder.positions(shard)):
            self.finish()

    def finish(self) -> None:
        """Write the shard of the last batch."""
        if not self._batches:
            return
        rows = ShardRows(
            np.concatenate([batch.ids for batch in self._batches]),
            np.concatenate([batch.embeddings for batch in self._batches]),
            list(chain.from_iterable(batch.paths for batch in self._batches)),
            list(chain.from_iterable(batch.labels for batch in self._batches)),
            list(chain.from_iterable(batch.unreadable for batch in self._batches)),
            image_files=self._image_files[self._shard],
        )
        self.folder.write(self._shard, rows)
        self._batches = []


@dataclass(frozen=True)
class SharedFolder:
    """A folder of embeddings, with the shards that this process fills. `share_folder` makes this object.

    Args:
        folder: the folder. `dim` in its manifest may be 0 if the dimension of an embedding is not known yet.
        missing: numbers of all shards to write, because they are missing or have changed; the same on all ranks.
        changed: numbers of the shards to write again, because their image files have changed.
        image_files: for each shard of this process, the digest of its image files.
    """

    folder: EmbeddingFolder
    missing: list[int]
    changed: list[int]
    image_files: dict[int, str]
    _lock: ExitStack = field(repr=False)

    @property
    def shards(self) -> list[int]:
        """Numbers of the shards that this process writes, in ascending order."""
        return _of_this_process(self.missing)

    @property
    def ranges(self) -> Iterator[range]:
        """The positions of the images of each shard that this process writes."""
        return map(self.folder.positions, self.shards)

    @property
    def every_rank_has_images(self) -> bool:
        """Whether there is a shard for each process."""
        return len(self.missing) >= world_size()

    def begin(self, dim: int) -> EmbeddingFolder:
        """Open the folder for embeddings of dimension `dim`. The first process to do so writes the manifest."""
        manifest = replace(self.folder.manifest, dim=dim)
        return EmbeddingFolder.create(self.folder.path, manifest)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def share_folder(
    path: Path, describe: Callable[[], EmbeddingManifest], image_files: Callable[[range], str]
) -> SharedFolder:
    """Distribute the missing shards over all processes. Each process must call this function; if one raises, all raise.

    Args:
        path: path of the folder, on a file system that all processes share.
        describe: returns the manifest of the embeddings; `dim` of the manifest may be 0 if it is not known yet.
        image_files: maps a range of positions to the digest of their image files, see `digest_of_files`. Shards that
            were written with another digest are written again.

    Raises:
        ValueError: if processes have different images or models, the folder has another manifest or a damaged file,
            another run is writing to the folder, or the path is not the same folder on all processes.
        OSError: if the folder cannot be written to.
    """
    manifests = together(describe)
    _check_agreement(manifests)
    folder = EmbeddingFolder(path, manifests[0])
    with ExitStack() as stack:
        missing, changed, token = together(lambda: _begin(folder, image_files, stack))[0]
        together(lambda: _join(folder, token, stack))
        # Computed before images are read, so that later changes are noticed.
        digests = {shard: image_files(folder.positions(shard)) for shard in _of_this_process(missing)}
        return SharedFolder(folder, missing, changed, digests, stack.pop_all())


def _of_this_process(missing: list[int]) -> list[int]:
    """The missing shards that this process writes."""
    return missing[rank() :: world_size()]


def _check_agreement(manifests: list[EmbeddingManifest]) -> None:
    """Raise if the manifest of a process differs from that of rank 0, except in `about`: paths may differ."""
    for number, manifest in enumerate(manifests):
        difference = manifest.difference(manifests[0])
        if difference:
            rule = f"all processes must make the same embeddings, but those of rank {number} are {difference}"
            raise InvalidValue(rule, cure="give each the same files")


def _begin(
    folder: EmbeddingFolder, image_files: Callable[[range], str], stack: ExitStack
) -> tuple[list[int], list[int], str]:
    """On rank 0: lock the folder. Returns the shards to write, the changed shards, and the name of a new file."""
    if rank() > 0:
        return [], [], ""
    check_output(folder.path)
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
    share = stack.enter_context(folder.lock())
    folder.check_begun()
    token = temporary_path(folder.path / "token")
    with writing(folder.path):
        token.touch()
    stack.callback(delete, token)
    share()
    changed = folder.changed(image_files)
    return sorted([*folder.missing(), *changed]), changed, token.name


def _join(folder: EmbeddingFolder, token: str, stack: ExitStack) -> None:
    """On the other ranks: share the lock of rank 0; raises unless this process sees the same folder."""
    if rank() == 0:
        return
    if not (folder.path / token).is_file():
        rule = "must be on a file system that all processes share"
        got = f"{folder.path}, which rank {rank()} does not see as rank 0 does"
        raise InvalidValue(rule, argument="output", got=got, cure="give a path on a shared one")
    stack.enter_context(folder_lock(folder.path, LOCK, shared=True))
