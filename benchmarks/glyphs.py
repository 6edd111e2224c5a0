"""The main job with three seeds, compared with raw pixels in the same evaluation: the figures of the README.

    python benchmarks/glyphs.py [--seeds 0 1 2]

Each seed is one run of `lightning-retrieval fit --config examples/glyphs.yaml`, timed as a whole process: import, both
evaluations of the test set and training. Prints one table, with the median and the range over the seeds.
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

import torch

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.datamodules import Glyphs

CONFIG = Path(__file__).parents[1] / "examples" / "glyphs.yaml"
NAMES = ("mAP", "R@1", "R@10", "mAP@R")


def main_job(seed: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Test metrics before and after training, and the duration of the process in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lightning_retrieval.cli", "fit", "--config", str(CONFIG)]
        command += ["--seed_everything", str(seed), "--trainer.enable_progress_bar", "false"]
        start = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
        seconds = time.perf_counter() - start
        (log,) = Path(folder).glob("logs/glyphs/version_0/metrics.csv")
        rows = [row for row in csv.DictReader(log.open()) if row["test/mAP"]]
    before, after = ({name: float(row[f"test/{name}"]) for name in NAMES} for row in (rows[0], rows[-1]))
    return before, after, seconds


def raw_pixels() -> dict[str, float]:
    """The same evaluation with the pixels themselves as embeddings."""
    test = Glyphs().test_set
    metrics = RetrievalMetrics()
    metrics.update(test.images.flatten(1).float() / 255, test.labels, torch.arange(len(test)))
    return {name: float(value) for name, value in metrics.compute().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    pixels = raw_pixels()
    runs = []
    for seed in seeds:
        runs.append(main_job(seed))
        print(f"seed {seed}: test/mAP {runs[-1][1]['mAP']:.4f} in {runs[-1][2]:.0f} s", file=sys.stderr, flush=True)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, seeds {' '.join(map(str, seeds))}, median (spread)\n")
    print("| test set | raw pixels | untrained | trained |\n| --- | --- | --- | --- |")
    for name in NAMES:
        cells = [summary([run[column][name] for run in runs], 3) for column in (0, 1)]
        print(f"| {name} | {pixels[name]:.3f} | {cells[0]} | {cells[1]} |")
    print(f"\nSeconds for the whole process: {summary([run[2] for run in runs], 0)}")


def summary(values: list[float], digits: int) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
