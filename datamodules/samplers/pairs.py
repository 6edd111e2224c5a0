"""Batches of two sides: for each of P classes, some queries and some candidates."""

import math
import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_retrieval.arguments import PositiveInt, Seed, checked
from lightning_retrieval.datamodules.samplers.base import (
    GlobalBatchSampler,
    Integers,
    Labels,
    Section,
    group_equal_values,
    integer_array,
    slice_positions,
)
from lightning_retrieval.datamodules.samplers.pk import shuffled_class_batches, shuffled_queue_table
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.models.sides import Side


class PairSampler(GlobalBatchSampler):
    """Batches of P classes with some queries and some candidates of each class, for data with two sides.

    The rows of the data set are all queries, then all candidates. A batch holds the queries of its P classes, then the
    candidates of the same classes in the same order.

    An epoch has as many batches as the side that needs more of them, where a side with N rows in shared classes and K
    rows per class in a batch needs ceil(N / (P K)). Within an epoch, every class is drawn once before any class is
    drawn twice; within a class, the same holds for the queries and for the candidates. A batch holds a row more than
    once only if its class has fewer rows of that side than a batch takes from it; the numbers of occurrences of these
    rows then differ by at most one.

    Args:
        query_labels: one integer for each query, in the order of the data set; any integers.
        candidate_labels: the same for each candidate. Classes with rows on one side only are skipped; one warning gives
            their number.
        classes_per_batch: P, at least 1 and at most the number of classes on both sides. With 1 a batch holds no
            negatives.
        queries_per_class: number of queries of each class in a batch, >= 1.
        samples_per_class: number of candidates of each class in a batch, >= 1.
        seed: an integer >= 0. The seed and the epoch determine every batch.

    Raises:
        TypeError: if the labels or another argument are not integers.
        ValueError: if the labels of a side are empty or not one-dimensional, no class is on both sides, or a number is
            out of its range.

    Example:
        >>> sampler = PairSampler([7, 5], [5, 5, 7, 7], classes_per_batch=2, samples_per_class=2)
        >>> [(sorted(batch[:2]), sorted(batch[2:])) for batch in sampler]  # the candidates are the rows 2 to 5
        [([0, 1], [2, 3, 4, 5])]

    The full epoch is drawn at its first batch. This takes about 8 bytes and a few tenths of a microsecond per row.

    Relations:
        `Pairs` makes this sampler. `PKSampler` draws batches of one side. With several processes,
        `RetrievalDataLoader` gives each process its shard of the queries and its shard of the candidates.
    """

    draws_classes = True

    def __init__(
        self,
        query_labels: Labels,
        candidate_labels: Labels,
        *,
        classes_per_batch: PositiveInt,
        queries_per_class: PositiveInt = 1,
        samples_per_class: PositiveInt = 1,
        seed: Seed = 0,
    ) -> None:
        self.classes_per_batch = checked(self, classes_per_batch=classes_per_batch)
        self.queries_per_class = checked(self, queries_per_class=queries_per_class)
        self.samples_per_class = checked(self, samples_per_class=samples_per_class)
        with owned_by(self.name):
            queries = integer_array("query_labels", query_labels)
            candidates = integer_array("candidate_labels", candidate_labels)
        shared = np.intersect1d(queries, candidates)
        self._check_classes(shared, np.union1d(queries, candidates))
        labels = np.concatenate([queries, candidates])
        rows = np.flatnonzero(np.isin(labels, shared))
        super().__init__(labels[rows], seed=seed)
        self.dataset_size = len(labels)
        self.num_queries = len(queries)
        self.images = rows[self.images]
        self._queries = _RowsOfSide(queries, shared, 0)
        self._candidates = _RowsOfSide(candidates, shared, len(queries))

    def _check_classes(self, shared: Integers, classes: Integers) -> None:
        if len(shared) == 0:
            rule = "a class must have queries and candidates"
            got = f"no shared class among {len(classes)}"
            raise InvalidValue(rule, self.name, got=got, cure="check that the labels of both sides mean the same")
        if self.classes_per_batch > len(shared):
            rule = "must be at most the number of classes with queries and candidates"
            got = f"{self.classes_per_batch} for {len(shared)} such classes"
            raise InvalidValue(rule, self.name, "classes_per_batch", got=got, cure="lower it")
        skipped = len(classes) - len(shared)
        if skipped:
            warnings.warn(
                f"{self.name}: skipped {skipped} of {len(classes)} classes in training because they have only queries "
                "or only candidates.",
                stacklevel=3,
            )

    def sections(self, batch: Sequence[int]) -> dict[Side | None, Section]:
        queries = self.classes_per_batch * self.queries_per_class
        return {"queries": Section(0, queries, 0), "candidates": Section(queries, len(batch), self.num_queries)}

    def __len__(self) -> int:
        for_queries = len(self._queries.items) / (self.classes_per_batch * self.queries_per_class)
        for_candidates = len(self._candidates.items) / (self.classes_per_batch * self.samples_per_class)
        return math.ceil(max(for_queries, for_candidates))

    def draw(self, generator: np.random.Generator) -> Iterator[Integers]:
        P, classes = self.classes_per_batch, len(self.class_sizes)
        rounds = math.ceil(len(self) * P / classes)
        class_batches = shuffled_class_batches(generator, classes, P=P, batches=len(self))
        queries = self._queries.draw(generator, rounds, self.queries_per_class)
        candidates = self._candidates.draw(generator, rounds, self.samples_per_class)
        for batch_classes, batch_rounds in class_batches:
            drawn = batch_classes, batch_rounds  # in round r, a class contributes its r-th rows
            yield np.concatenate([queries[drawn].reshape(-1), candidates[drawn].reshape(-1)])


class _RowsOfSide:
    """The rows of one side that are in shared classes, grouped by class, the smallest class first.

    Args:
        labels: the label of each row of the side.
        shared: the labels of the shared classes, ascending.
        first: index of the first row of the side in the data set.
    """

    def __init__(self, labels: Integers, shared: Integers, first: int) -> None:
        rows = np.flatnonzero(np.isin(labels, shared))
        order, starts = group_equal_values(labels[rows])
        sizes = np.diff(starts, append=len(rows))
        self.by_size = np.argsort(sizes, kind="stable")  # shared classes in the order of their sizes
        self.sizes = sizes[self.by_size]
        grouped = order[slice_positions(starts[self.by_size], self.sizes, order.dtype)]
        self.items: Integers = rows[grouped] + first

    def draw(self, generator: np.random.Generator, rounds: int, count: int) -> Integers:
        """Draw `rounds` groups of `count` rows of each shared class: a table (classes, rounds, count)."""
        queues = shuffled_queue_table(generator, self.items, self.sizes, group_size=count, length=rounds * count)
        table = np.empty_like(queues)
        table[self.by_size] = queues
        return table.reshape(len(self.sizes), rounds, count)
