"""Compare settings on your own images: train each setting with each seed, and write one table with intervals.

    python examples/compare.py photos
    python examples/compare.py photos --loss log_rank smooth_ap --lr 1e-4 3e-4 --seeds 0 1 2 3 4 --epochs 10

Options that take several values form a grid, and each combination is a setting. All runs have the same training and
test classes. The seed determines the initial weights of the head, the batches and the augmentation, so runs with the
same seed are compared with each other: the table shows the mean over the seeds, and the mean difference to the first
setting with its 95 % t-interval. If an interval does not contain 0, chance alone is an unlikely reason for the
difference; among twenty comparisons of equal settings, one interval does not contain 0.

The result of a run is one line of `results.jsonl` in the output folder, and runs that are in the file are not repeated.
A comparison that was killed continues where it stopped, and settings and seeds can be added later. A run is repeated if
one of its settings or the list of images changes. The models are evaluated after the last epoch and are not kept:
train the one that you choose with `own_images.py`, which needs the same options. If none of the networks can be
created, for example because weights cannot be downloaded, the command stops before the first run.
"""

import argparse
import csv
import hashlib
import io
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytorch_lightning as pl
from intervals import interval
from own_images import (
    EXPECTED_WARNINGS,
    LOSSES,
    SAMPLES_PER_CLASS,
    image_settings,
    make_data,
    make_embedder,
    make_module,
    set_batch_size,
    with_options,
)
from results_file import read_results, write_file, write_results

from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.command_line import CommandParser
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.training.run_report import quiet_trainer

METRICS = ("mAP", "R@1")  # the differences are those of the first
FAILURES = (ModuleNotFoundError, RuntimeError, URLError, ValueError)


@dataclass(frozen=True)
class Setting:
    """What determines a run, except for its seed and the images."""

    loss: str
    backbone: str
    weights: str
    size: int | None
    batch: int
    lr: float
    epochs: int

    def key(self, seed: int, images: str) -> str:
        """The key of a run.

        Args:
            seed: of the run.
            images: the fingerprint of the images.
        """
        text = json.dumps({**asdict(self), "seed": seed, "images": images}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def grid(options: argparse.Namespace) -> dict[str, Setting]:
    """Return all settings by their names, which say the loss and all other values that differ."""
    varied = {name: getattr(options, name) for name in ("loss", "backbone", "size", "batch", "lr")}
    settings = {}
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values))
        names = [str(chosen["loss"])]
        names += [f"{name} {chosen[name]}" for name in list(varied)[1:] if len(varied[name]) > 1]
        settings[", ".join(names)] = Setting(**chosen, weights=options.weights, epochs=options.epochs)
    return settings


def fingerprint(data: ImageFolder) -> str:
    """Return a hash of the names, the classes and the split of the images."""
    content = [(name, list(images.paths), images.labels.tolist()) for name, images in sorted(data.splits.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def train(setting: Setting, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train one setting with one seed, and return the metrics of the test classes."""
    pl.seed_everything(seed, verbose=False)
    data = make_data(options.folder, categories=options.categories, workers=options.workers)
    set_batch_size(data, setting.batch)
    module = make_module(
        loss=setting.loss,
        lr=setting.lr,
        backbone=setting.backbone,
        weights=setting.weights,
        preparation=image_settings(setting.size),
    )
    evaluation = RetrievalEvaluation(ks=(1,))
    trainer = pl.Trainer(
        max_epochs=setting.epochs,
        limit_val_batches=0,
        callbacks=[evaluation],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    return {name: round(evaluation.results["test"][f"test/{name}"], 6) for name in METRICS}


def make_table(results: Sequence[Mapping[str, Any]], names: Mapping[str, Setting]) -> list[dict[str, Any]]:
    """Return a row for each setting that has a result.

    Args:
        results: of the runs, with their settings, seeds and metrics.
        names: all settings by their names; the others are compared with the first.
    """
    by_setting = {}
    for name, setting in names.items():
        runs = [result for result in results if result["setting"] == asdict(setting)]
        by_setting[name] = {run["seed"]: run["metrics"] for run in runs}
    first = next(iter(by_setting))
    rows = []
    for name, runs in by_setting.items():
        if not runs:
            continue
        row: dict[str, Any] = {"setting": name, "seeds": len(runs)}
        for metric in METRICS:
            row[metric] = statistics.fmean(values[metric] for values in runs.values())
        shared = [seed for seed in runs if seed in by_setting[first]]
        if name != first and len(shared) > 1:
            differences = [runs[seed][METRICS[0]] - by_setting[first][seed][METRICS[0]] for seed in shared]
            row |= dict(zip(("difference", "low", "high"), interval(differences)))
        rows.append(row)
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table as text."""
    lines = [
        f"| setting | seeds | {' | '.join(METRICS)} | {METRICS[0]} minus that of the first (95 % interval) |",
        "| --- " * (len(METRICS) + 3) + "|",
    ]
    for row in rows:
        difference = ""
        if "difference" in row:
            difference = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        cells = [row["setting"], str(row["seeds"]), *(f"{row[metric]:.4f}" for metric in METRICS), difference]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `table.md` and `table.csv`."""
    write_file(folder / "table.md", markdown(rows))
    stream = io.StringIO()
    table = csv.DictWriter(stream, ["setting", "seeds", *METRICS, "difference", "low", "high"], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_file(folder / "table.csv", stream.getvalue())


def parse(arguments: Sequence[str] | None) -> tuple[CommandParser, argparse.Namespace]:
    """Parse the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with a subfolder of images for each class")
    parser.add_argument("--categories", action="store_true", help="class folders are in category folders")
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=["log_rank", "smooth_ap", "fast_ap"])
    parser.add_argument("--backbone", nargs="+", default=["resnet18"], help="of torchvision, timm/NAME or hf/NAME")
    parser.add_argument("--size", nargs="+", type=int, default=[None], help="height and width of the images")
    parser.add_argument("--batch", nargs="+", type=int, default=[128], help=f"images, {SAMPLES_PER_CLASS} of a class")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-4], help="learning rate of the backbone")
    parser.add_argument("--weights", default="DEFAULT", help="pretrained weights, downloaded; or none")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2, help="number of processes that read images")
    parser.add_argument("--output", type=Path, default=Path("logs/compare"), help="folder of results.jsonl and tables")
    options = parser.parse_args(arguments)
    if min(options.batch) < 2 * SAMPLES_PER_CLASS:
        parser.error(f"--batch must be at least {2 * SAMPLES_PER_CLASS}, two classes, got {min(options.batch)}.")
    return parser, options


