"""A million images: every sampler yields its first batch within a second and with less than 100 MB of memory."""

import time
from pathlib import Path

import numpy as np
import pytest

from lightning_retrieval.datamodules import AllClassesSampler, CategorySampler, PKSampler

IMAGES = 1_000_000
PK = {"classes_per_batch": 32, "samples_per_class": 4}
CASES = {  # number of classes, number of categories, and the sampler
    "PK": (100_000, 0, lambda labels, _: PKSampler(labels, **PK)),
    "12 categories": (100_000, 12, lambda labels, categories: CategorySampler(labels, categories, **PK)),
    "all classes": (10_000, 0, lambda labels, _: AllClassesSampler(labels, batch_size=15_000)),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("case", CASES)
def test_a_million_images_take_less_than_a_second_and_100_megabytes(case, run_processes):
    (measured,) = run_processes(measure, 1, case, timeout=300, backend=None)
    assert measured["images"] == (15_000 if case == "all classes" else 128)
    assert 0 < measured["seconds"] < 1  # processor time, independent of other processes
    assert 4e6 < measured["bytes"] < 1e8  # the images grouped by class take 4 bytes each


def measure(rank: int, world_size: int, case: str) -> dict[str, float]:
    """The time and the memory of a sampler and its first batch, in a separate process."""
    classes, count, make = CASES[case]
    labels = np.random.default_rng(0).integers(classes, size=IMAGES)
    categories = labels % count if count else None
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
    before, start = memory("VmRSS"), time.process_time()
    batch = next(iter(make(labels, categories)))
    seconds, peak = time.process_time() - start, memory("VmHWM")
    return {"images": len(batch), "seconds": seconds, "bytes": peak - before}


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
