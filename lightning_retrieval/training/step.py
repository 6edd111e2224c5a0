"""One training step: from the embeddings of a process to the sum of the gradients of all processes.

The loss ranks the batch of all processes together. `gather_batch` needs three collectives in the forward pass, and one
in the backward pass if each process computes the loss of its own queries.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.data import SequentialSampler

from lightning_retrieval.checks import is_integer
from lightning_retrieval.distributed import gather_rows, rank, sum_over_ranks, to_host, world_size
from lightning_retrieval.losses.batch_loss import BatchLoss, QueryRange, RankedBatch
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.training.chunk_size import largest_chunk_size
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.memory import CrossBatchMemory, MemoryMode
from lightning_retrieval.training.optimizers import trainable_parameters
from lightning_retrieval.training.random_state import step_random_state

Unpacked = tuple[Tensor, Tensor, Tensor | None]  # images, labels, ids


class GlobalBatch(NamedTuple):
    """The batch that the loss ranks: the rows of all processes in rank order, or of this process only."""

    embeddings: Float[Tensor, "batch dim"]
    labels: Int[Tensor, "batch ..."]
    ids: Int[Tensor, " batch"] | None
    counts: list[int]  # number of rows of each process


def gather_batch(
    owner: str,
    embeddings: Float[Tensor, "shard dim"],
    labels: Int[Tensor, "shard ..."],
    ids: Int[Tensor, " shard"] | None,
    *,
    gather: bool,
    local_queries: bool,
) -> GlobalBatch:
    """Gather the batch of all processes. The gradient of the embeddings flows back to the rows of each process.

    Args:
        owner: prefix of error messages.
        embeddings: rows of this process. The numbers of rows of the processes may differ.
        labels: label of each row.
        ids: id of each row, or None on all processes.
        gather: False returns the rows of this process only.
        local_queries: True if each process computes the loss of its shard of the queries. The gradient of a row is then
            summed over all processes, in one collective in the backward pass. False if each process computes an equal
            fraction of the same loss. Every process then already has the gradient, and nothing is communicated.

    Raises:
        ValueError: on all processes, if their batches differ in dimension, label levels or presence of ids; with
            `gather=False`, also if they differ in their number of rows.
        TypeError: on all processes, if labels or ids are not integers on one of them.
    """
    if world_size() == 1:
        return GlobalBatch(embeddings, labels, ids, [len(embeddings)])
    counts = _agreed_counts(owner, embeddings, labels, ids)
    if not gather:
        if len(set(counts)) > 1:
            raise ValueError(
                f"{owner}: with gather=False the loss is the mean of the processes' losses, which needs batches of "
                f"equal size, got {counts} rows in rank order; keep gather=True, or drop the uneven batch."
            )
        return GlobalBatch(embeddings, labels, ids, counts)
    all_labels, all_ids = _gather_labels_and_ids(labels, ids, counts)
    all_embeddings = _GatherEmbeddings.apply(embeddings, counts, local_queries)
    return GlobalBatch(all_embeddings, all_labels, all_ids, counts)


class _Form(NamedTuple):
    """The properties of a batch that processes compare before they gather."""

    rows: int
    dimension: int
    label_levels: int  # 0 for labels of shape (rows,)
    has_ids: int
    are_integers: int


def _form_of(embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> _Form:
    label_levels = 0
    if labels.ndim == 2:
        label_levels = labels.shape[1]
    are_integers = is_integer(labels) and labels.ndim in (1, 2)
    if ids is not None:
        are_integers = are_integers and is_integer(ids) and ids.shape == labels.shape[:1]
    return _Form(len(embeddings), embeddings.shape[1], label_levels, ids is not None, are_integers)


def _agreed_counts(owner: str, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> list[int]:
    """The number of rows of each process; raise if the processes' batches differ in anything else."""
    local_form = torch.tensor([_form_of(embeddings, labels, ids)], device=embeddings.device)
    forms = [_Form(*form) for form in gather_rows(local_form, [1] * world_size()).tolist()]
    if not all(form.are_integers for form in forms):
        came = "None"
        if ids is not None:
            came = f"{ids.dtype} {tuple(ids.shape)}"
        raise TypeError(
            f"{owner}: labels must be integers of shape (rows,) or (rows, levels) and ids integers of shape (rows,), "
            f"on every process, got labels {labels.dtype} {tuple(labels.shape)} and ids {came} on rank {rank()}."
        )
    kinds = [(form.dimension, form.label_levels, form.has_ids) for form in forms]
    if len(set(kinds)) > 1:
        raise ValueError(
            f"{owner}: the processes' batches may differ only in their number of rows, got (dimension, label levels, "
            f"has ids) {kinds} in rank order."
        )
    return [form.rows for form in forms]


