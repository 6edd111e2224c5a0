"""How often the host waits for the device in a training step and in an evaluation, and what a step sends.

Waits are counted on a GPU, and without one by the operations.
"""

import functools
import warnings
from typing import get_args

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_retrieval import CrossBatchMemory, RetrievalMetrics, RetrievalModule, distributed, losses
from lightning_retrieval.losses import blockwise, lists, positives
from lightning_retrieval.ranking import ranked_lists, ranks
from lightning_retrieval.training import gradient_sum as gradient_sum_module
from lightning_retrieval.training import memory as memory_module
from lightning_retrieval.training import step as step_module
from lightning_retrieval.training.chunked import chunked_backward
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.memory import MemoryMode
from lightning_retrieval.training.step import GlobalRows, TrainingStep
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
    """Counts where the host would wait if some tensors, and all that is computed from them, were on a device.

    It sees the operations whose result has a size, or is a number, that only the device knows, and numbers of the host
    that are written through indices. It does not see `torch.tensor(..., device=...)`.
    """

    READ = frozenset(
        {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
         "equal", "repeat_interleave"}
    )  # fmt: skip
    INDEXED = frozenset({"index", "index_put_", "index_put"})

    def __init__(self):
        super().__init__()
        self.found = []

    def to_host(self, values):
        self.found.append("to_host")
        return torch.tensor(values.detach().tolist(), dtype=values.dtype)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(is_marked(tensor) for tensor in tensors)
        if on_device and self.waits(name, args):
            self.found.append(name)
        result = function(*args, **(kwargs or {}))
        if on_device:
            mark(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result

    def waits(self, name, args):
        if name in self.READ:
            return True
        if name not in self.INDEXED:
            return False
        has_mask = any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1])
        from_host = name != "index" and args[2].ndim == 0 and not is_marked(args[2])
        return has_mask or from_host


def mark(*tensors):
    for tensor in tensors:
        tensor.is_on_pretended_device = True


def is_marked(tensor):
    return getattr(tensor, "is_on_pretended_device", False)


@pytest.fixture
def waits(monkeypatch):
    return pretended_accelerator(monkeypatch)


def pretended_accelerator(monkeypatch):
    """A mode in which the library takes the CPU for an accelerator, with blocks of a sixth of the scores or less."""
    mode = Waits()
    for module in (lists, memory_module, positives, gradient_sum_module, step_module):
        monkeypatch.setattr(module, "to_host", mode.to_host)
    for module in (distributed, positives):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(blockwise, "ACCELERATOR_BLOCK_ELEMENTS", 384 * 64)
    monkeypatch.setattr(lists, "ACCELERATOR_COUNTED_ELEMENTS", 384 * 64)
    return mode


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_waits_a_few_times_however_many_blocks_there_are(name, waits):
    images, labels = batch_of(name, 384)
    net, loss = nn.Linear(DIM, 8), LOSSES[name]()
    mark(images, labels, *net.parameters())
    step = TrainingStep(RetrievalModule(net, loss), [GlobalRows(labels, counts=[384])])
    with waits:
        part = chunked_backward(net, images, step.loss)
        step.finish(part, GradientSum(net.parameters()))
    expected = 3 if name == "HAP" else 2  # labels must nest
    assert waits.found == ["to_host"] * expected


ROWS = 6  # of each of two processes


class Embeds(RetrievalModule):
    """Notes when its network runs."""

    def forward(self, images):
        self.events.append("forward")
        return super().forward(images)


class EventsOfSteps(pl.Callback):
    """The order in which a step embeds, calls collectives and waits; and the bytes that each collective sends."""

    def __init__(self, mode):
        self.mode, self.steps, self.sent = mode, [], []

    def record(self, name, function, bytes_sent, *tensors, **settings):
        self.mode.found.append(name)
        self.sent[-1].append(bytes_sent(tensors))
        return function(*tensors, **settings)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        mark(*batch, *module.parameters())
        module.events = self.mode.found = []
        self.steps.append(module.events)
        self.sent.append([])
        self.collectives = pytest.MonkeyPatch()
        for name, bytes_sent in SENT.items():
            recorded = functools.partial(self.record, name, getattr(dist, name), bytes_sent)
            self.collectives.setattr(dist, name, recorded)
        self.mode.__enter__()

    def on_train_batch_end(self, *_):
        self.mode.__exit__(None, None, None)
        self.collectives.undo()


