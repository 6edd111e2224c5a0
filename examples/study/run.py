"""Repeats the ablations of the papers on Glyphs, and compares losses: trains all settings, then writes the pages.

    python examples/study/run.py [--experiments tau batch_size] [--seeds 0 1 2] [--jobs 2] [--output FOLDER]

Some experiments also need the emoji, `python examples/emoji.py emoji`, or the photographs,
`python examples/photographs.py photographs`.

The result of a run is one line of `results.jsonl` in the output folder. Its key is a hash of all settings of the run
and of its seed. A run that is in the file is not repeated: a study that was killed continues where it stopped,
experiments share the settings that they have in common, and a setting that was changed is run again. `report.py`
writes the pages and the plots from these lines. To add an experiment, add an entry to `ABLATION_EXPERIMENTS` in
`experiments.py`, or to the same of another page. Six of the losses need pytorch-metric-learning.
"""

import argparse
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # of results_file.py and intervals.py
import training
from experiments import ABLATION_EXPERIMENTS, Experiment, Setting
from losses import LOSS_EXPERIMENTS
from memory import MEMORY_EXPERIMENTS
from pairs import pair_experiments
from report import ABLATIONS, LOSSES, MEMORY, PAIRS, TUNING, Page, Report, runs_of
from results_file import read_results, write_results
from training import Place
from tuning import TUNING_EXPERIMENTS

HERE = Path(__file__).parent
PAGES = {
    "ablations.md": Page(ABLATIONS, ABLATION_EXPERIMENTS),
    "losses.md": Page(LOSSES, LOSS_EXPERIMENTS),
    "memory.md": Page(MEMORY, MEMORY_EXPERIMENTS),
    "tuning.md": Page(TUNING, TUNING_EXPERIMENTS),
    "pairs.md": Page(PAIRS, pair_experiments({})),
}
WEIGHTS = Path("logs/study/weights")  # of networks from which others start, and what frozen parts of networks give
NAMES = [name for page in PAGES.values() for name in page.experiments]

Run = tuple[Setting, int]  # with its seed


def outcomes(runs: Sequence[Run], jobs: int, place: Place) -> Iterator[tuple[Run, Callable[[], dict[str, Any]]]]:
    """Yield each run as it ends, with a function that returns its result or raises its error."""
    if jobs == 1:
        for run in runs:
            yield run, partial(training.run, *run, place)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker, initargs=(threads,)) as pool:
        futures = {pool.submit(training.run, *run, place): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker(threads: int) -> None:
    """Use a fraction of the cores, and end with the study even if the study is killed."""
    torch.set_num_threads(threads)
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def end_with(study: multiprocessing.process.BaseProcess) -> None:
    """Wait for the end of the study, then end this process."""
    study.join()
    os._exit(1)


def shorten_setting(setting: Setting) -> Setting:
    """Return the setting, and the one it starts from, with a few training steps and a part of the test set."""
    start = setting.start
    if start is not None:
        start = shorten_setting(start)
    return replace(setting, images=min(setting.images, 512), test_batches=2, start=start)


def shorten(experiment: Experiment) -> Experiment:
    """Return the experiment with a few training steps and a part of the test set."""
    curves = {}
    for curve, settings in experiment.curves.items():
        short = {}
        for x, setting in settings.items():
            short[x] = shorten_setting(setting)
        curves[curve] = short
    return replace(experiment, curves=curves)


def make_pages(options: argparse.Namespace, results: Mapping[str, Any]) -> dict[str, Page]:
    """Return the pages by the names of their files, as the options change them and results decide on their settings."""
    pages = {}
    for file, page in PAGES.items():
        experiments = dict(page.experiments)
        if file == "pairs.md":
            experiments = pair_experiments(results)
        for name, experiment in experiments.items():
            if options.quick:
                experiments[name] = shorten(experiment)
            if options.seeds:
                experiments[name] = replace(experiments[name], seeds=options.seeds)
        pages[file] = replace(page, experiments=experiments)
    return pages


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Add the options for the folders of images."""
    parser.add_argument("--emoji", type=Path, default=Path("emoji"), help="the folder that emoji.py wrote")
    parser.add_argument(
        "--photographs", type=Path, default=Path("photographs"), help="the folder that photographs.py wrote"
    )


def parse_with_defaults(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with the options --device, --output and --quick, and set the default folder of results."""
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine.")
    if options.output is None:
        options.output = HERE
        if options.quick:
            options.output = Path("logs/study-quick")
    return options


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", help="of all experiments; default three or five for each")
    parser.add_argument("--output", type=Path, help="folder of results, pages and plots; default this one")
    parser.add_argument("--jobs", type=int, help="number of parallel runs; default one for each core, one on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_folders(parser)
    parser.add_argument("--quick", action="store_true", help="a few steps and a part of the test set, to try it out")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page again")
    options = parse_with_defaults(parser, arguments)
    if options.jobs is None:
        options.jobs = os.cpu_count() or 1
        if options.device == "cuda":
            options.jobs = 1
    return options


def wanted_runs(options: argparse.Namespace, results: Mapping[str, Any]) -> dict[str, Run]:
    """Return the runs of the experiments, except of those whose settings are not chosen yet."""
    experiments: dict[str, Experiment] = {}
    for page in make_pages(options, results).values():
        experiments |= page.experiments
    wanted = []
    for name in options.experiments:
        choice = experiments[name].chosen_by
        if choice is None or runs_of([experiments[choice]]).keys() <= results.keys():
            wanted.append(experiments[name])
    return runs_of(wanted)


def run_all(missing: Sequence[Run], total: int, results: dict[str, Any], options: argparse.Namespace) -> int:
    """Run what is missing, write each result as soon as it is known, and return the number of runs that failed."""
    file = options.output / "results.jsonl"
    failed = 0
    folders = {"emoji": options.emoji, "photographs": options.photographs}
    place = Place(options.device, folders, WEIGHTS)
    # Without smoothing, the estimate of the remaining time is based on all runs of this call.
    with tqdm(total=total, initial=total - len(missing), unit="run", smoothing=0, disable=not missing) as bar:
        for (setting, seed), outcome in outcomes(missing, options.jobs, place):
            try:
                results[setting.key(seed)] = outcome()
                write_results(file, results)
            except Exception as error:
                failed += 1
                bar.write(f"study: {setting}, seed {seed}, failed: {error!r}", file=sys.stderr)
            bar.update()
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the return value is 1 if a run failed."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    results = read_results(options.output / "results.jsonl")
    tried = failed = 0
    try:
        while not (options.report or failed):
            wanted = wanted_runs(options, results)
            missing = [run for key, run in wanted.items() if key not in results]
            if not missing:
                break
            tried += len(missing)
            failed = run_all(missing, len(wanted), results, options)
    finally:
        for file, page in make_pages(options, results).items():
            Report(page, results).write(options.output / file)
    if failed:
        print(f"study: {failed} of {tried} runs failed; run the same command again to repeat them.", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
