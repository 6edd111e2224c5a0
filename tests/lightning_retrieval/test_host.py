"""How often the host waits for a GPU in a training step and in an evaluation: a few times, whatever their size.

Promise 2: checks cost nothing after the first steps. A wait is seen in no other way, since it changes no number.
"""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalMetrics, RetrievalModule, losses
from tests.quiet_trainer import quiet_trainer

MOST = {384: 6, 4096: 20}  # batch size: how often the host may wait in a step
MOST_OF_EVALUATION = 20
DIM = 16
LOSSES = {
    "SmoothAP": losses.SmoothAPLoss,
    "SupAP": losses.SupAPLoss,
    "FastAP": losses.FastAPLoss,
    "QuantizedAP": losses.QuantizedAPLoss,
    "RecallAtK": losses.RecallAtKLoss,
    "BlackboxAP": losses.BlackboxAPLoss,
    "BlackboxRecall": losses.BlackboxRecallLoss,
    "Calibration": losses.CalibrationLoss,
    "pairs of all queries": lambda: losses.CalibrationLoss(pair_mean="all"),
    "balanced classes": lambda: losses.SmoothAPLoss(class_balanced=True),
    "ROADMAP": losses.ROADMAPLoss,
    "HAP": losses.HAPLoss,
    "nested": lambda: losses.NestedLoss(losses.SmoothAPLoss(), (2, 4, 8)),
    "nested ROADMAP": lambda: losses.NestedLoss(losses.ROADMAPLoss(), (4, 8)),
}


def batch_of(name, size):
    """Images and labels: four images of a class and, for HAP, eight of a coarse class."""
    labels = torch.arange(size) // 4
    if name == "HAP":
        labels = torch.stack([labels, labels // 2], 1)
    return torch.randn(size, DIM), labels


class WaitsOfSteps(pl.Callback):
    """How often the host waits in each step, from the pretend GPU's counter or the warnings of PyTorch's debug mode."""

    def __init__(self, kernels):
        self.kernels, self.counts = kernels, []

    def on_train_batch_start(self, *_):
        if self.kernels is not None:
            self.kernels.reset()
            return
        self.recording = warnings.catch_warnings(record=True)
        self.recorded = self.recording.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_):
        if self.kernels is not None:
            self.counts.append(self.kernels.total())
            return
        torch.cuda.set_sync_debug_mode("default")
        self.recording.__exit__(None, None, None)
        self.counts.append(sum("synchronizing CUDA operation" in str(entry.message) for entry in self.recorded))


@pytest.mark.gpu
def test_an_evaluation_on_a_gpu_waits_a_few_times(stand_in_for_kernels):
    metrics, ids = RetrievalMetrics().to("cuda"), torch.arange(1000, device="cuda")
    metrics.update(torch.randn(1000, DIM, device="cuda"), ids // 5, ids)
    waits = WaitsOfSteps(stand_in_for_kernels)
    waits.on_train_batch_start()
    metrics.compute()
    waits.on_train_batch_end()
    assert waits.counts[0] <= MOST_OF_EVALUATION, waits.counts


@pytest.mark.gpu
@pytest.mark.parametrize("size", MOST)
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_on_a_gpu_waits_a_few_times(name, size, stand_in_for_kernels):
    waits = WaitsOfSteps(stand_in_for_kernels)
    trainer = quiet_trainer(accelerator="gpu", max_steps=2, callbacks=[waits])
    data = DataLoader([batch_of(name, size)] * 2, batch_size=None)
    trainer.fit(RetrievalModule(nn.Linear(DIM, 8), LOSSES[name]()), data)
    assert waits.counts[1] <= MOST[size], waits.counts
