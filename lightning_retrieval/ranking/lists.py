"""Which references are relevant to each query, and which are in its list.

Losses, metrics, curves and callbacks ask `Lists`. `lightning_retrieval.ranking.entries` finds the relevant references
of `Lists` without a mask of all references, for metrics; a test holds that both answers are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from lightning_retrieval.checks import check_finite, has_finite_sum
from lightning_retrieval.distributed import size_for, to_host
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.ranking.labels import check_nesting
from lightning_retrieval.ranking.relevance import Relevance, SameLabel, label_rule_of
from lightning_retrieval.ranking.rows import Rows

# Positives are counted in blocks of a mask, unless labels are sorted. These are the largest numbers of elements of a
# block: on the CPU, and on other devices.
COUNTED_ELEMENTS = 1 << 22
ACCELERATOR_COUNTED_ELEMENTS = 1 << 25

Levels = Bool[Tensor, "query gallery"] | Integer[Tensor, "query gallery"]


@dataclass(frozen=True, eq=False)
class QueryRange:
    """The range of queries that one process computes, if several processes share a batch.

    Args:
        begin: index of the first query.
        end: index after the last query.
        total: function that sums a tensor over all processes. Every process must call this function, with a tensor of
            the same shape.
    """

    begin: int
    end: int
    total: Callable[[Tensor], Tensor]


class Lists:
    """The lists of queries that rank references: which references are relevant, and which are candidates, by a rule.

    A query itself is no candidate, unless masks include it.

    Args:
        queries: labels, or the columns that the rule reads, and ids of the queries.
        references: the same of the references. If they are the same object as `queries`, each query ranks the others.
        rule: the rule of relevance; None for `SameLabel`.
        self_index: index of each query itself among the references, or -1. If None, the references with the query's id
            are the query itself and, if the references are the queries, the one at the query's own position.

    Attributes:
        in_batch: whether the queries themselves are the references.
        label_rule: the rule, if relevant images share labels.
        counted: the results of `count_positives`, by whether a query is in its own list, and is its own positive.
        is_checked: whether `check` has found labels or columns to be valid.

    Example:
        >>> import torch
        >>> from lightning_retrieval.ranking.lists import Lists
        >>> from lightning_retrieval.ranking.rows import Rows
        >>> images = Rows(torch.tensor([7, 7, 5]))
        >>> relevant, candidate = Lists(images, images).masks(torch.tensor([0]))
        >>> relevant.tolist(), candidate.tolist()
        ([[False, True, False]], [[False, True, True]])
    """

    def __init__(
        self,
        queries: Rows,
        references: Rows,
        rule: Relevance | None = None,
        *,
        self_index: Int[Tensor, " query"] | None = None,
    ) -> None:
        if rule is None:
            rule = SameLabel()
        self.queries, self.references, self.rule, self.self_index = queries, references, rule, self_index
        self.in_batch = queries is references
        self.label_rule = label_rule_of(rule)
        self.counted: dict[tuple[bool, bool], Tensor] = {}
        self.is_checked = False

    @property
    def gallery(self) -> int:
        """Number of references."""
        return len(self.references)

    @property
    def device(self) -> torch.device:
        """The device of labels and masks."""
        return self.queries.labels.device

    @cached_property
    def columns(self) -> Int[Tensor, "query column"]:
        """What the rule reads of the queries."""
        return _as_levels(self.queries.labels).long()

    @cached_property
    def ref_columns(self) -> Int[Tensor, "gallery column"]:
        """What the rule reads of the references."""
        if self.in_batch:
            return self.columns
        return _as_levels(self.references.labels).long()

    @property
    def levels(self) -> int:
        """The number of levels of relevance."""
        if self.label_rule is None:
            return 1
        return self.label_rule.labels(self.columns).shape[1]

    @cached_property
    def finest(self) -> "Lists":
        """The lists in which only references with the finest label of the query are relevant.

        References with labels of several levels are no longer sorted by label.
        """
        if self.levels == 1:
            return self
        queries = references = self._at_finest_level(self.queries, self.columns)
        if not self.in_batch:
            references = self._at_finest_level(self.references, self.ref_columns)
        return Lists(queries, references, self.rule, self_index=self.self_index)

    def masks(
        self,
        rows: Int[Tensor, " query"],
        references: Int[Tensor, " gallery"] | None = None,
        *,
        include_self: bool = False,
        self_is_positive: bool = True,
    ) -> tuple[Levels, Bool[Tensor, "query gallery"]]:
        """Two masks for these queries: the relevant candidates, or their levels of relevance, and all candidates.

        Args:
            rows: indices of queries.
            references: indices of references; None for all.
            include_self: whether each query is in its own list.
            self_is_positive: whether a query in its own list is a positive of itself.
        """
        relevant, candidate = self._related(rows, references)
        if not include_self:
            self.exclude_self(candidate, rows, references)
            return relevant * candidate, candidate
        if not self_is_positive:
            others = torch.ones_like(candidate)
            self.exclude_self(others, rows, references)
            return relevant * others, candidate
        return relevant, candidate

    def exclude_self(
        self, mask: Bool[Tensor, "query gallery"], rows: Int[Tensor, " query"], references: Tensor | None = None
    ) -> None:
        """Set the elements of a mask to False where the reference is the query itself.

        Args:
            mask: changed in place.
            rows: as for `masks`.
            references: as for `masks`.
        """
        chosen: slice | Tensor = slice(None)
        if references is not None:
            chosen = references
        if self.self_index is not None:
            positions = torch.arange(self.gallery, device=self.device)
            mask &= self.self_index[rows, None] != positions[chosen]
            return
        if self.in_batch and references is None:
            mask.scatter_(1, rows[:, None], False)
        elif self.in_batch:
            mask &= rows[:, None] != references
        ids, ref_ids = self.queries.ids, self.references.ids
        if ids is not None and ref_ids is not None:
            mask &= ids[rows, None] != ref_ids[chosen]

    def count_positives(
        self,
        embeddings: Mapping[str, Tensor],
        queries: QueryRange | None = None,
        *,
        include_self: bool = False,
        self_is_positive: bool = True,
    ) -> Int[Tensor, " query"]:
        """Number of relevant candidates of each query, on the CPU. They are counted once for all losses.

        A loss waits for the device only in this call, except that losses of graded relevance also read the levels. For
        this reason, the call also checks that the embeddings are finite.

        Args:
            embeddings: what must be finite, by the name of the argument.
            queries: the queries of this process. If counts need masks, each process counts for its own queries, and the
                counts are exchanged. None counts for all queries.
            include_self: as for `masks`.
            self_is_positive: as for `masks`.
        """
        key = (include_self, self_is_positive)
        if key not in self.counted:
            # Sorting labels and ids takes less time than one row of masks for each query.
            if type(self.rule) is SameLabel and self.self_index is None:
                counts = self._count_by_sorting(*key)
            else:
                counts = self._count_by_masks(queries, *key)
            finite = torch.stack([has_finite_sum(values.detach()) for values in embeddings.values()])
            *read, are_finite = to_host(torch.cat([counts, finite.all()[None]])).split([len(counts), 1])
            if not are_finite:
                for name, values in embeddings.items():
                    check_finite(name, values)
            (self.counted[key],) = read
        return self.counted[key]

    def counted_anew(self) -> "Lists":
        """The same lists for other embeddings, whose positives are not counted yet."""
        lists = Lists(self.queries, self.references, self.rule, self_index=self.self_index)
        lists.is_checked = self.is_checked
        return lists

    def check(self) -> None:
        """Raise if labels of several levels do not nest, such as multi-hot labels, or columns do not suit the rule.

        Labels of several levels are copied to the host.
        """
        if self.is_checked:
            return
        labels, ref_labels = self.queries.labels, self.references.labels
        if isinstance(self.rule, SameLabel):
            if labels.ndim > 1 or ref_labels.ndim > 1:
                self._check_levels(labels, ref_labels)
        else:
            self.rule.check_columns("labels", labels)
            if not self.in_batch:
                self._check_ref_columns(labels, ref_labels)
        self.is_checked = True

    def _check_levels(self, labels: Tensor, ref_labels: Tensor) -> None:
        if self.columns.shape[1] != self.ref_columns.shape[1]:
            got = f"`labels` {tuple(labels.shape)} and `ref_labels` {tuple(ref_labels.shape)}"
            raise InvalidValue("labels must have shape (rows, levels), finest level first", got=got)
        columns = self.columns
        if not self.in_batch:
            columns = torch.cat([columns, self.ref_columns])
        check_nesting(to_host(columns))

    def _check_ref_columns(self, labels: Tensor, ref_labels: Tensor) -> None:
        self.rule.check_columns("ref_labels", ref_labels)
        if labels.shape[1] != ref_labels.shape[1]:
            got = f"{tuple(ref_labels.shape)} against {tuple(labels.shape)}"
            cure = f"make both with {self.rule.name}.columns(labels, batch)"
            raise InvalidValue("must have as many columns as `labels`", argument="ref_labels", got=got, cure=cure)

    def _count_by_sorting(self, include_self: bool, self_is_positive: bool) -> Int[Tensor, " query"]:
        """The positives of each query by their labels and ids, on the device."""
        # Labels nest: images that share any label share the coarsest one.
        labels = self.columns[:, -1]
        ref_labels = labels
        if not self.in_batch:
            ref_labels = self.ref_columns[:, -1]
        counts = count_equal([labels], [ref_labels])
        if include_self and self_is_positive:
            return counts
        ids, ref_ids = self.queries.ids, self.references.ids
        if ids is not None and ref_ids is not None:
            return counts - count_equal([labels, ids], [ref_labels, ref_ids])
        if self.in_batch:
            return counts - 1
        return counts

    def _count_by_masks(
        self, queries: QueryRange | None, include_self: bool, self_is_positive: bool
    ) -> Int[Tensor, " query"]:
        """The positives of each query by masks, for a block of queries at a time, on the device."""
        rows = torch.arange(len(self.queries), device=self.device)
        counts = torch.zeros_like(rows)
        if queries is not None:
            rows = rows[queries.begin : queries.end]
        elements = size_for(self.device, cpu=COUNTED_ELEMENTS, accelerator=ACCELERATOR_COUNTED_ELEMENTS)
        rows_of_a_block = max(1, elements // max(1, self.gallery))
        for block in rows.split(rows_of_a_block):
            relevant = self.masks(block, include_self=include_self, self_is_positive=self_is_positive)[0]
            counts[block] = (relevant > 0).sum(1)
        if queries is not None:
            counts = queries.total(counts)
        return counts

    def _at_finest_level(self, rows: Rows, columns: Int[Tensor, "row column"]) -> Rows:
        """The rows without the columns of coarser label levels."""
        return replace(rows, labels=torch.cat([columns[:, :1], columns[:, self.levels :]], 1))

    def _related(self, rows: Tensor, references: Tensor | None) -> tuple[Tensor, Tensor]:
        """The masks of these queries before the query itself is excluded."""
        queries, of_references = self.columns[rows], self.ref_columns
        if references is not None:
            of_references = of_references[references]
        if self.label_rule is None:
            return self.rule.lists(queries, of_references)
        relevant, candidate = self.label_rule.of_pairs(queries[:, None], of_references)
        if candidate is None:
            candidate = torch.ones_like(relevant, dtype=torch.bool)
        return relevant, candidate


def _as_levels(labels: Int[Tensor, "row ..."]) -> Int[Tensor, "row level"]:
    """The labels with a dimension of levels, which has size 1 for labels without levels."""
    if labels.ndim == 1:
        return labels[:, None]
    return labels


def count_equal(columns: Sequence[Int[Tensor, " n"]], ref_columns: Sequence[Int[Tensor, " m"]]) -> Int[Tensor, " n"]:
    """How many references have the same values as each query in all columns, found by sorting."""
    references = len(ref_columns[0])
    in_batch = all(values is of_references for values, of_references in zip(columns, ref_columns))
    if not in_batch:
        columns = [
            torch.cat([of_references.long(), values.long()]) for values, of_references in zip(columns, ref_columns)
        ]
    order = columns[0].argsort()
    for values in columns[1:]:
        order = order[values[order].argsort(stable=True)]
    begins_run = torch.zeros_like(order, dtype=torch.bool)  # whether a row differs from the one before, in this order
    for values in columns:
        ordered = values[order]
        begins_run[1:] |= ordered[1:] != ordered[:-1]
    run = begins_run.cumsum(0)
    sizes = torch.zeros_like(order).index_add_(0, run, (order < references).long())
    counts = torch.empty_like(order)
    counts[order] = sizes[run]
    if in_batch:
        return counts
    return counts[references:]
