"""How far the stored embeddings of a memory are from those that the network would give now."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from lightning_retrieval.callbacks.evaluation_loop import evaluation_mode
from lightning_retrieval.callbacks.log_values import log_without_sync
from lightning_retrieval.checks import check_integer
from lightning_retrieval.distributed import rank, sum_over_ranks
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.memory import CrossBatchMemory
from lightning_retrieval.training.random_state import step_random_state


class MemoryMonitor(pl.Callback):
    """Logs how out of date the rows of a `CrossBatchMemory` are, and how similar images of different classes are.

    A few images of the first training batch, the probe, are embedded again at regular intervals, in evaluation mode and
    without a gradient. The interval is the age of the oldest rows of a full memory, in steps.

    `train/memory_drift` is 1 minus the mean cosine of each image's embedding with that of one interval before. It is
    the error of the oldest rows: near 0 they are ranked as new ones would be. `train/negative_cosine` is the mean
    cosine of the pairs of probe images of different classes. Where a memory makes it rise, the list without a gradient
    draws all images together. Both are logged from the first interval on, also before the memory begins.

    Args:
        probe: number of images that each process takes from its first batch, >= 2.

    Raises:
        ValueError: if `probe` is below 2; when training begins, if the module has no memory.
        TypeError: if `probe` is not an integer.

    Example:
        >>> from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
        >>> from lightning_retrieval.callbacks import MemoryMonitor
        >>> memory = CrossBatchMemory(size=512, start_step=100)
        >>> module = RetrievalModule(Embedder("glyph_net", 64), SmoothAPLoss(), memory=memory)
        >>> callbacks = [MemoryMonitor(probe=64)]

    Cost:
        One forward pass of the probe in each interval.

    Relations:
        The embeddings are those of `forward`, as the memory stores them. A resumed run takes a new probe. The drift of
        XBM (Wang et al., CVPR 2020, section 3.1, "slow drift") is a squared distance of the same pairs; for embeddings
        on the unit sphere it is twice this one.
    """

    _images: Tensor | None
    _labels: Tensor | None
    _embeddings: Tensor | None  # of one interval before
    _values: dict[str, Tensor]
    _interval: int
    _steps: int

    def __init__(self, probe: int = 64) -> None:
        self.probe = check_integer("MemoryMonitor", "probe", probe, least=2)
        self._restart()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(getattr(pl_module, "memory", None), CrossBatchMemory):
            raise ValueError(
                "MemoryMonitor: the module must have a memory, got none; give RetrievalModule(memory=...), or leave "
                "the callback out."
            )
        self._restart()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._images is None:
            images, labels, _ = pl_module.unpack_batch(batch)  # type: ignore[operator]
            self._images = images[: self.probe].clone()
            self._labels = finest(labels[: self.probe])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        memory: Any = pl_module.memory
        if self._interval == 0:
            _, labels, _ = pl_module.unpack_batch(batch)  # type: ignore[operator]
            batch_size = sum_over_ranks(torch.tensor(len(labels), device=pl_module.device))
            self._interval = math.ceil(memory.size / int(batch_size))
        if self._steps % self._interval == 0:
            self._measure(trainer, pl_module)
        self._steps += 1
        if self._values:
            log_without_sync(pl_module, self._values)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restart()

    def _restart(self) -> None:
        self._images = self._labels = self._embeddings = None
        self._values = {}
        self._interval = 0
        self._steps = 0

    def _measure(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        before, self._embeddings = self._embeddings, self._embed(trainer, module)
        if before is not None and self._labels is not None:
            sums = sum_over_ranks(sums_of_cosines(before, self._embeddings, self._labels))
            same, images, negatives, pairs = sums.unbind()
            self._values = {"train/memory_drift": 1 - same / images}
            if pairs > 0:
                self._values["train/negative_cosine"] = negatives / pairs

    @torch.no_grad()
    def _embed(self, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor:
        random_state = step_random_state(0, self._steps, rank())
        with evaluation_mode(module), random_state, trainer.precision_plugin.forward_context():
            embeddings: Tensor = module(self._images)
        return F.normalize(embeddings.float(), dim=1)


def sums_of_cosines(
    before: Float[Tensor, "image dim"], now: Float[Tensor, "image dim"], labels: Int[Tensor, " image"]
) -> Float[Tensor, "4"]:
    """Sum of the cosines of each image with itself, number of images, and both for pairs of different classes.

    Args:
        before: unit rows of one interval before.
        now: unit rows of the same images now.
        labels: of the images.
    """
    same = (before * now).sum()
    is_negative = labels[:, None] != labels
    negatives = (now @ now.T)[is_negative].sum()
    return torch.stack([same, same.new_tensor(len(now)), negatives, is_negative.sum().to(same)])
