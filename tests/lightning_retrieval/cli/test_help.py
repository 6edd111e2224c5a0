"""Help shows whole sentences in 80 columns, and fits on a screen that is wider, with one line for most options."""

import importlib
import inspect
import re

import pytest
import pytorch_lightning as pl

from lightning_retrieval import datamodules
from lightning_retrieval.cli.main import OTHER_COMMANDS, main
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.lightning_retrieval.cli.example_config import IGNORED

pytestmark = pytest.mark.filterwarnings(*IGNORED)

LINES = 50  # of a screen
NARROW, WIDE = 80, 200  # columns
OPTION = re.compile(r"^  -.*\n(?:      .*\n)*", flags=re.MULTILINE)  # with its sentence, which may be below it
DEFAULT = re.compile(r" (?:\[[^\]]*\]|\(required\))$")
CLASSES = [
    "--model.help=lightning_retrieval.RetrievalModule",
    "--trainer.callbacks.help=lightning_retrieval.RetrievalEvaluation",
    *(f"--data.help=lightning_retrieval.datamodules.{name}" for name in datamodules.__all__
      if isinstance(found := getattr(datamodules, name), type) and issubclass(found, RetrievalDataModule)
      and not inspect.isabstract(found)),
]  # fmt: skip


def test_help_lists_the_subcommands(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: lightning-retrieval ")
    listed = [line.split()[0] for line in printed.splitlines() if line.startswith("    ")]
    assert {"fit", "validate", "test", "predict", "check", "index", "search", "demo"} <= set(listed)


@pytest.fixture
def help_of(capsys, monkeypatch):
    """What a command prints for `--help` on a terminal with this number of columns."""

    def printed(columns, *args):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit, match=r"^0$"):
            main(list(args))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= columns
        assert " ..." not in text.replace("COMMAND ...", "").replace("IMAGE ...", "")
        return text

    return printed


def arguments_of(*callables):
    """The arguments that docstrings describe, each description on one line; the last docstring has precedence."""
    found = {}
    for described in callables:
        text = inspect.cleandoc(described.__doc__ or "")
        section = re.search(r"^Args:\n+((?:    .*\n?|\n)*)", text, flags=re.MULTILINE)
        if section is None:
            continue
        for argument in re.split(r"^    (?=\w)", section[1], flags=re.MULTILINE)[1:]:
            name, _, description = argument.partition(":")
            found[name] = " ".join(description.split())
    return found


def sentences(printed, prefix):
    """The sentence that is shown for each option, without its default, by the name without a prefix."""
    shown = {}
    for option in OPTION.findall(printed):
        name, *words = option.split()
        assert len(option.splitlines()) <= 6
        if name.startswith(f"--{prefix}.") and not name.endswith(".help"):
            shown[name.removeprefix(f"--{prefix}.")] = DEFAULT.sub("", " ".join(words))
    return shown


def is_whole(shown, description):
    """Whether the first sentence of a description, or all of it, is shown."""
    rest = description.removeprefix(shown)
    is_end = rest in ("", ".") or rest.startswith((". ", ".Set ", " Default: "))  # "instantiation.Set to True"
    return bool(shown) and description.startswith(shown) and is_end


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_has_whole_sentences_in_80_columns(command, help_of):
    printed = help_of(NARROW, command, "--help")
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
    shown = sentences(printed, "trainer")
    described = arguments_of(pl.Trainer.__init__)
    assert len(shown) > 40
    assert [name for name, sentence in shown.items() if not is_whole(sentence, described[name])] == []
    name = "--trainer.check_val_every_n_epoch"
    assert f"  {name}\n      Perform a validation loop after every `N` training epochs [1]\n" in printed
    assert "--data.help lightning_retrieval.datamodules.CUB200" in printed


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_fits_on_a_wide_screen_for_each_group(command, help_of):
    printed = help_of(WIDE, command, "--help")
    assert max(len(group.splitlines()) for group in printed.split("\n\n")) <= LINES
    (epochs,) = (line for line in printed.splitlines() if "--trainer.check_val_every_n_epoch" in line)
    assert re.fullmatch(r"  --trainer.check_val_every_n_epoch +Perform a validation loop after .* \[1\]", epochs)


@pytest.mark.parametrize("kind", CLASSES)
def test_help_of_a_class_has_whole_sentences_in_80_columns(kind, help_of):
    printed = help_of(NARROW, "fit", kind)
    assert len(printed.splitlines()) <= 2 * LINES
    option, _, path = kind.removeprefix("--").partition(".help=")
    package, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(package), name)
    shown = sentences(printed, option)
    described = arguments_of(*reversed(cls.__mro__))
    assert len(shown) > 5
    assert [name for name, sentence in shown.items() if not is_whole(sentence, described[name])] == []
    if "root" in shown:
        assert re.search(r"^  --data.root\n(?:      .*\n)*      .*\(required\)$", printed, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", CLASSES)
def test_help_of_a_class_fits_on_a_wide_screen(kind, help_of):
    assert len(help_of(WIDE, "fit", kind).splitlines()) <= LINES


OTHERS = [[command, "--help"] for command in OTHER_COMMANDS] + [["--help"], ["check", "--data", "CUB200", "--help"]]


@pytest.mark.parametrize("args", OTHERS, ids=" ".join)
def test_help_of_another_command_has_whole_sentences_in_80_columns(args, help_of):
    """All words are there that a terminal without an end shows."""
    narrow, endless = (help_of(columns, *args).split() for columns in (NARROW, 10_000))
    assert narrow == endless
