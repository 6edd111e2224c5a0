"""Several real processes: an error of one of them is raised by all, and none of them waits forever."""

import ctypes
import os
import subprocess
import sys

import pytest

from lightning_retrieval.distributed import FORK_MAY_DEADLOCK, together


@pytest.mark.distributed
@pytest.mark.parametrize(("ends_with", "is_open"), [("", False), ("1 / 0", True)])
def test_gloo_is_closed_before_the_interpreter_ends_unless_by_an_error(tmp_path, ends_with, is_open):
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        "import lightning_retrieval.distributed\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n" + ends_with
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == f"{is_open}\n"
    assert (ended.returncode != 0) == ("1 / 0" in ends_with)


def fork_while_a_thread_waits(this, world):
    """The number of threads that had finished when a process was forked while one waited for the interpreter."""
    finished = []
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(finished.append)
    library, thread = ctypes.PyDLL(None), ctypes.c_ulong()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    library.pthread_create(ctypes.byref(thread), None, function, None)
    process = os.fork()
    if process == 0:
        os._exit(len(finished))
    sys.setswitchinterval(interval)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    ctypes.CDLL(None).pthread_join(thread, None)
    return code


@pytest.mark.distributed
@pytest.mark.skipif(not FORK_MAY_DEADLOCK, reason="this Python forks without a deadlock")
def test_threads_finish_before_a_fork_of_several_processes(run_processes):
    assert run_processes(fork_while_a_thread_waits, 2) == [1, 1]


class DecodingError(Exception):
    """Pickle cannot copy it: it keeps one of the two arguments."""

    def __init__(self, path, position):
        super().__init__(f"{path} at {position}")


class MissingColumnError(Exception):
    """Pickle makes another message of it."""

    def __init__(self, name):
        super().__init__(f"no column {name}")


def error_of_one_process(error, this):
    """The type and the message of what `together` raises if this error occurs on rank 1."""

    def work():
        if this == 1:
            raise error

    with pytest.raises(Exception) as caught:  # noqa: PT011
        together(work)
    return type(caught.value).__name__, str(caught.value)


def results_and_errors_of_one_process(this, world):
    errors = [KeyError("label"), RuntimeError("no GPU"), DecodingError("a.png", 7), MissingColumnError("label")]
    found = [error_of_one_process(error, this) for error in errors]
    return found, together(lambda: this * 10)


def test_an_error_of_any_type_is_raised_by_all(run_processes):
    expected = [
        ("KeyError", "'label'"),
        ("RuntimeError", "no GPU"),
        ("RuntimeError", "DecodingError: a.png at 7"),
        ("RuntimeError", "MissingColumnError: no column label"),
    ]
    results = run_processes(results_and_errors_of_one_process, 2)
    assert results == [(expected, [0, 10])] * 2
