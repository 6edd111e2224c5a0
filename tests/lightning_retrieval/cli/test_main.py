"""The program finds the function of a subcommand, as a module and as a console script."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_retrieval.cli.main import LIGHTNING_COMMANDS, OTHER_COMMANDS, main


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [[sys.executable, "-m", "lightning_retrieval.cli"], [Path(sys.executable).with_name("lightning-retrieval")]],
)
def test_both_ways_to_start_the_program(program):
    done = subprocess.run([*program, "index", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: lightning-retrieval index ")


@pytest.mark.parametrize("command", OTHER_COMMANDS)
def test_subcommand(command, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lightning-retrieval {command} ")


@pytest.mark.refusal
@pytest.mark.parametrize("args", ["fit --config a.yaml", b"fit", 3])
def test_arguments_that_are_no_list_raise(args):
    with pytest.raises(TypeError, match=r"^main: `args` must be a list of strings, such as \['fit', .*, got .*\)\.$"):
        main(args)


WITHOUT_TORCH = """
import sys
from lightning_retrieval.cli.main import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules and "pytorch_lightning" not in sys.modules
"""


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["embed", "--help"],
        ["export", "--help"],
        ["index", "--help"],
        ["search", "--help"],
        ["check", "--help"],
        ["demo", "--help"],
    ],
)
def test_help_appears_without_an_import_of_torch(args):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["usage: lightning-retrieval", *args[:-1], ""]))


@pytest.mark.parametrize("args", [["fot"], []])
def test_error_for_an_unknown_or_missing_command_names_every_command(args, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(args)
    printed = capsys.readouterr().err
    for command in (*LIGHTNING_COMMANDS, *OTHER_COMMANDS):
        assert command in printed
