"""How often the host waits for a GPU in a training step and in an evaluation: a few times, whatever their size.

Promise 2: checks cost nothing after the first steps. A wait is seen in no other way, since it changes no number.
"""

import sys
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalMetrics, RetrievalModule, losses
from lightning_retrieval.losses import blockwise
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


class Waits(TorchDispatchMode):
    """Counts where the host would wait if some tensors, and all that is computed from them, were on a device."""

    READ = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"})

    def reset(self):
        self.found = []

    def total(self):
        return len(self.found)

    def to_host(self, values):
        self.found.append("to_host")
        return torch.tensor(values.detach().tolist(), dtype=values.dtype)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        on_device = any(getattr(leaf, "is_on_device", False) for leaf in tree_leaves((args, kwargs)))
        if on_device and name in self.READ:
            self.found.append(name)
        result = function(*args, **(kwargs or {}))
        for leaf in filter(torch.is_tensor, tree_leaves(result)):
            leaf.is_on_device = on_device
        return result


@pytest.mark.parametrize("name", ["SmoothAP", "BlackboxAP", "HAP", "nested ROADMAP"])
def test_a_step_waits_a_few_times_however_many_blocks_there_are(name, monkeypatch):
    """On the CPU, which the library takes for a device that computes small blocks."""
    pretended = Waits()
    changes = {"to_host": pretended.to_host, "is_accelerator": lambda device: True}
    for module in [module for path, module in sys.modules.items() if path.startswith("lightning_retrieval.")]:
        for changed in changes.keys() & vars(module).keys():
            monkeypatch.setattr(module, changed, changes[changed])
    monkeypatch.setattr(blockwise, "ACCELERATOR_BLOCK_ELEMENTS", 384 * 64)
    batch, network = batch_of(name, 384), nn.Linear(DIM, 8)
    for tensor in (*batch, *network.parameters()):
        tensor.is_on_device = True
    waits = WaitsOfSteps(pretended)
    pretended.reset()
    with pretended:
        quiet_trainer(max_steps=2, callbacks=[waits]).fit(
            RetrievalModule(network, LOSSES[name]()), DataLoader([batch] * 2, batch_size=None)
        )
    assert 0 < waits.counts[1] <= MOST[384], pretended.found
