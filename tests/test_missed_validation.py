"""A run that is killed in a validation, and resumed from a checkpoint of before, makes up for this validation.

The witness is the run that was not killed: the same weights, the same best checkpoint, and the same calls of hooks and
loggers at the same steps and epochs, with the same metrics and learning rates.
"""

import functools
import json
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import CheckpointOnInterrupt, RetrievalEvaluation
from lightning_retrieval.models import GlyphNet
from tests.processes import start_processes, wait_for
from tests.quiet_trainer import quiet_trainer
from tests.test_resume import BATCHES, FewGlyphs, assert_same

pytestmark = pytest.mark.slow


class TwoSets(FewGlyphs):
    """With two validation sets."""

    def val_dataloader(self):
        return {"one": super().val_dataloader(), "other": super().val_dataloader()}


class Diary(pl.Callback, Logger):
    """Writes what hooks and loggers are told, a line each, to a file that outlives a kill."""

    name, version = "diary", 0  # of the logger

    def __init__(self, file):
        super().__init__()
        self.file = file

    def write(self, *entry):
        with self.file.open("a") as file:
            print(json.dumps(entry), file=file)

    def log_hyperparams(self, *arguments):
        pass

    def log_metrics(self, metrics, step=None):
        self.write("log", step, without_times(metrics))

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.write(
            "validation", trainer.current_epoch, trainer.global_step, rate, without_times(trainer.callback_metrics)
        )

    def on_train_epoch_end(self, trainer, pl_module):
        self.write("epoch", trainer.current_epoch, trainer.global_step)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.write("batch", trainer.current_epoch, trainer.global_step, batch_idx)


def without_times(metrics):
    return {name: float(value) for name, value in metrics.items() if name != "train/images/s"}


class EndIn(pl.Callback):
    """Ends the process in the validation after a step or at its end, by a kill or by Ctrl-C."""

    def __init__(self, step, how):
        self.step = step
        self.how = how

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step != self.step or self.how == "at the end" or batch_idx == 0:
            return
        if self.how == "saved":
            self.save(trainer)
        os.kill(os.getpid(), signal.SIGINT if self.how == "interrupted" else signal.SIGKILL)

    def on_validation_end(self, trainer, pl_module):
        if trainer.global_step != self.step or self.how != "at the end":
            return
        for callback in trainer.checkpoint_callbacks:  # which come last
            callback.on_validation_end(trainer, pl_module)
        self.save(trainer)
        os.kill(os.getpid(), signal.SIGKILL)

    def save(self, trainer):
        trainer.save_checkpoint(trainer.checkpoint_callbacks[0].dirpath + "/last.ckpt")


def one_start(rank, world_size, folder, data, step, how, settings):
    """Train from the last checkpoint, or from scratch if there is none; end in the validation after `step`."""
    monitored = "val/mAP" if data is FewGlyphs else "val/one/mAP"
    every = settings.get("val_check_interval", 1.0)
    if isinstance(every, float):
        every = int(every * BATCHES)
    last = ModelCheckpoint(folder / "checkpoints", "last", every_n_train_steps=every, enable_version_counter=False)
    callbacks = [
        RetrievalEvaluation(ks=(1,)),
        last,
        ModelCheckpoint(folder / "best", "{step}", monitor=monitored, mode="max"),
        ModelCheckpoint(folder / "loss", "{step}", monitor="train/loss"),
        EarlyStopping(monitored, mode="max", patience=50),
        EarlyStopping("train/loss", patience=50),
        CheckpointOnInterrupt(),
        EndIn(step, how),
    ]
    strategy = "ddp" if world_size > 1 else "auto"
    checkpoints = [folder / "checkpoints" / name for name in ("last-interrupted.ckpt", "last.ckpt")]
    path = next((path for path in checkpoints if path.exists()), None)
    plateau = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=0.1)
    scheduler = {"lr_scheduler": plateau, "lr_scheduler_interval": "step", "lr_scheduler_monitor": monitored}
    settings = {"max_epochs": 2, "devices": world_size, "strategy": strategy, **settings}
    trainer = train(folder / f"diary{rank}", path, data, callbacks, scheduler, **settings)
    trainer.save_checkpoint(folder / "end.ckpt")


