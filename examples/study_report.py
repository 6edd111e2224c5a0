"""Writes the pages of `study.py` with their tables and plots, from the results of the runs."""

import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from intervals import interval, shown_interval
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_file import write_file
from study_experiments import BASE, NEGLIGIBLE, NO_DIFFERENCE, NOT_SAME, SAME, Experiment, Finding, Setting
from study_pairs import LAST_STAGES, PHOTOGRAPHS

VERDICTS = f"""
- **A difference** is the mean, over the seeds, of the first setting minus the second, with its 95 % t-interval.
- **{SAME}**: the interval is above 0. If the claim is that a setting is enough: the interval is not below 0.
  If it is that a setting changes nothing: the seeds agree one by one.
- **{NOT_SAME}**: the interval is below 0.
- **{NO_DIFFERENCE}**: the interval contains 0. The interval of two equal settings does not
  contain 0 one time in twenty, so a single line proves little.
""".strip()
VERDICTS_ELSEWHERE = "Differences and verdicts are those of [the first page](index.md)."
TOTALS = "{runs} runs took {minutes:.0f} minutes, with {used}."
HOLD = """Of {findings} claims {same} hold here and of {not_same} the
opposite; in {no_difference} there is no difference beyond the spread of seeds."""

INTRODUCTION = f"""
# A study on Glyphs

This page repeats the papers' ablations on Glyphs, the data set that comes with the library: images of characters in
many fonts, 32 x 32 pixels. The test set has other characters than the training set: 16,997 images of 1,745 classes,
each a query against all others. A small network is trained from scratch for less than a minute. This is far from the
papers' experiments: a finding that is not reproduced here is not refuted, and one that is reproduced is not proven.
[The losses](losses.md), each with a learning rate of its own, and [RaMBO's detector](detection.md) have pages of their
own.

`python examples/study.py` writes this page from [results.jsonl](results.jsonl), and runs only what that file does not
contain: about an hour on two CPU cores for this page, several hours for all.

- **A run** trains `GlyphNet(width={BASE.width})` with {BASE.dim} dimensions on {BASE.images:,} images, in batches of
  {BASE.classes} classes with {BASE.per_class} images each, with `{BASE.loss}` and AdamW. The learning rate falls from
  {BASE.lr} to 0 along a cosine, and gradients are clipped to 1. Each table says what differs. Trial runs of
  `{BASE.loss}` alone chose these settings for a short training; nothing was tuned for a finding.
- **A result** is the median over the seeds 0, 1, 2, with the lowest and the highest value in brackets.
{VERDICTS}

{TOTALS} Of {{findings}} findings {{same}} show the
same direction and {{not_same}} do not; in {{no_difference}} there is no difference beyond the spread of seeds.
"""

LOSSES_INTRODUCTION = f"""
# A study of the losses

Which loss is best? This page compares those of the library with four of pytorch-metric-learning: contrastive, triplet,
multi-similarity, and Proxy-Anchor, which learns an embedding for each class. `python examples/study.py` writes it.

- **A run** is as on [the first page](index.md), on Glyphs or the emoji of [the memory's page](memory.md).
- **Each loss** has the learning rate, of the same four, with the highest mAP on classes that are neither in training
  nor in the test set; where the best is at an end, further ones were tried. Other parameters are those of the paper, or
  pytorch-metric-learning's defaults. The proxies learn at the rate of the network.
- **A result** is the median over the seeds 0 to 4, with the lowest and the highest value in brackets; the tables that
  choose a setting have one seed. Losses are compared by mAP, and by R@1 where a paper optimizes recall.
- {VERDICTS_ELSEWHERE} A star marks findings that are quoted from memory, without the paper at hand.

{TOTALS} {HOLD}
"""

