"""The ranked lists of one call, one for each query: their scores, block by block, and the gradient of the scores.

Lists are made from embeddings (`EmbeddingLists`: cosine scores) or from a score matrix with masks (`ScoreLists`).
`lightning_retrieval.ranking.lists` says which references are relevant and which are in a list.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lightning_retrieval.checks import (
    check_finite,
    check_float,
    check_integers,
    check_matrix,
    check_tensor,
    has_finite_sum,
    is_integer,
    short_repr,
)
from lightning_retrieval.distributed import size_for, to_host
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses.batch_loss import QueryRange, RankedBatch
from lightning_retrieval.ranking.labels import check_nesting
from lightning_retrieval.ranking.lists import GivenLists, Lists
from lightning_retrieval.ranking.relevance import SameLabel
from lightning_retrieval.ranking.rows import Rows, normalize

# Positives are counted in blocks of a mask. These are the largest numbers of elements of a block: on the CPU, and on
# other devices.
COUNTED_ELEMENTS = 1 << 22
ACCELERATOR_COUNTED_ELEMENTS = 1 << 25


class RankedLists(ABC):
    """One ranked list for each query, computed for a block of queries at a time.

    `tensors` are the tensors that gradients are computed for; `given` maps
    names to the arguments that `tensors` were computed from. `gallery` is the number of references, and `levels` are
    the possible levels of relevance above 0.
    """

    tensors: tuple[Tensor, ...]
    given: dict[str, Tensor]
    gallery: int
    levels: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @abstractmethod
    def scores(self, rows: Int[Tensor, " query"]) -> Float[Tensor, "query gallery"]:
        """The scores of these queries in a new tensor without a graph."""

    @abstractmethod
    def masks(self, rows: Int[Tensor, " query"]) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"]]:
        """Two masks for these queries: the relevant candidates, and all candidates."""

    @abstractmethod
    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        """Propagate the gradient of these queries' scores to `tensors`, and add it to `gradients`.

        The rows must be in ascending order. `gradient` may be overwritten.
        """

    @abstractmethod
    def class_weights(self, valid: Bool[Tensor, " query"]) -> Float[Tensor, " query"]:
        """1 / (number of valid queries of the query's class), rescaled to mean 1; 0 for queries that are not valid."""

    def count_positives(self, queries: QueryRange | None = None) -> tuple[Int[Tensor, " query"], Int[Tensor, " query"]]:
        """Number of relevant candidates of each query, on the device and on the CPU.

        A loss waits for the device only in this call, except that losses of graded relevance also read the levels. For
        this reason, this call also checks that the inputs are finite.

        Args:
            queries: the queries of this process. If counts need masks, each process counts for its own queries, and the
                counts are exchanged. None counts for all queries.
        """
        counts = self._count_on_device(queries)
        finite = torch.stack([has_finite_sum(values) for values in self.given.values()])
        read = to_host(torch.cat([counts, finite.all()[None]]))
        if read[-1] == 0:
            for name, values in self.given.items():
                check_finite(name, values)
        return counts, read[:-1]

    def _count_on_device(self, queries: QueryRange | None) -> Int[Tensor, " query"]:
        """Count by masks, for a block of queries at a time."""
        counts = torch.zeros(len(self.tensors[0]), dtype=torch.int64, device=self.device)
        rows = torch.arange(len(counts), device=self.device)
        if queries is not None:
            rows = rows[queries.begin : queries.end]
        elements = size_for(self.device, cpu=COUNTED_ELEMENTS, accelerator=ACCELERATOR_COUNTED_ELEMENTS)
        rows_of_a_block = elements // max(1, self.gallery)
        for block in rows.split(max(1, rows_of_a_block)):
            relevant = self.masks(block)[0]  # the mask of candidates is freed at once
            counts[block] = (relevant > 0).sum(1)
        if queries is not None:
            counts = queries.total(counts)
        return counts


class ScoreLists(RankedLists):
    """The rows of a score matrix, one list for each.

    Args:
        scores: (queries, references), higher is nearer.
        relevant: which references are relevant to each query, or their levels of relevance if `graded`.
        candidate: which references are in each query's list; None for all.
        graded: whether `relevant` holds levels, 0 for not relevant.
    """

    def __init__(
        self,
        scores: Tensor,
        relevant: Tensor,
        *,
        candidate: Tensor | None = None,
        graded: bool = False,
    ) -> None:
        check_float("scores", scores)
        if scores.ndim != 2 or len(scores) == 0:
            raise InvalidValue("must have shape (Q, R) with Q > 0", argument="scores", got=tuple(scores.shape))
        _check_mask("relevant", relevant, scores, graded=graded)
        if candidate is not None:
            _check_mask("candidate", candidate, scores)
        self.given = {"scores": scores}
        self.lists = GivenLists(relevant, candidate)
        self.levels = (1,)
        if graded:
            self.levels = tuple(level for level in to_host(relevant.unique()).tolist() if level > 0)
        self.tensors = (scores.to(torch.promote_types(scores.dtype, torch.float32)),)
        self.gallery = scores.shape[1]
        self._scores = self.tensors[0].detach()

    def scores(self, rows: Tensor) -> Tensor:
        return self._scores[rows]

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.lists.masks(rows)

    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        if gradients[0] is not None:
            gradients[0].index_add_(0, rows, gradient)

    def class_weights(self, valid: Tensor) -> Tensor:
        raise NotImplementedError("a score matrix has no classes")  # from_scores has already raised


def _check_mask(name: str, mask: Tensor, scores: Tensor, *, graded: bool = False) -> None:
    check_tensor(name, mask)
    if graded and not is_integer(mask):
        raise InvalidType("must be integer levels, 0 for not relevant", argument=name, got=mask.dtype)
    if graded and bool((mask < 0).any()):
        raise InvalidValue("must be levels >= 0", argument=name, got=int(mask.min()))
    if not graded and mask.dtype != torch.bool:
        raise InvalidType("must be bool", argument=name, got=mask.dtype)
    if mask.shape != scores.shape:
        raise InvalidValue(
            f"must have the shape of `scores` {tuple(scores.shape)}", argument=name, got=tuple(mask.shape)
        )


# Number of rows, and of columns, of the tiles in which a matrix is transposed.
CPU_TILE = 256
ACCELERATOR_TILE = 4096


class EmbeddingLists(RankedLists):
    """The ranked lists of a batch: each query against the references or, without references, against the batch itself.

    Args:
        batch: queries and references; validated here.
        include_self: keep each query in its own list.
        self_is_positive: whether a query in its own list is a positive of itself.
        graded: whether relevance is the number of label levels that query and reference share, instead of a bool.
    """

    def __init__(
        self, batch: RankedBatch, *, include_self: bool, self_is_positive: bool = True, graded: bool = False
    ) -> None:
        check_batch(batch)
        _check_ids_of_both(batch.lists)
        check_lists(batch.lists)
        if graded:
            self.lists, self.levels = batch.lists, tuple(range(1, batch.lists.levels + 1))
        else:
            self.lists, self.levels = batch.lists.finest, (1,)
        self.gallery = batch.lists.gallery
        self.in_batch = batch.ref_emb is None
        self._self_counts = {"include_self": include_self, "self_is_positive": self_is_positive}

        queries = normalize(batch.embeddings)
        references = queries
        self.given = {"embeddings": batch.embeddings.detach()}
        if batch.ref_emb is not None:
            references = normalize(batch.ref_emb).to(queries.dtype)
            self.given["ref_emb"] = batch.ref_emb.detach()
        self.tensors: tuple[Tensor, ...] = (queries, references)
        if self.in_batch:
            self.tensors = (queries,)
        self._queries, self._references = queries.detach(), references.detach()

    def scores(self, rows: Tensor) -> Tensor:
        queries = self._queries
        if len(rows) != len(queries):  # otherwise rows are all queries in ascending order
            queries = queries[rows]
        return queries @ self._references.T

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.lists.masks(rows, None, **self._self_counts)

    def count_positives(self, queries: QueryRange | None = None) -> tuple[Tensor, Tensor]:
        settings = tuple(self._self_counts.values())
        if settings not in self.lists.counted:
            self.lists.counted[settings] = super().count_positives(queries)
        return self.lists.counted[settings]

    def _count_on_device(self, queries: QueryRange | None) -> Tensor:
        """Count by sorting, if the rule allows it: each process counts for all queries."""
        if not self.lists.can_be_sorted:
            return super()._count_on_device(queries)
        return self.lists.sorted_counts(**self._self_counts)

    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        if not self.in_batch:
            of_queries, of_references = gradients[:2]
            if of_queries is not None:
                of_queries.index_add_(0, rows, gradient @ self._references)
            if of_references is not None:
                of_references.addmm_(gradient.T, self._queries[rows])
            return
        of_embeddings = gradients[0]
        if of_embeddings is None:
            return
        if len(rows) == len(self._queries):  # one product with G + G^T instead of two with G and G^T
            of_embeddings.addmm_(add_transposed(gradient), self._queries)
        else:
            of_embeddings.index_add_(0, rows, gradient @ self._queries)
            of_embeddings.addmm_(gradient.T, self._queries[rows])

    def class_weights(self, valid: Tensor) -> Tensor:
        labels = self.lists.columns[:, 0].contiguous()
        ordered, order = labels.sort()
        before = pad(valid[order].cumsum(0), (1, 0))  # number of valid queries before each position
        begin, end = torch.searchsorted(ordered, labels), torch.searchsorted(ordered, labels, right=True)
        sizes = before[end] - before[begin]  # valid queries of the query's class
        weights = valid / sizes.clamp(min=1).to(self.dtype)
        return weights * (valid.sum() / weights.sum().clamp(min=torch.finfo(self.dtype).tiny))


def add_transposed(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Add the transposed matrix to a square matrix in place, tile by tile, without a second matrix of its size."""
    size = size_for(matrix.device, cpu=CPU_TILE, accelerator=ACCELERATOR_TILE)
    for i in range(0, len(matrix), size):
        for j in range(0, i, size):
            tile, mirrored = matrix[i : i + size, j : j + size], matrix[j : j + size, i : i + size]
            tile += mirrored.T
            mirrored.copy_(tile.T)
        diagonal = matrix[i : i + size, i : i + size]
        diagonal.copy_(diagonal + diagonal.T)
    return matrix


def check_lists(lists: Lists) -> None:
    """Raise if labels of several levels do not nest, such as multi-hot labels, or columns do not suit the rule.

    The labels are copied to the host, once for all losses of the same lists.

    Args:
        lists: the lists of a batch, whose labels are integers.
    """
    if lists.is_checked:
        return
    labels, ref_labels = lists.queries.labels, lists.references.labels
    if not isinstance(lists.rule, SameLabel):
        lists.rule.check_columns("labels", labels)
        if not lists.in_batch:
            _check_ref_columns(lists)
    elif labels.ndim > 1 or ref_labels.ndim > 1:
        _check_levels(lists.columns, lists.ref_columns)
    lists.is_checked = True


def _check_ref_columns(lists: Lists) -> None:
    labels, ref_labels, rule = lists.queries.labels, lists.references.labels, lists.rule
    rule.check_columns("ref_labels", ref_labels)
    if labels.shape[1] != ref_labels.shape[1]:
        got = f"{tuple(ref_labels.shape)} against {tuple(labels.shape)}"
        cure = f"make both with {rule.name}.columns(labels, batch)"
        raise InvalidValue("must have as many columns as `labels`", argument="ref_labels", got=got, cure=cure)


def _check_levels(labels: Tensor, ref_labels: Tensor) -> None:
    if labels.ndim != 2 or ref_labels.ndim != 2 or labels.shape[1] != ref_labels.shape[1]:
        got = f"`labels` {tuple(labels.shape)} and `ref_labels` {tuple(ref_labels.shape)}"
        raise InvalidValue("labels must have shape (rows, levels), finest level first", got=got)
    all_labels = labels
    if ref_labels is not labels:
        all_labels = torch.cat([labels, ref_labels])
    check_nesting(to_host(all_labels))


def check_batch(batch: RankedBatch) -> None:
    """Raise unless the tensors of a batch have matching shapes and types. Whether they are finite is not checked."""
    check_matrix("embeddings", batch.embeddings)
    if len(batch.embeddings) == 0:
        rule = "must hold at least one row"
        raise InvalidValue(rule, argument="embeddings", got=f"shape {tuple(batch.embeddings.shape)}")
    lists = batch.lists
    _check_rows(lists.queries, batch.embeddings, "embeddings")
    if batch.queries is not None and not isinstance(batch.queries, QueryRange):
        raise InvalidType("must be a QueryRange or None", argument="queries", got=short_repr(batch.queries))
    if batch.ref_emb is None:
        return
    check_matrix("ref_emb", batch.ref_emb)
    if batch.ref_emb.shape[1] != batch.embeddings.shape[1]:
        got = f"{tuple(batch.ref_emb.shape)} against {tuple(batch.embeddings.shape)}"
        raise InvalidValue("must have the dimension of `embeddings`", argument="ref_emb", got=got)
    _check_rows(lists.references, batch.ref_emb, "ref_emb")


def _check_ids_of_both(lists: Lists) -> None:
    if (lists.queries.ids is None) == (lists.references.ids is None):
        return
    missing, given = "ref_ids", "ids"
    if lists.queries.ids is None:
        missing, given = given, missing
    raise InvalidValue(f"was given without `{missing}`", argument=given, cure="with `ref_emb` give both or neither")


def _check_rows(rows: Rows, embeddings: Tensor, of: str) -> None:
    """Raise unless labels and ids have one row for each embedding. `of` is the name of the embeddings."""
    prefix = ""
    if of == "ref_emb":
        prefix = "ref_"
    check_integers(f"{prefix}labels", rows.labels, len(embeddings), of, levels=True)
    if rows.ids is not None:
        check_integers(f"{prefix}ids", rows.ids, len(embeddings), of)
