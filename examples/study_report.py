"""Writes the page of `study.py` with its tables and plots, from the results of the runs."""

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_file import write_file
from study_experiments import BASE, NO_DIFFERENCE, NOT_SAME, SAME, Experiment, Finding, Setting

INTRODUCTION = f"""
# A study on Glyphs

This page repeats the ablations of the papers on the data set that comes with the library: images of characters in
matplotlib's fonts, 32 x 32 pixels. The test set contains characters that are not in the training set: 16,997 images of
1,745 classes, each a query against all others. The network is small and is trained from scratch for less than a minute.
This is far from the papers' experiments: a finding that is not reproduced here is not refuted, and one that is
reproduced is not proven. The page shows the effect of each setting if everything else is equal. RaMBO's detector has
[a page of its own](detection.md).

`python examples/study.py` writes this page from [results.jsonl](results.jsonl). The command runs only what that file
does not contain yet; all runs together take half an hour to an hour on two CPU cores.

- **A run** trains `GlyphNet(width={BASE.width})` with {BASE.dim} dimensions on {BASE.images:,} images, in batches of
  {BASE.classes} classes with {BASE.per_class} images each, with `{BASE.loss}` and AdamW. The learning rate falls from
  {BASE.lr} to 0 along a cosine, and gradients are clipped to 1. Each table says what differs from this. These settings
  were chosen for a short training time, by trial runs of `{BASE.loss}` only. Nothing was tuned for another loss or for
  a finding.
- **A result** is the median over the seeds {{seeds}}, with the lowest and the highest value in brackets. The losses are
  compared by mAP, which they optimize, except the recall losses, which are compared by R@1.
- **{SAME}**: the paper's finding is reproduced, and the ranges of the seeds do not overlap. If the claim is that
  a setting is enough or changes nothing: the other setting is not clearly better, or the seeds agree one by one.
- **{NOT_SAME}**: the opposite is found, and the ranges do not overlap.
- **{NO_DIFFERENCE}**: the ranges overlap. The ranges of two equal settings are disjoint by
  chance one time in ten (with three seeds each), so a single line proves little.
- **A star** marks findings that are quoted from memory, without the paper at hand.

{{runs}} runs took {{minutes:.0f}} minutes in total, with {{used}}. Of {{findings}} findings {{same}} show the
same direction and {{not_same}} do not; in {{no_difference}} there is no difference beyond the spread of seeds.
"""

Results = Mapping[str, Mapping[str, Any]]
OverviewRow = tuple[str, str, str]  # experiment, the paper's finding, verdict


def runs_of(experiments: Iterable[Experiment], seeds: Sequence[int]) -> dict[str, tuple[Setting, int]]:
    """Return the runs of all experiments by their keys, each once: a setting and a seed."""
    runs = {}
    for experiment in experiments:
        for setting in experiment.rows.values():
            for seed in seeds:
                runs[setting.key(seed)] = (setting, seed)
    return runs


