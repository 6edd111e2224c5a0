"""Writes choice.md: the best losses of AP and of pairs on five tasks, all losses, and the settings that were chosen."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from decision import (
    LONGER,
    RANKING_SEEDS,
    Chosen,
    Decision,
    Results,
    above,
    among_trained,
    differences,
    finalists,
    has_won,
    held_out,
    leaves,
    on_test_set,
    verdicts,
)
from entrants import LOG_RANK, MULTI_SIMILARITY, PEERS
from experiments import Setting
from intervals import shown_interval
from pairs import TASKS, TRAINED_CLASSES
from report import filled, line_of
from results_file import write_file

INTRODUCTION = """
# The best loss on five tasks

Twelve losses that people use and six candidates of our own, all tuned alike on five tasks: a small network from
random weights on Glyphs and on emoji, a head on frozen features for emoji and for photographs, and fine-tuning of the
last two stages of a pretrained network on emoji. [Losses of AP and losses of pairs](pairs.md) describes the tasks.

The best loss of AP is log rank of longer lists, which is `LogRankLoss` with a `negative_weight` c of 1 to 10: each
negative of the batch counts c times in the rank of a positive. The best loss of pairs is multi-similarity. The table
has their mean mAP over ten seeds on the test set, and their differences in mAP and in R@1 with 95 % intervals. The
last column has the best loss with proxies minus log rank with c = 1, in mAP on held-out classes, over three seeds.
"""
WON = "{candidate} **{outcome}** by the rules below. A difference in bold is above 0 with Holm's correction, in mAP."
RULES = """
## How they were compared

These rules were written down before the runs, except that some peers left early to save time.

- **Tuning.** Each loss was tuned on held-out classes with one seed. With half of the images, it had four learning
  rates, and was multiplied by 1 and by 20 before gradients were clipped to 1. Eight combinations of its own
  parameters followed with the best of these. The best four were trained with all images, and if a value was at an
  end, up to two beyond it.
- **Proxies** have a learning rate of their own, a factor of that of the network, no weight decay and no clipping.
  They begin at the class means of the embeddings or at random, and batches are of P x K images or shuffled.
- **Peers.** A peer that was 0.03 or more below log rank left the task. Up to six that left no task met the best
  candidate on the test set, with ten seeds that no choice had used.
- **A candidate wins** if it is above all peers on four tasks, by paired t-tests at 5 % with Holm's correction, above
  or level on the fifth, and nowhere below in R@1.
- **Weighted log rank** gives the k-th best positive of a query the weight k^-p. The library does not have it.
- **The negative weight** alone: with all else equal, 10 was better than 1 in all six pairs of runs on photographs,
  and in 11 of 21 pairs on the other tasks.

`python examples/study/choice.py` runs what [choice.jsonl](choice.jsonl) lacks, and writes this page. All {runs:,}
runs took {hours:.1f} CPU hours.
"""


class Comparison:
    """A decision, and what its page shows of it.

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
        self.columns: dict[str, tuple[str, Callable[[Setting], Setting]]] = {}  # task and evaluation, by their title
        for task in chosen:
            self.columns[capital(TASKS[task].title)] = (task, on_test_set)
            if task in TRAINED_CLASSES:
                self.columns[f"{capital(TASKS[task].title)}, trained classes"] = (task, among_trained)

    def outcome(self) -> str:
        """Return whether the candidate has won."""
        found = {}
        for title, (task, evaluated) in self.columns.items():
            if evaluated is on_test_set:
                of_metrics = {metric: self.differences(title, metric) for metric in ("mAP", "R@1")}
                found[task] = verdicts(of_metrics)
        return "has won" if has_won(found) else "has not won"

    def differences(self, title: str, metric: str) -> dict[str, list[float]]:
        """Return the paired differences of the candidate from each peer."""
        task, evaluated = self.columns[title]
        settings = self.chosen[task]
        one = evaluated(settings[self.candidate])
        found = {}
        for peer in self.peers:
            found[peer] = differences(one, evaluated(settings[peer]), metric, self.results, self.decision.seeds)
        return found

    def mean(self, task: str, name: str, metric: str) -> str:
        """Return the mean of a metric of an entrant on the test set."""
        key = on_test_set(self.chosen[task][name]).key
        values = [self.results[key(seed)]["metrics"][metric] for seed in self.decision.seeds]
        return f"{statistics.fmean(values):.4f}"

    def section(self) -> str:
        """Return the section on the candidate and the peers."""
        outcome = WON.format(candidate=capital(self.candidate), outcome=self.outcome())
        lines = [f"## {self.decision.title}", "", filled(outcome)]
        for metric in ("mAP", "R@1"):
            lines += ["", f"Difference in {metric}, {self.candidate} minus:", ""]
            lines += table_head(["task", *self.peers])
            for title in self.columns:
                found = self.differences(title, metric)
                better = above(found) if metric == "mAP" else set()
                cells = [title]
                for peer, values in found.items():
                    mark = "**" if peer in better else ""
                    cells.append(f"{mark}{shown_interval(values)}{mark}")
                lines.append(line_of(cells))
        return "\n".join(lines)


