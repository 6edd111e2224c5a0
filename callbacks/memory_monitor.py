"""Measures the difference between the embeddings stored in a memory and embeddings that the network computes now."""

import math
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from lightning_retrieval.arguments import Several, checked, numbers
from lightning_retrieval.backend import move_data_to_device, pl, rank_zero_info, rank_zero_warn
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.evaluation import log_without_sync
from lightning_retrieval.checks import SMALLEST
from lightning_retrieval.distributed import gather_rows, sum_over_ranks
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.retrieval_network import evaluation_mode
from lightning_retrieval.random_state import step_random_state
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import Rows
from lightning_retrieval.training.memory import CrossBatchMemory
from lightning_retrieval.training.sides import is_two_sided

DRIFT = "train/memory_drift"
_STATE = ("images", "labels", "embeddings", "values", "interval", "measured")


class MemoryMonitor(Callback):
    """Logs the drift of the rows of a `CrossBatchMemory`, and decides when a memory with `start_step="auto"` begins.

    A few images of the first training batch, the probe, are embedded again at regular intervals, in evaluation mode and
    without a gradient. The interval is the age of the oldest rows of a full memory, in steps. The probe of batches with
    two sides are candidates.

    `train/memory_drift` is 1 minus the mean cosine between the embedding of each probe image now and one interval ago.
    This drift is the error of the oldest rows: if it is near 0, the oldest rows are ranked like new rows.
    `train/negative_cosine` is the mean cosine of the pairs of probe images of different classes or, if the module has
    `relevance`, of the pairs that are negatives by this rule. If this mean rises with a memory, the references without
    a gradient pull all images together. Both values are logged from the first interval on, even before the memory
    begins.

    A memory with `start_step="auto"` begins as soon as the drift is below `start_drift`, but not before the end of the
    first interval.

    Args:
        probe: number of images of the first global batch, >= 2.
        start_drift: drift below which a memory with `start_step="auto"` begins, > 0 and at most 2.

    Raises:
        ValueError: if a number is out of its range; when training begins, if the module has no memory.
        TypeError: if `probe` is not an integer, or `start_drift` not a number.

    Example:
        >>> from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
        >>> from lightning_retrieval.callbacks import MemoryMonitor
        >>> memory = CrossBatchMemory(size=512, start_step="auto")
        >>> module = RetrievalModule(Embedder("glyph_net", 64), SmoothAPLoss(), memory=memory)
        >>> callbacks = [MemoryMonitor()]

    Cost:
        Each process runs one forward pass of the probe per interval. Until a memory begins, checkpoints hold the images
        of the probe, so that the memory of a resumed run begins at the same step.

    Relations:
        The embeddings are results of `forward`, which the memory stores, too. A run that is resumed after the memory
        has begun takes a new probe. The drift of XBM (Wang et al., CVPR 2020, section 3.1, "slow drift") is a squared
        distance between the same embeddings; on the unit sphere, it is twice the drift here. Another callback with an
        attribute `begins_memory = True` may call `CrossBatchMemory.begin` instead, on all processes.
    """

    begins_memory = True  # RetrievalModule requires a callback with this attribute if start_step="auto"
    _images: Tensor | None
    _labels: Tensor | None
    _embeddings: Tensor | None  # embeddings of the probe one interval ago
    _values: dict[str, Tensor]
    _interval: int
    _measured: int  # number of the step before which the probe was last embedded
    _waits: bool  # whether the memory has start_step="auto" and has not begun

    def __init__(self, probe: Several = 64, start_drift: Annotated[float, numbers(SMALLEST, 2)] = 0.01) -> None:
        self.probe = checked(self, probe=probe)
        self.start_drift = checked(self, start_drift=start_drift)
        self._restart()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the state of an earlier run, before the state of a checkpoint is loaded."""
        if stage == "fit":
            self._restart()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if there is no memory; move the state of a checkpoint to the device."""
        if not isinstance(getattr(pl_module, "memory", None), CrossBatchMemory):
            cure = "give RetrievalModule(memory=...), or remove the callback"
            raise InvalidValue("the module must have a memory", "MemoryMonitor", got="none", cure=cure)
        for name in _STATE:
            value = getattr(self, f"_{name}")
            setattr(self, f"_{name}", move_data_to_device(value, pl_module.device))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Embed the probe if an interval is over. Before a step, the model is in the state after a complete step."""
        memory: Any = pl_module.memory
        if self._images is None:
            if is_two_sided(batch):
                batch = batch["candidates"]
            images, labels, _ = pl_module.unpack_batch(batch)  # type: ignore[operator]
            self._take_probe(images, _columns(pl_module, labels, batch), memory)
        self._waits = memory.start_step == "auto" and not memory.started
        # A run that is resumed from a checkpoint written during a step repeats this step, but does not measure again.
        if memory.steps % self._interval == 0 and memory.steps != self._measured:
            self._measured = memory.steps
            self._measure(trainer, pl_module, memory.steps)
            if self._waits and DRIFT in self._values:
                self._begin_if_stable(memory)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the latest measurement."""
        if self._values:
            log_without_sync(pl_module, self._values)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if the memory has never begun."""
        if not self._waits or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        found = f"the first drift is known after {self._interval} steps"
        if DRIFT in self._values:
            found = f"the drift was {self._values[DRIFT]:.3g} at last, not below start_drift={self.start_drift:g}"
        rank_zero_warn(
            f"MemoryMonitor: the memory has not begun in {pl_module.memory.steps} steps: {found}; "  # type: ignore[union-attr]
            "train longer, or give a smaller memory, whose rows are younger, or a larger start_drift."
        )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Free the probe."""
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the probe, its embeddings and the latest values until the memory begins; afterwards an empty dict."""
        if not self._waits:
            return {}
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the probe of a checkpoint."""
        for name in _STATE:
            setattr(self, f"_{name}", state_dict[name])

    def _restart(self) -> None:
        self._images = self._labels = self._embeddings = None
        self._values = {}
        self._interval = 0
        self._measured = -1
        self._waits = False

    def _take_probe(self, images: Tensor, labels: Tensor, memory: CrossBatchMemory) -> None:
        """Store the first images of the global batch, in rank order, on each process."""
        labels = gather_rows(labels)
        self._interval = math.ceil(memory.size / len(labels))
        self._labels = labels[: self.probe].clone()
        self._images = gather_rows(images[: self.probe])[: self.probe].clone()

    def _measure(self, trainer: pl.Trainer, module: pl.LightningModule, step: int) -> None:
        if self._images is None or self._labels is None:
            return
        before, self._embeddings = self._embeddings, self._embed(trainer, module, self._images, step)
        if before is None:
            return
        sums = sum_over_ranks(sums_of_cosines(before, self._embeddings, self._labels, _relevance_of(module)))
        same, images, negatives, pairs = sums.unbind()
        self._values = {DRIFT: 1 - same / images}
        if pairs > 0:
            self._values["train/negative_cosine"] = negatives / pairs

    def _begin_if_stable(self, memory: CrossBatchMemory) -> None:
        drift = float(self._values[DRIFT])
        if drift < self.start_drift:
            memory.begin()
            self._waits = False
            rank_zero_info(
                f"MemoryMonitor: the memory begins at step {memory.steps}, since the drift, {drift:.3g}, is below "
                f"start_drift={self.start_drift:g}."
            )

    @torch.no_grad()
    def _embed(self, trainer: pl.Trainer, module: pl.LightningModule, images: Tensor, step: int) -> Tensor:
        random_state = step_random_state(0, step, 0)
        with evaluation_mode(module), random_state, trainer.precision_plugin.forward_context():
            embeddings: Tensor = module(images)
        return F.normalize(embeddings.float(), dim=1)


