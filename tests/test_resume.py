"""A run that is killed several times, at any moment, and resumed ends like a run that was not killed."""

import functools
import os
import random
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.detection import DetectionAPLoss, DetectionModule, TinyFasterRCNN
from lightning_retrieval.losses import Schedule, WeightedSum
from lightning_retrieval.models import GlyphNet
from tests.lightning_retrieval.detection.scenes import SceneData, Scenes
from tests.processes import start_processes
from tests.quiet_trainer import quiet_trainer

pytestmark = pytest.mark.slow

EPOCHS, BATCHES = 3, 8
STEPS = EPOCHS * BATCHES
PAUSE = 0.02  # seconds before each step, so that a kill meets a run that still goes on
WHEN = {
    "steps": {"every_n_train_steps": 3},
    "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "validation": {"monitor": "val/mAP", "mode": "max"},
}


class FewGlyphs(Glyphs):
    """The first images of the training set, eight batches, and of the validation set."""

    @cached_property
    def train_set(self):
        return first(super().train_set, BATCHES * self.classes_per_batch * self.samples_per_class)

    @cached_property
    def val_set(self):
        return first(super().val_set, 60)


def first(dataset, size):
    dataset.images, dataset.labels = dataset.images[:size], dataset.labels[:size]
    return dataset


class FewScenes(SceneData):
    """Eight batches of two scenes."""

    train_set = Scenes(0, 2 * BATCHES)


# Bytes after which a process dies that writes a file: all checkpoints here are larger, and all other files smaller.
HALF_A_CHECKPOINT = 20_000


class Pace(pl.Callback):
    """Says which step begins. From step `die_writing` on, the process dies half-way through its next checkpoint."""

    def __init__(self, die_writing):
        self.die_writing = die_writing

    def on_train_batch_start(self, trainer, *_):
        import resource

        print(f"step {trainer.global_step}", flush=True)
        time.sleep(PAUSE)
        if trainer.global_step == self.die_writing:
            signal.signal(signal.SIGXFSZ, die)
            resource.setrlimit(resource.RLIMIT_FSIZE, (HALF_A_CHECKPOINT, HALF_A_CHECKPOINT))


def die(*_):
    print("dies writing", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def retrieval_run(workers):
    """A module, its data and its callbacks."""
    embedder = Embedder(nn.Sequential(GlyphNet(width=4), nn.Dropout(0.2)), 16)
    module = RetrievalModule(
        embedder,
        WeightedSum(
            {
                "pairs": (Schedule([(0, 1), (0.5, 0)]), ContrastiveLoss()),
                "ap": (Schedule([(0, 0.1), (1, 1.0)], "geometric"), SmoothAPLoss()),
            }
        ),
        chunk_size=16,  # of 40 images
        memory=CrossBatchMemory(100, start_step=2),
        **optimizer_settings(),
    )
    data = FewGlyphs(classes_per_batch=8, samples_per_class=5, num_workers=workers)
    return module, data, [RetrievalEvaluation(ks=(1,))]


def detection_run(workers):
    """The same for a detector whose past scores lengthen the lists, and whose regions are chosen at random."""
    detector = TinyFasterRCNN(2, width=4, image_size=64, rois_per_image=8, score_thresh=0.3)
    module = DetectionModule(detector, DetectionAPLoss(batch_memory=3), **optimizer_settings())
    return module, FewScenes(batch_size=2, num_workers=workers), []


def optimizer_settings():
    scheduler = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=STEPS + 1)
    optimizer = functools.partial(torch.optim.AdamW, lr=0.003)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "lr_scheduler_interval": "step"}


RUNS = {"retrieval": retrieval_run, "detection": detection_run}


def one_start(rank, world_size, folder, run, when, workers, die_writing):
    """Train from the last checkpoint, or from scratch if there is none, to the end."""
    pl.seed_everything(5)
    module, data, callbacks = RUNS[run](workers)
    keep = ModelCheckpoint(folder / "checkpoints", save_last=True, **WHEN[when])
    callbacks = [*callbacks, keep, Pace(die_writing)]
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, datamodule=data, ckpt_path="last")
    trainer.save_checkpoint(folder / "end.ckpt")


def start(folder, run, when, workers, kill_at=None, die_writing=None, delay=0.0):
    """One start in a separate process, killed after it has printed that step `kill_at` begins; returns its output."""
    files = Path(tempfile.mkdtemp(dir=folder))
    (started,) = start_processes(one_start, 1, folder, run, when, workers, die_writing, folder=files)
    deadline = time.monotonic() + 120
    try:
        while started.exit_code is None and time.monotonic() < deadline:
            if kill_at is not None and f"step {kill_at}\n" in started.output():
                time.sleep(delay)
                break
            time.sleep(0.005)
    finally:
        started.end()
    killed = kill_at is not None or die_writing is not None
    assert started.exit_code == (-signal.SIGKILL if killed else 0), started.output()[-3000:]
    return started.output()


def killed_run(folder, run="retrieval", when="steps", workers=0, kills=0, dies_writing=False):
    """The checkpoint of the end of a run killed that often, at steps that the name of its folder decides."""
    folder.mkdir()
    choose, outputs = random.Random(folder.name), []
    steps = sorted(choose.sample(range(1, STEPS - 4), kills))
    for number, step in enumerate(steps):
        if dies_writing and number == kills - 1:
            outputs.append(start(folder, run, when, workers, die_writing=step))
            assert "dies writing" in outputs[-1]
        else:
            outputs.append(start(folder, run, when, workers, kill_at=step, delay=2 * PAUSE * choose.random()))
    outputs.append(start(folder, run, when, workers))
    begins = [int(output.split("step ", 1)[1].split("\n")[0]) for output in outputs]
    return {**torch.load(folder / "end.ckpt", weights_only=True), "begins": begins}


CASES = {
    "steps with workers": {"when": "steps", "workers": 2, "kills": 2, "dies_writing": True},
    "epochs with workers": {"when": "epochs", "workers": 2, "kills": 2, "dies_writing": True},
    "validation": {"when": "validation", "kills": 1},
    "detection with workers": {"run": "detection", "workers": 2, "kills": 2, "dies_writing": True},
}
WHOLE = {"whole": {}, "whole detection": {"run": "detection"}}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The end of each run, two runs at a time."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(killed_run, folder / name, **case) for name, case in {**CASES, **WHOLE}.items()}
        return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_as_the_run_that_was_not_killed(ends, name):
    """Bit by bit: weights, statistics of batch norms, optimizer, scheduler, memory, and the number of steps."""
    found, whole = ends[name], ends["whole detection" if name.startswith("detection") else "whole"]
    assert whole["begins"] == [0]
    assert len(found["begins"]) == CASES[name]["kills"] + 1
    assert found["begins"][-1] > 0  # resumed, not begun anew
    assert whole["global_step"] == found["global_step"] == STEPS
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(found[key], whole[key], key)
    if not name.startswith("detection"):
        module, *_ = retrieval_run(workers=0)
        module.load_state_dict(whole["state_dict"])
        assert len(module.memory) == module.memory.size


def assert_same(found, expected, where):
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert found == expected, where
