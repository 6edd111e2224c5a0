"""Writes the page of `detection.py` and its table as JSON, from the results of the runs."""

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import Finding
from results_file import write_file

Results = Sequence[Mapping[str, Any]]
Table = dict[tuple[str, str, int], dict[int, float]]  # AP50 by the seed, of each arm, start and number of steps

INTRODUCTION = """
# RaMBO's detector

RaMBO's Tables 5 and 8 (Rolinek et al., CVPR 2020), tried again on GlyphScenes: the box classifier of Faster R-CNN is
trained by L_mAP and L_APC in place of the cross entropy. The paper fine-tunes ResNets on Pascal VOC.

- **A run** trains `TinyFasterRCNN` on 4,000 drawn scenes of 112 x 112 pixels, with 1 to 5 characters of 15 classes, in
  batches of 8 images with 32 regions each. **From scratch** means 500 steps from random weights; **from a trained
  detector** means 150 more steps after 700 steps of cross entropy.
- **An arm** is the cross entropy, or `DetectionAPLoss` with its defaults (lambda 0.5, margin 0, a memory of 7 batches,
  weight 5, L_mAP and L_APC in the ratio 2 : 1), except for what the name of the arm says.
- **A result** is the AP50 on 300 test scenes in percent: the mean over the seeds {seeds}, with the lowest and the
  highest value. Detections with a score below 0.01 are dropped; an AP loss determines the order of the scores and not
  their size, so an arm may lose most of its detections.

[What holds means](README.md#how-to-read-the-tables). `python examples/study/detection.py` writes this page from
[detection.json](detection.json).
""".strip()

STARTS = {
    "scratch, 500 steps": ("scratch", 500),
    "trained detector, 150 steps": ("trained", 150),
}
BOTH, CROSS_ENTROPY = "L_mAP and L_APC", "cross entropy"
FINDINGS = [
    Finding(
        "L_mAP and L_APC with the margin are above the cross entropy (Table 5, VOC 07: 75.7 and 74.2)",
        "margin 0.15",
        CROSS_ENTROPY,
    ),
    Finding("They are above it without the margin (Table 8: 74.6 and 74.2)", BOTH, CROSS_ENTROPY),
    Finding("The margin helps (Table 8: 75.7 with 0.15, 74.6 without)", "margin 0.15", BOTH),
    Finding("Lambda 0.5 is above 0.1 (Table 8, with the margin: 75.7 and 75.2)", BOTH, "lambda 0.1"),
    Finding("Lambda 0.5 is above 2.5 (Table 8, with the margin: 75.7 and 74.3)", BOTH, "lambda 2.5"),
    Finding("The memory helps (the paper has it; no figure known)", BOTH, "no memory"),
    Finding("Both terms are above L_mAP alone (the paper has both; no figure known)", BOTH, "L_mAP alone"),
    Finding("Both terms are above L_APC alone (the paper has both; no figure known)", BOTH, "L_APC alone"),
    Finding("The weight 5 is above 1 (ours: the paper names no weight)", BOTH, "weight 1"),
]


def write_report(results: Results, folder: Path) -> None:
    """Write `detection.json` and `detection.md`."""
    table = make_table(results)
    content = {"findings": compare(table), "rows": rows_of(table), "runs": list(results)}
    write_file(folder / "detection.json", json.dumps(content, indent=1) + "\n")
    write_file(folder / "detection.md", page(results, table))


def make_table(results: Results) -> Table:
    """AP50 in percent by arm, start and steps, and by seed."""
    table: Table = {}
    for result in results:
        run = result["run"]
        values = table.setdefault((run["arm"], run["start"], run["steps"]), {})
        values[run["seed"]] = 100 * result["metrics"]["AP50"]
    return table


def rows_of(table: Table) -> list[dict[str, Any]]:
    """Mean, lowest and highest AP50 of each row."""
    rows = []
    for (arm, start, steps), by_seed in table.items():
        values = list(by_seed.values())
        row: dict[str, Any] = {"arm": arm, "start": start, "steps": steps, "seeds": list(by_seed)}
        row |= {"AP50": statistics.mean(values), "lowest": min(values), "highest": max(values)}
        rows.append(row)
    return rows


def compare(table: Table) -> list[dict[str, str]]:
    """The verdict on each finding, for each start."""
    found = []
    for finding in FINDINGS:
        for name, start in STARTS.items():
            one, other = table.get((finding.one, *start), {}), table.get((finding.other, *start), {})
            verdict = "not complete"
            if one and sorted(one) == sorted(other):
                verdict = finding.verdict(list(one.values()), [other[seed] for seed in one])
            found.append({"finding": finding.paper, "start": name, "verdict": verdict})
    return found


def page(results: Results, table: Table) -> str:
    """The text of the page."""
    seeds = sorted({result["run"]["seed"] for result in results})
    introduction = INTRODUCTION.format(seeds=", ".join(map(str, seeds)))
    lines = [f"| arm | from {' | from a '.join(STARTS)} |", "| --- | --- | --- |"]
    for arm in dict.fromkeys(arm for arm, *_ in table):
        cells = [cell(table.get((arm, *start), {}), seeds) for start in STARTS.values()]
        lines.append(f"| {' | '.join([arm, *cells])} |")
    trained = cell(table.get((CROSS_ENTROPY, "scratch", 700), {}), seeds)
    begin = f"The trained detectors have {trained} after their 700 steps of cross entropy."
    verdicts = ["| the paper | from scratch | from a trained detector |", "| --- | --- | --- |"]
    compared = compare(table)
    for first, second in zip(compared[::2], compared[1::2]):
        verdicts.append(f"| {first['finding']} | {first['verdict']} | {second['verdict']} |")
    parts = [introduction, "## Results", "\n".join(lines), textwrap.fill(begin, 120)]
    parts += ["## Findings", "\n".join(verdicts)]
    return "\n\n".join(parts) + "\n"


def cell(by_seed: Mapping[int, float], seeds: Sequence[int]) -> str:
    """Mean and range of a row that has a result for each seed."""
    if sorted(by_seed) != seeds:
        return "not complete"
    values = list(by_seed.values())
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
