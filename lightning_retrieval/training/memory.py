"""A memory of past batches, which makes ranked lists longer than a batch.

Embeddings drift slowly, so those of past steps still rank much as fresh ones do (Wang et al., "Cross-Batch Memory for
Embedding Learning" (XBM), CVPR 2020; Rolinek et al., RaMBO, CVPR 2020, section 4.3; Ramzi et al., ROADMAP, NeurIPS
2021). They carry no gradient: they are ranked, they are not queries.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_retrieval.checks import check_embeddings, check_integer, check_integers, check_labels


class CrossBatchMemory(nn.Module):
    """The embeddings, labels and ids of past batches, the newest first, each image once.

    Args:
        size: rows kept, at least those of a batch.
        start_step: batches that are let go by at first, while embeddings still change fast, >= 0.

    Raises:
        ValueError: if a number is out of its range; at a call, if shapes do not fit those of the rows remembered, a
            batch is larger than `size`, or an embedding is not finite.
        TypeError: if a number is not an integer; at a call, if `ids` are missing.

    Example:
        >>> import torch
        >>> from lightning_retrieval import CrossBatchMemory, SmoothAPLoss
        >>> loss, memory = SmoothAPLoss(), CrossBatchMemory(size=100)
        >>> for step in range(3):
        ...     embeddings, ids = torch.randn(8, 4, requires_grad=True), torch.arange(8) + 4 * step
        ...     value = loss(embeddings, ids // 4, **memory.references(embeddings, ids // 4, ids))
        ...     memory.update(embeddings, ids // 4, ids)
        >>> len(memory)  # of 24 rows; eight images came twice
        16

    Relations:
        `RetrievalModule(memory=...)` does this, and gathers the batch over processes first, so that the memory is the
        same on all. Its state is part of `state_dict()`, but no buffer, so DDP does not send it around at each step.
        RaMBO's memory of scores is `BlackboxMAPLoss(batch_memory=...)`.
    """

    def __init__(self, size: int, start_step: int = 0) -> None:
        super().__init__()
        self.size = check_integer("CrossBatchMemory", "size", size, least=1)
        self.start_step = check_integer("CrossBatchMemory", "start_step", start_step, least=0)
        self.reset()

    def reset(self) -> None:
        """Forget all rows and begin to count the steps anew."""
        self.steps = 0
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None  # embeddings, labels, ids

    def __len__(self) -> int:
        """How many rows are remembered."""
        return 0 if self._rows is None else len(self._rows[0])

    @property
    def started(self) -> bool:
        """Whether `start_step` batches have gone by."""
        return self.steps >= self.start_step

    def references(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None,
    ) -> dict[str, Tensor]:
        """What a loss ranks for this batch: its own rows and, behind them, the images remembered that it has not.

        Args:
            embeddings: of the batch; detach them for references without any gradient.
            labels: of the batch, as for the loss.
            ids: dataset index of each row; None is refused.

        Returns:
            `ref_emb`, `ref_labels`, `ids` and `ref_ids`, the keywords of a loss's call.
        """
        batch = self._checked(embeddings, labels, ids)
        lists = [torch.cat(pair) for pair in zip(batch, self._others(batch))]
        return {"ref_emb": lists[0], "ref_labels": lists[1], "ids": batch[2], "ref_ids": lists[2]}

    def update(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None,
    ) -> None:
        """Remember a batch, in place of the oldest rows and of older rows of the same images."""
        batch = self._checked(embeddings.detach(), labels, ids)
        if self.started:
            others = self._others(batch)
            once = _first_of_each(batch[2])
            left = self.size - len(once)  # cut before they are joined: a checkpoint holds all that a part is cut from
            self._rows = tuple(torch.cat([new[once], old[:left]]) for new, old in zip(batch, others))  # type: ignore[assignment]
        self.steps += 1

    def get_extra_state(self) -> Any:
        """The rows and the number of steps, for checkpoints."""
        return {"rows": self._rows, "steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        """Take them back from a checkpoint; of a larger memory, the newest rows."""
        rows = state["rows"]
        if rows is not None:
            self._check_like_rows(rows[0], rows[1])
        self._rows = None if rows is None else tuple(part[: self.size].clone() for part in rows)
        self.steps = state["steps"]

    def extra_repr(self) -> str:
        return f"size={self.size}, start_step={self.start_step}"

    def _checked(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The batch in the memory's own precision, float32 or better."""
        check_embeddings("CrossBatchMemory", "embeddings", embeddings)
        check_labels("CrossBatchMemory", "labels", labels, len(embeddings), "embeddings")
        if ids is None:
            raise TypeError(
                "CrossBatchMemory: `ids` must be given, the dataset index of each row, since an image is remembered "
                "once and never ranked for itself, got None; let the batches hold (images, labels, ids)."
            )
        check_integers("CrossBatchMemory", "ids", ids, len(embeddings), "embeddings")
        if len(ids) > self.size:
            raise ValueError(
                f"CrossBatchMemory: `size` must be at least that of a batch, got {self.size} for a batch of {len(ids)} "
                "rows; enlarge the memory."
            )
        self._check_like_rows(embeddings, labels)
        return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), labels.long(), ids.long()

    def _check_like_rows(self, embeddings: Tensor, labels: Tensor) -> None:
        if self._rows is None:
            return
        if embeddings.shape[1] != self._rows[0].shape[1]:
            raise ValueError(
                f"CrossBatchMemory: `embeddings` must have the dimension of those remembered, "
                f"{self._rows[0].shape[1]}, got {embeddings.shape[1]}; the memory (perhaps from a checkpoint) is of "
                "another network, call reset()."
            )
        if labels.shape[1:] != self._rows[1].shape[1:]:
            raise ValueError(
                f"CrossBatchMemory: `labels` must have as many levels as those remembered, shape "
                f"{tuple(self._rows[1].shape)}, got {tuple(labels.shape)}; call reset() before another data set."
            )

    def _others(self, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """The rows remembered of images that are not in the batch, as tensors of the batch's kind."""
        if self._rows is None:
            return [part[:0].detach() for part in batch]
        rows = [old.to(new) for old, new in zip(self._rows, batch)]
        other = ~torch.isin(rows[2], batch[2])
        return [part[other] for part in rows]


def _first_of_each(ids: Tensor) -> Tensor:
    """Places of the first row of each id, in order."""
    ordered, order = ids.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first].sort()[0]