def _relevance_of(module: Any) -> Relevance | None:
    """The rule of relevance of a module; None for equal labels."""
    relevance: Relevance | None = getattr(module, "relevance", None)
    return relevance


def _columns(module: Any, labels: Tensor, batch: Any) -> Tensor:
    """What decides which images of a batch are relevant to each other: their finest labels, unless there is a rule."""
    relevance = _relevance_of(module)
    if relevance is None:
        return finest(labels)
    return relevance.columns(labels, batch)


def sums_of_cosines(
    before: Float[Tensor, "image dim"],
    now: Float[Tensor, "image dim"],
    labels: Int[Tensor, "image ..."],
    relevance: Relevance | None = None,
) -> Float[Tensor, "4"]:
    """Return two sums of cosines, each followed by its number of terms.

    The first sum has one term for each image: the cosine between its embeddings in `before` and `now`. The second sum
    has one term for each negative pair: the cosine between the embeddings in `now` of two images of different classes
    or, with `relevance`, of an image and a candidate that is not relevant to it.

    Args:
        before: unit embeddings of the images one interval ago.
        now: unit embeddings of the same images now.
        labels: labels of the images or, with `relevance`, the columns that the rule reads.
        relevance: a rule of relevance; None for equal labels.
    """
    same = (before * now).sum()
    rows = Rows(labels)
    relevant, candidate = Lists(rows, rows, relevance).masks(torch.arange(len(labels), device=labels.device))
    is_negative = candidate & ~relevant
    negatives = (now @ now.T)[is_negative].sum()
    return torch.stack([same, same.new_tensor(len(now)), negatives, is_negative.sum().to(same)])
