"""Flags and callbacks of the Trainer, methods of its Tuner: each is right with a RetrievalModule, or raises."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.training.trainer_checks import check_processes
from tests.lightning_retrieval.training.small_training import batches, fit, net

STEPS = 3


class Weights(Callback):
    """Keeps the weights after each step."""

    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(pl_module.embedder.weight.detach().clone())


def points():
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(STEPS, 10, 6, generator=generator)
    labels = torch.randint(3, (STEPS, 10), generator=generator)
    return DataLoader(list(zip(images, labels)), batch_size=None)


def module(**settings):
    torch.manual_seed(5)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    return RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), optimizer=optimizer, **settings)


def trainer(**flags):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, **quiet, **flags})


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("callback", "cure"),
    [
        (StochasticWeightAveraging(swa_lrs=0.1), "EMAWeightAveraging"),
        (LearningRateFinder(), "short runs"),
        (BatchSizeFinder(), "chunk_size='auto'"),
        (GradientAccumulationScheduler({0: 2}), "chunk_size"),
        (SpikeDetection(), "leave it out"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_need_automatic_optimization_raise(callback, cure):
    name = type(callback).__name__
    with pytest.raises(ValueError, match=rf"^RetrievalModule: the callback {name} of Lightning .*{cure}"):
        trainer(callbacks=[callback]).fit(module(), points())


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("method", "callback"), [("lr_find", "LearningRateFinder"), ("scale_batch_size", "BatchSizeFinder")]
)
def test_methods_of_the_tuner_raise(method, callback):
    with pytest.raises(ValueError, match=rf"^RetrievalModule: the callback {callback} of Lightning"):
        getattr(Tuner(trainer()), method)(module(), points())


def test_weights_averaged_by_lightning_are_the_moving_average():
    weights, trained = Weights(), module()
    trainer(callbacks=[weights, EMAWeightAveraging(decay=0.75)]).fit(trained, points())
    expected = weights.after[0]
    for after in weights.after[1:]:
        expected = 0.75 * expected + 0.25 * after
    assert len(weights.after) == 2 * STEPS
    torch.testing.assert_close(trained.embedder.weight.detach(), expected)
    assert not torch.allclose(weights.after[-1], expected)


def test_weights_averaged_by_lightning_are_the_mean():
    weights, trained = Weights(), module()
    trainer(callbacks=[weights, WeightAveraging()]).fit(trained, points())
    torch.testing.assert_close(trained.embedder.weight.detach(), sum(weights.after) / (2 * STEPS))


def test_early_stopping_stops():
    run = trainer(max_epochs=9, callbacks=[EarlyStopping("train/loss", patience=1, min_delta=1e9)])
    run.fit(module(), points())
    assert run.current_epoch == 2


def test_learning_rates_are_logged(tmp_path):
    settings = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    run = trainer(callbacks=[LearningRateMonitor("epoch")], **settings)
    run.fit(module(lr_scheduler=functools.partial(ExponentialLR, gamma=0.5)), points())
    assert run.callback_metrics["lr-SGD"] == 0.25


def test_timer_stops():
    run = trainer(max_epochs=9, callbacks=[Timer({"seconds": 0}, interval="step")])
    run.fit(module(), points())
    assert run.global_step <= 1


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"gradient_clip_val": 0.5},
            r"Trainer\(gradient_clip_val=0\.5\) does not work .* RetrievalModule\(\.\.\., gradient_clip_val=0\.5\)",
        ),
        ({"accumulate_grad_batches": 4}, r"Trainer\(accumulate_grad_batches=4\) would split .* chunk_size"),
        ({"overfit_batches": 2}, r"Trainer\(overfit_batches=2\) replaces the sampler.* limit_train_batches"),
    ],
)
def test_trainer_flags_that_break_the_lists_raise(flags, sentence):
    with pytest.raises(ValueError, match=rf"^RetrievalModule: {sentence}"):
        fit(RetrievalModule(net(), SmoothAPLoss()), batches(), **flags)


def test_a_static_graph_raises():
    module = RetrievalModule(net(), SmoothAPLoss())
    module.trainer = trainer(strategy=DDPStrategy(static_graph=True))
    with pytest.raises(
        ValueError, match=r"^RetrievalModule: DDPStrategy\(static_graph=True\) expects one backward pass"
    ):
        module.configure_callbacks()


@pytest.mark.parametrize("chunk_size", [None, 3, "auto"])
def test_chunks_and_sync_batch_norm_do_not_go_together(chunk_size, monkeypatch):
    """The layer works on GPUs only, so the module is asked without a run, as if on two processes."""
    module = RetrievalModule(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)), SmoothAPLoss(), chunk_size=chunk_size)
    check_processes(module)
    monkeypatch.setattr("lightning_retrieval.training.trainer_checks.world_size", lambda: 2)
    if chunk_size is None:
        check_processes(module)
    else:
        with pytest.raises(ValueError, match=r"^RetrievalModule: SyncBatchNorm waits for all processes at each chunk"):
            check_processes(module)
