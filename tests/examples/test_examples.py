"""Examples run, shortened where they train for long; the study runs one small experiment; programs print a help.

test_docs.py runs the scripts that the pages tell to run, and test_papers.py the configs of the papers.
"""

import csv
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import yaml
from PIL import Image

from lightning_retrieval.cli.main import main
from tests.examples.scripts import modules_of, run_script

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
FEW = [
    *("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"),
    *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"),
    *("--trainer.limit_test_batches=1", "--test_after_fit=false", "--trainer.enable_progress_bar=false"),
    "--data.eval_batch_size=64",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:RetrievalEvaluation. (val|test) metrics cover [12] of:UserWarning",
        "ignore:RetrievalModule. BatchNorm sees 128 images at a time:UserWarning",
    ),
]


def values(folder, name):
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def write_photos(folder):
    """Eight classes of three images in the colours of their classes."""
    colours = np.random.default_rng(0)
    for label in range(8):
        (folder / f"thing {label}").mkdir(parents=True)
        for number in range(3):
            pixels = np.clip(colours.normal(30 * label, 20, (40, 50, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"thing {label}" / f"{number}.jpg")


@pytest.mark.parametrize("name", ["subclass", "pml_loss"])
def test_a_script_that_trains(name, monkeypatch):
    make, trainers = pl.Trainer.__init__, []

    def two_steps(self, **settings):
        make(self, **{**settings, "limit_train_batches": 2, "limit_val_batches": 2, "enable_checkpointing": False})
        trainers.append(self)

    monkeypatch.setattr(pl.Trainer, "__init__", two_steps)
    run_script(EXAMPLES / f"{name}.py", monkeypatch=monkeypatch)
    assert trainers
    for trainer in trainers:
        assert trainer.global_step == 2
        assert trainer.callback_metrics["val/mAP"] > 0


def test_a_loop_in_plain_pytorch(monkeypatch, capsys):
    run_script(EXAMPLES / "plain_pytorch_loop.py", 5, monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    losses = [float(value) for value in re.findall(r"^step \d+: loss (\S+)$", output, flags=re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "'mAP': 0." in output


def test_own_images_from_a_folder_to_a_search(tmp_path, monkeypatch, capsys):
    """The commands that the script prints run, and `--resume` continues its run."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "my photos")
    options = ["my photos", "--weights", "none", "--workers", 0, "--size", 40, "--backbone", "squeezenet1_1"]
    options += ["--loss", "fast_ap", "--batch", 8, "--lr", 1e-3]
    run_script(EXAMPLES / "own_images.py", *options, "--epochs", 1, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    index, search, _ = (shlex.split(line)[1:] for line in lines if line.startswith("lightning-retrieval "))
    main(index)
    capsys.readouterr()
    main(["my photos/thing 1/0.jpg" if word == "IMAGE" else word for word in search])
    assert "thing 1/0.jpg" in capsys.readouterr().out.splitlines()[2]  # itself
    folder = tmp_path / "logs/own_images/version_0"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}

    run_script(EXAMPLES / "own_images.py", *options, "--epochs", 2, "--resume", monkeypatch=monkeypatch)
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    assert len(values(folder, "val/mAP")) == 2
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_two_processes(tmp_path):
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = ["bash", EXAMPLES / "ddp.sh", "2", *FEW]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "logs/glyphs/version_0"
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["batch"]["processes"] == 2
    assert len(values(folder, "train/loss")) == 2


@pytest.mark.parametrize("name", ["ddp.sh", "slurm.sh"])
def test_a_script_of_bash_can_be_parsed(name):
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)


def test_the_command_of_the_sweep(monkeypatch, capsys):
    """A sweep agent runs it with one value of each parameter."""
    sweep = yaml.safe_load((EXAMPLES / "sweep.yaml").read_text())
    drawn = {name: ({"min": 0, **space}["min"] or space["values"][0]) for name, space in sweep["parameters"].items()}
    monkeypatch.chdir(REPOSITORY)
    command = [part for part in sweep["command"][1:] if part != "${args}"]
    with pytest.raises(SystemExit) as ended:
        main([*command, *(f"--{name}={value}" for name, value in drawn.items()), "--print_config"])
    assert ended.value.code == 0, capsys.readouterr().err


def test_the_upgraded_network_searches_the_index_of_the_old_one(tmp_path, monkeypatch, capsys):
    """The commands at the beginning of upgrade.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    write_photos(tmp_path / "photos")
    (tmp_path / "photos/thing 1/0.jpg").rename(tmp_path / "query.jpg")
    text = (EXAMPLES / "upgrade.yaml").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^#   lightning-retrieval (.*)$", text, flags=re.MULTILINE)]
    for command in commands:
        if command[0] == "fit":  # the first batch of a validation set with two sides has queries only
            command += [*FEW, "--trainer.limit_val_batches=1.0"]
        capsys.readouterr()
        main(command)
    assert "thing" in capsys.readouterr().out
    assert values(tmp_path / "logs/upgrade/version_0", "val/mAP")


def test_the_study_runs_one_experiment_and_repeats_no_run(tmp_path):
    arguments = ["--quick", "--experiments", "tau", "--seeds", "5", "--jobs", "1", "--output", str(tmp_path)]
    with modules_of(EXAMPLES / "study"):
        study = importlib.import_module("run")
        assert study.main(arguments) == 0
        written = (tmp_path / "results.jsonl").read_text()
        assert study.main(arguments) == 0
    assert (tmp_path / "results.jsonl").read_text() == written
    results = [json.loads(line) for line in written.splitlines()]
    assert len(results) == 3
    assert all(0.05 < result["metrics"]["mAP"] < 1 for result in results)
    assert (tmp_path / "ablations.md").exists()
    assert (tmp_path / "tau.png").exists()


FOLDERS = [REPOSITORY / "examples", REPOSITORY / "examples/study", REPOSITORY / "benchmarks"]
SCRIPTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
WITHOUT_OPTIONS = {"plain_pytorch_loop.py", "pml_loss.py", "subclass.py", "photographs.py"}
PROGRAMS = [path for path in SCRIPTS if "__main__" in path.read_text() and path.name not in WITHOUT_OPTIONS]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_a_script_prints_its_help(path, monkeypatch, capsys):
    run_script(path, "--help", monkeypatch=monkeypatch)
    assert "usage: " in capsys.readouterr().out
