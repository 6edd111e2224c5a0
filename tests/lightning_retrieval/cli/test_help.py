"""Help fits on a screen, with one line for each option."""

import inspect
import re

import pytest

from lightning_retrieval import datamodules
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.lightning_retrieval.cli.example_config import IGNORED

pytestmark = pytest.mark.filterwarnings(*IGNORED)

SCREEN = 50, 100  # lines and columns


def test_help_lists_the_subcommands(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: lightning-retrieval ")
    listed = [line.split()[0] for line in printed.splitlines() if line.startswith("    ")]
    assert {"fit", "validate", "test", "predict", "check", "index", "search", "demo"} <= set(listed)


def help_of(capsys, *args):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(list(args))
    printed = capsys.readouterr().out
    options = [line for line in printed.splitlines() if line.startswith("  -")]
    assert max(map(len, options)) <= SCREEN[1]
    return printed


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_fits_on_a_screen_for_each_group(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))
    printed = help_of(capsys, command, "--help")
    groups = printed.split("\n\n")
    assert max(len(group.splitlines()) for group in groups) <= SCREEN[0]
    named = {line.split()[0].rstrip(",") for line in printed.splitlines() if line.startswith("  -")}
    assert {
        "-h",
        "-c",
        "--trainer.max_epochs",
        "--trainer.model_registry",
        "--model",
        "--model.help",
        "--data",
    } <= named
    (epochs,) = (line for line in printed.splitlines() if "--trainer.check_val_every_n_epoch" in line)
    assert re.fullmatch(r"  --trainer.check_val_every_n_epoch +Perform a validation loop after .* \[1\]", epochs)
    assert "--data.help lightning_retrieval.datamodules.CUB200" in printed


@pytest.mark.parametrize("kind", ["--model.help=lightning_retrieval.RetrievalModule", *(
    f"--data.help=lightning_retrieval.datamodules.{name}" for name in datamodules.__all__
    if isinstance(found := getattr(datamodules, name), type) and issubclass(found, RetrievalDataModule)
    and not inspect.isabstract(found)
)])  # fmt: skip
def test_help_of_a_class_fits_on_a_screen(kind, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))
    printed = help_of(capsys, "fit", kind)
    assert len(printed.splitlines()) <= SCREEN[0]
    setting = "--model.loss" if kind.startswith("--model") else "--data.classes_per_batch"
    assert re.search(rf"^  {setting} +\S", printed, flags=re.MULTILINE)
    if "--data.root" in printed:
        assert re.search(r"^  --data.root .* \(required\)$", printed, flags=re.MULTILINE)