def _gather_labels_and_ids(labels: Tensor, ids: Tensor | None, counts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Labels and ids of all processes, in one collective."""
    columns = [labels.reshape(len(labels), -1).long()]
    levels = columns[0].shape[1]
    if ids is not None:
        columns.append(ids[:, None].long())
    gathered = gather_rows(torch.cat(columns, 1), counts)
    all_labels = gathered[:, :levels]
    if labels.ndim == 1:
        all_labels = gathered[:, 0]
    if ids is None:
        return all_labels, None
    return all_labels, gathered[:, -1]


class _GatherEmbeddings(torch.autograd.Function):
    """Gathers rows of all processes; the backward pass returns the gradient of the sum of all processes' losses."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], local_queries: bool) -> Tensor:
        ctx.counts, ctx.local_queries = list(counts), local_queries
        return gather_rows(rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        counts, world = ctx.counts, len(ctx.counts)
        if not ctx.local_queries:
            return world * grad.split(counts)[rank()], None, None
        rows = counts[rank()]
        parts = grad.new_empty(world * rows, grad.shape[1])
        dist.all_to_all_single(parts, grad.contiguous(), [rows] * world, counts)
        return parts.view(world, rows, grad.shape[1]).sum(0), None, None


def unpack(owner: str, batch: Any) -> Unpacked:
    """Split a batch into images, labels and ids; the ids are None if the batch has none.

    Args:
        owner: prefix of error messages.
        batch: `(images, labels)`, `(images, labels, ids)` or a dict with these keys, as the DataLoader yields.

    Raises:
        TypeError: if the batch has another form.
    """
    if isinstance(batch, dict):
        if "images" in batch and "labels" in batch:
            return batch["images"], batch["labels"], batch.get("ids")
        came = f"a dict with the keys {sorted(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1], None
        if len(batch) == 3:
            return batch[0], batch[1], batch[2]
        came = f"{len(batch)} items"
    else:
        came = type(batch).__name__
    raise TypeError(
        f"{owner}: a batch must be (images, labels), (images, labels, ids) or a dict with the keys images, labels and "
        f"optionally ids, got {came}; override unpack_batch for another form."
    )


def check_first_batch(module: Any, labels: Tensor, batch: GlobalBatch) -> None:
    """Compare labels and ids of a run's first batch with what the sampler drew, if the sampler is known.

    Labels and ids of a wrong type are not checked here, because the loss raises for them.

    Args:
        module: a `RetrievalModule` in a run.
        labels: labels of the images of this process; those of `batch` differ if the module has a rule of relevance.
        batch: the batch of all processes or, if the module does not gather, of this process.

    Raises:
        ValueError: if labels or ids contradict the sampler of a `RetrievalDataLoader`. Other loaders cause a warning.
    """
    if not is_integer(batch.labels) or batch.labels.ndim not in (1, 2):
        return
    ranked_by_class = True
    if module.relevance is None:
        labels = batch.labels
    else:
        ranked_by_class = module.relevance.has_classes
        if module.gather:
            labels = gather_rows(labels, batch.counts)
    labels, ids = to_host(labels), None
    if batch.ids is not None:
        if not is_integer(batch.ids) or batch.ids.shape != labels.shape[:1]:
            return
        ids = to_host(batch.ids)
    owner, loader = type(module).__name__, module.trainer.train_dataloader
    if hasattr(loader, "check_first_batch"):
        loader.check_first_batch(labels, ids, gathered=module.gather)
    elif ids is not None:
        _warn_of_ids(owner, loader, finest(labels), ids)
    if module.memory is None and ranked_by_class:
        _warn_of_one_label(owner, finest(labels))


def _warn_of_ids(owner: str, loader: Any, labels: Tensor, ids: Tensor) -> None:
    """Warn if an id has two labels, or if ids repeat although the loader seems to draw different images."""
    unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    repeated = int((counts[inverse] > 1).sum())
    if not repeated:
        return
    cure = "give each image a different id, such as its index in the data set, or no ids"
    first = torch.full_like(unique, len(ids)).scatter_reduce(0, inverse, torch.arange(len(ids)), "amin")
    differs = (labels != labels[first][inverse]).nonzero()[:, 0]
    if len(differs):
        row = int(differs[0])
        labels_of_id = f"{int(labels[first[inverse[row]]])} and {int(labels[row])}"
        rank_zero_warn(
            f"{owner}: an image must have one label, but in the first batch the id {int(ids[row])} has the labels "
            f"{labels_of_id}, and {len(ids)} images have {len(unique)} different ids; images with the same id are not "
            f"in each other's lists: {cure}."
        )
    elif _repeats_are_unexpected(loader, fraction_of_ids=len(unique) / len(ids)):
        rank_zero_warn(
            f"{owner}: in the first batch {repeated} of {len(ids)} images share their id with others, so that they "
            f"are not in each other's lists; unless the sampler draws images several times, {cure}."
        )


def _repeats_are_unexpected(loader: Any, fraction_of_ids: float) -> bool:
    """Whether repeated ids in a batch are probably an error, judging by the sampler of a loader.

    Args:
        loader: the loader of the training batches.
        fraction_of_ids: number of different ids divided by the number of rows.
    """
    sampler = getattr(loader, "sampler", None)
    replacement = getattr(sampler, "replacement", None)
    draws_images = getattr(loader, "batch_size", None) is not None  # otherwise the sampler may draw whole batches
    if draws_images and (replacement is False or isinstance(sampler, SequentialSampler)):
        return True
    return replacement is not True and fraction_of_ids <= 0.5


def _warn_of_one_label(owner: str, labels: Tensor) -> None:
    if len(labels) > 1 and bool((labels == labels[0]).all()):
        rank_zero_warn(
            f"{owner}: all {len(labels)} images of the first batch have the label {int(labels[0])}, so that no list "
            "has a negative and nothing is learned; check the labels, and that the sampler draws several classes."
        )


class ChunkSizeSearch:
    """Finds the largest chunk size of a run, and searches again for each batch that is larger than all before."""

    def __init__(self) -> None:
        self.chunk_size = 0
        self.rows = 0  # rows of the batch for which the chunk size was found

    def find(self, module: nn.Module, images: Tensor, keep_graphs: int) -> int:
        """The largest chunk size for a batch.

        Args:
            module: the module that embeds images. Memory is reserved for Adam's two moments, which do not exist before
                the first step, and for the flat copy of the gradients that several processes sum.
            images: images of this process.
            keep_graphs: number of chunks whose graphs are kept.
        """
        if len(images) > self.rows:
            size = sum(parameter.numel() * parameter.element_size() for parameter in trainable_parameters(module))
            self.chunk_size = largest_chunk_size(module, images, keep_graphs=keep_graphs, reserve=3 * size)
            self.rows = len(images)
            rank_zero_info(
                f"{type(module).__name__}: chunks of {self.chunk_size} of {self.rows} images fit into memory."
            )
        return self.chunk_size


@dataclass(eq=False)
class TrainingStep:
    """Gathers the batch of all processes, adds the memory, computes the loss and sums the gradients.

    `loss` maps the embeddings of this process to its contribution to the loss; the contributions of all processes add
    up to the loss. `finish` sums the contributions and the gradients.

    Args:
        owner: prefix of error messages.
        batch_loss: the loss.
        labels: labels of this process's images or, with `relevance`, the columns that the rule reads.
        ids: dataset indices of this process's images, or None.
        number: the global step.
        seed: the seed of the run.
        gather: whether lists rank the global batch.
        memory: past batches that are ranked with the current batch, or None.
        memory_mode: how the memory is ranked.
        memory_weight: weight of the second term of the mode `"two_terms"`.
        fraction: fraction of the training steps that are done.
        relevance: the rule of relevance; None for equal labels.
        check_batch: function that is called with the batch before its loss is computed, or None.
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
    fraction: float = 1.0
    relevance: Relevance | None = None
    check_batch: Callable[[GlobalBatch], None] | None = None
    batch: GlobalBatch = field(init=False)
    terms: dict[str, Tensor] = field(init=False)  # this process's contribution to each logged term

    def loss(self, embeddings: Tensor) -> Tensor:
        """Compute this process's contribution to the loss from its embeddings."""
        self.batch = self._gather(embeddings)
        if self.check_batch is not None:
            self.check_batch(self.batch)
        device = embeddings.device
        # `step_random_state` gets rank 0, so that a loss draws the same random numbers on all processes.
        random_state = step_random_state(self.seed, self.number, 0)
        with self._explained_errors(), random_state, torch.autocast(device.type, enabled=False):
            ranked, with_memory = self._ranked_batches()
            value: Any = self.batch_loss.of_batch(ranked)
            _check_scalar(self.owner, value)
            terms = dict(self.batch_loss.terms)
            if with_memory is not None:
                of_memory: Any = self.batch_loss.of_batch(with_memory)
                _check_scalar(self.owner, of_memory)
                terms |= {"batch": value.detach(), "memory": of_memory.detach()}
                value = value + self.memory_weight * of_memory
        scale = 1.0  # so weighted, the values of all processes add up to the loss
        if not self._divides_queries:
            scale = 1 / world_size()
        self.terms = {f"train/loss/{name}": scale * term for name, term in terms.items()}
        part: Tensor = scale * value
        return part

    def finish(self, part: Tensor, gradients: GradientSum) -> dict[str, Tensor]:
        """Sum gradients, loss and terms over the processes; return the loss and its terms, on the CPU.

        Args:
            part: the return value of `loss`, detached from its graph.
            gradients: the sum of the gradients of the step.

        Raises:
            ValueError: if an embedding or the loss is not finite.
        """
        terms = {"train/loss": part, **self.terms}
        is_invalid = ~torch.isfinite(self.batch.embeddings).all()
        parts = torch.stack([term.to(part) for term in (*terms.values(), is_invalid)])
        totals = gradients.finish(parts)
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
    def weights(self) -> dict[str, Tensor]:
        """The weights of terms that change during training, on the CPU, by the names under which they are logged."""
        weights = self.batch_loss.scheduled_weights(self.fraction)
        return {f"train/weight/{name}": torch.tensor(weight) for name, weight in weights.items()}

    @property
    def splits_by_query(self) -> bool:
        """Whether the loss of this step is a sum over queries."""
        return self.batch_loss.splits_by_query(self.fraction)

    @property
    def images(self) -> int:
        """Number of images of all processes; without `gather`, all processes must have batches of the same size."""
        if self.gather:
            return len(self.batch.labels)
        return len(self.batch.labels) * world_size()

    @property
    def _divides_queries(self) -> bool:
        """Whether each process computes the loss of its local queries only, instead of the loss of all queries."""
        return self.gather and world_size() > 1 and self.splits_by_query

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
            local_queries=self.splits_by_query,
        )

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """If the loss raises because embeddings are not finite, raise an error with step, rank and ids instead.

        If the loss does not raise, `finish` checks the embeddings: a check before the loss would wait for the device.
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
        """The batch for the loss and the batch for its second term, None if there is no second term at this step."""
        embeddings, labels, ids, counts = self.batch
        queries = None
        if self._divides_queries:
            begin = sum(counts[: rank()])
            queries = QueryRange(begin, begin + counts[rank()], sum_over_ranks)
        settings: dict[str, Any] = {"queries": queries, "fraction": self.fraction, "relevance": self.relevance}
        ranked = RankedBatch(embeddings, labels, ids=ids, **settings)
        if self.memory is None:
            return ranked, None
        # `references` also runs during the warm-up, so that an invalid batch raises before any state has changed.
        references = self.memory.references(embeddings, labels, ids, detach=self.memory_mode != "one_list")
        with_memory = replace(references, **settings)
        if not self.memory.started:
            return ranked, None
        if self.memory_mode == "two_terms":
            return ranked, with_memory
        return with_memory, None


def _check_scalar(owner: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        raise ValueError(f"{owner}: `loss` must return a scalar, got {value!r}; set its reduction.")
