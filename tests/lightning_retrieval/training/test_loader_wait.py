"""Which part of the time of an epoch the network waits for its images, and the line that says so."""

import copy
import logging
import re

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.training import loader_wait
from lightning_retrieval.training.loader_wait import LoaderWait
from tests.quiet_trainer import QUIET

LINE = re.compile(r"^RetrievalModule: the network waited for images in (\d+) % of the time of the first epoch(.*)\.$")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves on, so that a busy machine changes nothing."""
    clock = Clock()
    monkeypatch.setattr(loader_wait.time, "perf_counter", lambda: clock.seconds)
    return clock


class Clock:
    seconds = 0.0

    def wait(self, seconds):
        self.seconds += seconds


class Slow(nn.Module):
    """A network that takes some time."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.linear = nn.Linear(4, 3)

    def forward(self, images):
        self.clock.wait(self.seconds)
        return self.linear(images)


class SlowBatches(torch.utils.data.Dataset):
    """Items of which each takes some time; the first takes long, as starting workers does."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return 32

    def __getitem__(self, index):
        self.clock.wait(50 if index == 0 else self.seconds)
        return torch.randn(4), index % 2, index


def lines_of_run(caplog, clock, *, loader, network):
    """The lines about waiting, and the value that was logged last."""
    module = RetrievalModule(Slow(clock, network), SmoothAPLoss())
    trainer = pl.Trainer(max_epochs=2, **QUIET)
    with caplog.at_level(logging.INFO):
        trainer.fit(module, DataLoader(SlowBatches(clock, loader / 4), batch_size=4))
    found = [LINE.match(record.getMessage()) for record in caplog.records]
    return [match for match in found if match is not None], float(trainer.callback_metrics["train/loader_wait"])


@pytest.mark.parametrize(("loader", "network", "percent"), [(6, 2, 75), (1, 9, 10), (0.5, 9.5, 5)])
def test_one_line_after_the_first_epoch_says_how_long_the_network_waited(caplog, clock, loader, network, percent):
    """The start of the loader and the time between epochs do not count."""
    (line,), logged = lines_of_run(caplog, clock, loader=loader, network=network)
    assert int(line[1]) == percent
    assert 100 * logged == pytest.approx(percent)
    helps = "what helps: " in line[2]
    assert helps == (percent >= 10)
    if helps:
        assert "`lightning-retrieval shrink PHOTOS SMALL --size 288`" in line[2]
        assert "num_workers=0 now" in line[2]


def test_a_validation_does_not_count(caplog, clock):
    """Nor does the first step after it."""
    module = RetrievalModule(Slow(clock, 9), SmoothAPLoss())
    trainer = pl.Trainer(max_epochs=1, val_check_interval=2, **{**QUIET, "limit_val_batches": 1})
    module.validation_step = lambda *_: clock.wait(100)
    with caplog.at_level(logging.INFO):
        trainer.fit(module, DataLoader(SlowBatches(clock, 0.25), batch_size=4), DataLoader(range(8)))
    (line,) = filter(None, (LINE.match(record.getMessage()) for record in caplog.records))
    assert int(line[1]) == 10


def test_the_measurement_is_copied_with_a_module_and_counts_whole_steps_only():
    wait, device = LoaderWait(), torch.device("cpu")
    wait.end(device)
    assert (wait.fraction, wait.steps) == (None, 0)
    wait.begin(device)
    wait.end(device)
    wait.pause()
    wait.begin(device)
    wait.end(device)
    assert wait.steps == 1
    assert 0 <= wait.fraction <= 1
    assert copy.deepcopy(wait).steps == 0
    wait.restart()
    assert (wait.fraction, wait.steps) == (None, 0)
