"""Finds processes that have drawn the same batches. Each image would then be a positive of its own copy."""

import zlib
from collections.abc import Sequence

import torch

from lightning_retrieval.distributed import to_host, world_size
from lightning_retrieval.training.step import GlobalRows, LocalRows, are_integers

LEAST_ROWS = 4  # number of rows from which batches are not equal by chance


class EqualBatches:
    """Compares the batches of all processes in the first steps of a run.

    A hash of the batches is gathered together with the number of rows, so no further collective is needed. All batches
    since the start of the run are compared, until each process has had a few rows. Later steps compute no hash.

    Args:
        is_needed: False if the loader is known to give each process its own part of a batch.
    """

    def __init__(self, is_needed: bool) -> None:
        self._is_done = world_size() == 1 or not is_needed
        self._hash = 0  # hash of all batches of this process
        self._rows = [0] * world_size()  # number of rows that each process has had

    def add(self, sides: Sequence[LocalRows]) -> int:
        """Return the hash of all batches of this process, this batch included; 0 if nothing is compared.

        Args:
            sides: the rows of this process, for each side of a batch.
        """
        if self._is_done or not all(map(are_integers, sides)):
            return 0
        self._hash = hash((self._hash, *map(_hash_of, sides)))
        return self._hash

    def compare(self, owner: str, sides: Sequence[GlobalRows]) -> None:
        """Raise on all processes if two of them have had the same batches.

        Args:
            owner: prefix of error messages.
            sides: for each side of a batch, its rows in all processes, gathered with the hash that `add` returned.

        Raises:
            ValueError: if two processes have the same ids or, without ids, the same labels and inputs.
        """
        if self._is_done:
            return
        for rows in sides:
            self._rows = [had + count for had, count in zip(self._rows, rows.counts)]
        first_rank: dict[int, int] = {}
        for rank, hash_of_rank in enumerate(sides[0].hashes):
            first = first_rank.setdefault(hash_of_rank, rank)
            if first != rank and self._rows[rank] >= LEAST_ROWS:
                raise ValueError(_message(owner, first, rank, self._rows[rank], has_ids=sides[0].ids is not None))
        self._is_done = min(self._rows) >= LEAST_ROWS


def _hash_of(rows: LocalRows) -> int:
    """The hash of labels and ids or, without ids, of labels and inputs. Equal on all processes for equal rows."""
    labels = to_host(rows.labels).flatten().tolist()
    if rows.ids is not None:
        return hash((*labels, *to_host(rows.ids).tolist()))
    inputs = to_host(rows.inputs).contiguous().flatten().view(torch.uint8)
    return hash((*labels, zlib.crc32(inputs.numpy().data)))


def _message(owner: str, first: int, second: int, rows: int, *, has_ids: bool) -> str:
    """The error message for two ranks with the same rows."""
    same, cure = "labels and inputs", ""
    if has_ids:
        same, cure = "labels and ids", "; if their images differ, give the images ids that are unique in all processes"
    return (
        f"{owner}: each process must have its own part of a batch, got the same {same} in {rows} rows on the ranks "
        f"{first} and {second}, so that each image would be a positive of its own copy; use RetrievalDataLoader("
        f"dataset, PKSampler(...)), or another sampler that gives each process other images{cure}."
    )
