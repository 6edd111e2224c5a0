"""Fixtures of all tests: each starts with the same random state, and fails if it leaves anything behind."""

# isort: off
import tests.fast_start  # before all others

# isort: on
import gc
import logging
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tests.one_lightning  # noqa: F401 - before anything imports Lightning
from lightning_retrieval.files import POSIX
from lightning_retrieval.plain_data import named_by_user
from tests.processes import start_processes, wait_for

# Environment variables that a test may change, since what sets them cannot undo it. They are restored all the same.
MAY_CHANGE = {
    "_LIGHTNING_RETRIEVAL_BACKEND_OF_PARENT",  # the library, when it first needs Lightning
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn, when it is first imported
    "PL_GLOBAL_SEED",  # seed_everything
    "PL_SEED_WORKERS",  # seed_everything
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning, when it is first imported
    "CUDA_DEVICE_ORDER",  # Lightning, when it uses a GPU
    "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
    "TORCHINDUCTOR_CACHE_DIR",  # use_deterministic_algorithms
    "TOKENIZERS_PARALLELISM",  # Weights & Biases
    "LD_LIBRARY_PATH",  # OpenCV, when faster-coco-eval or albumentations first imports it
}
# Threads that a library starts once and keeps.
KEPT_THREADS = {"TMonitor", "fsspecIO"}  # by class or name: tqdm monitors its progress bars, fsspec reads addresses
# Processes that Python's multiprocessing keeps once something was spawned.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Programs that Pillow and its plug-ins, or libraries of documents, start for some formats.
PROGRAMS = ("gs", "gswin64c", "convert", "magick", "ffmpeg", "dcraw", "inkscape", "djpeg", "git", "xdg-open")
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost", None, "")
GRACE = 5.0  # seconds that threads and processes have to end


