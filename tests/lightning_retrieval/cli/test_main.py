"""The program finds the function of a subcommand, as a module and as a console script."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_retrieval.cli.main import COMMANDS, main


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [[sys.executable, "-m", "lightning_retrieval.cli"], [Path(sys.executable).with_name("lightning-retrieval")]],
)
def test_both_ways_to_start_the_program(program):
    done = subprocess.run([*program, "index", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: lightning-retrieval index ")


@pytest.mark.parametrize("command", COMMANDS)
def test_subcommand(command, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lightning-retrieval {command} ")
