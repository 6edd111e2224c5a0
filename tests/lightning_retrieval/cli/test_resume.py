"""`fit --ckpt_path last` and `--run_folder` continue the run of this config that Ctrl-C ended, and no other."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml

from lightning_retrieval.checkpoints import write_sharded_checkpoint
from lightning_retrieval.cli.main import main
from tests.lightning_retrieval.cli.example_config import IGNORED, SMALL, metrics_of, write_example
from tests.processes import start_processes, wait_for

IGNORED_HERE = [*IGNORED, "ignore:RetrievalEvaluation. val metrics cover"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*IGNORED_HERE)]

SHORT = [
    *SMALL,
    "--trainer.max_epochs=2",
    "--trainer.limit_train_batches=3",
    "--trainer.check_val_every_n_epoch=1",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.classes_per_batch=4",
    "--test_after_fit=false",
]
CALLBACK = "--trainer.callbacks+=tests.lightning_retrieval.cli.test_resume.PressCtrlC"


class PressCtrlC(pl.Callback):
    """Sends the signal of Ctrl-C, in a step or in a validation, after a number of steps."""

    def __init__(self, steps: int, during: str) -> None:
        self.steps, self.during = steps, during

    def press(self, trainer, during):
        if trainer.global_step == self.steps and during == self.during:
            os.kill(os.getpid(), signal.SIGINT)

    def on_before_optimizer_step(self, trainer, *_):
        self.press(trainer, "step")

    def on_validation_batch_start(self, trainer, *_):
        self.press(trainer, "validation")


@pytest.fixture(autouse=True)
def sigint():
    """Lightning ignores further signals once Ctrl-C has ended a run, because the process ends."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def write_config(folder):
    """The example without the callbacks that draw, which take a third of the time."""
    path = write_example(folder)
    config = yaml.safe_load(path.read_text())
    trainer = config["trainer"]
    drawing = ("RetrievalGallery", "TrainingCurve")
    trainer["callbacks"] = [one for one in trainer["callbacks"] if not one["class_path"].endswith(drawing)]
    path.write_text(yaml.safe_dump(config))
    return str(path)


def fit(folder, *options):
    folder.mkdir(exist_ok=True)
    main(["fit", "--config", write_config(folder), *SHORT, *options])


def interrupt(folder, steps, during, *options):
    with pytest.raises(SystemExit, match=r"^130$"):
        fit(folder, *options, CALLBACK, f"--trainer.callbacks.steps={steps}", f"--trainer.callbacks.during={during}")
    signal.signal(signal.SIGINT, signal.default_int_handler)


def assert_same_end(run, expected):
    """Compare the last checkpoint of a run with that of another."""
    found, wanted = (torch.load(folder / "checkpoints/last.ckpt", weights_only=True) for folder in (run, expected))
    assert found["global_step"] == wanted["global_step"] == 6
    assert all(torch.equal(found["state_dict"][name], value) for name, value in wanted["state_dict"].items())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that was not interrupted, with a row of metrics for each step."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    fit(folder, f"--run_folder={folder / 'run'}", "--trainer.log_every_n_steps=1")
    return folder / "run"


def test_last_continues_the_newest_run_of_the_same_model_and_data(uninterrupted, tmp_path, caplog):
    interrupt(tmp_path, 3, "validation")
    checkpoints = tmp_path / "glyphs/version_0/checkpoints"
    left = checkpoints / "last-interrupted.ckpt"
    assert torch.load(left, weights_only=True)["global_step"] == 3
    for other, settings in {"version_1": "tau: 0.01", "version_2": "classes_per_batch: 4"}.items():
        run = tmp_path / "glyphs" / other
        shutil.copytree(checkpoints, run / "checkpoints")
        config = (checkpoints.parent / "config.yaml").read_text()
        assert config.count(settings) == 1
        (run / "config.yaml").write_text(config.replace(settings, settings.replace("4", "5").replace("0.01", "0.02")))
    fit(tmp_path, "--ckpt_path=last")
    assert str(left) in caplog.text
    assert_same_end(tmp_path / "glyphs/version_3", uninterrupted)


