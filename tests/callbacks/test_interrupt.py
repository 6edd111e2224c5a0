"""Ctrl-C in a run: it ends soon, with a checkpoint from which it continues exactly, also on two processes."""

import contextlib
import faulthandler
import io
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_retrieval.callbacks.interrupt import EXIT_CODE, CheckpointOnInterrupt
from lightning_retrieval.cli.main import main
from tests.lightning_retrieval.cli.example_config import SMALL, write_example
from tests.processes import StartedCommand

STEPS = 8  # two epochs of four
SHORT = [
    *SMALL,
    "--trainer.devices=2",
    "--trainer.max_epochs=2",
    "--trainer.limit_train_batches=4",
    "--trainer.limit_val_batches=0",
    "--data.init_args.classes_per_batch=4",
    "--data.init_args.num_workers=1",  # which must not end before the training
    "--test_after_fit=false",
    "--trainer.callbacks=tests.callbacks.test_interrupt.Pace",
    "--trainer.callbacks+=ModelCheckpoint",
]


class Pace(pl.Callback):
    """Prints each step, which takes a while in a command, prints the stacks on SIGUSR1, and saves the last state.

    `save_last=True` of Lightning's ModelCheckpoint saves only if the monitored value is among the best.
    """

    def setup(self, *_, **__):
        faulthandler.register(signal.SIGUSR1)

    def on_train_batch_start(self, trainer, *_):
        if trainer.is_global_zero:
            print(f"step {trainer.global_step} of {os.getpid()}", flush=True)
        if "STARTED_COMMAND" in os.environ:
            time.sleep(0.3)  # so that the interrupt comes in a step

    def on_train_end(self, trainer, *_):
        trainer.save_checkpoint(Path(trainer.checkpoint_callback.dirpath, "end.ckpt"))


class Group:
    """What the callback asks of a Trainer with several processes; it notes what is saved."""

    world_size, fast_dev_run = 2, False

    def __init__(self, folder):
        self.global_step, self.saved = 0, []
        self.checkpoint_callback = SimpleNamespace(dirpath=folder)
        self.strategy = SimpleNamespace(launcher=None)

    def save_checkpoint(self, path, weights_only):
        self.saved.append((Path(path).name, self.global_step))


def train(rank, world_size, signals, folder):
    """Ten steps of a process that receives signals at given moments; at which steps it has saved and ended."""
    callback, trainer = CheckpointOnInterrupt(), Group(folder)
    callback.seconds_between_reads = 0.1

    def moment(name):
        if (rank, trainer.global_step, name) in signals:
            signal.raise_signal(signal.SIGINT)

    callback.on_train_start(trainer, None)
    try:
        for _ in range(10):
            moment("before")
            callback.on_train_batch_start(trainer, None)
            moment("step")
            dist.barrier()  # the collectives of a step
            moment("after")
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, None)
        callback.on_train_end(trainer, None)
    except SystemExit as interrupt:
        callback.on_exception(trainer, None, interrupt)
    return trainer.saved, trainer.global_step


SIGNALS = {  # (rank, step, moment) of each signal, and the step after which all should stop
    "first before": ([(0, 3, "before")], 4),
    "other before": ([(1, 3, "before")], 4),
    "first in a step": ([(0, 3, "step")], 5),
    "other after": ([(1, 3, "after")], 5),
    "both after and before": ([(0, 3, "after"), (1, 4, "before")], 5),
    "both in two steps": ([(0, 4, "before"), (1, 3, "step")], 5),
    "both in a step": ([(0, 3, "step"), (1, 4, "step")], 5),
    "last step": ([(0, 9, "step")], None),  # the training ends before
    "twice": ([(rank, 3, moment) for rank in (0, 1) for moment in ("before", "step")], 3),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_processes_agree_on_the_last_step(name, run_processes, tmp_path):
    """Whichever receives the signal, and whenever: all save after the same step. A second signal ends them at once."""
    signals, last = SIGNALS[name]
    saved = [] if name in ("last step", "twice") else [("last-interrupted.ckpt", last)]
    assert run_processes(train, 2, signals, tmp_path) == [(saved, last or 10)] * 2


def test_a_signal_that_python_drops_ends_the_training_after_the_next_step(tmp_path):
    """Python ignores an exception that is raised while it deletes an object, such as between two steps."""
    callback, trainer = CheckpointOnInterrupt(), Group(tmp_path)
    trainer.world_size, trainer.global_step = 1, 3
    callback.on_train_start(trainer, None)
    try:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGINT)
        callback.on_train_batch_start(trainer, None)
        trainer.global_step = 4
        with pytest.raises(SystemExit) as ended:
            callback.on_train_batch_end(trainer, None)
        callback.on_exception(trainer, None, ended.value)
    finally:
        callback.on_train_end(trainer, None)
    assert trainer.saved == [("last-interrupted.ckpt", 4)]


