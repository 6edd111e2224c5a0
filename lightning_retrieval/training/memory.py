"""A memory of past batches, which makes ranked lists longer than a batch.

After an initial phase of training, embeddings drift slowly, so stored embeddings of past steps are ranked much like
new ones (Wang et al., "Cross-Batch Memory for Embedding Learning" (XBM), CVPR 2020; Ramzi et al., ROADMAP, NeurIPS
2021). Stored embeddings carry no gradient: they are references, never queries.

This code differs from the official code of both papers. Here, `references` returns one list per query, which holds the
batch (with a gradient) and the memory. The official code adds two losses: the loss of the batch, and the loss of the
batch's queries against the memory, which also holds the batch. In the second loss, no reference has a gradient. With
`mode="two_terms"`, `RetrievalModule` does the same as the official code.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_retrieval.checks import (
    as_int64,
    check_choice,
    check_finite,
    check_finite_number,
    check_integer,
    check_integers,
    check_matrix,
    has_finite_sum,
)
from lightning_retrieval.distributed import to_host
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned
from lightning_retrieval.losses.batch_loss import RankedBatch
from lightning_retrieval.losses.score_block import true_indices
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import Rows

MemoryMode = Literal["one_list", "one_list_detached", "two_terms"]


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddedRows(Rows):
    """Rows with their embeddings, in float32 or better."""

    ids: Tensor
    embeddings: Tensor

    def select(self, chosen: Tensor) -> "EmbeddedRows":
        return replace(super().select(chosen), embeddings=self.embeddings[chosen])

    def followed_by(self, other: "EmbeddedRows") -> "EmbeddedRows":
        return EmbeddedRows(
            labels=torch.cat([self.labels, other.labels]),
            ids=torch.cat([self.ids, other.ids]),
            embeddings=torch.cat([self.embeddings, other.embeddings]),
        )

    def like(self, other: "EmbeddedRows") -> "EmbeddedRows":
        """The rows on the device and in the dtypes of `other`."""
        of_device = self.map(lambda column: column.to(other.ids))
        return replace(of_device, embeddings=self.embeddings.to(other.embeddings))

    def detached(self) -> "EmbeddedRows":
        return replace(self, embeddings=self.embeddings.detach())


class CrossBatchMemory(nn.Module):
    """Stores the embeddings, labels and ids of past batches, newest first, with one row for each image.

    Args:
        size: maximum number of rows, at least the size of a batch.
        start_step: number of warm-up batches, >= 0, that are not stored because embeddings still change fast. With
            `"auto"`, the warm-up lasts until the callback `MemoryMonitor` calls `begin`.
        mode: how `RetrievalModule` ranks the memory. `"one_list"` appends it to each query's list;
            `"one_list_detached"` does the same, but no reference has a gradient; `"two_terms"` adds two losses, as the
            code of XBM and ROADMAP does: the loss of the batch, and the loss of the batch's queries against batch and
            memory, whose rows have no gradient there.
        weight: weight of the second loss of `"two_terms"`; the other modes have a single loss, and the weight 1.

    Raises:
        ValueError: if a number is out of its range, `mode` is none of its values, or `weight` is not 1 in a mode with a
            single loss; when a method is called, if shapes do not match those of the stored
            rows, a batch is larger than `size`, or an embedding is not finite.
        TypeError: if a number is not an integer, or `start_step` is a string other than `"auto"`; when a method is
            called, if `ids` are missing or `detach` is not a bool.

    Example:
        >>> import torch
        >>> from lightning_retrieval import CrossBatchMemory, SmoothAPLoss
        >>> loss, memory = SmoothAPLoss(), CrossBatchMemory(size=100)
        >>> for step in range(3):
        ...     embeddings, ids = torch.randn(8, 4, requires_grad=True), torch.arange(8) + 4 * step
        ...     batch = memory.references(embeddings, ids // 4, ids)
        ...     value = loss.of_batch(batch)
        ...     memory.update(embeddings, ids // 4, ids)
        >>> len(memory)  # 24 rows were given, but eight images came twice
        16

    Relations:
        `RetrievalModule(memory=...)` calls `with_stored` and `update` with the batch of all processes, so that the
        memory is the same on all processes. The state is part of `state_dict()` but not a buffer, so DDP does not
        broadcast it at each step. RaMBO's memories of scores are `BlackboxMAPLoss(batch_memory=...)` and
        `BlackboxRecallLoss(batch_memory=...)`.
    """

    def __init__(
        self, size: int, start_step: int | Literal["auto"] = 0, *, mode: MemoryMode = "one_list", weight: float = 1.0
    ) -> None:
        super().__init__()
        self.size = check_integer("size", size, least=1, owner="CrossBatchMemory")
        if start_step != "auto":
            start_step = check_integer("start_step", start_step, least=0, owner="CrossBatchMemory")
        self.start_step: int | Literal["auto"] = start_step
        self.mode: MemoryMode = check_choice("mode", mode, get_args(MemoryMode), owner="CrossBatchMemory")
        self.weight = check_finite_number("weight", weight, owner="CrossBatchMemory")
        if self.weight != 1 and mode != "two_terms":
            rule = "must be 1 unless `mode` is 'two_terms'"
            got = f"{weight} for {mode!r}, whose loss is a single term"
            raise InvalidValue(rule, "CrossBatchMemory", "weight", got=got, cure="give mode='two_terms' or no weight")
        self.reset()

    def reset(self) -> None:
        """Remove all rows and count the steps from 0 again."""
        self.steps = 0
        self._begun = False  # whether `begin` ended the warm-up: early, or with start_step="auto"
        self._rows: EmbeddedRows | None = None

    def __len__(self) -> int:
        """Number of stored rows."""
        if self._rows is None:
            return 0
        return len(self._rows)

    @property
    def started(self) -> bool:
        """Whether the warm-up is over."""
        if self._begun or isinstance(self.start_step, str):
            return self._begun
        return self.steps >= self.start_step

    def begin(self) -> None:
        """End the warm-up: the next batch will be stored."""
        self._begun = True

    @owned
    def references(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None,
        *,
        detach: bool = False,
        relevance: Relevance | None = None,
    ) -> RankedBatch:
        """The batch with its references: the rows of the batch, followed by the stored images that are not in it.

        Args:
            embeddings: embeddings of the batch.
            labels: labels of the batch, as for the loss.
            ids: dataset index of each row; required.
            detach: if True, no reference has a gradient.
            relevance: the rule of relevance, whose columns the labels are; None for equal labels.

        Returns:
            The argument for `loss.of_batch(batch)`.
        """
        references = self.with_stored(embeddings, labels, ids, detach=detach)
        batch = Rows(references.labels[: len(embeddings)], references.ids[: len(embeddings)])
        return RankedBatch(embeddings, Lists(batch, references, relevance), references.embeddings)

    def with_stored(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None,
        *,
        detach: bool = False,
    ) -> EmbeddedRows:
        """The rows of the batch, followed by the stored images that are not in it; arguments as for `references`."""
        batch = self._validated(embeddings, labels, ids)
        if detach:
            batch = batch.detached()
        stored = self._stored_like(batch)
        return batch.followed_by(stored.select(_indices(~_occurs(stored.ids, batch.ids), embeddings)))

    def update(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None,
    ) -> None:
        """Store a batch. Its rows replace stored rows of the same images and, if the memory is full, the oldest rows.

        Args:
            embeddings: embeddings of the batch; stored without a gradient.
            labels: labels of the batch.
            ids: dataset index of each row; required.
        """
        batch = self._validated(embeddings, labels, ids).detached()
        stored = self._stored_like(batch)
        is_kept = torch.cat([_is_first(batch.ids), ~_occurs(stored.ids, batch.ids)])
        kept = _indices(is_kept, embeddings)  # raises if an embedding is not finite, also in the warm-up
        if self.started:
            self._rows = batch.followed_by(stored).select(kept[: self.size])
        self.steps += 1

    def get_extra_state(self) -> Any:
        """The rows, the number of steps and whether the warm-up is over, for checkpoints."""
        rows = None
        if self._rows is not None:
            rows = (self._rows.embeddings, self._rows.labels, self._rows.ids)
        return {"rows": rows, "steps": self.steps, "started": self.started}

    def set_extra_state(self, state: Any) -> None:
        """Restore the state of a checkpoint. If the checkpoint has more than `size` rows, keep only the newest rows."""
        rows = None
        if state["rows"] is not None:
            embeddings, labels, ids = state["rows"]
            self._check_like_stored(embeddings, labels)
            newest = torch.arange(min(len(ids), self.size), device=ids.device)
            rows = EmbeddedRows(labels=labels, ids=ids, embeddings=embeddings).select(newest)
        self._rows = rows
        self.steps = state["steps"]
        self._begun = state["started"]

    def extra_repr(self) -> str:
        return f"size={self.size}, start_step={self.start_step!r}, mode={self.mode!r}, weight={self.weight}"

    def _validated(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> EmbeddedRows:
        """Validate a batch and convert it to the dtypes of the memory. Whether embeddings are finite is not checked."""
        check_matrix("embeddings", embeddings, owner="CrossBatchMemory")
        labels = as_int64("labels", labels, owner="CrossBatchMemory")
        ids = as_int64("ids", ids, owner="CrossBatchMemory")
        rows = len(embeddings)
        check_integers("labels", labels, rows, "embeddings", levels=True, owner="CrossBatchMemory")
        if ids is None:
            raise InvalidType(
                "must be given, the dataset index of each row, since an image is stored once and never ranked for "
                "itself",
                "CrossBatchMemory",
                "ids",
                got="None",
                cure="let the batches hold (images, labels, ids)",
            )
        check_integers("ids", ids, rows, "embeddings", owner="CrossBatchMemory")
        if len(ids) > self.size:
            rule = "must be at least that of a batch"
            got = f"{self.size} for a batch of {len(ids)} rows"
            raise InvalidValue(rule, "CrossBatchMemory", "size", got=got, cure="enlarge the memory")
        self._check_like_stored(embeddings, labels)
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        return EmbeddedRows(labels=labels.long(), ids=ids.long(), embeddings=embeddings.to(dtype))

    def _check_like_stored(self, embeddings: Tensor, labels: Tensor) -> None:
        if self._rows is None:
            return
        dim = self._rows.embeddings.shape[1]
        if embeddings.shape[1] != dim:
            rule = f"must have the dimension of the stored ones, {dim}"
            cure = "the memory (perhaps from a checkpoint) belongs to another network, call reset()"
            raise InvalidValue(rule, "CrossBatchMemory", "embeddings", got=embeddings.shape[1], cure=cure)
        if labels.shape[1:] != self._rows.labels.shape[1:]:
            rule = f"must have as many levels or columns as the stored ones, shape {tuple(self._rows.labels.shape)}"
            cure = "call reset() before another data set or another rule of relevance"
            raise InvalidValue(rule, "CrossBatchMemory", "labels", got=tuple(labels.shape), cure=cure)

    def _stored_like(self, batch: EmbeddedRows) -> EmbeddedRows:
        """The stored rows, on the device and in the dtypes of a batch."""
        if self._rows is None:
            return batch.select(batch.ids[:0]).detached()  # no rows
        return self._rows.like(batch)


def _is_first(ids: Tensor) -> Tensor:
    """Whether each row is the first with its id."""
    ordered, order = ids.sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    is_first = torch.empty_like(begins)
    is_first[order] = begins
    return is_first


def _occurs(values: Tensor, among: Tensor) -> Tensor:
    """Whether each value occurs among others; unlike `torch.isin`, without waiting for the device."""
    ordered = among.sort().values
    return torch.searchsorted(ordered, values, right=True) > torch.searchsorted(ordered, values)


def _indices(mask: Tensor, embeddings: Tensor) -> Tensor:
    """The indices where a mask is True; raises if an embedding is not finite. The host waits for the device once."""
    number, is_finite = to_host(torch.stack([mask.sum(), has_finite_sum(embeddings.detach())])).tolist()
    if not is_finite:
        check_finite("embeddings", embeddings, owner="CrossBatchMemory")
    return true_indices(mask, number)[0]
