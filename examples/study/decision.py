"""The decisions of choice.md: which candidate meets which peers, with which runs, and if it wins."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from entrants import CANDIDATES, LATER_CANDIDATES, LOG_RANK, PEERS
from experiments import Setting
from intervals import interval
from pairs import TRAINED_CLASSES

RANKING_SEEDS = (0, 1, 2)
MOST_PEERS = 6
LEAST_TASKS = 4  # on which a candidate must be above all peers
LEAVES = 0.03  # a peer whose mAP is so far below that of log rank leaves the task
METRICS = ("mAP", "R@1", "mAP@R")
# Quantiles of Student's t distribution with nine degrees of freedom, for two-sided tests at 5 % / 1, 5 % / 2, ...
QUANTILES = (2.2622, 2.6850, 2.9333, 3.1109, 3.2498, 3.3642)

Chosen = Mapping[str, Mapping[str, Setting]]  # the setting of each entrant on each task
Results = Mapping[str, Mapping[str, Any]]  # of the runs, by their keys


@dataclass(frozen=True)
class Decision:
    """A comparison of a candidate with the best peers on the test set.

    Args:
        title: of its section on the page.
        candidates: of which the best in the choice is compared.
        seeds: ten that were not used before.
    """

    title: str
    candidates: Sequence[str]
    seeds: Sequence[int]


FIRST = Decision("A sum of log rank and multi-similarity against the best others", tuple(CANDIDATES), range(30, 40))
LONGER = Decision("Log rank of longer lists against the best others", tuple(LATER_CANDIDATES), range(45, 55))
DECISIONS = (FIRST, LONGER)


def held_out(setting: Setting, seed: int, results: Results) -> float:
    """Return the mAP of a chosen setting on held-out classes."""
    return float(results[setting.key(seed)]["metrics"]["mAP"])


def leaves(entrant: str, chosen: Mapping[str, Setting], results: Results) -> bool:
    """Whether an entrant is a peer that leaves a task, on which log rank and the entrant have chosen settings."""
    best = held_out(chosen[LOG_RANK], RANKING_SEEDS[0], results)
    return entrant in PEERS and held_out(chosen[entrant], RANKING_SEEDS[0], results) <= best - LEAVES


def finalists(chosen: Chosen, results: Results, candidates: Iterable[str]) -> tuple[str, list[str]]:
    """Return the candidate that goes on and the peers that it meets, with the best first."""

    def rank(entrant: str) -> float:
        values = []
        for settings in chosen.values():
            values += [held_out(settings[entrant], seed, results) for seed in RANKING_SEEDS]
        return -statistics.fmean(values)

    stay = []
    for peer in PEERS:
        if not any(leaves(peer, settings, results) for settings in chosen.values()):
            stay.append(peer)
    return min(candidates, key=rank), sorted(stay, key=rank)[:MOST_PEERS]


def on_test_set(setting: Setting) -> Setting:
    """Return a chosen setting that is evaluated on the test set."""
    return replace(setting, held_out=False)


def among_trained(setting: Setting) -> Setting:
    """Return a chosen setting that is evaluated among trained classes."""
    return replace(setting, held_out=False, trained_classes=True)


def final_runs(task: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[tuple[Setting, int]]:
    """Return the runs of a decision on a task: on the test set, and on two tasks among trained classes as well."""
    tested = list(map(on_test_set, settings))
    if task in TRAINED_CLASSES:
        tested += map(among_trained, settings)
    return list(itertools.product(tested, seeds))


def further_runs(task: str, settings: Iterable[Setting]) -> list[tuple[Setting, int]]:
    """Return the runs of all entrants among trained classes, which decide nothing."""
    if task not in TRAINED_CLASSES:
        return []
    return list(itertools.product(map(among_trained, settings), RANKING_SEEDS))


def differences(one: Setting, other: Setting, metric: str, results: Results, seeds: Sequence[int]) -> list[float]:
    """Return the paired differences of a metric over seeds."""
    found = []
    for seed in seeds:
        pair = [results[each.key(seed)]["metrics"][metric] for each in (one, other)]
        found.append(pair[0] - pair[1])
    return found


def above(of_peers: Mapping[str, Sequence[float]]) -> set[str]:
    """Return the peers above which a candidate is, from ten paired differences each, with Holm's correction."""
    found: set[str] = set()
    statistic = {peer: t_statistic(values) for peer, values in of_peers.items()}
    for peer in sorted(statistic, key=lambda peer: -abs(statistic[peer])):
        left = len(statistic) - len(found)
        if abs(statistic[peer]) <= QUANTILES[left - 1]:
            break
        found.add(peer)
    return {peer for peer in found if statistic[peer] > 0}


def t_statistic(values: Sequence[float]) -> float:
    """Return the statistic of the paired t-test."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / len(values) ** 0.5
    if error > 0:
        return mean / error
    if mean == 0:
        return 0.0
    return math.copysign(math.inf, mean)


def verdicts(of_metrics: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, str]:
    """Return what a candidate is against each peer on a task: above, level, below, or neither of them.

    Args:
        of_metrics: the differences to each peer, of mAP and of R@1.
    """
    found = {}
    better = above(of_metrics["mAP"])
    for peer, values in of_metrics["mAP"].items():
        _, low, high = interval(values)
        found[peer] = "neither"
        if peer in better:
            found[peer] = "above"
        elif low <= 0 <= high:
            found[peer] = "level"
        if interval(of_metrics["R@1"][peer])[2] < 0:
            found[peer] = "below in R@1"
    return found


def has_won(of_tasks: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a candidate has won, from its verdicts on all tasks."""
    above_all = 0
    for of_peers in of_tasks.values():
        values = set(of_peers.values())
        if not values <= {"above", "level"}:
            return False
        above_all += values == {"above"}
    return above_all >= LEAST_TASKS
