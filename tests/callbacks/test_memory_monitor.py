"""MemoryMonitor: drift and cosines compared with loops over the embeddings of a recorded run."""

import functools
import math

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import MemoryMonitor
from lightning_retrieval.callbacks.memory_monitor import sums_of_cosines
from lightning_retrieval.distributed import sum_over_ranks
from tests.csv_logs import logged

PROBE = 6


class Net(nn.Module):
    """A net with dropout and batch norm, whose training mode gives other embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))

    def forward(self, images):
        return self.layers(images)


class Record(pl.Callback):
    """Records the embeddings of the first images of the first batch, in evaluation mode, after each step."""

    def __init__(self):
        self.images, self.embeddings = None, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.images is None:
            self.images, self.labels = batch[0][:PROBE], batch[1][:PROBE].tolist()
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        with torch.no_grad():
            self.embeddings.append(module(self.images).tolist())
        for part, mode in modes:
            part.training = mode


def batches(classes=3):
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        labels = torch.arange(8) % classes
        yield torch.randn(8, 6, generator=generator) + labels[:, None], labels, torch.arange(8) + 8 * step


def fit(folder, *callbacks, data=None, **settings):
    module = RetrievalModule(
        Net(), SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.SGD, lr=0.5), seed=5, **settings
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=CSVLogger(folder, version=0),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(list(data or batches()), batch_size=None))
    return module


def cosine(a, b):
    product = sum(x * y for x, y in zip(a, b))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


@pytest.mark.parametrize(("size", "interval"), [(9, 2), (24, 3)])
def test_drift_and_cosines_are_those_of_a_loop(size, interval, tmp_path):
    record = Record()
    fit(tmp_path, record, MemoryMonitor(PROBE), memory=CrossBatchMemory(size, start_step=2))
    rows = logged(tmp_path)
    for step, values in rows.items():
        measured = step // interval * interval
        if measured == 0:
            assert "train/memory_drift" not in values
            continue
        now, before = record.embeddings[measured], record.embeddings[measured - interval]
        drift = sum(1 - cosine(a, b) for a, b in zip(before, now)) / PROBE
        pairs = [(i, j) for i in range(PROBE) for j in range(i) if record.labels[i] != record.labels[j]]
        negative = sum(cosine(now[i], now[j]) for i, j in pairs) / len(pairs)
        assert values["train/memory_drift"] == pytest.approx(drift, abs=1e-5)
        assert values["train/negative_cosine"] == pytest.approx(negative, abs=1e-5)
        assert drift > 1e-3
    assert len(rows) == 6


def test_the_run_is_the_same_with_and_without(tmp_path):
    """The weights, the statistics of batch norm and the random numbers of dropout."""
    watched = fit(tmp_path / "a", MemoryMonitor(), memory=CrossBatchMemory(9))
    plain = fit(tmp_path / "b", memory=CrossBatchMemory(9))
    for name, value in plain.embedder.state_dict().items():
        assert torch.equal(watched.embedder.state_dict()[name], value), name


def test_one_class_has_no_negatives(tmp_path):
    fit(tmp_path, MemoryMonitor(), data=batches(classes=1), memory=CrossBatchMemory(9))
    last = logged(tmp_path)[5]
    assert "train/memory_drift" in last
    assert "train/negative_cosine" not in last


def test_a_module_without_memory_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^MemoryMonitor: the module must have a memory, got none; give"):
        fit(tmp_path, MemoryMonitor())


def probe_of(this):
    generator = torch.Generator().manual_seed(this)
    rows = nn.functional.normalize(torch.randn(2, 3 + this, 4, generator=generator), dim=2)
    return rows[0], rows[1], torch.arange(3 + this) % 2


def sums_of_all_ranks(this, world):
    return sum_over_ranks(sums_of_cosines(*probe_of(this))).tolist()


@pytest.mark.distributed
def test_probes_of_two_processes_count_by_their_images_and_pairs(run_processes):
    expected = [0.0] * 4
    for rank in range(2):
        before, now, labels = probe_of(rank)
        for i in range(len(labels)):
            expected[0] += cosine(before[i].tolist(), now[i].tolist())
            expected[1] += 1
            for j in range(len(labels)):
                if labels[i] != labels[j]:
                    expected[2] += cosine(now[i].tolist(), now[j].tolist())
                    expected[3] += 1
    for sums in run_processes(sums_of_all_ranks, 2):
        assert sums == pytest.approx(expected, abs=1e-5)
