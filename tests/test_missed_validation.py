"""A run that is killed in a validation, and resumed from a checkpoint of before, makes up for this validation.

The witness is the run that was not killed: the same weights, the same best checkpoint, and the same calls of hooks and
loggers at the same steps and epochs, with the same metrics and learning rates.
"""

import functools
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers.logger import DummyLogger
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import CheckpointOnInterrupt, RetrievalEvaluation
from lightning_retrieval.models import GlyphNet
from tests.processes import start_processes, wait_for
from tests.quiet_trainer import quiet_trainer
from tests.test_resume import BATCHES, FewGlyphs, assert_same

pytestmark = pytest.mark.slow

LAST = "checkpoints/last.ckpt"


class TwoSets(FewGlyphs):
    """With two validation sets."""

    def val_dataloader(self):
        return {"one": super().val_dataloader(), "other": super().val_dataloader()}


class Diary(pl.Callback, DummyLogger):
    """Writes what hooks and loggers are told, a line each, to a file that outlives a kill."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def write(self, *entry):
        with self.file.open("a") as file:
            print(json.dumps(entry), file=file)

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
    return {
        name: float(value) for name, value in metrics.items() if name not in ("train/images/s", "train/loader_wait")
    }


class EndIn(pl.Callback):
    """Ends the process in the validation after a step, by a kill or by Ctrl-C."""

    def __init__(self, step, how):
        self.step = step
        self.how = how

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step != self.step or trainer.sanity_checking or batch_idx == 0:
            return
        if self.how == "saved":
            trainer.save_checkpoint(trainer.checkpoint_callbacks[0].dirpath + "/last.ckpt")
        os.kill(os.getpid(), signal.SIGINT if self.how == "interrupted" else signal.SIGKILL)


def one_start(rank, world_size, folder, data, step, how, settings):
    """Train from the last checkpoint, or from scratch if there is none; end in the validation after `step`."""
    pl.seed_everything(5)
    plateau = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=0.1)
    module = RetrievalModule(
        Embedder(nn.Sequential(GlyphNet(width=4), nn.Dropout(0.2)), 16),
        SmoothAPLoss(),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.003),
        lr_scheduler=plateau,
        lr_scheduler_interval="step",
        lr_scheduler_monitor="val/mAP" if data is FewGlyphs else "val/one/mAP",
    )
    monitored = module.lr_scheduler_monitor
    folder.mkdir(exist_ok=True)
    diary = Diary(folder / f"diary{rank}")
    every = settings.get("val_check_interval", BATCHES)
    every = int(every * BATCHES) if isinstance(every, float) else every
    callbacks = [
        RetrievalEvaluation(ks=(1,)),
        ModelCheckpoint(folder / "checkpoints", "last", every_n_train_steps=every, enable_version_counter=False),
        ModelCheckpoint(folder / "best", "{step}", monitor=monitored, mode="max"),
        ModelCheckpoint(folder / "loss", "{step}", monitor="train/loss"),
        EarlyStopping(monitored, mode="max", patience=50),
        EarlyStopping("train/loss", patience=50),
        diary,
        CheckpointOnInterrupt(),
        EndIn(step, how),
    ]
    trainer = quiet_trainer(
        callbacks=callbacks,
        enable_checkpointing=True,
        logger=diary,
        log_every_n_steps=1,
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        **{"max_epochs": 2, **settings},
    )
    interrupted = folder / "checkpoints" / "last-interrupted.ckpt"
    path = interrupted if interrupted.exists() else folder / LAST
    images = data(classes_per_batch=8, samples_per_class=5, eval_batch_size=20)
    trainer.fit(module, datamodule=images, ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(folder / "end.ckpt")


def start(folder, processes, *args):
    files = folder.with_name(f"{folder.name} {len(list(folder.parent.iterdir()))}")
    files.mkdir()
    started = start_processes(one_start, processes, folder, *args, folder=files)
    codes = wait_for(started, 120)
    for process in started:
        process.end()
    return codes, "".join(process.output() for process in started)


CASES = {
    "within an epoch": (12, {"val_check_interval": 4}),
    "fraction of an epoch": (4, {"val_check_interval": 0.5}),
    "any number of epochs": (10, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "end of an epoch": (8, {}),
    "last epoch": (16, {}),
    "every second epoch": (16, {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "last step": (12, {"val_check_interval": 4, "max_steps": 12, "max_epochs": -1}),
    "last step of an epoch": (8, {"max_steps": 8}),
    "saved in the validation": (12, {"val_check_interval": 4}),
    "saved in the last epoch": (16, {}),
    "interrupted": (8, {}),
    "two sets": (8, {}),
    "two processes": (8, {}),
}


def runs(folder, name):
    """The folders of the run that was not killed, and of the one that was killed and resumed."""
    step, settings = CASES[name]
    how = name.split()[0] if name.startswith(("saved", "interrupted")) else "killed"
    data = TwoSets if name == "two sets" else FewGlyphs
    processes = 2 if name == "two processes" else 1
    whole, resumed = folder / "whole", folder / "resumed"
    folder.mkdir()
    codes, output = start(whole, processes, data, None, how, settings)
    assert not any(codes), output
    codes, output = start(resumed, processes, data, step, how, settings)
    assert any(codes), output
    before = (resumed / "diary0").read_text()
    codes, output = start(resumed, processes, data, None, how, settings)
    assert not any(codes), output
    return whole, resumed, before


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The runs of all cases, two at a time."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(runs, folder / name, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_makes_up_for_the_validation_in_which_it_was_killed(ends, name):
    whole, resumed, before = ends[name].result()
    step, _ = CASES[name]
    assert f'"batch", 0, {step - 1}' in before or step > BATCHES
    assert (resumed / "diary0").read_text().splitlines() == (whole / "diary0").read_text().splitlines()
    for kept in ("best", "loss"):
        assert [file.name for file in (resumed / kept).iterdir()] == [file.name for file in (whole / kept).iterdir()]
    found, expected = (torch.load(folder / "end.ckpt", weights_only=True) for folder in (resumed, whole))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(found[key], expected[key], key)
