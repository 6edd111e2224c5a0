"""Chooses the settings of the losses that choice.md compares, compares them, and writes the page.

    python examples/study/choice.py [--jobs 1]
    python examples/study/choice.py --report

It needs the emoji, `python examples/emoji.py emoji`, and the photographs, `python examples/photographs.py photographs`.
Each run is appended to `choice.jsonl` in the output folder, with its setting, its seed, its metrics and its CPU time.
A run that is in the file is not repeated, so the command continues where it was stopped. When all is chosen, the best
meet on the test set, which `decision.py` describes. The peers and candidates are in `entrants.py`.

What the page leaves open:

- The learning rate is a setting like the others: if the best is at an end, half of the lowest or twice the highest is
  tried. The scale of the loss is not, since it decides whether most gradients are clipped or few.
- If several settings are at an end, each is changed alone. The values beyond the ends are in `entrants.py`.
- Equal values are decided by the order in which they were tried.
- When the setting is chosen, it is also trained with the seeds 1 and 2, for the mean of three seeds.
- A peer that leaves a task after the runs with half of the images has the setting that was the best of these.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # of results_file.py and intervals.py
from choice_page import Comparison, write_page
from decision import DECISIONS, RANKING_SEEDS, final_runs, further_runs
from entrants import ENTRANTS, LOG_RANK, PEERS, Entrant, Own, Values
from experiments import Setting
from pairs import CHOICE_SEED, SCALES, TASKS
from results_file import append_result, read_results, write_results
from run import WEIGHTS, Run, add_folders, outcomes, parse_with_defaults, shorten_setting
from training import Place

ORDER = ("head", "photographs", "glyphs", "emoji", "fine_tuning")  # of the tasks
COMBINATIONS = 8  # of own settings that are tried with half of the images
FULL_LENGTH = 4  # settings that are then trained with all images
LEAVES_EARLY = 0.06  # a peer that is so far below log rank with half of the images leaves the task
EARLY_TASKS = ("glyphs", "emoji", "fine_tuning")  # the others were complete before this rule was written


@dataclass(frozen=True)
class Trial:
    """The values that are tried, with half of the images or with all, and a seed."""

    values: Values
    full: bool = False
    seed: int = CHOICE_SEED


Value = Callable[[Trial], float]  # of a trial that was run


def stages(entrant: Entrant, rates: Sequence[float], value: Value, least: float) -> Iterator[list[Trial]]:
    """Yield the trials of one step after another, as they follow from the values of those before.

    The last list holds the chosen values, with each of the seeds of the ranking. If no trial with half of the images
    has the least value, it holds the best of these.
    """
    combinations = list(entrant.combinations())
    first = []
    for lr, scale in itertools.product(rates, SCALES):
        first.append(Trial({"lr": lr, "loss_scale": scale, **combinations[0]}))
    yield first
    ranked = sorted(first, key=value, reverse=True)
    pairs = itertools.islice(itertools.product(ranked, combinations), COMBINATIONS)
    second = [Trial({**trial.values, **combination}) for trial, combination in pairs]
    yield second
    tried = first + [trial for trial in second if trial not in first]
    best = sorted(tried, key=value, reverse=True)[:FULL_LENGTH]
    full = [replace(trial, full=True) for trial in best]
    if value(best[0]) <= least:
        yield [replace(full[0], seed=seed) for seed in RANKING_SEEDS]
        return
    yield full
    ladders = [Ladder(own) for own in (own_rates(rates), *entrant.own)]
    while more := beyond(max(full, key=value), ladders):
        yield more
        full += more
    if entrant.tries_random_proxies:
        best_values = max(full, key=value).values
        full.append(Trial({**best_values, "proxies": "random"}, full=True))
        yield full[-1:]
    chosen = max(full, key=value)
    yield [replace(chosen, seed=seed) for seed in RANKING_SEEDS]


def own_rates(rates: Sequence[float]) -> Own:
    """Return the learning rates of a task, and those beyond them."""
    lowest, highest = rates[0], rates[-1]
    return Own("lr", rates, (lowest / 2, lowest / 4), (2 * highest, 4 * highest))


class Ladder:
    """The values of a setting in their order, and which of them were tried so far."""

    def __init__(self, own: Own) -> None:
        self.name = own.name
        self.values = [*reversed(own.below), *own.values, *own.above]
        self.first = len(own.below)
        self.last = self.first + len(own.values) - 1

    def beyond(self, value: Any) -> list[Any]:
        """Return the next value if this one is at an end of what was tried, and count it as tried."""
        position = self.values.index(value)
        if position == self.first and self.first > 0:
            self.first -= 1
            return [self.values[self.first]]
        if position == self.last and self.last < len(self.values) - 1:
            self.last += 1
            return [self.values[self.last]]
        return []


def beyond(best: Trial, ladders: Sequence[Ladder]) -> list[Trial]:
    """Return trials that each change one value of the best trial that is at an end."""
    trials = []
    for ladder in ladders:
        for value in ladder.beyond(best.values[ladder.name]):
            trials.append(Trial({**best.values, ladder.name: value}, full=True))
    return trials


@dataclass
class Progress:
    """What is known of an entrant on a task: its runs so far, by their keys, those without a result, and the choice."""

    runs: dict[str, Run] = field(default_factory=dict)
    missing: dict[str, Run] = field(default_factory=dict)
    chosen: Setting | None = None


def follow(
    entrant: Entrant,
    task: str,
    chosen: Mapping[str, Setting],
    results: Mapping[str, Any],
    quick: bool,
    *,
    least: float = -math.inf,
) -> Progress:
    """Return the progress of an entrant on a task.

    Args:
        entrant: the peer or candidate.
        task: name of the task.
        chosen: the chosen settings of the entrants that it needs.
        results: of the runs, by their keys.
        quick: whether the runs are shortened.
        least: the mAP of its best run with half of the images below which it leaves.
    """

    def run_of(trial: Trial) -> Run:
        start = replace(TASKS[task].base, held_out=True)
        setting = entrant.setting(task, start, trial.values, chosen)
        if quick:
            setting = shorten_setting(setting)
        if not trial.full:
            setting = replace(setting, images=setting.images // 2)
        return setting, trial.seed

    def value(trial: Trial) -> float:
        setting, seed = run_of(trial)
        return float(results[setting.key(seed)]["metrics"]["mAP"])

    progress = Progress()
    for trials in stages(entrant, TASKS[task].rates, value, least):
        runs = {setting.key(seed): (setting, seed) for setting, seed in map(run_of, trials)}
        progress.runs |= runs
        progress.missing = {key: run for key, run in runs.items() if key not in results}
        if progress.missing:
            return progress
    progress.chosen, _ = run_of(trials[0])
    return progress


def follow_all(task: str, results: Mapping[str, Any], quick: bool) -> dict[str, Progress]:
    """Return the progress of each entrant on a task; a candidate waits for the entrants that it needs.

    Log rank comes first, and decides which peers leave early. Those that candidates need do not.
    """
    found: dict[str, Progress] = {}
    chosen: dict[str, Setting] = {}
    needed = set().union(*(entrant.needs for entrant in ENTRANTS.values()))
    least = -math.inf
    for name, entrant in ENTRANTS.items():
        found[name] = Progress()
        if entrant.needs <= chosen.keys():
            may_leave = name in PEERS and name not in needed
            found[name] = follow(entrant, task, chosen, results, quick, least=least if may_leave else -math.inf)
        if name == LOG_RANK and task in EARLY_TASKS:
            least = best_of_half(found[name], results) - LEAVES_EARLY
        setting = found[name].chosen
        if setting is not None:
            chosen[name] = setting
    return found


def best_of_half(progress: Progress, results: Mapping[str, Any]) -> float:
    """Return the highest mAP of an entrant with half of the images; minus infinity before these runs are done."""
    most = max(setting.images for setting, _ in progress.runs.values())
    values = [-math.inf]
    for key, (setting, _) in progress.runs.items():
        if setting.images < most:
            values.append(float(results[key]["metrics"]["mAP"]))
    return max(values)


def run_task(task: str, results: dict[str, Any], options: argparse.Namespace) -> int:
    """Run what is missing on a task, step by step, and return the number of runs that failed."""
    failed: set[str] = set()
    while True:
        missing: dict[str, Run] = {}
        for progress in follow_all(task, results, options.quick).values():
            missing |= progress.missing
        runs = [run for key, run in missing.items() if key not in failed]
        if not runs:
            return len(failed)
        failed |= run_all(runs, task, results, options)


def run_all(runs: Sequence[Run], task: str, results: dict[str, Any], options: argparse.Namespace) -> set[str]:
    """Run settings of a task, write each result as soon as it is known, and return the keys of runs that failed."""
    failed = set()
    place = Place(options.device, {"emoji": options.emoji, "photographs": options.photographs}, WEIGHTS)
    for (setting, seed), outcome in tqdm(outcomes(runs, options.jobs, place), task, len(runs), unit="run"):
        key = setting.key(seed)
        try:
            result = {**outcome(), "task": task, "setting": setting.different()}
        except Exception as error:
            failed.add(key)
            tqdm.write(f"choice: {setting}, seed {seed}, failed: {error!r}", file=sys.stderr)
            continue
        results[key] = result
        append_result(options.output / "choice.jsonl", result)
    return failed


def decide(results: dict[str, Any], options: argparse.Namespace) -> int:
    """Run the decisions, and write their page; the return value is the number of failed runs.

    It is 1 if a choice is not complete.
    """
    chosen: dict[str, dict[str, Setting]] = {}
    for task in ORDER:
        chosen[task] = {}
        for name, progress in follow_all(task, results, options.quick).items():
            if progress.chosen is None:
                print(f"choice: the choice of {name} on {task} is not complete.", file=sys.stderr)
                return 1
            chosen[task][name] = progress.chosen
    comparisons = [Comparison(chosen, results, decision) for decision in DECISIONS]
    failed: set[str] = set()
    for task, settings in chosen.items():
        runs = further_runs(task, settings.values())
        for comparison in comparisons:
            compared = [settings[name] for name in comparison.compared]
            runs += final_runs(task, compared, comparison.decision.seeds)
        missing = [(setting, seed) for setting, seed in runs if setting.key(seed) not in results]
        if missing and options.report:
            print(f"choice: {len(missing)} runs on {task} are missing.", file=sys.stderr)
            return 1
        if missing:
            failed |= run_all(missing, task, results, options)
    if not failed:
        write_page(comparisons, options.output / "choice.md")
    return len(failed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder of choice.jsonl; default that of this file")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_folders(parser)
    parser.add_argument("--quick", action="store_true", help="a few steps and a part of the classes, to try it out")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page again")
    return parse_with_defaults(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the return value is 1 if a run failed."""
    options = parse(arguments)
    file = options.output / "choice.jsonl"
    results = read_results(file)
    failed = 0
    if not options.report:
        options.output.mkdir(parents=True, exist_ok=True)
        write_results(file, results)  # without a line that was not finished
        failed = sum(run_task(task, results, options) for task in ORDER)
    if not failed:
        failed = decide(results, options)
    if failed:
        print(f"choice: {failed} runs failed; the same command repeats them.", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
