"""Starts processes for tests, each of which calls a function of a test file; the fixture `run_processes` builds on it.

They are forked from a server, a process that has imported `tests/process_server.py` and has done nothing else, so each
of them starts in a moment. The server starts with the first of them, and ends with the tests.
"""

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.timing import launcher_variables

REPOSITORY = Path(__file__).parents[1]
LOCK = threading.Lock()  # threads start processes too, and only one may read the code of one that has ended
GRACE = 10.0  # seconds that a killed process has to end
# So that no thread is there to be forked; the last one is of pyarrow's allocator.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # of an earlier test, and not of the function that is called


class StartedProcess:
    """A process that calls a function. Its job, its output and the function's result are files in `folder`.

    Args:
        job: the function by `file` and `name`, its arguments `args`, and the process group: `rank`, `world_size`, the
            address `store` of the file by which the processes meet, and `backend`, None for no group.
        environment: further environment variables.
    """

    def __init__(self, job, folder, environment):
        folder.mkdir()
        self.folder = folder
        (folder / "job").write_bytes(pickle.dumps(job))
        (folder / "output").touch()
        inherited = {name: value for name, value in os.environ.items() if name not in SEEDS}
        environment = {**inherited, **ONE_THREAD, **environment}
        self._process = server().Process(target=run_job, args=(folder, environment))
        with LOCK, environment_of_server():
            self._process.start()

    @property
    def exit_code(self):
        """None while it runs; the negative number of the signal that has killed it."""
        with LOCK:
            return self._process.exitcode

    def wait(self, timeout):
        """Wait until it has ended, or the seconds are over; returns the exit code."""
        deadline = time.monotonic() + timeout
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.exit_code

    def output(self):
        """What it has printed so far."""
        return (self.folder / "output").read_text()

    def result(self):
        """What the function has returned."""
        return pickle.loads((self.folder / "result").read_bytes())

    def end(self):
        if self.exit_code is None:
            self._process.kill()
        self.wait(GRACE)


class StartedCommand:
    """A command in a session of its own, as a terminal starts it; its output is a file in `folder`."""

    def __init__(self, command, folder):
        self.file = folder / "output"
        with self.file.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONWARNINGS": "ignore",
                    "PYTHONPATH": str(REPOSITORY),
                    "STARTED_COMMAND": str(self.file),
                },
            )

    def output(self):
        """What it has printed so far."""
        return self.file.read_text(errors="replace")

    def output_with_stacks(self):
        """The output, at its end what each process that has registered `faulthandler` for SIGUSR1 is doing."""
        for process in self.group():
            status = Path(f"/proc/{process}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if caught >> (signal.SIGUSR1 - 1) & 1:
                os.kill(process, signal.SIGUSR1)
                time.sleep(0.5)
        return self.output()

    def group(self):
        """Ids of the processes that it has started, itself included, and that are still alive."""
        return [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/environ") if self._has_started(file)]

    def end(self):
        for process in self.group():
            os.kill(process, signal.SIGKILL)
        self.process.wait()

    def _has_started(self, file):
        """Whether this environment is of one of its processes: torchrun starts each in a session of its own."""
        try:
            return f"STARTED_COMMAND={self.file}\0".encode() in file.read_bytes()
        except OSError:  # a process that has just ended, or of another user
            return False


def start_processes(function, world_size, *args, folder, backend=None):
    """Start `function(rank, world_size, *args)` in that many processes.

    `function` stands at the top of its test file, which each process loads by itself.

    Args:
        folder: an empty folder for the files of the processes.
        backend: joins the processes to a group. If None, they get the environment variables that a launcher sets, with
            which a Trainer joins them.
    """
    environments = [{}] * world_size
    if backend is None and world_size > 1:
        environments = launcher_environments(world_size)
    started = []
    for rank, environment in enumerate(environments):
        job = {
            "file": inspect.getfile(function),
            "name": function.__name__,
            "args": args,
            "rank": rank,
            "world_size": world_size,
            "backend": backend,
            "store": (folder / "store").as_uri(),
        }
        started.append(StartedProcess(job, folder / str(rank), environment))
    return started


def launcher_environments(world_size):
    """The environment variables of each process, as a launcher such as torchrun sets them."""
    common = launcher_variables(world_size)
    return [{**common, "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def wait_for(processes, timeout):
    """Wait until all have ended, one has failed, or the seconds are over; return their exit codes, None if running."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [started.exit_code for started in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.01)


def load(file):
    """The module of a test file."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def process_group(backend, store, rank, world_size):
    """Join the processes to a group for the duration of a `with` block."""
    if backend is None:
        yield
        return
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def server():
    """The context of `multiprocessing` whose processes are forked from the server.

    On other systems than Linux libraries do not allow for that, and each process is started anew.
    """
    if sys.platform != "linux" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.process_server"])
    return context


@contextmanager
def environment_of_server():
    """Set what libraries read when they are imported, in case that the server starts now."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def run_job(folder, environment):
    """What a process does, as if it had been started alone: with its own output, environment and random numbers."""
    with (folder / "output").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # the default, not its own
    random.seed()
    np.random.seed()
    sys.path.insert(0, str(REPOSITORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the output is read by tests, and shown where one fails
    job = pickle.loads((folder / "job").read_bytes())
    rank, world_size = job["rank"], job["world_size"]
    function = getattr(load(job["file"]), job["name"])
    with process_group(job["backend"], job["store"], rank, world_size):
        result = function(rank, world_size, *job["args"])
    (folder / "result").write_bytes(pickle.dumps(result))
