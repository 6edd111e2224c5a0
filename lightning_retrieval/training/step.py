"""One training step between the embeddings of a process and the gradients of all processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.distributed import rank, sum_over_ranks, world_size
from lightning_retrieval.host import to_host
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.ranked_batch import QueryRange, RankedBatch
from lightning_retrieval.training.global_batch import GlobalBatch, gather_batch
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.memory import CrossBatchMemory, MemoryMode
from lightning_retrieval.training.random_state import step_random_state


@dataclass(eq=False)
class TrainingStep:
    """Gathers the batch of all processes, adds the memory, computes the loss and sums the gradients.

    `loss` is called with the embeddings of this process and returns its part of the loss; the parts of all processes
    add up to the loss. `finish` sums them, and the gradients.

    Args:
        owner: prefix of error messages.
        batch_loss: the loss.
        labels: labels of this process's images.
        ids: their dataset indices, or None.
        number: the global step.
        seed: of the run.
        gather: whether lists are those of the global batch.
        memory: past batches that are ranked with this one, or None.
        memory_mode: how the memory is ranked.
        memory_weight: weight of the second term of the mode `"two_terms"`.
        check_batch: called with the batch before its loss is computed, or None.
    """

    owner: str
    batch_loss: BatchLoss
    labels: Tensor
    ids: Tensor | None
    number: int
    seed: int
    gather: bool = True
    memory: CrossBatchMemory | None = None
    memory_mode: MemoryMode = "one_list"
    memory_weight: float = 1.0
    check_batch: Callable[[GlobalBatch], None] | None = None
    batch: GlobalBatch = field(init=False)
    terms: dict[str, Tensor] = field(init=False)  # this process's parts of the terms that are logged

    def loss(self, embeddings: Tensor) -> Tensor:
        """Compute this process's part of the loss from its embeddings."""
        self.batch = self._gather(embeddings)
        if self.check_batch is not None:
            self.check_batch(self.batch)
        device = embeddings.device
        # A loss that draws random numbers draws the same on all processes.
        random_state = step_random_state(self.seed, self.number, 0)
        with self._explained_errors(), random_state, torch.autocast(device.type, enabled=False):
            ranked, with_memory = self._ranked_batches()
            value: Any = self.batch_loss(**ranked.keywords())
            _check_scalar(self.owner, value)
            terms = dict(self.batch_loss.terms)
            if with_memory is not None:
                of_memory: Any = self.batch_loss(**with_memory.keywords())
                _check_scalar(self.owner, of_memory)
                terms |= {"batch": value.detach(), "memory": of_memory.detach()}
                value = value + self.memory_weight * of_memory
        fraction = self._fraction_of_the_value()
        self.terms = {f"train/loss/{name}": fraction * term for name, term in terms.items()}
        part: Tensor = fraction * value
        return part

    def finish(self, part: Tensor, gradients: GradientSum) -> dict[str, Tensor]:
        """Sum the gradients, the loss and its terms over the processes; return the loss and its terms, on the CPU.

        Args:
            part: what `loss` returned, without a graph.
            gradients: sums the gradients of the step.

        Raises:
            ValueError: if an embedding or the loss is not finite.
        """
        terms = {"train/loss": part, **self.terms}
        is_invalid = ~torch.isfinite(self.batch.embeddings).all()
        parts = torch.stack([term.to(part) for term in (*terms.values(), is_invalid)])
        totals = to_host(gradients.finish(parts))
        if totals[-1] > 0:
            self._check_finite()
            raise ValueError(
                f"{self.owner}: embeddings must be finite, got NaN or inf on another rank at step {self.number}."
            )
        if not math.isfinite(totals[0]):
            raise ValueError(f"{self.owner}: the loss is {totals[0].item()} at step {self.number}.")
        return dict(zip(terms, totals[:-1]))

    def remember(self) -> None:
        """Store the batch in the memory."""
        if self.memory is not None:
            self.memory.update(self.batch.embeddings, self.batch.labels, self.batch.ids)

    @property
    def images(self) -> int:
        """Number of images of all processes; without `gather`, their batches must have the same size."""
        if self.gather:
            return len(self.batch.labels)
        return len(self.batch.labels) * world_size()

    @property
    def _divides_queries(self) -> bool:
        """Whether each process computes the loss of its own queries; else each computes the whole loss."""
        return self.gather and world_size() > 1 and self.batch_loss.splits_by_query

    def _fraction_of_the_value(self) -> float:
        """What this process's value is multiplied by, so that the processes' values add up to the loss."""
        if self._divides_queries:
            return 1.0
        return 1 / world_size()

    def _gather(self, embeddings: Tensor) -> GlobalBatch:
        if len(self.labels) != len(embeddings):
            raise ValueError(
                f"{self.owner}: a batch must have one label for each image, got {len(self.labels)} labels for "
                f"{len(embeddings)} images."
            )
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        return gather_batch(
            self.owner,
            embeddings,
            self.labels,
            self.ids,
            gather=self.gather,
            own_queries=self.batch_loss.splits_by_query,
        )

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """If embeddings are not finite, say so in place of the error of the loss, which knows no step, rank and ids.

        A loss that raises nothing is left to `finish`, since a check before the loss would wait for the device.
        """
        try:
            yield
        except Exception:
            self._check_finite()
            raise

    def _check_finite(self) -> None:
        """Raise if an embedding of the batch is not finite."""
        batch = self.batch
        finite = torch.isfinite(batch.embeddings).all(1)
        if bool(finite.all()):
            return
        rows = (~finite).nonzero()[:, 0]
        which = f"rows {rows[:5].tolist()}"
        if batch.ids is not None:
            which = f"ids {batch.ids[rows][:5].tolist()}"
        raise ValueError(
            f"{self.owner}: embeddings must be finite, got NaN or inf in {len(rows)} of {len(finite)} rows at step "
            f"{self.number} (seen on rank {rank()}), the first for {which}; a lower learning rate or "
            "gradient_clip_val often helps."
        ) from None

    def _ranked_batches(self) -> tuple[RankedBatch, RankedBatch | None]:
        """What the loss ranks, and what its second term ranks; None if there is no second term at this step."""
        embeddings, labels, ids, counts = self.batch
        queries = None
        if self._divides_queries:
            begin = sum(counts[: rank()])
            queries = QueryRange(begin, begin + counts[rank()], sum_over_ranks)
        ranked = RankedBatch(embeddings, labels, ids=ids, queries=queries)
        if self.memory is None:
            return ranked, None
        # Called during the warm-up too, so that an invalid batch raises before any state has changed.
        references = self.memory.references(embeddings, labels, ids, detach=self.memory_mode != "one_list")
        with_memory = replace(references, queries=queries)
        if not self.memory.started:
            return ranked, None
        if self.memory_mode == "two_terms":
            return ranked, with_memory
        return with_memory, None


def _check_scalar(owner: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        raise ValueError(f"{owner}: `loss` must return a scalar, got {value!r}; set its reduction.")
