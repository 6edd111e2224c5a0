"""What every test stands on: the same random numbers at its start, and nothing of it left behind at its end."""

import gc
import inspect
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

# Variables that a test may leave behind, since what sets them offers no way back; they are restored all the same.
LEFT_BEHIND = {
    "PYTEST_CURRENT_TEST",  # pytest's own, changed between setup and teardown
    "PL_GLOBAL_SEED",  # seed_everything
    "PL_SEED_WORKERS",  # seed_everything
    "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
    "TORCHINDUCTOR_CACHE_DIR",  # use_deterministic_algorithms
    "TOKENIZERS_PARALLELISM",  # Weights & Biases
}
# Threads that libraries keep once for the whole process.
KEPT_THREADS = {"TMonitor"}  # tqdm's watch over its progress bars
# Processes that Python's multiprocessing keeps for the whole process once something was spawned.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
GRACE = 5.0  # seconds that ending threads and processes get


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "distributed: runs in several processes; marked here, where a test asks for them"
    )
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(items):
    for item in items:
        if "run_processes" in item.fixturenames:
            item.add_marker("distributed")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test begins with the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def run_processes(tmp_path_factory):
    """Call `function(rank, world_size, *args)` in that many processes joined by `backend`; their results in rank order.

    `function` stands at the top of its test file, which each process loads by itself. All are ended as soon as one has
    failed, and after `timeout` seconds, so that ranks that wait for one another fail the test rather than stop it.
    """

    def run(function, world_size, *args, timeout=120, backend="gloo"):
        folder = tmp_path_factory.mktemp("processes")
        (folder / "job").write_bytes(pickle.dumps((inspect.getfile(function), function.__name__, args, backend)))
        script = str(Path(__file__).with_name("processes.py"))
        processes, outputs = [], [folder / f"output{rank}" for rank in range(world_size)]
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                command = [sys.executable, script, str(folder), str(rank), str(world_size)]
                processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
        deadline, codes = time.monotonic() + timeout, [None] * world_size
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(
            output.read_text()[-3000:] for output in outputs
        )
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]

    return run


@pytest.fixture
def end_offline_run(tmp_path, monkeypatch):
    """Weights & Biases offline, all its files below `tmp_path`: what ends its run, after which they are whole."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    (tmp_path / "wandb-home").mkdir()

    def end():
        import wandb

        wandb.finish()
        wandb.teardown()

    yield end
    end()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fails a test that changes what the tests after it would see, and puts it back."""
    environment = dict(os.environ)
    threads, processes, settings = set(threading.enumerate()), _children(), _settings()
    yield
    leaks = []
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("a torch.distributed process group")
    after = _settings()
    for name, (value, restore) in settings.items():
        if after[name][0] != value:
            leaks.append(f"{name}: {value} became {after[name][0]}")
            restore(value)
    names = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    if names:
        os.environ.clear()
        os.environ.update(environment)
        leaks += [f"the environment variable {name}" for name in sorted(names - LEFT_BEHIND)]
    leaks += _still_alive(threads, processes)
    assert not leaks, "the test leaves behind: " + "; ".join(leaks)


def _settings():
    return {
        "default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.use_deterministic_algorithms,
        ),
        "grad mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled(), torch.autograd.set_detect_anomaly),
        "working directory": (os.getcwd(), os.chdir),
    }


def _still_alive(threads, processes):
    """Threads and child processes that were not there before, once they have had time to end."""
    deadline = time.monotonic() + GRACE
    while True:
        left = [
            f"the thread {thread.name} ({type(thread).__name__})"
            for thread in threading.enumerate()
            if thread not in threads and type(thread).__name__ not in KEPT_THREADS
        ]
        left += [f"the process {pid} ({command})" for pid, command in _children().items() if pid not in processes]
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()  # a loader's workers live as long as the loader
        time.sleep(0.02)


def _children():
    """Command line of each living child process; none where the system has no /proc."""
    found = {}
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            pids = file.read_text().split()
        except OSError:  # a thread that has just ended
            continue
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # a process that has just ended
                continue
            # One that has ended and was not yet waited for has no command line.
            if command and not any(kept in command for kept in KEPT_PROCESSES):
                found[int(pid)] = command.strip()[:80]
    return found
