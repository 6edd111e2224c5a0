"""Finds processes whose loaders do not give each of them its own part of one batch.

If loaders give several processes the same rows, each image is a positive of its own copy. A loader that takes its part
of a global batch needs the same global batch in all processes.
"""

import warnings
import zlib
from collections.abc import Sequence

import torch

from lightning_retrieval.distributed import rank, to_host, world_size
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.training.step import GlobalRows, LocalRows, are_integers, gather_labels

LEAST_ROWS = 4  # number of rows from which batches are not equal by chance
LEAST_LABELS = 3  # number of different labels from which the labels of batches are not equal by chance
_BITS = 32  # of each of two hashes


class EqualBatches:
    """Compares the batches of all processes in the first steps of a run.

    A hash of the batches is gathered together with the number of rows, so no further collective is needed. All batches
    since the start of the run are compared, until each process has had a few rows. Later steps compute no hash.

    Random transforms may have changed the inputs of equal images. So equal labels without ids cause a warning.

    Args:
        drawn: the first global batch of each loader, if all loaders give each process its part of a global batch. Then
            only these batches are compared, in the first step. Otherwise None.
        may_repeat_labels: True if the loader is known to give each process other images, perhaps of the same classes.
    """

    def __init__(self, drawn: Sequence[Sequence[int]] | None, *, may_repeat_labels: bool = False) -> None:
        self.is_done = world_size() == 1  # whether all batches that must differ have been compared
        self._drawn = drawn
        self._may_repeat_labels = may_repeat_labels
        self._hash = 0  # hash of all batches of this process
        self._hash_of_labels = 0
        self._rows = [0] * world_size()  # number of rows that each process has had

    def gather_labels(self, sides: Sequence[LocalRows], *, gather: bool) -> list[GlobalRows]:
        """Call `gather_labels` of `training/step.py` and compare the batches of the processes, in one collective.

        Args:
            sides: the rows of this process, for each side of a batch.
            gather: as for `gather_labels`, which also raises errors.

        Raises:
            ValueError: on all processes, if two of them have the same ids or, without ids, the same labels and inputs;
                if processes have drawn different global batches.
        """
        gathered = gather_labels(sides, gather=gather, hash_of_batch=self._hash_after(sides))
        self._compare(gathered)
        return gathered

    def _hash_after(self, sides: Sequence[LocalRows]) -> int:
        """A hash of the first global batches, or hashes of all batches up to this one and of all labels, in one number.

        It is 0 for a batch of another type, for which the gathering raises.
        """
        if self._drawn is not None:
            return hash(tuple(map(tuple, self._drawn))) % 2**63
        if not all(map(are_integers, sides)):
            return 0
        self._hash = hash((self._hash, *map(_hash_of, sides)))
        self._hash_of_labels = hash((self._hash_of_labels, *map(_hash_of_labels, sides)))
        of_batches, of_labels = self._hash % 2 ** (_BITS - 1), self._hash_of_labels % 2**_BITS
        return int(of_batches << _BITS | of_labels)

    def _compare(self, sides: Sequence[GlobalRows]) -> None:
        """Raise if two processes have had the same batches, or parts of different global batches."""
        if self._drawn is not None:
            self.is_done = True
            _check_same_draws(sides[0].hashes)
            return
        for rows in sides:
            self._rows = [had + count for had, count in zip(self._rows, rows.counts)]
        has_ids = sides[0].ids is not None
        equal = self._first_equal([hashes >> _BITS for hashes in sides[0].hashes])
        if equal is not None:
            raise _same_batches(*equal, self._rows[equal[1]], has_ids=has_ids)
        self.is_done = min(self._rows) >= LEAST_ROWS
        if not self.is_done or has_ids or self._may_repeat_labels:
            return
        equal = self._first_equal([hashes % 2**_BITS for hashes in sides[0].hashes])
        if equal is not None and len(torch.unique(sides[0].labels)) >= LEAST_LABELS and rank() == 0:
            warnings.warn(_warning(*equal, self._rows[equal[1]]), stacklevel=2)

    def _first_equal(self, hashes: Sequence[int]) -> tuple[int, int] | None:
        """The first two ranks that have the same hash after enough rows; None if there are none."""
        first_rank: dict[int, int] = {}
        for index, hash_of_rank in enumerate(hashes):
            first = first_rank.setdefault(hash_of_rank, index)
            if first != index and self._rows[index] >= LEAST_ROWS:
                return first, index
        return None


def _check_same_draws(hashes: Sequence[int]) -> None:
    """Raise if the first global batches of the processes differ.

    Args:
        hashes: a hash of the batches of each process.
    """
    others = [index for index, hash_of_rank in enumerate(hashes) if hash_of_rank != hashes[0]]
    if others:
        raise InvalidValue(
            "all processes must draw the same global batches, of which each takes its part",
            "RetrievalDataLoader",
            got=f"another first batch on rank {others[0]} than on rank 0",
            cure="give the sampler the same labels and the same `seed` in all processes",
        )


def _hash_of(rows: LocalRows) -> int:
    """The hash of labels and ids or, without ids, of labels and inputs. Equal on all processes for equal rows."""
    labels = to_host(rows.labels).flatten().tolist()
    if rows.ids is not None:
        return hash((*labels, *to_host(rows.ids).tolist()))
    inputs = to_host(rows.inputs).contiguous().flatten().view(torch.uint8)
    return hash((*labels, zlib.crc32(inputs.numpy().data)))


def _hash_of_labels(rows: LocalRows) -> int:
    """The hash of labels. Equal on all processes for equal labels."""
    return hash(tuple(to_host(rows.labels).flatten().tolist()))


def _warning(first: int, second: int, rows: int) -> str:
    """The warning for two ranks with the same labels, whose images may be the same."""
    return (
        f"RetrievalModule: each process must have its own part of a batch, got the same labels in {rows} rows on the "
        f"ranks {first} and {second}; if their images are the same but for random transforms, each would be a positive "
        "of its own copy: use RetrievalDataLoader(dataset, PKSampler(...)), or let the data set return the index of "
        "each image as its id, which is then compared instead."
    )


def _same_batches(first: int, second: int, rows: int, *, has_ids: bool) -> InvalidValue:
    """The error for two ranks with the same rows."""
    same, cure = "labels and inputs", ""
    if has_ids:
        same, cure = "labels and ids", "; if their images differ, give the images ids that are unique in all processes"
    ranks = f"the ranks {first} and {second}, so that each image would be a positive of its own copy"
    return InvalidValue(
        "each process must have its own part of a batch",
        got=f"the same {same} in {rows} rows on {ranks}",
        cure="use RetrievalDataLoader(dataset, PKSampler(...)), or another sampler that gives each process other "
        f"images{cure}",
    )
