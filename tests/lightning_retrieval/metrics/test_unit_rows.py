"""Rows that stay in their batches, and the memory of an evaluation."""

import ctypes
from pathlib import Path

import pytest
import torch

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.distributed import Shard
from lightning_retrieval.metrics import gathering as module
from lightning_retrieval.metrics.gathering import UnitRows, unit_rows
from lightning_retrieval.ranking.rows import normalize

ROWS, DIM = 12_000, 512
M_MMAP_THRESHOLD = -3  # of mallopt


def status(field):
    """A size that Linux reports of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def evaluate(rows):
    metrics = RetrievalMetrics()
    for begin in range(0, rows, 500):
        ids = torch.arange(begin, begin + 500)
        metrics.update(torch.randn(500, DIM), ids % (rows // 5), ids)
    return metrics.compute()


def added_memory(rank, world_size):
    """Peak of `update` and `compute`, as a multiple of the embeddings' bytes.

    A first evaluation loads what the first use loads; large tensors are returned to the system as soon as they are
    freed.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    evaluate(1500)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak to the memory in use
    before = status("VmRSS")
    evaluate(ROWS)
    return (status("VmHWM") - before) / (ROWS * DIM * 4)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak memory from the /proc of Linux")
def test_an_evaluation_keeps_two_and_a_half_times_the_rows(run_alone):
    """Once in the batches of `update`, once as they are ranked, and the rest for scores and results."""
    assert 2 < run_alone(added_memory) < 2.5


@pytest.mark.parametrize(
    ("sizes", "dtype", "numbers"),
    [([50], torch.float16, 16), ([7, 1, 0, 30, 12], torch.float32, 16), ([1] * 50, torch.float64, 1 << 18)],
)
def test_chosen_rows_are_those_of_all_batches_together(sizes, dtype, numbers, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_NUMBERS", numbers)
    batches = torch.randn(50, 4, dtype=dtype).split(sizes)
    chosen = torch.randint(0, 50, (40,))  # some of them several times
    is_kept = torch.arange(40) % 3 > 0
    rows = unit_rows(batches).select(chosen).select(is_kept)
    assert torch.equal(rows.tensor(), normalize(torch.cat(batches))[chosen][is_kept])


def test_no_rows():
    rows = unit_rows([torch.zeros(0, 3)])
    assert rows.tensor().shape == (0, 3)
    assert unit_rows([torch.randn(4, 3)]).select(torch.zeros(4, dtype=torch.bool)).tensor().shape == (0, 3)


def distributed_in_each_process(this, world):
    """Processes have unequal numbers of rows, the last one none; some rows are chosen twice, some are not."""
    generator = torch.Generator().manual_seed(5)
    every = torch.randn(60, 8, generator=generator)
    chosen = torch.randint(0, 60, (50,), generator=generator)
    counts = [37, 23] + [0] * (world - 2)
    own = every[sum(counts[:this]) : sum(counts[: this + 1])]
    module._BLOCK_NUMBERS = 64  # parts of eight rows
    shard = Shard(this, world, device=torch.device("cpu"))
    rows = UnitRows(list(own.split(5)) or [own], torch.arange(60), counts, shard).select(chosen)
    sizes = [0, 45, 5]
    return {
        "mine": rows.distribute(sizes),
        "expected": normalize(every)[chosen].split(sizes)[this],
        "all": rows.tensor(),
        "all expected": normalize(every)[chosen],
        "sharded": rows.sharded(4).all(),
    }


def test_rows_are_sent_to_the_processes_that_need_them(run_processes):
    for found in run_processes(distributed_in_each_process, 3):
        assert torch.equal(found["mine"], found["expected"])
        assert torch.equal(found["all"], found["all expected"])
        assert torch.equal(found["sharded"], found["all expected"])