MEMORY_INTRODUCTION = f"""
# A study of the memory

Does a memory of past batches help? `CrossBatchMemory` makes ranked lists longer with embeddings that the network gave
some steps ago. The papers with such a memory start from a pretrained network. So do these runs, unless a section or a
row says that it starts from random weights: each continues the training of a network with batches of 32 images, which
are small enough to need a memory. The network at the start was trained as on [the first page](index.md), on 40,000
glyphs or 160,000 emoji. The emoji are 15,000 images in colour of 3,786 emoji, drawn by four makers; the classes of the
test set are half of them. `python examples/emoji.py emoji` downloads them, and `python examples/study.py` writes this
page.

- **A run** has 1,200 steps of 32 images, 4 of each class, or 300 steps of 128 images, with `{BASE.loss}`. The learning
  rate falls to 0 along a cosine. All else is as on [the first page](index.md).
- **A memory** holds 512 images, unless a row says something else. *One list* ranks the batch and the memory together,
  *one list, detached* without a gradient for the references of the batch, and *two terms* adds the loss of the batch's
  queries against the memory, as XBM and ROADMAP do: the three values of `CrossBatchMemory(mode=...)`. *Fresh*
  means that the images of the memory are embedded again before each step, so that nothing in it is out of date.
- **A result** is the median over the seeds (five; three in the sections on the begin of a memory and on a memory from
  the first step; one for the learning rate), with the lowest and the highest value in brackets.
- **The learning rate** of no memory, of one list and of two terms is the best of the same four for each of them, chosen
  by classes that are neither in training nor in the test set. The other rows have that of the memory or of the batch
  from which they differ, and a batch of 128 has twice that of a batch of 32.
- **CPU time** includes the training of the network at the start for the first run that needs it.
- {VERDICTS_ELSEWHERE}

{TOTALS} {HOLD}
"""


TUNING_INTRODUCTION = f"""
# Tuning of the main example

This page shows how the settings of `examples/glyphs.yaml` were chosen, and everything that was tried.
`python examples/study.py` writes it. The settings were compared on the validation set alone, whose characters are
neither in the training set nor in the test set, with half of the steps and one or two seeds. A narrower network with a
higher learning rate was chosen twice, because it sees more images in the same CPU time, and log rank in place of
Smooth-AP; then shorter gradients and a negative weight of 10, with four epochs more. The last table compares earlier
settings of the example on the test set. CPU time is that of training and evaluation, without the import of the
libraries. {VERDICTS_ELSEWHERE}

{TOTALS} {HOLD}
"""
PAIRS_INTRODUCTION = f"""
# A study of AP losses and pair losses

Which loss is best? This page compares losses of AP with losses of pairs, all tuned alike: from random weights on Glyphs
and on emoji, in a head on frozen features of a pretrained network, for emoji and for photographs, and in fine-tuning of
its last two stages. `python examples/emoji.py emoji` downloads the emoji, `python examples/photographs.py photographs`
the photographs, and `python examples/study.py` runs and writes the page. The pretrained network is EfficientNet-Lite0
on images of 96 x 96 pixels, with the ImageNet weights of the extra `offline-weights`. Its images are not augmented, so
that its frozen part is applied to each of them once.

- **A run** has {BASE.images:,} images ({LAST_STAGES.images:,} in fine-tuning, {PHOTOGRAPHS.images:,} if they are
  photographs), in batches of {BASE.classes} classes with {BASE.per_class} images each. Gradients are clipped to 1. All
  else is as on [the page of the losses](losses.md).
- **Each loss** has the best of ten settings: four learning rates, each with the loss multiplied by 1 and by 20, which
  decides how many of its gradients are clipped, and then two more values of one parameter of its own. One seed and
  classes that are neither in training nor in the test set choose it.
- **A result** is the median over the seeds 20 to 24, which no choice has used, with the lowest and the highest value in
  brackets. The sections that sweep one parameter have the seeds 0 to 2. The comparisons were written down before the
  runs, except those of the last two losses of each table. These two, and the comparisons of the loss above them with
  single losses of pairs, were added when the results of the other losses from random weights were known. The
  sections on longer lists, on weights of positives and on weights of ranks came last; their comparisons, too, were
  written down before their runs, and the last two have seeds of their own.
- **Photographs** are 5,856 images of 732 tiles of 38 photographs, eight changed parts of each tile. A tile is a class,
  and no photograph is in two of the splits: 334 classes train, 64 choose the settings, and 334 are the test set.
  `examples/photographs.py` takes the photographs from four Debian packages, and names them. Their licences are, as the
  packages' files `copyright` say, CC-BY-4.0, CC-BY-SA-4.0, CC-BY-SA-3.0 and CC0-1.0 (lomiri-wallpapers-16.04 and
  -20.04), and GPL-2+ (mate-backgrounds and plasma-workspace-wallpapers). No picture is part of this repository.
- **Among trained classes** means that the queries are images without training of classes with training. These sections
  and those on photographs came after all others, when the results of a prototype with other splits were known. They
  compare four losses. Not tuned: the settings are chosen on classes without training only; of multi-similarity only
  alpha is tuned, and neither base nor beta; the tau chosen for log rank is the largest that was tried; and the number
  of images of photographs is that of the prototype, which also found that lower learning rates are better there. The
  learning rate chosen for log rank on photographs is twice that of the other three losses, and that alone may be why
  it is better among trained classes and worse on the others.
- {VERDICTS_ELSEWHERE} **As good** means that the whole interval is above -{NEGLIGIBLE}: for such a claim, read
  -{NEGLIGIBLE} for 0 there.

{TOTALS} {HOLD}
"""
COLUMNS = ("mAP", "R@1")  # of a table of results
FEW_CURVES = 4  # whose legend finds a place in the plot


