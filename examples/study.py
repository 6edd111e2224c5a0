"""Repeats the ablations of the papers on Glyphs: trains each setting with each seed, then writes tables and plots.

    python examples/study.py [--experiments tau batch_size] [--seeds 0 1 2] [--jobs 2] [--output docs/study]

The result of a run is one line of `results.jsonl` in the output folder. Its key is a hash of all settings of the run
and of its seed. A run that is in the file is not repeated: a study that was killed continues where it stopped,
experiments share the settings that they have in common, and a setting that was changed is run again. `study_report.py`
writes `index.md` and the plots from these lines. To add an experiment, add an entry to `EXPERIMENTS` in
`study_experiments.py`. Two of the losses need pytorch-metric-learning.
"""

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from study_experiments import EXPERIMENTS, THIRD_PARTY, Experiment, Setting
from study_report import Report, runs_of, write_file
from torch import nn
from tqdm import tqdm

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, losses
from lightning_retrieval.datamodules import CategorySampler, GlobalBatchSampler, Glyphs
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models import GlyphNet

Run = tuple[Setting, int]  # with its seed


class WholeClassesSampler(GlobalBatchSampler):
    """Fills batches with one class after another, in random order; a class may continue in the next batch."""

    def __init__(self, labels: torch.Tensor, *, batch_size: int, seed: int = 0) -> None:
        super().__init__(labels, seed=seed)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def draw(self, generator: np.random.Generator) -> list[np.ndarray[Any, Any]]:
        classes = np.split(self.images, self.class_starts[1:])
        order = generator.permutation(len(classes))
        images = np.concatenate([classes[i] for i in order])
        return np.split(images[: len(self) * self.batch_size], len(self))


class StudyGlyphs(Glyphs):
    """Glyphs with the batch sampler of a setting."""

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__(classes_per_batch=setting.classes, samples_per_class=setting.per_class, seed=seed)
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
    """Create a loss of this library or of pytorch-metric-learning."""
    source: Any = losses
    if name in THIRD_PARTY:
        try:
            source = importlib.import_module("pytorch_metric_learning.losses")
        except ImportError:
            raise ImportError(f"{name} is pytorch-metric-learning's: pip install pytorch-metric-learning.") from None
    loss: nn.Module = getattr(source, name)(**arguments)
    return loss


def make_module(setting: Setting, steps: int) -> RetrievalModule:
    """Create the module of a setting, whose learning rate falls to 0 over the steps."""
    embedder = Embedder(GlyphNet(setting.width), setting.dim, freeze_batch_norm=setting.freeze_batch_norm)
    memory = None
    if setting.memory:
        memory = CrossBatchMemory(setting.memory, setting.memory_start)
    return RetrievalModule(
        embedder.to(memory_format=torch.channels_last),  # faster
        make_loss(setting.loss, setting.loss_args),
        chunk_size=setting.chunk_size,
        optimizer=partial(torch.optim.AdamW, lr=setting.lr),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=max(1, steps)),
        lr_scheduler_interval="step",
        gradient_clip_val=1.0,
        memory=memory,
    )


def train_and_test(setting: Setting, seed: int, accelerator: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return the metrics of the test set and the type of the device."""
    pl.seed_everything(seed, verbose=False)
    steps = setting.images // (setting.classes * setting.per_class)
    data = StudyGlyphs(setting, seed)
    module = make_module(setting, steps)
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
    return metrics.compute(), trainer.strategy.root_device.type


def train(setting: Setting, seed: int, accelerator: str) -> dict[str, Any]:
    """Train and evaluate one setting with one seed, and return the line of `results.jsonl`."""
    start = time.perf_counter()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # only the study shows its progress
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, device = train_and_test(setting, seed, accelerator)
    return {
        "key": setting.key(seed),
        "seed": seed,
        "setting": asdict(setting),
        "metrics": {name: round(float(values[name]), 6) for name in ("mAP", "R@1", "mAP@R")},
        "seconds": round(time.perf_counter() - start, 1),
        "device": device,
        "torch": torch.__version__,
    }


def outcomes(runs: Sequence[Run], jobs: int, accelerator: str) -> Iterator[tuple[Run, Callable[[], dict[str, Any]]]]:
    """Yield each run as it ends, with a function that returns its result or raises its error."""
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
    """Use a fraction of the cores, and end with the study even if the study is killed."""
    torch.set_num_threads(threads)
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def end_with(study: multiprocessing.process.BaseProcess) -> None:
    """Wait for the end of the study, then end this process."""
    study.join()
    os._exit(1)


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of `results.jsonl` by their keys; none if there is no such file."""
    if not file.exists():
        return {}
    results = [json.loads(line) for line in file.read_text().splitlines()]
    return {result["key"]: result for result in results}


def shorten(experiment: Experiment) -> Experiment:
    """Return the experiment with a few training steps and a part of the test set."""
    curves = {}
    for curve, settings in experiment.curves.items():
        short = {}
        for x, setting in settings.items():
            short[x] = replace(setting, images=min(setting.images, 512), test_batches=2)
        curves[curve] = short
    return replace(experiment, curves=curves)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="folder of results, page and plots; default docs/study")
    parser.add_argument("--jobs", type=int, help="number of parallel runs; default one for each core, one on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few steps and a part of the test set, to try it out")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page again")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine.")
    if options.jobs is None:
        options.jobs = os.cpu_count() or 1
        if options.device == "cuda":
            options.jobs = 1
    if options.output is None:
        options.output = Path("docs/study")
        if options.quick:
            options.output = Path("logs/study-quick")
    return options


def run_all(missing: Sequence[Run], total: int, results: dict[str, Any], options: argparse.Namespace) -> int:
    """Run what is missing, write each result as soon as it is known, and return the number of runs that failed."""
    file = options.output / "results.jsonl"
    failed = 0
    # Without smoothing, the estimate of the remaining time is based on all runs of this call.
    with tqdm(total=total, initial=total - len(missing), unit="run", smoothing=0, disable=not missing) as bar:
        for (setting, seed), outcome in outcomes(missing, options.jobs, options.device):
            try:
                results[setting.key(seed)] = outcome()
                lines = [json.dumps(result) + "\n" for result in results.values()]
                write_file(file, "".join(lines))
            except Exception as error:
                failed += 1
                bar.write(f"study: {setting}, seed {seed}, failed: {error!r}", file=sys.stderr)
            bar.update()
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the return value is 1 if a run failed."""
    options = parse(arguments)
    experiments = dict(EXPERIMENTS)
    if options.quick:
        experiments = {name: shorten(experiment) for name, experiment in EXPERIMENTS.items()}
    options.output.mkdir(parents=True, exist_ok=True)
    results = read_results(options.output / "results.jsonl")
    wanted = runs_of([experiments[name] for name in options.experiments], options.seeds)
    missing = []
    if not options.report:
        missing = [run for key, run in wanted.items() if key not in results]
    failed = 0
    try:
        failed = run_all(missing, len(wanted), results, options)
    finally:
        Report(experiments, results, options.seeds).write(options.output)
    if failed:
        print(
            f"study: {failed} of {len(missing)} runs failed; run the same command again to repeat them.",
            file=sys.stderr,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
