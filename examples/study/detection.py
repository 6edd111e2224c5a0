"""Asks RaMBO's Tables 5 and 8 again on GlyphScenes: trains a small detector with each loss, then writes a table.

    python examples/study/detection.py [--arms ...] [--seeds 0 1 2] [--jobs 1] [--runs logs/detection]

Each run uses one thread, and writes one file to the folder of the runs: settings, seed, versions, results. A run whose
file is there is not repeated: a study that was killed continues where it stopped, and a setting that was changed is run
again. A second file has the weights. `detection.json` and `detection.md` are written from these files, by default
beside this script. All runs together take about an hour of CPU time. They need faster-coco-eval:
pip install "lightning-retrieval[detection]".
"""

import argparse
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, SequentialLR
from tqdm import tqdm

from lightning_retrieval.datamodules import GlyphScenes
from lightning_retrieval.detection import DetectionAPLoss, DetectionModule, TinyFasterRCNN

sys.path.insert(0, str(Path(__file__).parents[1]))  # of results_file.py and intervals.py
from detection_page import write_report
from results_file import write_file

WARM_UP = 30  # steps in which the learning rate rises
VERSIONS = ("lightning-retrieval", "torch", "torchvision", "torchmetrics", "pytorch-lightning", "faster-coco-eval")


@dataclass(frozen=True)
class Run:
    """Everything that determines a run."""

    arm: str
    start: str  # "scratch", or "trained": the weights that the run `TRAINED` of the same seed ends with
    loss: Mapping[str, float] | None  # arguments of DetectionAPLoss that are not its defaults; None: cross entropy
    seed: int
    steps: int
    lr: float = 0.002
    batch_size: int = 8
    scenes: int = 4000  # for training
    test_scenes: int = 300

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.arm} {self.start} {self.steps} seed {self.seed}".replace(" ", "_")


ARMS: dict[str, Mapping[str, float] | None] = {
    "cross entropy": None,
    "L_mAP and L_APC": {},
    "L_mAP alone": {"interclass_coef": 0.0},
    "L_APC alone": {"interclass_coef": 1.0},
    "no memory": {"batch_memory": 0},
    "lambda 0.1": {"lambda_": 0.1},
    "lambda 2.5": {"lambda_": 2.5},
    "margin 0.15": {"margin": 0.15},
    "weight 1": {"weight": 1.0},
}
STEPS = {"scratch": 500, "trained": 150}
TRAINED = Run("cross entropy", "scratch", None, 0, 700)  # the trained detector


def plan(seeds: Sequence[int], arms: Sequence[str], *, quick: bool) -> list[list[Run]]:
    """The runs in two groups: the second group begins with weights of the first."""
    first = [replace(TRAINED, seed=seed) for seed in seeds]
    second = []
    for arm in arms:
        for seed in seeds:
            first.append(Run(arm, "scratch", ARMS[arm], seed, STEPS["scratch"]))
            second.append(Run(arm, "trained", ARMS[arm], seed, STEPS["trained"]))
    if not quick:
        return [first, second]
    return [[shorten(run) for run in group] for group in (first, second)]


def shorten(run: Run) -> Run:
    """The run with a hundredth of the steps and a few scenes."""
    return replace(run, steps=run.steps // 100, scenes=16, test_scenes=8)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """A learning rate that rises linearly over `WARM_UP` steps, and falls to a tenth after 80 % of the steps."""
    warm_up = LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP - 1)
    drop = MultiStepLR(optimizer, [int(0.8 * steps) - WARM_UP])
    return SequentialLR(optimizer, [warm_up, drop], [WARM_UP])


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Train and evaluate; returns the content of the run's file."""
    start = time.process_time()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seed = run.seed
    if run.start == "trained":
        seed += 100  # other batches than those of the trained detector
    pl.seed_everything(seed, verbose=False)
    data = GlyphScenes(train_size=run.scenes, eval_size=run.test_scenes, batch_size=run.batch_size, seed=seed)
    detector = TinyFasterRCNN(data.num_classes)
    if run.start == "trained":
        detector.load_state_dict(torch.load(weights_of(run, folder), weights_only=True))
    loss = None
    if run.loss is not None:
        loss = DetectionAPLoss(**run.loss)  # type: ignore[arg-type]
    module = DetectionModule(
        detector,
        loss,
        optimizer=partial(torch.optim.AdamW, lr=run.lr, fused=True),
        lr_scheduler=partial(schedule, steps=run.steps),
        lr_scheduler_interval="step",
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = fit_and_test(module, data, run.steps)
    torch.save(module.detector.state_dict(), folder / f"{run.name}.pt")
    return {
        "run": asdict(run),
        "metrics": metrics,
        "cpu_seconds": round(time.process_time() - start, 1),
        "versions": {name: version(name) for name in VERSIONS},
    }


def weights_of(run: Run, folder: Path) -> Path:
    """The file of the trained detector with which a run begins."""
    trained = replace(TRAINED, seed=run.seed)
    if run.steps < STEPS["trained"]:
        trained = shorten(trained)
    return folder / f"{trained.name}.pt"


def fit_and_test(module: DetectionModule, data: GlyphScenes, steps: int) -> dict[str, float]:
    """AP and AP50 of the test set, and AP50 of each class."""
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=10.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    (metrics,) = trainer.test(module, datamodule=data, verbose=False)
    return {name.removeprefix("test/"): round(value, 6) for name, value in metrics.items()}


def read_result(run: Run, folder: Path) -> dict[str, Any] | None:
    """The content of the run's file; None if it has to be run."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text())
    if result["run"] != asdict(run):
        return None
    return result


def outcomes(runs: Sequence[Run], folder: Path, jobs: int) -> Iterator[tuple[Run, Callable[[], dict[str, Any]]]]:
    """Yield each run as it ends, with a function that returns its result or raises its error."""
    if jobs == 1:
        for run in runs:
            yield run, partial(train, run, folder)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(train, run, folder): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result


def run_all(runs: Sequence[Run], folder: Path, jobs: int) -> int:
    """Run what has no file yet, and write the files; the return value is the number of runs that failed."""
    missing = [run for run in runs if read_result(run, folder) is None]
    failed = 0
    for run, outcome in tqdm(outcomes(missing, folder, jobs), total=len(missing), unit="run", smoothing=0):
        try:
            write_file(folder / f"{run.name}.json", json.dumps(outcome(), indent=1) + "\n")
        except Exception as error:
            failed += 1
            tqdm.write(f"detection: {run.name} failed: {error!r}", file=sys.stderr)
    return failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--runs", type=Path, default=Path("logs/detection"), help="folder of the runs")
    parser.add_argument("--output", type=Path, help="folder of the tables; default that of this file")
    parser.add_argument("--quick", action="store_true", help="a few steps and scenes, to try it out")
    parser.add_argument("--report", action="store_true", help="run nothing, write the tables of detection.json again")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = Path(__file__).parent
        if options.quick:
            options.output = options.runs
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the return value is 1 if a run failed."""
    options = parse(arguments)
    if options.report:
        write_report(json.loads((options.output / "detection.json").read_text())["runs"], options.output)
        return 0
    options.runs.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    groups = plan(options.seeds, options.arms, quick=options.quick)
    failed = 0
    for group in groups:
        failed += run_all(group, options.runs, options.jobs)
    results = [read_result(run, options.runs) for group in groups for run in group]
    write_report([result for result in results if result is not None], options.output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