@dataclass(frozen=True)
class Page:
    """A page of the study."""

    introduction: str
    experiments: Mapping[str, Experiment]  # by the names of their plots
    overview: Literal["claims", "numbers", "picture"] = "claims"  # at the top: each claim, their number, or a plot


NOT_COMPLETE = "not complete"

Results = Mapping[str, Mapping[str, Any]]
OverviewRow = tuple[str, str, str]  # experiment, the paper's finding, verdict
Interval = tuple[float, float, float]  # mean, lower end, upper end
Comparisons = dict[str, dict[str, Interval]]  # {what is trained: {metric and the two losses: interval}}


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
        """Write the page, and beside it a plot for each complete experiment."""
        sections, overview = [], []
        for name, experiment in self.page.experiments.items():
            text, rows = self.section(name, experiment, file.parent)
            sections.append(text)
            overview += rows
        parts = [self.introduction(overview), self.summary(overview, file), *sections]
        write_file(file, "\n\n".join(parts) + "\n")

    def summary(self, overview: Sequence[OverviewRow], file: Path) -> str:
        """Return what the page shows of all its claims, and write the plot if it is one."""
        if self.page.overview == "claims":
            return "\n".join(table_of_claims(overview))
        if self.page.overview == "picture":
            comparisons = self.comparisons()
            if comparisons:
                picture = file.with_name(f"{file.stem}_comparisons.png")
                write_file(picture, plot_comparisons(comparisons))
                return f"![All comparisons of two losses]({picture.name})"
        return "\n".join(table_of_numbers(overview))

    def introduction(self, overview: Sequence[OverviewRow]) -> str:
        """Return the first part of the page, with the totals."""
        verdicts = Counter(verdict for *_, verdict in overview)
        keys = runs_of(self.page.experiments.values())
        shown = [self.results[key] for key in keys if key in self.results]
        used = sorted({f"torch {result['torch']} on {result['device']}" for result in shown})
        page = self.page.introduction.format(
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
        anchor = re.sub(r"[^\w -]", "", experiment.title.lower()).replace(" ", "-")
        link = f"[{experiment.title}](#{anchor})"
        head = f"## {experiment.title}\n\n{textwrap.fill(experiment.about, 120, break_on_hyphens=False)}"
        missing = self.missing_runs(experiment)
        if missing:
            total = len(experiment.rows) * len(experiment.seeds)
            note = f"Not complete: {len(missing)} of {total} runs are missing (the first is {missing[0]})."
            claims = [f"- {finding.paper} ({finding.metric})." for finding in experiment.findings]
            if claims:
                claims.insert(0, "\n\nIt compares:\n")
            return f"{head}\n\n{note}" + "\n".join(claims), [(link, "", NOT_COMPLETE)]
        lines = [head, ""]
        if experiment.plotted:
            write_file(folder / f"{name}.png", self.plot(experiment))
            lines += [f"![{experiment.title}]({name}.png)", ""]
        lines += self.table(experiment)
        if experiment.findings:
            lines.append("")
        overview = []
        for finding in experiment.findings:
            text, verdict = self.compare(experiment, finding)
            lines.append(text)
            overview.append((link, finding.paper, verdict))
        return "\n".join(lines), overview

    def table(self, experiment: Experiment) -> list[str]:
        """Return the lines of the table of an experiment.

        It has the CPU time, unless this is not known, as that of older runs, or if the table only chooses a number.
        """
        runs = [self.results[key] for key in runs_of([experiment])]
        chooses_number = experiment.axis is not None and len(experiment.seeds) == 1
        has_cpu_time = not chooses_number and all("cpu_seconds" in run for run in runs)
        names = ["setting", *COLUMNS]
        if has_cpu_time:
            names.append("CPU time")
        has_begin = any("memory_begin" in run for run in runs)
        if has_begin:
            names.append("the memory begins at step (with drift)")
        lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
        for row, setting in experiment.rows.items():
            cells = [row, *(self.cell(experiment, setting, metric) for metric in COLUMNS)]
            if has_cpu_time:
                seconds = [self.results[setting.key(seed)]["cpu_seconds"] for seed in experiment.seeds]
                cells.append(f"{statistics.median(seconds):.0f} s")
            if has_begin:
                cells.append(self.begin(experiment, setting))
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    def begin(self, experiment: Experiment, setting: Setting) -> str:
        """Return for each seed the step at which the memory has begun, with the drift that was measured then."""
        if not setting.memory:
            return ""
        steps = []
        for seed in experiment.seeds:
            run = self.results[setting.key(seed)]
            step = run.get("memory_begin", setting.memory_start)
            drift = run.get("drift", {}).get(str(step))
            if step is None:
                steps.append("never")
            elif drift is None:
                steps.append(str(step))
            else:
                steps.append(f"{step} ({drift:.3f})")
        return ", ".join(steps)

    def missing_runs(self, experiment: Experiment) -> list[str]:
        """Return the row and the seed of each run that has no result."""
        missing = []
        for row, setting in experiment.rows.items():
            seeds = [seed for seed in experiment.seeds if setting.key(seed) not in self.results]
            missing += [f"{row}, seed {seed}" for seed in seeds]
        return missing

    def compare(self, experiment: Experiment, finding: Finding) -> tuple[str, str]:
        """Return the line that compares a finding with the results, and the verdict."""
        metric = finding.metric
        one, other = experiment.rows[finding.one], experiment.rows[finding.other]
        values = self.values(experiment, one, metric), self.values(experiment, other, metric)
        verdict = finding.verdict(*values)
        compared = f"{metric} of {finding.one} against {finding.other},"
        if metric not in COLUMNS:
            cells = self.cell(experiment, one, metric), self.cell(experiment, other, metric)
            compared = f"{metric} of {finding.one} {cells[0]}, {finding.other} {cells[1]},"
        elif names_its_rows(finding):
            compared = metric
        claim = finding.paper
        if self.page.overview == "claims":
            claim = re.sub(r" \(.*\)$", "", claim)  # its source is in the table of the claims
        line = f"- {claim}. Here, {compared} difference {difference(*values)}: **{verdict}**."
        return textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False), verdict

    def comparisons(self) -> "Comparisons":
        """Return the intervals of the claims of each complete experiment without an axis, by what it trains.

        If two experiments compare the same on the same task, the later one, with more seeds, is taken.
        """
        found: Comparisons = {}
        for experiment in self.page.experiments.values():
            if experiment.axis is not None or not experiment.findings or self.missing_runs(experiment):
                continue
            kind, task = experiment.title.split(": ")
            column = task
            if all(setting.trained_classes for setting in experiment.rows.values()):
                column = f"{task}, {kind.lower()}"
            for finding in experiment.findings:
                rows = [experiment.rows[name] for name in (finding.one, finding.other)]
                one, other = [self.values(experiment, row, finding.metric) for row in rows]
                label = f"{finding.metric}: {finding.one} minus {finding.other}"
                found.setdefault(column, {})[label] = interval([a - b for a, b in zip(one, other)])
        return found

    def values(self, experiment: Experiment, setting: Setting, metric: str) -> list[float]:
        """Return the value of a metric for each seed."""
        return [self.results[setting.key(seed)]["metrics"][metric] for seed in experiment.seeds]

    def cell(self, experiment: Experiment, setting: Setting, metric: str) -> str:
        """Return median and range of a metric, or its only value."""
        values = self.values(experiment, setting, metric)
        median = f"{statistics.median(values):.4f}"
        if len(values) == 1:
            return median
        return f"{median} ({min(values):.4f} to {max(values):.4f})"

    def plot(self, experiment: Experiment) -> Figure:
        """Plot median and range of each setting: along an axis of numbers, or one below the other."""
        width, height = 6.4, 3.6
        if experiment.axis is None:
            height = 1 + 0.3 * len(experiment.rows)
        elif len(experiment.curves) > FEW_CURVES:
            width, height = 9.6, max(height, 0.8 + 0.25 * len(experiment.curves))
        figure = Figure(figsize=(width, height), dpi=100)
        axes = figure.subplots()
        axes.set_prop_cycle(color=colormaps["tab10" if len(experiment.curves) <= 10 else "tab20"].colors)
        for curve, settings in experiment.curves.items():
            medians, below, above = self.medians_and_spread(experiment, list(settings.values()))
            if experiment.axis is None:
                axes.errorbar(medians, list(settings), xerr=[below, above], fmt="o", capsize=3)
            else:
                axes.errorbar(list(settings), medians, yerr=[below, above], marker="o", capsize=3, label=curve)
        if experiment.axis is None:
            axes.set_ylim(len(experiment.rows) - 0.5, -0.5)
            axes.set_xlabel(label_of_metric(experiment))
        else:
            label_axis_of_numbers(axes, experiment, experiment.axis)
        axes.grid(alpha=0.3)
        figure.set_layout_engine("constrained")
        return figure

    def medians_and_spread(
        self, experiment: Experiment, settings: Sequence[Setting]
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the median of each setting, and how far its lowest and its highest value are from it."""
        medians, below, above = [], [], []
        for setting in settings:
            values = self.values(experiment, setting, experiment.metric)
            median = statistics.median(values)
            medians.append(median)
            below.append(median - min(values))
            above.append(max(values) - median)
        return medians, below, above


def plot_comparisons(comparisons: Comparisons) -> Figure:
    """Plot the mean and the interval of each difference: a column for each task, a row for each pair of losses."""
    labels = sorted({label: None for rows in comparisons.values() for label in rows}, key=metric_of_label)
    figure = Figure(figsize=(4.2 + 1.5 * len(comparisons), 1.4 + 0.24 * len(labels)), dpi=100)
    columns = figure.subplots(1, max(1, len(comparisons)), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (task, rows) in zip(columns, comparisons.items()):
        for label, found in rows.items():
            draw_interval(axes, labels.index(label), found)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(textwrap.fill(task, 19), fontsize=8)
        axes.grid(axis="y", alpha=0.3)
    columns[0].set_yticks(range(len(labels)), labels, fontsize=8)
    columns[0].set_ylim(len(labels) - 0.5, -0.5)
    text = (
        "first loss minus second, with the 95 % interval, which is above 0 (blue), below 0 (red), or contains 0 (gray)"
    )
    figure.supxlabel(text, fontsize=9)
    figure.set_layout_engine("constrained")
    return figure


def draw_interval(axes: Axes, place: int, found: Interval) -> None:
    """Draw a mean with its interval in a row of a plot: blue above 0, red below 0, gray if it contains 0."""
    mean, low, high = found
    color = "tab:gray"
    if low > 0:
        color = "tab:blue"
    elif high < 0:
        color = "tab:red"
    axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", ms=4, color=color)


def metric_of_label(label: str) -> int:
    """Return the place of the metric of a row in the plot of comparisons."""
    return ("mAP", "mAP@R", "R@1").index(label.split(":")[0])


def table_of_claims(overview: Iterable[OverviewRow]) -> list[str]:
    """Return the lines of a table with each claim and its verdict."""
    table = ["| experiment | claim | here |", "| --- | --- | --- |"]
    table += [f"| {' | '.join(row)} |" for row in overview]
    return table


def table_of_numbers(overview: Iterable[OverviewRow]) -> list[str]:
    """Return the lines of a table with the number of claims of each experiment by their verdict."""
    verdicts: dict[str, Counter[str]] = {}
    for link, _, verdict in overview:
        verdicts.setdefault(link, Counter())[verdict] += 1
    columns = (SAME, NOT_SAME, NO_DIFFERENCE)
    table = [f"| claims of | {' | '.join(columns)} |", "| --- | --- | --- | --- |"]
    for link, counts in verdicts.items():
        cells = [str(counts[column]) for column in columns]
        if NOT_COMPLETE in counts:
            cells[0] = NOT_COMPLETE
        table.append(f"| {link} | {' | '.join(cells)} |")
    return table


def names_its_rows(finding: Finding) -> bool:
    """Return whether the text of a claim names what differs between its rows, in the order of the comparison."""
    one, other = finding.one.split(", "), finding.other.split(", ")
    own, others = [part for part in one if part not in other], [part for part in other if part not in one]
    if not own or not others or not all(mentions(finding.paper, part) for part in own + others):
        return False
    return mentions(finding.paper, own[0])[0] < mentions(finding.paper, others[0])[-1]


def mentions(claim: str, part: str) -> list[int]:
    """Return where a claim has a part of the name of a row, as whole words."""
    return [found.start() for found in re.finditer(rf"(?<![\w.]){re.escape(part)}(?![\w.])", claim, re.IGNORECASE)]


def difference(one: Sequence[float], other: Sequence[float]) -> str:
    """Return the mean of the paired differences with its interval, which one pair does not have."""
    differences = [a - b for a, b in zip(one, other)]
    if len(differences) == 1:
        return f"{differences[0]:+.4f}"
    return shown_interval(differences)


def label_of_metric(experiment: Experiment) -> str:
    """Return the name of the metric of a plot, with that of the classes on which it is measured."""
    settings = experiment.rows.values()
    if all(setting.held_out for setting in settings):
        return f"validation {experiment.metric}"
    if all(setting.trained_classes for setting in settings):
        return f"{experiment.metric} among trained classes"
    return f"test {experiment.metric}"


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
    axes.set_ylabel(label_of_metric(experiment))
    if len(experiment.curves) > FEW_CURVES:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the plot, where it covers no curve
    else:
        axes.legend()