def test_the_first_process_may_end_before_the_others_have_ended_their_last_step(tmp_path):
    """Its store, which the others ask, ends with it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    dist.init_process_group("gloo", store=others, rank=0, world_size=1)
    callback, trainer = CheckpointOnInterrupt(), Group(tmp_path)
    callback.seconds_between_reads = 0.0
    callback.on_train_start(trainer, None)
    try:
        callback.on_train_batch_end(trainer, None)
        del store
        callback.on_train_batch_end(trainer, None)
    finally:
        callback.on_train_end(trainer, None)
        dist.destroy_process_group()


def test_an_error_leaves_the_handler_of_the_signal_as_it_was(tmp_path):
    callback, trainer, before = CheckpointOnInterrupt(), Group(tmp_path), signal.getsignal(signal.SIGINT)
    trainer.world_size = 1
    callback.on_train_start(trainer, None)
    assert signal.getsignal(signal.SIGINT) != before
    callback.on_exception(trainer, None, ValueError("of the training"))
    assert signal.getsignal(signal.SIGINT) == before


LAUNCHERS = {
    "fit": [sys.executable, "-m", "lightning_retrieval.cli"],
    "torchrun": [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "lightning_retrieval.cli"),
    ],
}


def interrupted_fit(folder, launcher):
    """Run the command, and interrupt it in its third step as a terminal does; its exit code and output."""
    command = [*LAUNCHERS[launcher], "fit", "--config", str(write_example(folder)), *SHORT]
    started = StartedCommand(command, folder)
    interrupted = False
    try:
        deadline = time.monotonic() + 240
        while started.process.poll() is None:
            assert time.monotonic() < deadline, started.output_with_stacks()[-20_000:]
            if not interrupted and "step 2 of" in started.output():
                os.killpg(started.process.pid, signal.SIGINT)
                interrupted, deadline = True, time.monotonic() + 60
            time.sleep(0.02)
        end = time.monotonic() + 15  # workers of a process that was killed look every five seconds
        while started.group() and time.monotonic() < end:
            time.sleep(0.1)
        assert started.group() == []
    finally:
        started.end()
    return started.process.returncode, started.output()


def fit(rank, world_size, folder, *options):
    """Run the command in a process that has been started already; the steps that it prints on rank 0."""
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["fit", "--config", "glyphs.yaml", *SHORT, *options])
    dist.destroy_process_group()
    return [int(step) for step in re.findall(r"step (\d+) of", printed.getvalue())]


def checkpoint(folder, version, name):
    return torch.load(folder / f"glyphs/version_{version}/checkpoints/{name}.ckpt", weights_only=True)


@pytest.mark.slow
def test_two_processes_leave_a_checkpoint_and_continue_from_it(tmp_path, run_processes):
    (tmp_path / "whole").mkdir()
    write_example(tmp_path / "whole")
    assert run_processes(fit, 2, tmp_path / "whole", backend=None) == [list(range(STEPS)), []]
    code, output = interrupted_fit(tmp_path, "fit")
    assert code == EXIT_CODE, output[-3000:]
    left = checkpoint(tmp_path, 0, "last-interrupted")
    assert 3 <= left["global_step"] < STEPS, output[-3000:]
    steps, _ = run_processes(fit, 2, tmp_path, "--ckpt_path=last", backend=None)
    assert steps == list(range(left["global_step"], STEPS))
    whole, resumed = checkpoint(tmp_path / "whole", 0, "end"), checkpoint(tmp_path, 1, "end")
    assert resumed["global_step"] == whole["global_step"] == STEPS
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name


SCRIPT = """
import sys, time
import pytorch_lightning as pl
import torch
from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import CheckpointOnInterrupt
from torch.utils.data import DataLoader, TensorDataset

class Slow(RetrievalModule):
    def training_step(self, batch, batch_idx):
        print(f"step {self.global_step}", flush=True)
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        print("validation", flush=True)
        time.sleep(0.1)
        return super().validation_step(batch, batch_idx)

loader = DataLoader(TensorDataset(torch.randn(400, 4), torch.arange(400) // 2), batch_size=4)
settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": "run"}
trainer = pl.Trainer(max_epochs=9, callbacks=[CheckpointOnInterrupt()], num_sanity_val_steps=99, **settings)
trainer.fit(Slow(torch.nn.Linear(4, 4), SmoothAPLoss()), loader, loader, ckpt_path=(sys.argv[1:] or [None])[0])
"""


def interrupted_script(folder, moment, *arguments):
    """Run a script that trains, and interrupt it when it has printed some words; its exit code and output."""
    started = StartedCommand([sys.executable, "-c", SCRIPT, *arguments], folder)
    try:
        deadline = time.monotonic() + 120
        while moment not in started.output():
            assert started.process.poll() is None, started.output()[-3000:]
            assert time.monotonic() < deadline, started.output()[-3000:]
            time.sleep(0.02)
        os.killpg(started.process.pid, signal.SIGINT)
        started.process.wait(60)
    finally:
        started.end()
    return started.process.returncode, started.output()


@pytest.mark.slow
def test_a_script_ends_with_the_usual_code_and_says_how_to_continue(tmp_path):
    code, output = interrupted_script(tmp_path, "validation")
    assert code == EXIT_CODE, output[-3000:]
    code, output = interrupted_script(tmp_path, "step 2")
    assert code == EXIT_CODE, output[-3000:]
    assert "--ckpt_path" not in output
    (path,) = re.findall(r"ckpt_path=.* (\S+last-interrupted\.ckpt)", output)
    left = torch.load(tmp_path / path, weights_only=True)["global_step"]
    code, output = interrupted_script(tmp_path, "step", path)
    assert code == EXIT_CODE, output[-3000:]
    assert re.findall(r"step (\d+)", output)[0] == str(left)


@pytest.mark.slow
def test_processes_of_torchrun_leave_a_checkpoint(tmp_path):
    code, output = interrupted_fit(tmp_path, "torchrun")
    assert code == 1, output[-3000:]  # torchrun's own code
    assert 3 <= checkpoint(tmp_path, 0, "last-interrupted")["global_step"] < STEPS, output[-3000:]
