"""Callbacks of the runs of `run.py`: what a memory of past batches holds, and what is recorded of it."""

from typing import Any

import pytorch_lightning as pl
import torch
from experiments import Setting
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_retrieval.callbacks import MemoryMonitor


class DriftRecord(MemoryMonitor):
    """Keeps the drift, and the step at which the memory begins."""

    def __init__(self, setting: Setting) -> None:
        if isinstance(setting.memory_start, float):
            super().__init__(start_drift=setting.memory_start)
        else:
            super().__init__()
        self.begin: int | None = None
        self.drift: dict[int, float] = {}  # by the step before which it was measured

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        memory: Any = pl_module.memory
        step = memory.steps - 1
        drift = trainer.callback_metrics.get("train/memory_drift")
        if drift is not None and step % self._interval == 0:
            self.drift[step] = round(float(drift), 4)
        if self.begin is None and memory.started and len(memory) > 0:
            self.begin = step

    def result(self) -> dict[str, Any]:
        """Return what a line of `results.jsonl` holds of it."""
        return {"memory_begin": self.begin, "drift": {str(step): drift for step, drift in self.drift.items()}}


class FreshMemory(pl.Callback):
    """Embeds the images of the memory again before each step, so that no row of it is out of date.

    Each image keeps the augmentation with which it is first read.
    """

    def __init__(self) -> None:
        self.images: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        state = module.memory.get_extra_state()
        if state["rows"] is None:
            return
        _, labels, ids = state["rows"]
        dataset = trainer.train_dataloader.dataset  # type: ignore[union-attr]
        for index in ids.tolist():
            if index not in self.images:
                self.images[index] = dataset[index]["images"]
        images = torch.stack([self.images[index] for index in ids.tolist()]).to(module.device)
        module.eval()
        embeddings = module.embed(images)  # which takes images of uint8 too
        module.train()
        module.memory.set_extra_state({**state, "rows": (embeddings, labels, ids)})


class SlowEncoder(pl.Callback):
    """Stores what a moving average of the network gives for each batch, in place of what the network gave (MoCo).

    The average is in evaluation mode: its BatchNorm layers use running statistics, which are averaged too.

    Args:
        momentum: weight of the average's own values at each step; with 0 it is the network after the step.
    """

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: Any = pl_module
        average = get_ema_multi_avg_fn(self.momentum)
        self.average = AveragedModel(module.embedder, multi_avg_fn=average, use_buffers=True).eval()
        self.average.update_parameters(module.embedder)  # the first time, this copies

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        self.average.update_parameters(module.embedder)
        state = module.memory.get_extra_state()
        if state["rows"] is None:
            return
        images, _, ids = module.unpack_batch(batch)
        slow = dict(zip(ids.tolist(), self.average(images)))
        embeddings, labels, stored = state["rows"]
        rows = [slow.get(index, row) for index, row in zip(stored.tolist(), embeddings)]
        module.memory.set_extra_state({**state, "rows": (torch.stack(rows), labels, stored)})