class Report:
    """The page and its plots. An experiment is shown if each of its settings has a result for each seed.

    Args:
        experiments: by the names of their plots.
        results: of the runs, by their keys.
        seeds: that are shown.
    """

    def __init__(self, experiments: Mapping[str, Experiment], results: Results, seeds: Sequence[int]) -> None:
        self.experiments = experiments
        self.results = results
        self.seeds = seeds

    def write(self, folder: Path) -> None:
        """Write `index.md`, and a plot for each complete experiment."""
        sections, overview = [], []
        for name, experiment in self.experiments.items():
            text, rows = self.section(name, experiment, folder)
            sections.append(text)
            overview += rows
        table = ["| experiment | the paper | here |", "| --- | --- | --- |"]
        table += [f"| {' | '.join(row)} |" for row in overview]
        parts = [self.introduction(overview), "\n".join(table), *sections]
        write_file(folder / "index.md", "\n\n".join(parts) + "\n")

    def introduction(self, overview: Sequence[OverviewRow]) -> str:
        """Return the first part of the page, with the totals."""
        verdicts = Counter(verdict for *_, verdict in overview)
        keys = runs_of(self.experiments.values(), self.seeds)
        shown = [self.results[key] for key in keys if key in self.results]
        used = sorted({f"torch {result['torch']} on {result['device']}" for result in shown})
        page = INTRODUCTION.format(
            seeds=", ".join(map(str, self.seeds)),
            runs=len(shown),
            minutes=sum(result["seconds"] for result in shown) / 60,
            used=" and ".join(used) or "nothing",
            findings=verdicts[SAME] + verdicts[NOT_SAME] + verdicts[NO_DIFFERENCE],
            same=verdicts[SAME],
            not_same=verdicts[NOT_SAME],
            no_difference=verdicts[NO_DIFFERENCE],
        )
        return page.strip()

    def section(self, name: str, experiment: Experiment, folder: Path) -> tuple[str, list[OverviewRow]]:
        """Return the text of an experiment and its rows of the overview, and write its plot."""
        anchor = experiment.title.lower().replace(" ", "-")
        link = f"[{experiment.title}](#{anchor})"
        head = f"## {experiment.title}\n\n{textwrap.fill(experiment.about, 120)}"
        missing = self.missing_runs(experiment)
        if missing:
            total = len(experiment.rows) * len(self.seeds)
            note = f"Not complete: {len(missing)} of {total} runs are missing (the first is {missing[0]})."
            return f"{head}\n\n{note}", [(link, "", "not complete")]
        write_file(folder / f"{name}.png", self.plot(experiment))
        lines = [head, "", f"![{experiment.title}]({name}.png)", "", "| setting | mAP | R@1 |", "| --- | --- | --- |"]
        for row, setting in experiment.rows.items():
            lines.append(f"| {row} | {self.cell(setting, 'mAP')} | {self.cell(setting, 'R@1')} |")
        lines.append("")
        overview = []
        for finding in experiment.findings:
            text, verdict = self.compare(experiment, finding)
            lines.append(text)
            overview.append((link, finding.paper, verdict))
        return "\n".join(lines), overview

    def missing_runs(self, experiment: Experiment) -> list[str]:
        """Return the row and the seed of each run that has no result."""
        missing = []
        for row, setting in experiment.rows.items():
            seeds = [seed for seed in self.seeds if setting.key(seed) not in self.results]
            missing += [f"{row}, seed {seed}" for seed in seeds]
        return missing

    def compare(self, experiment: Experiment, finding: Finding) -> tuple[str, str]:
        """Return the line that compares a finding with the results, and the verdict."""
        metric = finding.metric
        one, other = experiment.rows[finding.one], experiment.rows[finding.other]
        verdict = finding.verdict(self.values(one, metric), self.values(other, metric))
        here = f"{finding.one} {self.cell(one, metric)}, {finding.other} {self.cell(other, metric)}"
        line = f"- {finding.paper}. Here, {metric} of {here}: **{verdict}**."
        return textwrap.fill(line, 120, subsequent_indent="  "), verdict

    def values(self, setting: Setting, metric: str) -> list[float]:
        """Return the value of a metric for each seed."""
        return [self.results[setting.key(seed)]["metrics"][metric] for seed in self.seeds]

    def cell(self, setting: Setting, metric: str) -> str:
        """Return median and range of a metric."""
        values = self.values(setting, metric)
        return f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"

    def plot(self, experiment: Experiment) -> Figure:
        """Plot median and range of each setting: along an axis of numbers, or one below the other."""
        height = 3.6
        if experiment.axis is None:
            height = 1 + 0.3 * len(experiment.rows)
        figure = Figure(figsize=(6.4, height), dpi=100)
        axes = figure.subplots()
        for curve, settings in experiment.curves.items():
            medians, below, above = self.medians_and_spread(list(settings.values()), experiment.metric)
            if experiment.axis is None:
                axes.errorbar(medians, list(settings), xerr=[below, above], fmt="o", capsize=3)
            else:
                axes.errorbar(list(settings), medians, yerr=[below, above], marker="o", capsize=3, label=curve)
        if experiment.axis is None:
            axes.set_ylim(len(experiment.rows) - 0.5, -0.5)
            axes.set_xlabel(f"test {experiment.metric}")
        else:
            label_axis_of_numbers(axes, experiment, experiment.axis)
        axes.grid(alpha=0.3)
        figure.set_layout_engine("constrained")
        return figure

    def medians_and_spread(
        self, settings: Sequence[Setting], metric: str
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the median of each setting, and how far its lowest and its highest value are from it."""
        medians, below, above = [], [], []
        for setting in settings:
            values = self.values(setting, metric)
            median = statistics.median(values)
            medians.append(median)
            below.append(median - min(values))
            above.append(max(values) - median)
        return medians, below, above


def label_axis_of_numbers(axes: Axes, experiment: Experiment, label: str) -> None:
    """Give the x axis a logarithmic scale with a tick for each number."""
    numbers = set()
    for settings in experiment.curves.values():
        numbers.update(settings)
    ticks = sorted(numbers)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel(f"test {experiment.metric}")
    axes.legend()
