"""The collectives of the library in two and three real processes: the same results as in one process."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from lightning_retrieval.distributed import (
    Shard,
    exchange_rows,
    fetch_rows,
    fork_may_deadlock,
    gather_objects,
    gather_rows,
    rank,
    scatter_objects,
    together,
    world_size,
)


def gather_kinds_of_rows(this, world):
    """Rows of unequal numbers, of other types, of more dimensions, and none at all."""
    return {
        "unequal": gather_rows(torch.full((3 * this + 1, 2), float(this))),
        "integers": gather_rows(torch.arange(2 * this) + 2**62, [2 * r for r in range(world)]),
        "bool": gather_rows(torch.ones(2 - this % 2, 1, 3, dtype=torch.bool)),
        "none": gather_rows(torch.zeros(0, 5)),
    }


def held_by(process, index):
    """The row with this index of a process."""
    return [100 * process + index, process]


def rows_of_other_processes(this, world):
    """Each process sends as many rows as the number of the receiver, and fetches other rows; the last fetches none."""
    shard = Shard(this, world, device=torch.device("cpu"))
    rows = torch.tensor([held_by(this, index) for index in range(5 + this)])
    process = torch.arange(7 * (world - 1 - this)) % world
    index = torch.arange(len(process)) * 3 % 5
    sent = torch.cat([torch.full((to,), 10 * this + to) for to in range(world)])
    return {
        "fetched": fetch_rows(rows, process, index, shard),
        "wanted": [held_by(*wanted) for wanted in zip(process.tolist(), index.tolist())],
        "exchanged": exchange_rows(sent, range(world), [this] * world, shard).tolist(),
    }


def in_each_process(this, world):
    return gather_kinds_of_rows(this, world), rows_of_other_processes(this, world), (rank(), world_size())


def test_rows_come_in_rank_order_and_from_other_processes(run_processes):
    world = 3
    expected = torch.cat([torch.full((3 * r + 1, 2), float(r)) for r in range(world)])
    expected_integers = torch.cat([torch.arange(2 * r) for r in range(world)]) + 2**62
    for this, (rows, others, place) in enumerate(run_processes(in_each_process, world)):
        assert place == (this, world)
        assert torch.equal(rows["unequal"], expected)
        assert torch.equal(rows["integers"], expected_integers)
        assert rows["bool"].shape == (5, 1, 3)
        assert rows["bool"].all()
        assert rows["none"].shape == (0, 5)
        assert others["fetched"].shape == (len(others["wanted"]), 2)
        assert others["fetched"].tolist() == others["wanted"]
        assert others["exchanged"] == [10 * sender + this for sender in range(world) for _ in range(this)]


def test_one_process_without_a_group():
    assert (rank(), world_size()) == (0, 1)
    rows = torch.randn(3, 2, requires_grad=True)
    assert torch.equal(gather_rows(rows), rows)
    assert not gather_rows(rows).requires_grad
    assert together(lambda: 3) == [3]
    with pytest.raises(DecodingError, match=r"^a\.png at 7$"):
        together(lambda: raise_error(DecodingError("a.png", 7)))


def raise_error(error):
    raise error


@pytest.mark.distributed
@pytest.mark.parametrize(("ends_with", "is_open"), [("", False), ("raise SystemExit(0)", False), ("1 / 0", True)])
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


@pytest.mark.parametrize(
    ("version", "expected"),
    [((3, 11, 7), True), ((3, 11, 10), False), ((3, 12, 0), False)],
)
def test_versions_of_python_in_which_a_fork_may_deadlock(version, expected):
    assert fork_may_deadlock(*version) is expected


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
@pytest.mark.skipif(not fork_may_deadlock(*sys.version_info[:3]), reason="this Python forks without a deadlock")
@pytest.mark.parametrize("processes", [1, 2])
def test_threads_finish_before_a_fork_of_several_processes(processes, run_processes):
    finished = int(processes > 1)
    assert run_processes(fork_while_a_thread_waits, processes) == [finished] * processes


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


def scattered(this, world):
    """The value of this process, as all processes get it from the first one; the others give nothing."""
    values = []
    if this == 0:
        values = [f"for {number}" for number in range(world)]
    return scatter_objects(values)


def test_each_process_gets_its_own_value(run_processes):
    assert run_processes(scattered, 2) == ["for 0", "for 1"]
    assert scatter_objects(["alone"]) == "alone"


def results_and_errors_of_one_process(this, world):
    errors = [KeyError("label"), RuntimeError("no GPU"), DecodingError("a.png", 7), MissingColumnError("label")]
    found = [error_of_one_process(error, this) for error in errors]
    return found, gather_objects({"rank": this}), together(lambda: this * 10)


def test_an_error_of_any_type_is_raised_by_all(run_processes):
    expected = [
        ("KeyError", "'label'"),
        ("RuntimeError", "no GPU"),
        ("RuntimeError", "DecodingError: a.png at 7"),
        ("RuntimeError", "MissingColumnError: no column label"),
    ]
    results = run_processes(results_and_errors_of_one_process, 2)
    assert results == [(expected, [{"rank": 0}, {"rank": 1}], [0, 10])] * 2
