"""The ablations of the papers, repeated on Glyphs: trains every setting with every seed, then writes tables and plots.

    python examples/study.py [--experiments tau batch_size] [--seeds 0 1 2] [--jobs 2] [--output docs/study]

A run's result is one line of `results.jsonl` in the output folder, under a hash of all its settings and its seed. A run
that stands there is not done again: a study that was killed goes on where it was, experiments share the settings they
have in common, and a setting that was changed runs anew. `index.md` and its plots are written from these lines. To add
an experiment, add an entry to `EXPERIMENTS` in `study_experiments.py`. Two of the losses need pytorch-metric-learning.
"""

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import statistics
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from study_experiments import (
    BASE,
    EXPERIMENTS,
    NO_DIFFERENCE,
    NOT_SAME,
    SAME,
    THEIRS,
    Experiment,
    Setting,
)
from torch import nn
from tqdm import tqdm

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, losses
from lightning_retrieval.datamodules import CategorySampler, GlobalBatchSampler, Glyphs
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models import GlyphNet

INTRODUCTION = f"""
# A study on Glyphs

The ablations of the papers, asked again on the data set that comes with the library: characters in matplotlib's fonts,
32 x 32 pixels. The test set has characters that training has not seen, 16,997 images of 1,745 classes, each a query
against all others. The network is small and trained from nothing for less than a minute, which is far from the papers:
a finding that does not show here is not refuted, and one that does is not proven. The page says what these settings do
where all else is equal.

It is written by `python examples/study.py` from [results.jsonl](results.jsonl). That command runs what is not in there
yet; all of it takes half an hour to an hour on two CPU cores.

- **A run** trains `GlyphNet(width={BASE.width})` with {BASE.dim} dimensions on {BASE.images:,} images, in batches of
  {BASE.classes} classes with {BASE.per_class} images each, by `{BASE.loss}` and AdamW, the learning rate falling from
  {BASE.lr} to 0 along a cosine, gradients clipped to 1. A table says what was changed. This was chosen for time, by
  trial runs of `{BASE.loss}` alone; nothing was tuned for another loss or for a finding.
- **A number** is the median of the seeds {{seeds}}, the lowest and the highest in brackets. mAP is what the losses are
  for, and what they are compared by, but for those of recall, compared by R@1.
- **{SAME}**: what the paper found shows here too, and the ranges of the seeds do not overlap. Where the claim
  is that something is enough or changes nothing: the other is not clearly better, or the seeds agree one by one.
- **{NOT_SAME}**: the opposite shows, and the ranges do not overlap.
- **{NO_DIFFERENCE}**: the ranges overlap. By chance alone those of two equal settings do not,
  one time in ten (three seeds each), so a single line is not much.
- **A star** says that the finding is given from memory, without the paper at hand.

{{runs}} runs that took {{minutes:.0f}} minutes, added up, with {{used}}. Of {{findings}} findings {{same}} show the
same direction and {{not_same}} do not; in {{no_difference}} there is no difference beyond the spread of seeds.
"""


class WholeClassesSampler(GlobalBatchSampler):
    """Batches filled with class after class, in random order; a class that a batch cuts goes on in the next."""

    def __init__(self, labels: torch.Tensor, *, batch_size: int, seed: int = 0) -> None:
        super().__init__(labels, seed=seed)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def draw(self, generator: np.random.Generator) -> list[np.ndarray[Any, Any]]:
        classes = np.split(self.images, self.class_starts[1:])
        images = np.concatenate([classes[i] for i in generator.permutation(len(classes))])
        return np.split(images[: len(self) * self.batch_size], len(self))


class StudyGlyphs(Glyphs):
    """Glyphs with the batches of a setting."""

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__(setting.classes, setting.per_class, seed=seed)
        self.setting = setting

    def train_sampler(self) -> GlobalBatchSampler:
        labels, P, K = self.train_set.labels, self.classes_per_batch, self.samples_per_class
        if self.setting.sampler == "category":
            neighbours = torch.unique(labels, return_inverse=True)[1] // 32  # labels are in the order of Unicode
            return CategorySampler(labels, neighbours, classes_per_batch=P, samples_per_class=K, seed=self.seed)
        if self.setting.sampler == "whole classes":
            return WholeClassesSampler(labels, batch_size=P * K, seed=self.seed)
        return super().train_sampler()