def train(file, path, data, callbacks, scheduler, **settings):
    """Train from a checkpoint, or from scratch if there is none, and write the diary to a file."""
    pl.seed_everything(5)
    embedder = Embedder(nn.Sequential(GlyphNet(width=4), nn.Dropout(0.2)), 16)
    optimizer = functools.partial(torch.optim.AdamW, lr=0.003)
    module = RetrievalModule(embedder, SmoothAPLoss(), optimizer=optimizer, **scheduler)
    file.parent.mkdir(exist_ok=True)
    file.touch()
    diary = Diary(file)
    callbacks = [diary, *callbacks]
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet_trainer(
        callbacks=callbacks, enable_checkpointing=saves, logger=diary, log_every_n_steps=1, **settings
    )
    images = data(classes_per_batch=8, samples_per_class=5, eval_batch_size=20)
    trainer.fit(module, datamodule=images, ckpt_path=path)
    return trainer


def start(folder, processes, *args):
    """One start in separate processes; returns their exit codes and what they have printed."""
    files = Path(tempfile.mkdtemp(dir=folder.parent))
    started = start_processes(one_start, processes, folder, *args, folder=files)
    codes = wait_for(started, 120)
    for process in started:
        process.end()
    return codes, "".join(process.output() for process in started)


# The step after which the run ends in the validation, each time by what, and the settings of the Trainer.
CASES = {
    "within an epoch": (12, ["killed"], {"val_check_interval": 4}),
    "fraction of an epoch": (4, ["killed"], {"val_check_interval": 0.5}),
    "any number of epochs": (10, ["killed"], {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "every second epoch": (16, ["killed"], {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "end of an epoch": (8, ["killed"], {}),
    "last epoch": (16, ["killed"], {}),
    "last step": (12, ["killed"], {"val_check_interval": 4, "max_steps": 12, "max_epochs": -1}),
    "last step of an epoch": (8, ["killed"], {"max_steps": 8}),
    "killed again": (8, ["killed", "killed"], {}),
    "killed at its end": (12, ["killed", "at the end"], {"val_check_interval": 4}),
    "saved in the validation": (12, ["saved"], {"val_check_interval": 4}),
    "saved in the last epoch": (16, ["saved", "saved"], {}),
    "interrupted": (8, ["interrupted"], {}),
    "two sets": (8, ["killed"], {}),
    "two processes": (8, ["killed"], {}),
}


def runs(folder, name):
    """The folders of the run that was not killed, and of the one that was killed and resumed."""
    step, ends, settings = CASES[name]
    data = TwoSets if name == "two sets" else FewGlyphs
    processes = 2 if name == "two processes" else 1
    whole, resumed = folder / "whole", folder / "resumed"
    folder.mkdir()
    for run, how in [(whole, None), *[(resumed, how) for how in ends], (resumed, None)]:
        codes, output = start(run, processes, data, step if how else None, how, settings)
        assert any(codes) == bool(how), output
    return whole, resumed


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The runs of all cases, two at a time."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(runs, folder / name, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_makes_up_for_the_validation_in_which_it_was_killed(ends, name):
    whole, resumed = ends[name].result()
    assert (resumed / "diary0").read_text().splitlines() == (whole / "diary0").read_text().splitlines()
    for kept in ("best", "loss"):
        assert [file.name for file in (resumed / kept).iterdir()] == [file.name for file in (whole / kept).iterdir()]
    found, expected = (torch.load(folder / "end.ckpt", weights_only=True) for folder in (resumed, whole))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(found[key], expected[key], key)


@pytest.mark.parametrize(("step", "max_steps"), [(4, -1), (8, -1), (12, -1), (12, 12), (16, -1)])
def test_a_run_that_no_longer_validates_goes_on_with_the_next_batch(tmp_path, step, max_steps):
    """A run without validations is the witness."""
    save = ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=4, save_top_k=-1)
    train(tmp_path / "validated", None, FewGlyphs, [save], {}, max_epochs=2, val_check_interval=4)
    settings = {"max_epochs": 2, "max_steps": max_steps, "limit_val_batches": 0}
    train(tmp_path / "whole", None, FewGlyphs, [], {}, **settings)
    train(tmp_path / "resumed", tmp_path / "steps" / f"step={step}.ckpt", FewGlyphs, [], {}, **settings)
    found, expected = (batches_and_losses(tmp_path / name) for name in ("resumed", "whole"))
    assert found == expected[2 * step :]


def batches_and_losses(diary):
    return [line for line in diary.read_text().splitlines() if line.startswith(('["batch"', '["log"'))]


def test_a_run_at_its_end_stays_there_if_its_last_epoch_is_not_validated(tmp_path):
    settings = {"check_val_every_n_epoch": 2, "max_steps": BATCHES, "max_epochs": -1}
    trainer = train(tmp_path / "first", None, FewGlyphs, [], {}, **settings)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    train(tmp_path / "again", tmp_path / "end.ckpt", FewGlyphs, [], {}, **settings)
    assert (tmp_path / "again").read_text() == ""