def error_of_network(backbone: str, weights: str, size: int | None) -> Exception | None:
    """Return the error that the creation of a network raises, or None."""
    try:
        make_embedder(backbone, weights, image_settings(size))
    except FAILURES as error:
        return error
    return None


def check_networks(settings: Sequence[Setting]) -> None:
    """Create networks until one can be created; if there is none, all runs would end with the error that is raised."""
    first_error = None
    for backbone, weights, size in dict.fromkeys((one.backbone, one.weights, one.size) for one in settings):
        error = error_of_network(backbone, weights, size)
        if error is None:
            return
        first_error = first_error or error
    if first_error is not None:
        raise first_error


def run_missing(
    settings: Mapping[str, Setting], images: str, results: dict[str, dict[str, Any]], options: argparse.Namespace
) -> int:
    """Run what has no result, write each result as soon as it is known, and return the number of runs that failed."""
    runs = list(itertools.product(options.seeds, settings.items()))  # all settings with the first seed come first
    failed = 0
    for number, (seed, (name, setting)) in enumerate(runs, 1):
        key = setting.key(seed, images)
        if key in results:
            continue
        print(f"\nRun {number} of {len(runs)}: {name}, seed {seed}", flush=True)
        try:
            metrics = train(setting, seed, options)
        except FAILURES as error:
            failed += 1
            print(f"compare: {name}, seed {seed}, failed: {with_options(str(error))}", file=sys.stderr)
            continue
        results[key] = {"key": key, "seed": seed, "setting": asdict(setting), "images": images, "metrics": metrics}
        write_results(options.output / "results.jsonl", results)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the return value is 1 if a run failed."""
    parser, options = parse(arguments)
    settings = grid(options)
    try:
        data = make_data(options.folder, categories=options.categories, workers=options.workers)
        set_batch_size(data, min(options.batch))
        images = fingerprint(data)
        results = read_results(options.output / "results.jsonl")
        runs = itertools.product(options.seeds, settings.values())
        check_networks([setting for seed, setting in runs if setting.key(seed, images) not in results])
    except (FileNotFoundError, *FAILURES) as error:
        parser.error(with_options(str(error)))
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        failed = run_missing(settings, images, results, options)
    finally:
        shown = [result for result in results.values() if result["images"] == images]
        shown = [result for result in shown if result["seed"] in options.seeds]
        rows = make_table(shown, settings)
        write_table(options.output, rows)
    print(f"\n{markdown(rows)}\nThe table is in {options.output / 'table.md'} and table.csv.")
    return int(failed > 0)


if __name__ == "__main__":
    with quiet_trainer(*EXPECTED_WARNINGS):
        code = main()
    sys.exit(code)
