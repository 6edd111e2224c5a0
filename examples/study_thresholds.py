"""What the calibration term of ROADMAP is worth for a threshold, on Glyphs: SupAP with and without `CalibrationLoss`.

    python examples/study_thresholds.py [--seeds 0 1 2 3 4] [--images 60000]

Both losses train the network of `study.py` from the same random weights with the same batches, each with the learning
rate that the study of losses chose for it. A threshold for a false-match rate of 10 % is chosen on every second class
of the test set, and the rates are measured on the other classes, so a threshold that does not carry over to other
classes is seen. The table has the means over the seeds and, for the differences, 95 % intervals of paired differences.
With five seeds it takes about five minutes of CPU time.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intervals import interval
from study_experiments import FIVE_SEEDS, Setting
from study_losses import GLYPHS_RATES
from study_runs import Place, train

from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores

FALSE_MATCH_RATE = 0.1  # many glyphs of different characters look the same
LOSSES = {"SupAP": "SupAPLoss", "SupAP and calibration": "ROADMAPLoss"}
COLUMNS = ("mAP", "threshold", "false-match rate", "miss rate")


def measure(loss: str, seed: int, images: int) -> dict[str, float]:
    """Train with one loss and one seed; the figures of the classes on which the threshold was not chosen."""
    setting = Setting(loss=loss, images=images, lr=GLYPHS_RATES[loss])
    module, (trainer, data) = train(setting, seed, Place("cpu", {}, Path("weights")))
    chosen_on, measured_on = RetrievalMetrics(ks=(1,)), RetrievalMetrics(ks=(1,))
    outputs: Any = trainer.predict(module, data.test_dataloader())
    for output in outputs:
        is_even = output["labels"] % 2 == 0
        for metrics, rows in ((chosen_on, is_even), (measured_on, ~is_even)):
            metrics.update(output["embeddings"][rows], output["labels"][rows], output["ids"][rows])
    threshold = nearest_scores(chosen_on).threshold(FALSE_MATCH_RATE)
    scores = nearest_scores(measured_on)
    rates = float(scores.false_match_rates(threshold)), float(scores.miss_rates(threshold))
    return dict(zip(COLUMNS, (float(measured_on.compute()["mAP"]), threshold, *rates)))


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """The means of each loss, and the mean paired differences with their intervals, as a table of Markdown."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- " * (1 + len(COLUMNS)) + "|"]
    for name, runs in results.items():
        means = [f"{statistics.fmean(run[column] for run in runs):.4f}" for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(means)} |")
    without, with_term = results.values()
    differences = []
    for column in COLUMNS:
        mean, low, high = interval([b[column] - a[column] for a, b in zip(without, with_term)])
        differences.append(f"{mean:+.4f} ({low:+.4f} to {high:+.4f})")
    return "\n".join([*lines, f"| difference | {' | '.join(differences)} |"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=FIVE_SEEDS, help="at least two")
    parser.add_argument("--images", type=int, default=60_000, help="training images over all batches")
    options = parser.parse_args(arguments)
    if len(options.seeds) < 2:
        parser.error(f"--seeds must be at least two, for intervals, got {options.seeds}.")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in LOSSES}
    start = time.process_time()
    for seed in options.seeds:
        for name, loss in LOSSES.items():
            results[name].append(measure(loss, seed, options.images))
            print(name, seed, results[name][-1], file=sys.stderr, flush=True)
    print(table(results))
    seconds = time.process_time() - start
    print(f"\n{len(options.seeds)} seeds, {options.images} training images, {seconds:.0f} s of CPU time.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