def pytest_configure(config):
    # The tensors of tests are small: more threads would wait for each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests
    # The commands list the folders of images that their user names: here not in the user's own folder.
    data_home = tempfile.TemporaryDirectory(prefix="data-home-")
    os.environ["XDG_DATA_HOME"] = data_home.name
    config.add_cleanup(data_home.cleanup)
    config.addinivalue_line(
        "markers", "distributed: runs in several processes; conftest.py marks the tests that use `run_processes`"
    )
    config.addinivalue_line("markers", "posix: needs what Windows does not have; skipped there")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(items):
    for item in items:
        if "run_processes" in item.fixturenames:
            item.add_marker("distributed")
        if "posix" in item.keywords and not POSIX:
            item.add_marker(pytest.mark.skip(reason="needs what Windows does not have"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "gpu" in item.keywords and "distributed" in item.keywords and on_pretend_gpu():
            item.add_marker(pytest.mark.skip(reason="NCCL needs real GPUs"))


def pytest_collection_finish():
    """Save each test some milliseconds.

    The garbage collector need not look through the million objects of loaded modules and collected tests, which stay to
    the end, nor look for garbage after each 700 new objects, as it does by default. And pytest, which adds two handlers
    to each logger that does not propagate, three times in a test, need not do so for the 60 loggers of torch: their
    messages reach its handlers at the root.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(7000)
    gc.enable()


def on_pretend_gpu():
    return torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Pretend GPU")


@pytest.fixture(autouse=True)
def same_random_numbers(request):
    """Every test starts with the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` would also format the stack of its caller, for each kind of device that may be used later.
    torch.default_generator.manual_seed(0)
    if "gpu" in request.keywords:
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def stand_in_for_kernels(request):
    """Fill in the values that kernels would compute, where the `gpu` tests run on a pretend GPU.

    That is a stand-in CUDA runtime whose kernels do nothing, for machines without a GPU. It names its devices "Pretend
    GPU", and brings a module `pretend` with the dispatch mode that computes the values on the CPU instead.
    """
    if "gpu" not in request.keywords or not on_pretend_gpu():
        yield None
        return
    from pretend import Pretend

    with Pretend() as kernels:
        yield kernels


@pytest.fixture(autouse=True)
def users_folder(request, tmp_path_factory, monkeypatch):
    """In a test marked `hostile`: a folder of the user's that must stay as it was; None in other tests.

    Such a test cannot look up a host or connect to another machine, and the programs that image and document libraries
    start are scripts that leave a mark. It fails if any of this happens, also if what tried it hides the error.
    """
    if "hostile" not in request.keywords:
        yield None
        return
    place = tmp_path_factory.mktemp("surroundings")
    folder = place / "photos"
    (folder / "trip").mkdir(parents=True)
    (folder / "private.txt").write_text("private")
    (folder / "trip" / "private.txt").write_text("private, too")
    before = _content(folder)
    programs, started = place / "programs", place / "started"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> '{started}'\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # its import asks PyPI for a newer version
    reached = _without_network(monkeypatch)
    yield folder
    assert _content(folder) == before, "the user's folder has changed"
    assert not started.exists(), f"a file started {started.read_text()}"
    assert not reached, f"a file tried to reach {reached}"


def _content(folder):
    """The files below a folder, with their content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _without_network(monkeypatch):
    """Let only connections within this machine pass; the list to which all other addresses are added."""
    reached = []
    real_connect, real_lookup = socket.socket.connect, socket.getaddrinfo

    def connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in LOCAL_HOSTS:
            reached.append(address)
            raise OSError("no network in a test that is marked hostile")
        return real_connect(self, address)

    def look_up(host, *args, **kwargs):
        if host not in LOCAL_HOSTS:
            reached.append(host)
            raise socket.gaierror("no network in a test that is marked hostile")
        return real_lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return reached


@pytest.fixture
def as_another_user(tmp_path, monkeypatch):
    """Context in which root has no more rights than another user, in the folder `tmp_path`; paths must be relative."""

    @contextmanager
    def context():
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    return context


@pytest.fixture(scope="session")
def run_processes(tmp_path_factory):
    """Call `function(rank, world_size, *args)` in that many processes; returns their results in rank order.

    `function` stands at the top of its test file, which each process loads by itself. `backend` joins the processes to
    a group; with None they get the environment variables of a launcher, with which a Trainer joins them. All processes
    are killed as soon as one has failed, or after `timeout` seconds: ranks that wait for one another fail the test
    rather than hang.
    """

    def run(function, world_size, *args, timeout=120, backend="gloo"):
        folder = tmp_path_factory.mktemp("processes")
        return results_of_processes(function, world_size, *args, folder=folder, timeout=timeout, backend=backend)

    return run


@pytest.fixture(scope="session")
def run_alone(tmp_path_factory):
    """Call `function(0, 1, *args)` in a process of its own, as `run_processes` does in several; returns its result."""

    def run(function, *args, timeout=120):
        folder = tmp_path_factory.mktemp("process")
        (result,) = results_of_processes(function, 1, *args, folder=folder, timeout=timeout, backend=None)
        return result

    return run


def results_of_processes(function, world_size, *args, folder, timeout, backend):
    """The results of a function in each of its processes, all of which must end without an error."""
    processes = start_processes(function, world_size, *args, folder=folder, backend=backend)
    try:
        codes = wait_for(processes, timeout)
    finally:
        for process in processes:
            process.end()
    outputs = "\n".join(process.output()[-3000:] for process in processes)
    assert codes == [0] * world_size, f"exit codes {codes}\n{outputs}"
    return [process.result() for process in processes]


@pytest.fixture(autouse=True)
def nothing_left_behind(caplog):
    """Fail a test that changes what later tests would see, and undo the change."""
    environment = dict(os.environ)
    threads, processes, settings = set(threading.enumerate()), _children(), _settings()
    yield
    caplog.get_records("call").clear()  # a logged error keeps all objects of its traceback alive
    leaks = []
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("a torch.distributed process group")
    after = _settings()
    for name, (value, restore) in settings.items():
        if after[name][0] != value:
            leaks.append(f"{name}: {value} became {after[name][0]}")
            restore(value)
    names = {name for name, _ in environment.items() ^ dict(os.environ).items()}
    names.discard("PYTEST_CURRENT_TEST")  # which pytest changes itself
    if names:
        os.environ.clear()
        os.environ.update(environment)
        leaks += [f"the environment variable {name}" for name in sorted(names - MAY_CHANGE)]
    leaks += _still_alive(threads, processes)
    assert not leaks, "the test leaves behind " + "; ".join(leaks)


def _settings():
    return {
        "default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.use_deterministic_algorithms,
        ),
        "precision of matrix products": (
            torch.get_float32_matmul_precision(),
            torch.set_float32_matmul_precision,
        ),
        "grad mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled(), torch.autograd.set_detect_anomaly),
        "working directory": (os.getcwd(), os.chdir),
    }


def _still_alive(threads, processes):
    """New threads and child processes that are still alive after the time they have to end."""
    deadline = time.monotonic() + GRACE
    while True:
        left = [
            f"the thread {thread.name} ({type(thread).__name__})"
            for thread in threading.enumerate()
            if thread not in threads and not {type(thread).__name__, thread.name} & KEPT_THREADS
        ]
        left += [f"the process {pid} ({command})" for pid, command in _children().items() if pid not in processes]
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()  # the workers of a data loader live as long as it does
        time.sleep(0.02)


def _children():
    """{process id: command line} of the living child processes; of few where the system has no /proc."""
    found = {process.pid: process.name for process in multiprocessing.active_children()}
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
            # A process that has ended but was not waited for has no command line.
            if command and not any(kept in command for kept in KEPT_PROCESSES):
                found[int(pid)] = command.strip()[:80]
    return found


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module on sys.path that nobody has imported; its name, and the file that importing it writes."""
    folder = tmp_path / "planted"
    folder.mkdir()
    written = folder / "written"
    source = f"from torch import nn\nopen({str(written)!r}, 'w').close()\nclass Net(nn.Linear):\n    pass\n"
    (folder / "planted_module.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    yield "planted_module", written
    sys.modules.pop("planted_module", None)
    named_by_user.discard("planted_module")