def make_loss(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A loss of this library, or of pytorch-metric-learning."""
    try:
        source = importlib.import_module("pytorch_metric_learning.losses") if name in THEIRS else losses
    except ImportError:
        raise ImportError(f"{name} is pytorch-metric-learning's: pip install pytorch-metric-learning.") from None
    loss: nn.Module = getattr(source, name)(**arguments)
    return loss


def train(setting: Setting, seed: int, accelerator: str) -> dict[str, Any]:
    """One training and its evaluation: the line of `results.jsonl`."""
    start, steps = time.perf_counter(), setting.images // (setting.classes * setting.per_class)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # the progress bar is the study's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.seed_everything(seed, verbose=False)
        data = StudyGlyphs(setting, seed)
        embedder = Embedder(GlyphNet(setting.width), setting.dim, freeze_batch_norm=setting.freeze_batch_norm)
        module = RetrievalModule(
            embedder.to(memory_format=torch.channels_last),  # faster
            make_loss(setting.loss, setting.loss_args),
            chunk_size=setting.chunk_size,
            optimizer=partial(torch.optim.AdamW, lr=setting.lr),
            lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=max(1, steps)),
            lr_scheduler_interval="step",
            gradient_clip_val=1.0,
            memory=CrossBatchMemory(setting.memory, setting.memory_start) if setting.memory else None,
        )
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator=accelerator,
            devices=1,
            precision=setting.precision,
            limit_val_batches=0,
            limit_predict_batches=setting.test_batches,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if steps:
            trainer.fit(module, datamodule=data)
        metrics = RetrievalMetrics(ks=(1,))
        outputs: Any = trainer.predict(module, datamodule=data)  # of the test set
        for output in outputs:
            metrics.to(output["embeddings"].device).update(**output)
        values = metrics.compute()
    return {
        "key": setting.key(seed),
        "seed": seed,
        "setting": asdict(setting),
        "metrics": {name: round(float(values[name]), 6) for name in ("mAP", "R@1", "mAP@R")},
        "seconds": round(time.perf_counter() - start, 1),
        "device": trainer.strategy.root_device.type,
        "torch": torch.__version__,
    }


Run = tuple[Setting, int]  # and its seed


def outcomes(runs: Sequence[Run], jobs: int, accelerator: str) -> Iterator[tuple[Run, Callable[[], dict[str, Any]]]]:
    """Each run, as they end, with what gives its result or raises its error."""
    if jobs == 1:
        for run in runs:
            yield run, partial(train, *run, accelerator)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker, initargs=(threads,)) as pool:
        futures = {pool.submit(train, *run, accelerator): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker(threads: int) -> None:
    """Take a share of the cores, and end with the study even where that is killed."""
    torch.set_num_threads(threads)
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def end_with(study: multiprocessing.process.BaseProcess) -> None:
    study.join()
    os._exit(1)


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The lines by their keys."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


def write(file: Path, content: str | Figure) -> None:
    """Write a file whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    if isinstance(content, str):
        part.write_text(content, encoding="utf-8")
    else:
        content.savefig(part, format="png")
    os.replace(part, file)


class Report:
    """The page and its plots: of the experiments of which every setting has a result for every seed."""

    def __init__(self, experiments: Mapping[str, Experiment], results: Mapping[str, Any], seeds: Sequence[int]) -> None:
        self.experiments, self.results, self.seeds = experiments, results, seeds

    def values(self, setting: Setting, metric: str) -> list[float]:
        return [self.results[setting.key(seed)]["metrics"][metric] for seed in self.seeds]

    def cell(self, setting: Setting, metric: str) -> str:
        values = self.values(setting, metric)
        return f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"

    def write(self, folder: Path) -> None:
        """Write `index.md` and a plot for each experiment that is complete."""
        sections = [self.section(name, experiment, folder) for name, experiment in self.experiments.items()]
        rows = [row for _, overview in sections for row in overview]
        verdicts = Counter(verdict for *_, verdict in rows)
        shown = [self.results[key] for key in runs_of(self.experiments.values(), self.seeds) if key in self.results]
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
        table = [
            "| experiment | the paper | here |",
            "| --- | --- | --- |",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        parts = [page.strip(), "\n".join(table), *(text for text, _ in sections)]
        write(folder / "index.md", "\n\n".join(parts) + "\n")

    def section(self, name: str, experiment: Experiment, folder: Path) -> tuple[str, list[tuple[str, str, str]]]:
        """An experiment's part of the page, and its rows of the overview."""
        link = f"[{experiment.title}](#{experiment.title.lower().replace(' ', '-')})"
        head = f"## {experiment.title}\n\n{textwrap.fill(experiment.about, 120)}"
        runs = [(row, setting, seed) for row, setting in experiment.rows.items() for seed in self.seeds]
        missing = [f"{row}, seed {seed}" for row, setting, seed in runs if setting.key(seed) not in self.results]
        if missing:
            said = f"Not complete: {len(missing)} of {len(runs)} runs are not there (the first is {missing[0]})."
            return f"{head}\n\n{said}", [(link, "", "not complete")]
        write(folder / f"{name}.png", self.plot(experiment))
        lines = ["| setting | mAP | R@1 |", "| --- | --- | --- |"]
        for row, setting in experiment.rows.items():
            lines.append(f"| {row} | {self.cell(setting, 'mAP')} | {self.cell(setting, 'R@1')} |")
        lines.append("")
        overview = []
        for finding in experiment.findings:
            one, other = experiment.rows[finding.one], experiment.rows[finding.other]
            verdict = finding.verdict(self.values(one, finding.metric), self.values(other, finding.metric))
            here = f"{finding.one} {self.cell(one, finding.metric)}, {finding.other} {self.cell(other, finding.metric)}"
            said = f"- {finding.paper}. Here, {finding.metric} of {here}: **{verdict}**."
            lines.append(textwrap.fill(said, 120, subsequent_indent="  "))
            overview.append((link, finding.paper, verdict))
        return "\n".join([f"{head}\n\n![{experiment.title}]({name}.png)\n", *lines]), overview

    def plot(self, experiment: Experiment) -> Figure:
        """Median and range of each setting: along an axis of numbers, or one below the other."""
        figure = Figure(figsize=(6.4, 3.6 if experiment.axis else 1 + 0.3 * len(experiment.rows)), dpi=100)
        axes = figure.subplots()
        for curve, settings in experiment.curves.items():
            values = [self.values(setting, experiment.metric) for setting in settings.values()]
            middle = [statistics.median(v) for v in values]
            spread = [[m - min(v) for m, v in zip(middle, values)], [max(v) - m for m, v in zip(middle, values)]]
            if experiment.axis:
                axes.errorbar(list(settings), middle, yerr=spread, marker="o", capsize=3, label=curve)
            else:
                axes.errorbar(middle, list(settings), xerr=spread, fmt="o", capsize=3)
        if experiment.axis:
            ticks = sorted({x for settings in experiment.curves.values() for x in settings})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel(experiment.axis)
            axes.set_ylabel(f"test {experiment.metric}")
            axes.legend()
        else:
            axes.set_ylim(len(experiment.rows) - 0.5, -0.5)
            axes.set_xlabel(f"test {experiment.metric}")
        axes.grid(alpha=0.3)
        figure.set_layout_engine("constrained")
        return figure


def runs_of(experiments: Iterable[Experiment], seeds: Sequence[int]) -> dict[str, Run]:
    """The runs by their keys, each once, experiment by experiment."""
    settings = [setting for experiment in experiments for setting in experiment.rows.values()]
    return {setting.key(seed): (setting, seed) for setting in settings for seed in seeds}


def cut_down(experiment: Experiment) -> Experiment:
    """The same with a few steps and a part of the test set."""
    curves = {
        curve: {x: replace(s, images=min(s.images, 512), test_batches=2) for x, s in settings.items()}
        for curve, settings in experiment.curves.items()
    }
    return replace(experiment, curves=curves)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="folder of results, page and plots; docs/study where not given")
    parser.add_argument("--jobs", type=int, help="runs side by side; one for each core where not given, one on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="some steps, a part of the test set: to see that it works")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page anew")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here that torch can use.")
    experiments = {name: cut_down(e) if options.quick else e for name, e in EXPERIMENTS.items()}
    output = options.output or Path("logs/study-quick" if options.quick else "docs/study")
    jobs = options.jobs or (1 if options.device == "cuda" else os.cpu_count() or 1)

    output.mkdir(parents=True, exist_ok=True)
    file = output / "results.jsonl"
    results = read_results(file)
    wanted = runs_of([experiments[name] for name in options.experiments], options.seeds)
    missing = [] if options.report else [run for key, run in wanted.items() if key not in results]
    failed = 0
    try:
        # The estimate of the time left goes by the runs of this call.
        with tqdm(
            total=len(wanted), initial=len(wanted) - len(missing), unit="run", smoothing=0, disable=not missing
        ) as bar:
            for (setting, seed), outcome in outcomes(missing, jobs, options.device):
                try:
                    results[setting.key(seed)] = outcome()
                    write(file, "".join(json.dumps(result) + "\n" for result in results.values()))
                except Exception as error:
                    failed += 1
                    bar.write(f"study: {setting}, seed {seed}, failed: {error!r}", file=sys.stderr)
                bar.update()
    finally:
        Report(experiments, results, options.seeds).write(output)
    if failed:
        print(f"study: {failed} of {len(missing)} runs failed; the same command tries them again.", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
