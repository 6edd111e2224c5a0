"""Time and memory of the batch samplers at ten million images.

    python benchmarks/samplers.py

The labels are random, so the class sizes differ a little. The time of the first batch includes the construction of the
sampler; its memory is the peak without the labels and categories themselves. Later batches are those of the same epoch.
A batch of `AllClassesSampler` is larger than those of the others. This takes about two minutes on two cores.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from timing import Timing, arguments, environment, interleaved, peak_added_memory, report

from lightning_retrieval.datamodules import AllClassesSampler, CategorySampler, GlobalBatchSampler, PKSampler

MIB = 1 << 20
SAMPLERS = [  # name, fraction of the classes, categories, batch size
    ("PKSampler", 1.0, None, 128),
    ("CategorySampler", 1.0, 12, 128),
    ("CategorySampler", 1.0, 1000, 128),
    ("AllClassesSampler", 0.1, None, None),
]


def maker(name: str, images: int, classes: int, categories: int | None, batch: int) -> Callable[[], GlobalBatchSampler]:
    """Create the labels; return a function that creates the sampler."""
    warnings.filterwarnings("ignore", ".*classes in training because they have a single image")
    labels = np.random.default_rng(0).integers(classes, size=images)
    if name == "AllClassesSampler":
        return lambda: AllClassesSampler(labels, batch_size=batch)
    pk = {"classes_per_batch": batch // 4, "samples_per_class": 4}
    if categories is None:
        return lambda: PKSampler(labels, **pk)
    of_class = labels % categories
    return lambda: CategorySampler(labels, of_class, **pk)


def first_batch(*case: Any) -> Callable[[], list[int]]:
    make = maker(*case)
    return lambda: next(iter(make()))


def later_batches(sampler: GlobalBatchSampler, batch: int) -> Timing:
    count = min(len(sampler) - 1, 5 + 100_000 // batch)
    batches = iter(sampler)
    next(batches)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        next(batches)
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), count)


def main() -> None:
    options = arguments("The batch samplers at ten million images.")
    quick = options.quick
    images = 200_000 if quick else 10_000_000
    rows: list[dict[str, Any]] = []
    for name, fraction, categories, batch_size in SAMPLERS:
        classes = round(fraction * images / 10)
        batch = batch_size or 2 * classes
        case = (name, images, classes, categories, batch)
        first = interleaved({"first": first_batch(*case)}, 1 if quick else 3, "cpu", warm_up=0 if quick else 1)
        rows.append(
            {
                "sampler": name,
                "images": images,
                "classes": classes,
                "categories": categories,
                "batch": batch,
                "first batch": first["first"],
                "later batch": later_batches(maker(*case)(), batch),
                "added MiB": peak_added_memory(first_batch, "cpu", *case) / MIB,
            }
        )
    title = "Batch samplers: construction and first batch, later batches, and memory; median (lowest to highest)"
    report(title, environment("cpu", "numpy"), rows, options.json)


if __name__ == "__main__":
    main()
