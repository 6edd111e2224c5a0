"""The interface that a training step expects of every loss, from this library or another.

The inputs of one call of a loss are packed once, as a `RankedBatch`, and passed on as one value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_retrieval.arguments import settings_repr
from lightning_retrieval.checks import as_int64, check_integers, check_matrix, check_tensor
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.ranking.lists import Lists, QueryRange
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import Rows


@dataclass(frozen=True, eq=False)
class RankedBatch:
    """The queries of one call, the references that are ranked for them, and the lists of both.

    Args:
        embeddings: one row for each query.
        lists: labels and ids of queries and references, and which references are relevant and in which list. The
            positives are counted once for all losses of the same lists, and only the first of them checks that the
            embeddings are finite; batches of other embeddings need other lists.
        ref_emb: the references; None ranks the batch itself.
        queries: the queries that this process computes; None computes all of them.
        fraction: fraction of the training steps that are done, from 0 to 1; 1 for a call outside of a training.

    Raises:
        ValueError: if shapes do not match, or labels of several levels do not nest. Whether embeddings are finite is
            checked by the losses.
        TypeError: if embeddings are not floating point, or labels or ids not integers.
    """

    embeddings: Float[Tensor, "query dim"]
    lists: Lists
    ref_emb: Float[Tensor, "gallery dim"] | None = None
    queries: QueryRange | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        _check_rows("", self.embeddings, self.lists.queries)
        if self.ref_emb is not None:
            _check_rows("ref_", self.ref_emb, self.lists.references)
            self._check_references(self.ref_emb)
        self.lists.check()

    def _check_references(self, ref_emb: Tensor) -> None:
        if ref_emb.shape[1] != self.embeddings.shape[1]:
            got = f"{tuple(ref_emb.shape)} against {tuple(self.embeddings.shape)}"
            raise InvalidValue("must have the dimension of `embeddings`", argument="ref_emb", got=got)
        if (self.ids is None) != (self.lists.references.ids is None):
            given, missing = ("ref_ids", "ids") if self.ids is None else ("ids", "ref_ids")
            rule = f"was given without `{missing}`"
            raise InvalidValue(rule, argument=given, cure="with `ref_emb` give both or neither")

    @property
    def labels(self) -> Int[Tensor, "query ..."]:
        """Label of each query, or what the rule of relevance reads."""
        return self.lists.queries.labels

    @property
    def ids(self) -> Int[Tensor, " query"] | None:
        """Dataset index of each query."""
        return self.lists.queries.ids


def _check_rows(prefix: str, embeddings: Tensor, rows: Rows) -> None:
    """Raise unless there are a label and, if ids are given, an id for each of the embeddings.

    Args:
        prefix: "ref_" for the references, else "".
        embeddings: one row for each item.
        rows: labels and ids.
    """
    name = "ref_emb" if prefix else "embeddings"
    check_matrix(name, embeddings)
    check_integers(f"{prefix}labels", rows.labels, len(embeddings), name, levels=True)
    if rows.ids is not None:
        check_integers(f"{prefix}ids", rows.ids, len(embeddings), name)


def ranked_batch(
    embeddings: Any,
    labels: Any,
    ref_emb: Any = None,
    ref_labels: Any = None,
    *,
    ids: Any = None,
    ref_ids: Any = None,
    relevance: Relevance | None = None,
    **settings: Any,
) -> RankedBatch:
    """A batch from the arguments of a loss, which `BatchLoss.forward` explains.

    Args:
        embeddings: one row for each query.
        labels: labels of the queries.
        ref_emb: the references.
        ref_labels: labels of the references.
        ids: ids of the queries.
        ref_ids: ids of the references.
        relevance: the rule of relevance.
        settings: `queries` and `fraction` of `RankedBatch`.
    """
    columns = {"labels": labels, "ids": ids, "ref_labels": ref_labels, "ref_ids": ref_ids}
    columns = {name: as_int64(name, values) for name, values in columns.items()}
    of_queries = Rows(columns["labels"], columns["ids"])
    references = of_queries
    if ref_emb is not None:
        check_tensor("ref_emb", ref_emb)  # users of pytorch-metric-learning give what a miner returns as third argument
        if ref_labels is None:
            raise InvalidValue("was given without `ref_labels`", argument="ref_emb", cure="give both or neither")
        references = Rows(columns["ref_labels"], columns["ref_ids"])
    else:
        for name in ("ref_labels", "ref_ids"):
            if columns[name] is not None:
                raise InvalidValue("was given without `ref_emb`", argument=name, cure="give both or neither")
    batch = RankedBatch(embeddings, Lists(of_queries, references, relevance), ref_emb, **settings)
    if len(batch.embeddings) == 0:
        raise InvalidValue("must hold at least one row", argument="embeddings", got=f"shape {tuple(embeddings.shape)}")
    return batch


class BatchLoss(nn.Module):
    """Base class of `RetrievalLoss`, `WeightedSum`, `NestedLoss` and `ThirdPartyLoss`: a loss of a whole batch.

    A subclass implements `compute`; callers use the loss itself or `of_batch`.

    Attributes:
        terms: the unweighted terms of the latest call by name; empty for a loss of one term.
        observers: functions that get the loss and the batch after each call; empty but while a callback looks on.
    """

    terms: dict[str, Tensor]
    observers: list[Callable[["BatchLoss", RankedBatch], None]]

    def __init__(self) -> None:
        super().__init__()
        self.terms = {}
        self.observers = []

    @owned
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
        queries: QueryRange | None = None,
        relevance: Relevance | None = None,
    ) -> Any:
        """The loss of a batch in which each row is the query of a list.

        Args:
            embeddings: one row for each query; the loss normalises the rows.
            labels: any integers; the same label means relevant. With `relevance`, the columns that the rule reads:
                `relevance.columns(labels, batch)`.
            ref_emb: the references to rank for each query; None ranks the batch itself.
            ref_labels: labels of `ref_emb`.
            ids: dataset index of each row; a reference with the query's own id is not in the query's list.
            ref_ids: dataset index of each reference, required with `ids` and `ref_emb`.
            queries: range of the queries that this process computes; None computes all. The values of all processes add
                up to the loss, and so do their gradients.
            relevance: which references are relevant to a query, and which are in its list, such as `SharedTags()`; None
                for those with the same label, and all references.

        Raises:
            ValueError: if shapes do not match, or an embedding is not finite.
            TypeError: if embeddings are not floating point, or labels not integers.
        """
        keywords: dict[str, Any] = {"ids": ids, "ref_ids": ref_ids, "relevance": relevance, "queries": queries}
        return self.of_batch(ranked_batch(embeddings, labels, ref_emb, ref_labels, **keywords))

    def of_batch(self, batch: RankedBatch) -> Any:
        """The value of the loss; a tensor, except for losses of other libraries, which may return anything."""
        value = self.compute(batch)
        for observe in self.observers:
            observe(self, batch)
        return value

    def compute(self, batch: RankedBatch) -> Any:
        """The value of the loss, which `of_batch` returns."""
        raise NotImplementedError(f"{type(self).__name__}: a loss must implement `compute`.")

    def check_relevance(self, relevance: Relevance) -> None:
        """Raise if the loss cannot follow this rule of relevance. The terms of a sum check for themselves."""

    def splits_by_query(self, fraction: float = 1.0) -> bool:
        """Whether the loss is a sum over queries, so that each process can compute its own range of queries.

        Args:
            fraction: fraction of the training steps that are done. The answer may differ between two steps.
        """
        return True

    def scheduled_weights(self, fraction: float = 1.0) -> dict[str, float]:
        """The weights that change during training, by name of their terms; empty for a loss that does not change.

        Args:
            fraction: fraction of the training steps that are done.
        """
        return {}

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references and therefore cannot be used with a memory."""
        return []

    def extra_repr(self) -> str:
        return settings_repr(self)
