"""Writes the pages of `run.py` with their tables and plots, from the results of the runs."""

import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import BASE, Experiment, Finding, Setting
from intervals import shown_interval
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pairs import LAST_STAGES, PHOTOGRAPHS
from results_file import write_file

ABLATIONS = f"""
# The papers' ablations

Each claim of a paper, tried again on Glyphs, the images of characters that come with the library. A run trains
`GlyphNet(width={BASE.width})` with {BASE.dim} dimensions from random weights on {BASE.images:,} images, in batches of
{BASE.classes} classes with {BASE.per_class} images each, with `{BASE.loss}` and AdamW. The learning rate falls from
{BASE.lr} to 0 along a cosine, and gradients are clipped to 1. Each table says what differs. The test set has other
characters: 16,997 images of 1,745 classes, each a query against all others.
"""
LOSSES = """
# Losses of the library and of pairs

The losses of the library and four of pytorch-metric-learning, trained as in [the ablations](ablations.md), on Glyphs
and on emoji (15,000 pictures of 3,786 emoji; half of the emoji are the test set). Each loss has the learning rate, of
the same four or more, with the highest mAP on classes that are neither in training nor in the test set; other
parameters are those of the paper or of pytorch-metric-learning. [A comparison with more tuning](choice.md) has the
losses that are closest. A star marks findings that are quoted from memory.
"""
MEMORY = f"""
# The memory of past batches

`CrossBatchMemory` makes the ranked lists of small batches longer, with embeddings that the network gave some steps
ago.

- **What helps:** a memory of 512 images for a network that is trained already, in batches of 32. From random weights,
  use `start_step="auto"`: a memory from the first step ruins the training. A larger batch is better than a memory on
  Glyphs, and not on emoji. With frozen BatchNorm layers the memory helps on emoji, and not on Glyphs.
- **What does not:** a memory of 4,096 images.

A run trains a network further, for 1,200 steps of 32 images, 4 of each class, with `{BASE.loss}`, unless a table says
something else. The network was trained as in [the ablations](ablations.md), on 40,000 glyphs or 160,000 emoji. *One
list* ranks the batch and the memory together, *one list, detached* without a gradient for the references of the
batch, and *two terms* adds the loss of the queries against the memory: the values of `CrossBatchMemory(mode=...)`.
The learning rate of each row was chosen on other classes, with one seed; a batch of 128 has twice that of a batch of
32.
"""
TUNING = """
# How the settings of glyphs.yaml were chosen

On the validation set, whose characters are neither in the training set nor in the test set, with half of the steps. A
narrower network with a higher learning rate sees more images in the same time, and log rank is better than Smooth-AP.
Then shorter gradients and a negative weight of 10 were chosen, and four epochs more. The last table compares earlier
settings of the example on the test set; `python benchmarks/glyphs.py --configs` compares what it has now.
"""
PAIRS = f"""
# Losses of AP and losses of pairs

Five tasks: a small network from random weights on Glyphs and on emoji, a head on frozen features of a pretrained
network for emoji and for photographs, and fine-tuning of its last two stages on emoji. [A later
comparison](choice.md) tunes more and has more losses; this page has what that one has not: Smooth-AP, ROADMAP and
FastAP, temperatures, batches, and retrieval among the classes of the training.

- **A run** has {BASE.images:,} images ({LAST_STAGES.images:,} in fine-tuning, {PHOTOGRAPHS.images:,} for
  photographs), in batches of {BASE.classes} classes with {BASE.per_class} images each. All else is as in [the
  ablations](ablations.md). The pretrained network is EfficientNet-Lite0 on images of 96 x 96 pixels, with ImageNet
  weights and without augmentation.
- **Each loss** has the best of ten settings: four learning rates, each with the loss multiplied by 1 and by 20, which
  decides how many gradients are clipped, and then two more values of one parameter of its own. One seed and classes
  that are neither in training nor in the test set choose it. The comparisons have seeds that no choice has used, and
  most of them were written down before the runs. `lambda` is that of `LogRankLoss`.
- **Photographs** are 5,856 images of 732 tiles of 38 photographs. A tile is a class, and no photograph is in two
  splits.
"""
NOTE = """
Each cell is the mean over the seeds. [What holds means](README.md#how-to-read-the-tables). `python
examples/study/run.py` writes this page from [results.jsonl](results.jsonl); its {runs} runs took {hours:.1f} hours.
"""
COLUMNS = ("mAP", "R@1")  # of a table of results
FEW_CURVES = 4  # whose legend finds a place in the plot
NOT_COMPLETE = "not complete"

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Page:
    """A page of the study."""

    introduction: str
    experiments: Mapping[str, Experiment]  # by the names of their plots


def runs_of(experiments: Iterable[Experiment]) -> dict[str, tuple[Setting, int]]:
    """Return the runs of all experiments by their keys, each once: a setting and a seed."""
    runs = {}
    for experiment in experiments:
        for setting in experiment.rows.values():
            for seed in experiment.seeds:
                runs[setting.key(seed)] = (setting, seed)
    return runs


