"""The processes that tests start: each is as if it had been started alone, and is ended with its test."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.processes import start_processes


def what_it_sees(rank, world_size, folder):
    print(f"printed by {rank}")
    print(f"error of {rank}", file=sys.stderr)
    return {
        "rank": (rank, world_size, folder),
        "process": os.getpid(),
        "variable": os.environ.get("OF_THIS_TEST"),
        "launcher": os.environ.get("LOCAL_RANK"),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        "threads": torch.get_num_threads(),
        "start method": multiprocessing.get_start_method(),
        "random": (random.random(), float(np.random.rand())),
        "torch": torch.initial_seed(),
    }


@pytest.fixture
def started(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "its value")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")  # as `seed_everything` of an earlier test leaves it
    processes = start_processes(what_it_sees, 2, tmp_path, folder=tmp_path)
    yield processes
    for process in processes:
        process.end()


@pytest.mark.distributed
def test_each_process_has_its_own_output_environment_and_random_numbers(started, tmp_path):
    assert [process.wait(60) for process in started] == [0, 0]
    one, two = (process.result() for process in started)
    for rank, result in enumerate((one, two)):
        assert result["rank"] == (rank, 2, tmp_path)
        assert (result["variable"], result["launcher"], result["threads"]) == ("its value", str(rank), 1)
        assert result["seed"] is None
        assert result["start method"] == multiprocessing.get_all_start_methods()[0]  # of the workers of a data loader
        assert sorted(started[rank].output().splitlines()) == [f"error of {rank}", f"printed by {rank}"]
    assert len({one["process"], two["process"], os.getpid()}) == 3
    assert len({*one["random"], *two["random"]}) == 4
    assert one["torch"] == two["torch"]  # torch itself starts with the same seed


def fails(rank, world_size):
    raise ValueError(f"of rank {rank}")


def waits(rank, world_size):
    print("waits", flush=True)
    time.sleep(60)


def dies(rank, world_size):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed
def test_exit_codes_say_how_a_process_has_ended(tmp_path):
    codes = []
    for function in (fails, dies, waits):
        folder = tmp_path / function.__name__
        folder.mkdir()
        (process,) = start_processes(function, 1, folder=folder)
        try:
            codes.append(process.wait(60 if function is not waits else 0.5))
        finally:
            process.end()
        if function is fails:
            assert "ValueError: of rank 0" in process.output()
    assert codes == [1, -signal.SIGKILL, None]
    assert process.exit_code == -signal.SIGKILL  # end() kills
    assert not multiprocessing.active_children()


SCRIPT = """
import os, sys
import beside
if __name__ == "__main__":
    print(beside.VALUE, sys.argv, sys.path[0], __file__, os.getcwd(), os.environ["OF_THIS_TEST"], flush=True)
    os.system("echo printed by a command")
    print("an error", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""


def test_a_script_runs_as_python_runs_it(run_python, tmp_path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text(SCRIPT)
    script.with_name("beside.py").write_text("VALUE = 3\n")
    printed = run_python(script, 0, "b c", folder=tmp_path, OF_THIS_TEST="its value")
    command = [sys.executable, script, "0", "b c"]
    environment = {**os.environ, "OF_THIS_TEST": "its value"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert printed == done.stdout
    assert "printed by a command" in printed
    with pytest.raises(AssertionError, match=r"exit codes \[4\]\s+an error"):
        run_python(script, 4, folder=tmp_path, OF_THIS_TEST="its value")