def size_of(tensor):
    return tensor.numel() * tensor.element_size()


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# The bytes that one of two processes with equal numbers of rows sends, given the tensors of the call.
SENT = {
    GATHER: lambda tensors: size_of(tensors[1]),
    "all_to_all_single": lambda tensors: size_of(tensors[1]) / 2,
    "all_reduce": lambda tensors: size_of(tensors[0]),
}


def steps_of_a_process(rank, world, settings):
    """The events of the second and third step, in two chunks, and the bytes of their collectives."""
    generator = torch.Generator().manual_seed(rank)
    labels = torch.arange(ROWS) // 2
    batch = torch.randn(ROWS, DIM, generator=generator), labels, torch.arange(ROWS) + ROWS * rank
    with pytest.MonkeyPatch.context() as monkeypatch:
        events = EventsOfSteps(pretended_accelerator(monkeypatch))
        trainer = quiet_trainer(devices=world, strategy="ddp", max_steps=3, callbacks=[events])
        module = Embeds(nn.Linear(DIM, 8), losses.SmoothAPLoss(), chunk_size=ROWS // 2, **settings)
        trainer.fit(module, DataLoader([batch] * 3, batch_size=None))
    return events.steps[1:], events.sent[1:]


@pytest.mark.parametrize(("settings", "bytes_of_number"), [({}, 4), ({"gather": "float16"}, 2)])
def test_what_a_step_of_two_processes_sends_and_waits_for(run_processes, settings, bytes_of_number):
    """Between the forward pass of the last chunk and the loss, the host waits for the positives only."""
    for steps, sent in run_processes(steps_of_a_process, 2, settings, backend=None):
        before = [GATHER, "to_host", GATHER]
        loss = [GATHER, "to_host", "all_to_all_single"]
        expected = [*before, "forward", "forward", *loss, "forward", "all_reduce", "to_host"]
        assert steps == [expected] * 2
        forms, labels_and_ids, embeddings, gradients = 6 * 8, ROWS * 16, ROWS * 8 * bytes_of_number, ROWS * 8 * 4
        of_network = 8 * DIM + 8 + 4  # its gradient, two flags, the loss, and whether an embedding is not finite
        assert sent == [[forms, labels_and_ids, embeddings, gradients, of_network * 4]] * 2


@pytest.mark.parametrize("mode", get_args(MemoryMode))
def test_a_memory_adds_two_waits_to_a_step(mode, waits):
    """One where its rows are ranked, one where they are replaced; in the second step, images come again."""
    images, labels = batch_of("SmoothAP", 384)
    net, loss, memory = nn.Linear(DIM, 8), losses.SmoothAPLoss(), CrossBatchMemory(1000, mode=mode)
    module = RetrievalModule(net, loss, memory=memory)
    ids = torch.arange(384)
    mark(images, labels, ids, *net.parameters())
    for number in range(2):
        with waits:
            rows = GlobalRows(labels, ids + 200 * number, counts=[384])
            step = TrainingStep(module, [rows])
            part = chunked_backward(net, images, step.loss)
            step.finish(part, GradientSum(net.parameters()))
            step.remember()
    assert len(memory) == 584
    of_second_term = ["to_host"] * (mode == "two_terms")
    assert waits.found == ["to_host"] * 8 + 2 * of_second_term


@pytest.mark.parametrize("levels", [1, 2])
def test_the_waits_of_an_evaluation_do_not_grow_with_the_images(levels, waits, monkeypatch):
    monkeypatch.setattr(ranks, "is_accelerator", lambda device: True)
    monkeypatch.setattr(ranked_lists, "_CPU_COLUMNS", 384)
    found = []
    for images in (200, 1000):
        labels, ids = torch.arange(images) // 5, torch.arange(images)
        labels = torch.stack([labels, labels // 4], 1)[:, :levels]
        metrics, rows = RetrievalMetrics(), torch.randn(images, DIM)
        mark(rows, labels, ids)
        with waits:
            metrics.update(rows, labels, ids)
            waits.found.clear()
            metrics.compute()
        found.append(list(waits.found))
    assert found[0] == found[1]
    assert 0 < len(found[0]) <= MOST_OF_EVALUATION


def test_what_a_device_has_to_tell_the_host_is_counted(waits):
    x = torch.arange(6.0)
    mark(x)
    with waits:
        x[x > 2]
        (x > 2).nonzero()
        x.sum().item()
        x.index_put_((torch.tensor([1]),), torch.tensor(0.0))  # which x[index] = 0.0 was before torch 2.15
        torch.arange(3).nonzero()  # of the host
    assert waits.found == ["index", "nonzero", "_local_scalar_dense", "index_put_"]