def write_page(comparisons: Sequence[Comparison], file: Path) -> None:
    """Write the page of all decisions."""
    last = next(comparison for comparison in comparisons if comparison.decision == LONGER)
    results = last.results
    hours = sum(result["cpu_seconds"] for result in results.values()) / 3600
    parts = [INTRODUCTION.strip(), best_of_each(last), all_losses(last), minus_log_rank(last)]
    parts += [comparison.section() for comparison in reversed(comparisons)]
    parts += [settings(last, [comparison.candidate for comparison in comparisons])]
    parts += [RULES.strip().format(runs=len(results), hours=hours)]
    write_file(file, "\n\n".join(parts) + "\n")


def best_of_each(last: Comparison) -> str:
    """Return the table of the best loss of AP, the best of pairs and the best with proxies."""
    names = ["task", last.candidate, MULTI_SIMILARITY, "difference in mAP", "in R@1", "best loss with proxies"]
    lines = table_head(names)
    for task, of_task in last.chosen.items():
        title = capital(TASKS[task].title)
        cells = [title, *(last.mean(task, name, "mAP") for name in (last.candidate, MULTI_SIMILARITY))]
        for metric in ("mAP", "R@1"):
            cells.append(shown_interval(last.differences(title, metric)[MULTI_SIMILARITY]))
        proxies = [name for name in PEERS if "proxies" in PEERS[name].base]
        best = max(proxies, key=lambda name: ranking_mean(of_task[name], last.results))
        found = differences(of_task[best], of_task[LOG_RANK], "mAP", last.results, RANKING_SEEDS)
        lines.append(line_of([*cells, f"{best}: {shown_interval(found)}"]))
    return "\n".join(lines)


def ranking_mean(setting: Setting, results: Results) -> float:
    """Return the mean mAP of a chosen setting on held-out classes, or of what it evaluates instead."""
    return statistics.fmean(held_out(setting, seed, results) for seed in RANKING_SEEDS)


def all_losses(last: Comparison) -> str:
    """Return the table of all entrants on all tasks."""
    text = (
        "Mean mAP over three seeds, on held-out classes; the last two columns have other images of the classes of the "
        "training. A star marks a peer that left the task, because it was 0.03 or more below log rank with the first "
        "seed; on Glyphs, emoji and in fine-tuning, one that left early was tuned with half of the images only."
    )
    titles = [capital(TASKS[task].title) for task in last.chosen]
    titles += [f"{capital(TASKS[task].title)}, trained classes" for task in TRAINED_CLASSES]
    lines = ["## All losses", "", filled(text), "", *table_head(["loss", *titles])]
    for name in next(iter(last.chosen.values())):
        cells = [name]
        for of_task in last.chosen.values():
            star = "\\*" if leaves(name, of_task, last.results) else ""
            cells.append(f"{ranking_mean(of_task[name], last.results):.4f}{star}")
        for task in TRAINED_CLASSES:
            cells.append(f"{ranking_mean(among_trained(last.chosen[task][name]), last.results):.4f}")
        lines.append(line_of(cells))
    return "\n".join(lines)


def minus_log_rank(last: Comparison) -> str:
    """Return the table of the differences of all entrants from log rank."""
    lines = [
        "## Each loss minus log rank",
        "",
        "Differences in mAP on held-out classes, with their 95 % intervals over three seeds.",
        "",
        *table_head(["loss", *(capital(TASKS[task].title) for task in last.chosen)]),
    ]
    for name in next(iter(last.chosen.values())):
        if name == LOG_RANK:
            continue
        pairs = [(of_task[name], of_task[LOG_RANK]) for of_task in last.chosen.values()]
        found = [differences(*pair, "mAP", last.results, RANKING_SEEDS) for pair in pairs]
        lines.append(line_of([name, *map(shown_interval, found)]))
    return "\n".join(lines)


def settings(last: Comparison, candidates: Sequence[str]) -> str:
    """Return the section on the chosen settings of the peers, and of the candidates that met them."""
    lines = ["## Chosen settings", "", "`loss_scale` multiplies the loss before gradients are clipped to 1."]
    for task, of_task in last.chosen.items():
        lines += ["", f"### {capital(TASKS[task].title)}", "", *table_head(["loss", "setting"])]
        for name, setting in of_task.items():
            if name in PEERS or name in candidates:
                lines.append(line_of([name, setting.chosen()]))
    return "\n".join(lines)


def table_head(names: Sequence[str]) -> list[str]:
    """Return the first two lines of a table."""
    return [line_of(names), "| --- " * len(names) + "|"]


def capital(text: str) -> str:
    """Return a text with a capital letter at its start."""
    return text[0].upper() + text[1:]