class Report:
    """A page and its plots. An experiment is shown if each of its settings has a result for each seed.

    Args:
        page: what it shows.
        results: of the runs, by their keys.
    """

    def __init__(self, page: Page, results: Results) -> None:
        self.page = page
        self.results = results

    def write(self, file: Path) -> None:
        """Write the page, and beside it a plot for each complete experiment with an axis."""
        keys = runs_of(self.page.experiments.values())
        shown = [self.results[key] for key in keys if key in self.results]
        hours = sum(result["seconds"] for result in shown) / 3600
        parts = [self.page.introduction.strip(), filled(NOTE.format(runs=len(shown), hours=hours))]
        for name, experiment in self.page.experiments.items():
            if experiment.shown:
                parts.append(self.section(name, experiment, file.parent))
        write_file(file, "\n\n".join(parts) + "\n")

    def section(self, name: str, experiment: Experiment, folder: Path) -> str:
        """Return the text of an experiment, and write its plot."""
        head = f"## {experiment.title}\n\n{filled(experiment.about)}\n"
        missing = self.missing_runs(experiment)
        if missing:
            total = len(experiment.rows) * len(experiment.seeds)
            return f"{head}\nNot complete: {len(missing)} of {total} runs are missing (the first is {missing[0]})."
        lines = [head]
        if experiment.axis is not None:
            write_file(folder / f"{name}.png", self.plot(experiment))
            lines += [f"![{experiment.title}]({name}.png)", ""]
        lines += self.table(experiment)
        if experiment.findings:
            lines += ["", "| claim | difference | here |", "| --- | --- | --- |"]
            lines += [self.compare(experiment, finding) for finding in experiment.findings]
        return "\n".join(lines)

    def table(self, experiment: Experiment) -> list[str]:
        """Return the lines of the table of an experiment: with an axis, a column for each of its numbers."""
        rows: list[list[str]] = []
        if experiment.axis is not None:
            numbers = sorted({x for settings in experiment.curves.values() for x in settings})
            names = [f"mAP by {experiment.axis}", *map(str, numbers)]
            for curve, settings in experiment.curves.items():
                cells = [self.mean(experiment, settings[x], "mAP") if x in settings else "" for x in numbers]
                rows.append([curve, *cells])
        else:
            names = ["setting", *COLUMNS]
            for row, setting in experiment.rows.items():
                rows.append([row, *(self.mean(experiment, setting, metric) for metric in COLUMNS)])
        waits = [setting for setting in experiment.rows.values() if isinstance(setting.memory_start, float)]
        if len(waits) > 1:
            names.append("the memory begins at step")
        if experiment.with_settings:
            names.append("chosen")
        for cells, setting in zip(rows, experiment.rows.values()):
            if len(waits) > 1:
                cells.append(self.begin(experiment, setting))
            if experiment.with_settings:
                cells.append(setting.chosen())
        return [line_of(names), "| --- " * len(names) + "|", *map(line_of, rows)]

    def mean(self, experiment: Experiment, setting: Setting, metric: str) -> str:
        """Return the mean of a metric over the seeds."""
        return f"{statistics.fmean(self.values(experiment, setting, metric)):.4f}"

    def begin(self, experiment: Experiment, setting: Setting) -> str:
        """Return for each seed the step at which the memory has begun."""
        if not setting.memory:
            return ""
        runs = [self.results[setting.key(seed)] for seed in experiment.seeds]
        steps = {str(run.get("memory_begin", setting.memory_start)): None for run in runs}
        return ", ".join(steps)

    def missing_runs(self, experiment: Experiment) -> list[str]:
        """Return the row and the seed of each run that has no result."""
        missing = []
        for row, setting in experiment.rows.items():
            seeds = [seed for seed in experiment.seeds if setting.key(seed) not in self.results]
            missing += [f"{row}, seed {seed}" for seed in seeds]
        return missing

    def compare(self, experiment: Experiment, finding: Finding) -> str:
        """Return the line that compares a finding with the results."""
        rows = [experiment.rows[name] for name in (finding.one, finding.other)]
        one, other = [self.values(experiment, row, finding.metric) for row in rows]
        differences = [a - b for a, b in zip(one, other)]
        found = f"{differences[0]:+.4f}"  # of one seed, which has no interval
        if len(differences) > 1:
            found = shown_interval(differences)
        claim = finding.paper
        if finding.metric != "mAP":
            claim += f", in {finding.metric}"
        return line_of([claim, found, finding.verdict(one, other)])

    def values(self, experiment: Experiment, setting: Setting, metric: str) -> list[float]:
        """Return the value of a metric for each seed."""
        return [self.results[setting.key(seed)]["metrics"][metric] for seed in experiment.seeds]

    def plot(self, experiment: Experiment) -> Figure:
        """Plot the median, the lowest and the highest value of each setting along the axis."""
        width, height = 6.4, 3.6
        if len(experiment.curves) > FEW_CURVES:
            width, height = 9.6, max(height, 0.8 + 0.25 * len(experiment.curves))
        figure = Figure(figsize=(width, height), dpi=100)
        axes = figure.subplots()
        axes.set_prop_cycle(color=colormaps["tab10"].colors)
        for curve, settings in experiment.curves.items():
            values = [self.values(experiment, setting, "mAP") for setting in settings.values()]
            medians = [statistics.median(row) for row in values]
            below = [median - min(row) for median, row in zip(medians, values)]
            above = [max(row) - median for median, row in zip(medians, values)]
            axes.errorbar(list(settings), medians, yerr=[below, above], marker="o", capsize=3, label=curve)
        label_axes(axes, experiment)
        figure.set_layout_engine("constrained")
        return figure


def label_axes(axes: Axes, experiment: Experiment) -> None:
    """Give the x axis a logarithmic scale with a tick for each number, and both axes a label."""
    numbers = set()
    for settings in experiment.curves.values():
        numbers.update(settings)
    ticks = sorted(numbers)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(str(experiment.axis))
    held_out = all(setting.held_out for setting in experiment.rows.values())
    axes.set_ylabel("validation mAP" if held_out else "test mAP")
    axes.grid(alpha=0.3)
    if len(experiment.curves) > FEW_CURVES:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the plot, where it covers no curve
    else:
        axes.legend()


def line_of(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def filled(text: str) -> str:
    """Return a paragraph in lines of 120 characters; its line ends do not count."""
    return textwrap.fill(re.sub(r"\s+", " ", text.strip()), 120, break_on_hyphens=False)
