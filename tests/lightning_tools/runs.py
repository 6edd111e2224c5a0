"""A small training whose weights are known after each step, and the same training with a tool of Lightning.

It has what a run can have that depends on the order of things: dropout, chunks, a memory and augmented batches that are
a function of the seed and the epoch.
"""

import functools
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import Precision
from torch import nn

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

BATCHES, EPOCHS = 3, 3
STEPS = EPOCHS * BATCHES


class PointData(RetrievalDataModule):
    """Three batches of three classes; six batches in evaluation."""

    def __init__(self):
        super().__init__(classes_per_batch=3, samples_per_class=3, eval_batch_size=5, seed=1)
        self.train_loaders = 0

    train_set, val_set, test_set = Points(1), Points(2), Points(3, 29)

    def train_dataloader(self):
        self.train_loaders += 1
        return super().train_dataloader()


class Record(pl.Callback):
    """Keeps the weights after each step, and the steps at which a batch of each kind was seen."""

    def __init__(self):
        self.weights = {0: None}
        self.validations, self.batches = [], {"val": 0, "test": 0, "predict": 0}

    def on_train_batch_end(self, trainer, module, *_):
        self.weights[trainer.global_step] = flat(module)

    def on_validation_epoch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)

    def on_validation_batch_end(self, trainer, *_):
        self.batches["val"] += not trainer.sanity_checking

    def on_test_batch_end(self, *_):
        self.batches["test"] += 1

    def on_predict_batch_end(self, *_):
        self.batches["predict"] += 1


@dataclass
class Run:
    """A run and what was recorded of it."""

    trainer: pl.Trainer
    module: RetrievalModule
    record: Record
    data: PointData = field(default_factory=PointData)

    @property
    def metrics(self):
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


def flat(module):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def make_module(dropout=0.2, **settings):
    torch.manual_seed(4)
    network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4))
    defaults = {
        "chunk_size": 4,
        "memory": CrossBatchMemory(12),
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.05),
    }
    return RetrievalModule(network, SmoothAPLoss(tau=0.1), **{**defaults, **settings})


def make_run(callbacks=(), module=None, **flags):
    """A run that has not begun; `flags` are those of the Trainer."""
    record = Record()
    callbacks = [RetrievalEvaluation((1,)), record, *callbacks]
    trainer = quiet_trainer(**{"max_epochs": EPOCHS, **flags}, callbacks=callbacks)
    return Run(trainer, module or make_module(), record)


def fit(callbacks=(), module=None, ckpt_path=None, **flags):
    """A run that has ended; `flags` are those of the Trainer."""
    run = make_run(callbacks, module, **flags)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RetrievalEvaluation: val metrics cover")
        run.trainer.fit(run.module, run.data, ckpt_path=ckpt_path)
    return run


@functools.cache
def plain():
    """The run without any further tool or flag."""
    run = fit()
    assert run.trainer.global_step == STEPS
    assert len(run.record.weights) == STEPS + 1
    return run


def assert_step(run, step):
    """The run has stopped after a step of the plain run, with its weights."""
    assert run.trainer.global_step == step
    assert torch.equal(flat(run.module), plain().record.weights[step])


def assert_unchanged(run):
    """The run has trained and validated as the plain run."""
    assert_step(run, STEPS)
    expected = plain().metrics
    del expected["train/images/s"]
    expected.pop("train/loader_wait", None)
    assert {name: run.metrics[name] for name in expected} == expected


def trainer_with(kind):
    """What a module asks of a trainer, with a strategy or a precision whose package or device need not be there."""
    trainer = make_run().trainer
    asked = {name: getattr(trainer, name) for name in ("gradient_clip_val", "gradient_clip_algorithm", "callbacks")}
    own = {"precision_plugin": trainer.precision_plugin, "strategy": trainer.strategy}
    own["precision_plugin" if issubclass(kind, Precision) else "strategy"] = object.__new__(kind)
    return SimpleNamespace(**asked, **own, accumulate_grad_batches=1, lightning_module=None)
