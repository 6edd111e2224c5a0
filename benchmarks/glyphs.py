"""The main job with three seeds, compared with raw pixels in the same evaluation.

    python benchmarks/glyphs.py [--seeds 0 1 2] [--configs examples/glyphs.yaml other.yaml]

Each seed is one run of `lightning-retrieval fit --config examples/glyphs.yaml`, timed as a whole process: import, both
evaluations of the test set and training. Prints one table for each config, with the median and the range over the
seeds. The runs of several configs with the same seed follow each other.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.datamodules import Glyphs

CONFIG = Path(__file__).parents[1] / "examples" / "glyphs.yaml"
NAMES = ("mAP", "R@1", "R@10", "mAP@R")


def main_job(config: Path, seed: int) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Test metrics before and after training, and the seconds and the CPU seconds of the process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lightning_retrieval.cli", "fit", "--config", str(config.resolve())]
        command += ["--seed_everything", str(seed), "--trainer.enable_progress_bar", "false"]
        start, cpu_start = time.perf_counter(), cpu_seconds_of_children()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
        seconds, cpu_seconds = time.perf_counter() - start, cpu_seconds_of_children() - cpu_start
        (log,) = Path(folder).glob("logs/glyphs/version_0/metrics.csv")
        rows = [row for row in csv.DictReader(log.open()) if row["test/mAP"]]
    before, after = ({name: float(row[f"test/{name}"]) for name in NAMES} for row in (rows[0], rows[-1]))
    return before, after, seconds, cpu_seconds


def cpu_seconds_of_children() -> float:
    """CPU time of the processes that this one started and that have ended."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def raw_pixels() -> dict[str, float]:
    """The same evaluation with the pixels themselves as embeddings."""
    test = Glyphs().test_set
    metrics = RetrievalMetrics()
    metrics.update(test.images.flatten(1).float() / 255, test.labels, torch.arange(len(test)))
    return {name: float(value) for name, value in metrics.compute().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--configs", type=Path, nargs="+", default=[CONFIG])
    options = parser.parse_args()
    pixels = raw_pixels()
    runs: dict[Path, list[Any]] = {config: [] for config in options.configs}
    for seed in options.seeds:
        for config in options.configs:
            run = main_job(config, seed)
            runs[config].append(run)
            result = f"test/mAP {run[1]['mAP']:.4f} in {run[2]:.0f} s, CPU time {run[3]:.0f} s"
            print(f"{config}, seed {seed}: {result}", file=sys.stderr, flush=True)
    seeds = " ".join(map(str, options.seeds))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, seeds {seeds}, median (spread)")
    for config in options.configs:
        print_table(config, runs[config], pixels)


def print_table(config: Path, runs: list[Any], pixels: dict[str, float]) -> None:
    """Print the results of a config beside those of raw pixels."""
    print(f"\n{config}\n\n| test set | raw pixels | untrained | trained |\n| --- | --- | --- | --- |")
    for name in NAMES:
        cells = [summary([run[column][name] for run in runs], 3) for column in (0, 1)]
        print(f"| {name} | {pixels[name]:.3f} | {cells[0]} | {cells[1]} |")
    print(f"\nSeconds for the whole process: {summary([run[2] for run in runs], 0)}")
    print(f"CPU seconds: {summary([run[3] for run in runs], 0)}")


def summary(values: list[float], digits: int) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