@pytest.mark.refusal
def test_runs_that_cannot_be_continued_are_reported(tmp_path, capsys):
    (tmp_path / "file").touch()
    for option, named in (
        ("--ckpt_path=last", "`--ckpt_path last`"),
        (f"--run_folder={tmp_path / 'file'}", "`--run_folder`"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            fit(tmp_path, option)
        assert f"lightning-retrieval fit: {named}" in capsys.readouterr().err
    assert not (tmp_path / "glyphs").exists()


def test_the_folder_of_a_checkpoint_callback_is_searched_too(tmp_path, capsys, caplog):
    """The first run begins anew, as Lightning does; a later one without a checkpoint stops and names the folder."""
    own = tmp_path / "own"
    options = [
        "--trainer.callbacks+=pytorch_lightning.callbacks.ModelCheckpoint",
        "--trainer.callbacks.monitor=val/mAP@R",
        f"--trainer.callbacks.dirpath={own}",
        "--ckpt_path=last",
    ]
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        interrupt(tmp_path, 1, "step", *options)
    left = tmp_path / "glyphs/version_0/checkpoints/last-interrupted.ckpt"
    assert torch.load(left, weights_only=True)["global_step"] == 2  # a step that has begun is completed

    own.mkdir(exist_ok=True)
    left.rename(own / "kept.ckpt")
    fit(tmp_path, *options, "--trainer.max_epochs=1")
    assert str(own / "kept.ckpt") in caplog.text

    for path in tmp_path.rglob("*.ckpt"):
        path.unlink()
    with pytest.raises(SystemExit, match=r"^2$"):
        fit(tmp_path, *options)
    assert str(own) in capsys.readouterr().err


def test_the_same_command_continues_the_run_in_its_folder(uninterrupted, tmp_path, capsys):
    """After Ctrl-C in the second epoch and a checkpoint that is half written; the rows are those of one start."""
    run = tmp_path / "run"
    options = [f"--run_folder={run}", "--trainer.log_every_n_steps=1"]
    interrupt(tmp_path, 4, "step", *options)
    left = run / "checkpoints/last-interrupted.ckpt"
    (run / "checkpoints/later.ckpt").write_bytes(left.read_bytes()[:-99])
    with pytest.warns(UserWarning, match=r"skipped the checkpoint .*later\.ckpt"):
        fit(tmp_path, *options, "--ckpt_path=last")
    assert_same_end(run, uninterrupted)
    assert len(metrics_of(run)) > 6
    assert metrics_of(run) == metrics_of(uninterrupted)
    assert not (tmp_path / "glyphs").exists()  # the folder of the logger that is replaced
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt", left.name, "later.ckpt"}

    for other in ("--model.init_args.updates.gradient_clip_val=2.0", "--seed_everything=7"):
        with pytest.raises(SystemExit, match=r"^2$"):
            fit(tmp_path, *options, other)
        assert "`--run_folder`" in capsys.readouterr().err


def test_an_evaluation_in_the_folder_of_a_run_leaves_its_config(uninterrupted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    config = (run / "config.yaml").read_text()
    checkpoint = run / "checkpoints/last.ckpt"
    main(["validate", "--config", str(run / "config.yaml"), f"--run_folder={run}", f"--ckpt_path={checkpoint}"])
    assert (run / "config.yaml").read_text() == config


class Stay(pl.Callback):
    """Stays in the first step, when the workers of the data loader are running."""

    def on_train_batch_start(self, trainer, *_):
        (trainer.logger.log_dir / Path("training")).touch()
        time.sleep(600)


def stay_in_the_first_step(rank, world_size, folder):
    stay = "--trainer.callbacks+=tests.lightning_retrieval.cli.test_resume.Stay"
    fit(folder / "first", f"--run_folder={folder / 'run'}", stay, "--data.init_args.num_workers=1")


def test_a_second_start_in_one_folder_stops_and_a_start_after_a_kill_does_not(tmp_path, capsys):
    """The workers of the data loader outlive a process that is killed, and must not keep the folder locked."""
    run = tmp_path / "run"
    (tmp_path / "processes").mkdir()
    (started,) = start_processes(stay_in_the_first_step, 1, tmp_path, folder=tmp_path / "processes")
    try:
        while not (run / "training").exists():
            assert started.wait(0.1) is None, started.output()
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["validate", "--config", write_config(tmp_path), *SHORT[:-1], f"--run_folder={run}"])
        assert f"{run} is being written to by another process" in capsys.readouterr().err
    finally:
        started.end()
    workers = "--data.init_args.num_workers=1"
    again = [f"--run_folder={run}", workers, "--trainer.limit_train_batches=1"]
    fit(tmp_path, *again, "--trainer.max_epochs=1")
    fit(tmp_path, *again)  # the lock of a start that has ended is released in the same process
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_a_killed_run_has_left_is_deleted_when_its_folder_is_continued(tmp_path):
    """Only what has a temporary name and was written by a run; a user's file in such a folder stays."""
    run = tmp_path / "run"
    once = [f"--run_folder={run}", "--trainer.limit_train_batches=1"]
    fit(tmp_path, *once, "--trainer.max_epochs=1")
    folder = run / "checkpoints"
    names = [f".{number * 16}.tmp" for number in "abc"]
    (folder / names[0]).write_bytes((folder / "last.ckpt").read_bytes()[:-99])
    for name in names[1:]:
        write_sharded_checkpoint(folder / name, {"epoch": 3})
    for other in (names[2] + "/notes.txt", "notes.tmp", ".notes.tmp"):
        (folder / other).write_text("the user's")
    fit(tmp_path, *once)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left - {"best.ckpt"} == {"last.ckpt", names[2] + "/notes.txt", "notes.tmp", ".notes.tmp"}


def run_on_two_ranks(rank, world_size, folder, run):
    (folder / str(rank)).mkdir(parents=True)
    fit(
        folder / str(rank),
        f"--run_folder={run}",
        "--trainer.strategy=ddp",
        "--trainer.devices=2",
        "--trainer.limit_train_batches=1",
    )


@pytest.mark.distributed
def test_the_processes_of_one_run_share_its_folder(tmp_path):
    for start in ("first", "again"):
        (tmp_path / start).mkdir()
        folders = (tmp_path / f"configs-{start}", tmp_path / "run")
        processes = start_processes(run_on_two_ranks, 2, *folders, folder=tmp_path / start)
        try:
            assert wait_for(processes, 240) == [0, 0], processes[0].output() + processes[1].output()
        finally:
            for one in processes:
                one.end()
