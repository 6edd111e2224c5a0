"""Writes a page for each decision of docs/study/candidates.md; the first one shows the choice of settings as well."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intervals import interval, shown_interval
from matplotlib.figure import Figure
from results_file import write_file
from study_decision import (
    FIRST,
    METRICS,
    RANKING_SEEDS,
    Chosen,
    Decision,
    Results,
    among_trained,
    differences,
    finalists,
    has_won,
    leaves,
    on_test_set,
    verdicts,
)
from study_entrants import LOG_RANK
from study_experiments import Setting
from study_pairs import TASKS, TRAINED_CLASSES
from study_report import draw_interval

PHRASES = {
    "above": "above",
    "above without Holm's correction": "above, but not with Holm's correction,",
    "level": "level with",
    "below": "below",
    "below in R@1": "not below in mAP, but below in R@1,",
}
INTRODUCTION = """
# {title}

{outcome}

{about}

![Differences on all tasks]({plot})
"""
ABOUT_FIRST = """
The tasks, the settings that were tried, the seeds, and what counts as above, level and below were
[written down before the runs](candidates.md), but for one rule that saves time. The candidate with the highest mAP on
held-out classes, in the mean over the tasks, went on, and so did the peers, at most six, that left no task.
`python examples/study_choice.py --decide` runs what [choice.jsonl](choice.jsonl) lacks, and writes this page. All
{runs:,} runs took {hours:.1f} CPU hours. This includes [a second try](longer-lists.md), whose two candidates are the
last rows of the tables of all losses.
"""
ABOUT_LATER = """
This is a second try, with other candidates and fresh seeds, after [the first one](choice.md). What was tried, and why,
was [written down before the runs](candidates.md#{section}); the tasks, the peers and the rules are those of the first
one. The chosen settings and the table of all losses are on [that page](choice.md#all-losses).
"""


class ChoicePage:
    """The page of a decision.

    Args:
        chosen: the setting of each entrant on each task.
        results: of all runs, by their keys.
        decision: which candidates and seeds it has.
    """

    def __init__(self, chosen: Chosen, results: Results, decision: Decision) -> None:
        self.chosen = chosen
        self.results = results
        self.decision = decision
        self.candidate, self.peers = finalists(chosen, results, decision.candidates)
        self.compared = (self.candidate, *self.peers)

    def write(self, file: Path) -> None:
        """Write the page, and its plot beside it."""
        sections = [self.introduction(file)]
        if self.decision == FIRST:
            sections.append(self.all_losses())
        for task in self.chosen:
            sections.append(self.comparison(task))
            if task in TRAINED_CLASSES:
                sections.append(self.comparison(task, trained_classes=True))
        if self.decision == FIRST:
            sections += map(self.settings, self.chosen)
        write_file(file.with_suffix(".png"), self.plot())
        write_file(file, "\n\n".join(sections) + "\n")

    def outcome(self) -> str:
        """Return whether the candidate has won."""
        return "has won" if has_won({task: self.verdicts(task) for task in self.chosen}) else "has not won"

    def introduction(self, file: Path) -> str:
        """Return the first part of the page, which begins with the outcome."""
        best = f"{capital(self.candidate)}, the best of the candidates, **{self.outcome()}**."
        lines = [wrapped(f"{best} In mAP, against the {len(self.peers)} best peers:")]
        for task in self.chosen:
            found = self.verdicts(task)
            groups: dict[str, list[str]] = {}
            for peer, verdict in found.items():
                groups.setdefault(verdict, []).append(peer)
            parts = [f"{PHRASES[verdict]} {', '.join(names)}" for verdict, names in groups.items()]
            lines.append(wrapped(f"- {capital(TASKS[task].title)}: {'; '.join(parts)}."))
        seconds = sum(result["cpu_seconds"] for result in self.results.values())
        about = ABOUT_FIRST if self.decision == FIRST else ABOUT_LATER
        text = INTRODUCTION.format(
            title=self.decision.title,
            outcome="\n".join([lines[0], "", *lines[1:]]),
            about=about.strip().format(runs=len(self.results), hours=seconds / 3600, section=self.decision.page),
            plot=file.with_suffix(".png").name,
        )
        return text.strip()

    def verdicts(self, task: str) -> dict[str, str]:
        """Return what the candidate is against each peer on a task."""
        of_metrics = {}
        for metric in ("mAP", "R@1"):
            of_metrics[metric] = {peer: self.differences(task, peer, metric) for peer in self.peers}
        found = verdicts(of_metrics)
        for peer, verdict in found.items():
            if interval(of_metrics["mAP"][peer])[2] < 0:
                found[peer] = "below"
            elif verdict == "neither":
                found[peer] = "above without Holm's correction"
        return found

    def differences(self, task: str, peer: str, metric: str, *, trained_classes: bool = False) -> list[float]:
        """Return the paired differences of the candidate from a peer on the test set, or among trained classes."""
        evaluated = among_trained if trained_classes else on_test_set
        one, other = (evaluated(self.chosen[task][name]) for name in (self.candidate, peer))
        return differences(one, other, metric, self.results, self.decision.seeds)

    def values(self, setting: Setting, metric: str, seeds: Sequence[int]) -> list[float]:
        """Return a metric of a setting for each seed."""
        return [self.results[setting.key(seed)]["metrics"][metric] for seed in seeds]

    def all_losses(self) -> str:
        """Return the table of all entrants on all tasks."""
        columns: list[tuple[str, Mapping[str, Setting]]] = []
        for task, settings in self.chosen.items():
            columns.append((capital(TASKS[task].title), settings))
        for task in TRAINED_CLASSES:
            columns.append((f"{capital(TASKS[task].title)}, trained classes", self.trained(task)))
        lines = [
            "## All losses",
            "",
            wrapped(
                "Mean mAP, R@1 and mAP@R of the seeds 0 to 2 with the chosen settings, which are below. The columns "
                "on trained classes have other images of these classes, for which nothing is chosen; the others have "
                "held-out classes. A star marks a peer that left the task, because it was 0.03 or more below log rank "
                "with seed 0; one that left early was tuned with half of the images only."
            ),
            "",
            f"| loss | {' | '.join(title for title, _ in columns)} |",
            "| --- " * (1 + len(columns)) + "|",
        ]
        for name in self.chosen[next(iter(self.chosen))]:
            cells = [name]
            for _, settings in columns:
                means = [statistics.fmean(self.values(settings[name], metric, RANKING_SEEDS)) for metric in METRICS]
                star = ""
                if settings[name].held_out and leaves(name, settings, self.results):
                    star = "\\*"
                cells.append(", ".join(f"{mean:.4f}" for mean in means) + star)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def trained(self, task: str) -> dict[str, Setting]:
        """Return the chosen settings of all entrants on a task, evaluated among trained classes."""
        return {name: among_trained(setting) for name, setting in self.chosen[task].items()}

    def comparison(self, task: str, *, trained_classes: bool = False) -> str:
        """Return the section on the candidate and the peers on a task: on the test set, or among trained classes."""
        title = capital(TASKS[task].title)
        evaluated = on_test_set
        if trained_classes:
            title += ", among trained classes"
            evaluated = among_trained
        seeds = f"{self.decision.seeds[0]} to {self.decision.seeds[-1]}"
        lines = [
            f"## {title}",
            "",
            wrapped(
                f"Means of the seeds {seeds}. The differences are {self.candidate}, minus the loss of the row; the "
                'column "minus log rank" is the loss of the row minus log rank, in mAP.'
            ),
            "",
            "| loss | mAP | R@1 | mAP@R | difference in mAP | in R@1 | in mAP@R | minus log rank | CPU time of a run |",
            "| --- " * 9 + "|",
        ]
        for name in self.compared:
            setting = evaluated(self.chosen[task][name])
            cells = [name]
            for metric in METRICS:
                cells.append(f"{statistics.fmean(self.values(setting, metric, self.decision.seeds)):.4f}")
            for metric in METRICS:
                cells.append("")
                if name != self.candidate:
                    found = self.differences(task, name, metric, trained_classes=trained_classes)
                    cells[-1] = shown_interval(found)
            cells.append("")
            if name != LOG_RANK and LOG_RANK in self.peers:
                log_rank = evaluated(self.chosen[task][LOG_RANK])
                cells[-1] = shown_interval(differences(setting, log_rank, "mAP", self.results, self.decision.seeds))
            seconds = [self.results[setting.key(seed)]["cpu_seconds"] for seed in self.decision.seeds]
            cells.append(f"{statistics.median(seconds):.0f} s")
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def settings(self, task: str) -> str:
        """Return the section on the chosen settings of all entrants on a task, and on their distance from log rank."""
        settings = self.chosen[task]
        columns: list[tuple[str, str, Mapping[str, Setting]]] = [(metric, metric, settings) for metric in METRICS]
        if task in TRAINED_CLASSES:
            columns.append(("mAP among trained classes", "mAP", self.trained(task)))
        lines = [
            f"## Each loss: {TASKS[task].title}",
            "",
            wrapped(
                "Each loss minus log rank, with the 95 % interval over the seeds 0 to 2 on held-out classes, and the "
                "chosen settings."
            ),
            "",
            f"| loss | {' | '.join(title for title, *_ in columns)} | CPU time of a run | setting |",
            "| --- " * (3 + len(columns)) + "|",
        ]
        for name, setting in settings.items():
            cells = [name]
            for _, metric, evaluated in columns:
                cells.append("")
                if name != LOG_RANK:
                    pair = evaluated[name], evaluated[LOG_RANK]
                    cells[-1] = shown_interval(differences(*pair, metric, self.results, RANKING_SEEDS))
            seconds = [self.results[setting.key(seed)]["cpu_seconds"] for seed in RANKING_SEEDS]
            cells += [f"{statistics.median(seconds):.0f} s", describe(setting)]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Plot the differences in each metric: a column for each task, a row for each peer."""
        figure = Figure(figsize=(13, 2 + 0.3 * len(METRICS) * len(self.peers)), dpi=100)
        grid = figure.subplots(len(METRICS), len(self.chosen), sharey="row", squeeze=False)
        for row, metric in zip(grid, METRICS):
            row[0].set_ylabel(metric)
            row[0].set_yticks(range(len(self.peers)), self.peers, fontsize=8)
            row[0].set_ylim(len(self.peers) - 0.5, -0.5)
            for axes, task in zip(row, self.chosen):
                for place, peer in enumerate(self.peers):
                    draw_interval(axes, place, interval(self.differences(task, peer, metric)))
                axes.axvline(0, color="black", linewidth=0.8)
                axes.grid(alpha=0.3)
                axes.tick_params(axis="x", labelsize=8)
                axes.locator_params(axis="x", nbins=4)
        for axes, task in zip(grid[0], self.chosen):
            axes.set_title(textwrap.fill(TASKS[task].title, 22), fontsize=9)
        text = f"{self.candidate} minus the peer of the row, with the 95 % interval"
        figure.supxlabel(text, fontsize=9)
        figure.set_layout_engine("constrained")
        return figure


def describe(setting: Setting) -> str:
    """Return what was chosen, on one line."""
    names = ("lr", "loss_scale", "proxies", "proxy_rate", "sampler", "added_weight", "first_loss")
    values: dict[str, Any] = {"lr": setting.lr, "loss_scale": setting.loss_scale, **setting.loss_args}
    values |= {name: value for name, value in setting.different().items() if name in names}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def capital(text: str) -> str:
    """Return a text with a capital letter at its start."""
    return text[0].upper() + text[1:]


def wrapped(text: str) -> str:
    """Return a paragraph in lines of 120 characters."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False)
