"""Kills in a run on two nodes: whether torchrun goes on with it, in which time, and how it ends.

    python benchmarks/elastic.py

Two agents of `torchrun` on this machine stand for two nodes, with one worker each. They meet at a store in a process of
its own and train GlyphNet on Glyphs in float64 by `lightning-retrieval fit --run_folder`. The batches of 45 images
are divided into 23 and 22. torchrun starts the workers again after a kill, and the run continues from its newest
checkpoint, which it finds by itself. "restart" is the time from the kill to the next row of metrics.csv. Killed
(`kill -9`) are:

- workers: that of either node in turn, at random steps, five times in a run;
- first node, started again: the agent and the worker of the first node, whose agent is then started again;
- first node: the same, but the second node goes on alone.

The benchmark fails if a run does not end, if weights, optimizer or the number of steps are not, bit by bit, those of a
run that was not disturbed, or if metrics.csv does not have the same rows. That run has the same two workers, without
agents. If the second node goes on alone, sums have another order, so weights may differ by rounding.
"""

import csv
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from timing import Timing, arguments, environment, free_port, launcher_variables, report, run_processes

from lightning_retrieval.cli.main import main as main_of_command

REPOSITORY = Path(__file__).parents[1]
NODES, STEPS, PER_EPOCH = 2, 40, 20
if "--quick" in sys.argv:
    STEPS, PER_EPOCH = 16, 8
LONGEST = 180  # seconds in which a run must make progress
ROUNDING = 1e-9  # largest difference of a weight that another order of sums may cause, in float64

# The store at which the agents meet; it must outlive any node.
STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
while True:
    time.sleep(60)
"""
# A worker: torchrun knows the number of nodes only when it starts one.
WORKER = 'exec "$0" -m lightning_retrieval.cli fit "$@" --trainer.num_nodes $((WORLD_SIZE / LOCAL_WORLD_SIZE))'

CONFIG = f"""
seed_everything: 0
model:
  class_path: lightning_retrieval.RetrievalModule
  init_args:
    embedder:
      class_path: lightning_retrieval.Embedder
      init_args: {{backbone: glyph_net, embedding_dim: 16, freeze_batch_norm: true}}
    loss: lightning_retrieval.SmoothAPLoss
    chunk_size: 10
data:
  class_path: lightning_retrieval.datamodules.Glyphs
  init_args: {{classes_per_batch: 9, samples_per_class: 5}}
trainer:
  accelerator: cpu
  strategy: ddp
  precision: 64-true
  devices: 1
  num_nodes: {NODES}
  max_epochs: {STEPS // PER_EPOCH}
  limit_train_batches: {PER_EPOCH}
  limit_val_batches: 0
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - elastic.Pace
    - class_path: pytorch_lightning.callbacks.ModelCheckpoint
      init_args: {{filename: last, every_n_train_steps: 5, enable_version_counter: false}}
"""


class Pace(pl.Callback):
    """Waits before each step, so that a kill meets a run that still goes on."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.1)


def write_config(folder: Path) -> Path:
    """The config of a run, beside its folder."""
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG)
    return config


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv of a run."""
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def last_checkpoint(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return checkpoint


class Run:
    """A run on two agents of torchrun, which meet at a store in a third process.

    Args:
        folder: of the run; the outputs of the agents are beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = free_port()
        self.store = subprocess.Popen([sys.executable, "-c", STORE, str(port)])
        config, endpoint = write_config(folder), f"127.0.0.1:{port}"
        self.command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{NODES}", "--nproc-per-node", "1"),
            *("--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", folder.name),
            *("--rdzv-conf", "is_host=0", "--no-python", "bash", "-c", WORKER, sys.executable),
            *("--config", str(config), "--run_folder", str(folder)),
        ]
        self.agents = [self._start(node) for node in range(NODES)]

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        """The agent of a node, in a process group of its own."""
        settings = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else workers may meet at the address of the start before
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}",
        }
        with self.folder.with_name(f"{self.folder.name}-node{node}.log").open("ab") as log:
            environ = {**os.environ, **settings}
            return subprocess.Popen(self.command, stdout=log, stderr=log, env=environ, start_new_session=True)

    def last_write(self) -> int:
        """When metrics.csv was written for the last time, in nanoseconds; 0 before."""
        path = self.folder / "metrics.csv"
        return path.stat().st_mtime_ns if path.exists() else 0

    def worker(self, node: int) -> int | None:
        """The process of the worker of a node; None while there is none."""
        agent = self.agents[node].pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return int(children[-1]) if children else None

    def wait_for_step(self, step: int) -> None:
        """Wait until a step has been logged."""
        self._wait(lambda: any(int(row["step"]) >= step for row in rows_of(self.folder)), f"step {step}")

    def kill(self, node: int) -> float:
        """Kill the worker of a node; the seconds until both have been started again and a step is logged."""
        before = [self.worker(number) for number in range(NODES)]
        os.kill(before[node], signal.SIGKILL)  # type: ignore[arg-type]
        begin = time.monotonic()
        self._wait(lambda: all(self.worker(n) not in (None, before[n]) for n in range(NODES)), "a restart")
        written = self.last_write()
        self._wait(lambda: self.last_write() > written, "a step after the restart")
        return time.monotonic() - begin

    def kill_first_node(self, again: bool) -> float:
        """Kill the agent and the worker of the first node; the seconds until a further step is logged.

        Args:
            again: whether the agent is then started again.
        """
        first, worker, written = self.agents[0], self.worker(0), self.last_write()
        os.kill(worker, signal.SIGKILL)  # type: ignore[arg-type]
        os.killpg(first.pid, signal.SIGKILL)
        begin = time.monotonic()
        first.wait()
        if again:
            self.agents[0] = self._start(0)
        else:
            del self.agents[0]
        self._wait(lambda: self.last_write() > written, "a step after the restart")
        return time.monotonic() - begin

    def wait_for_end(self) -> None:
        self._wait(lambda: all(agent.poll() is not None for agent in self.agents), "the end", may_end=True)
        codes = [agent.returncode for agent in self.agents]
        if any(codes):
            sys.exit(f"elastic.py: the agents ended with {codes}.\n{self._logs()}")

    def stop(self) -> None:
        """End the agents, which end their workers, and the store."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in self.agents:
            agent.wait()
        self.store.kill()
        self.store.wait()

    def _wait(self, is_done: Any, what: str, may_end: bool = False) -> None:
        deadline = time.monotonic() + LONGEST
        while not is_done():
            has_ended = any(agent.poll() is not None for agent in self.agents)
            if time.monotonic() > deadline or (has_ended and not may_end):
                sys.exit(f"elastic.py: waited for {what} in vain.\n{self._logs()}")
            time.sleep(0.02)

    def _logs(self) -> str:
        logs = sorted(self.folder.parent.glob(f"{self.folder.name}-node*.log"))
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


@dataclass(frozen=True)
class Ended:
    """A run that has ended: seconds of its restarts, its last checkpoint and its rows of metrics.csv."""

    seconds: list[float]
    checkpoint: dict[str, Any]
    rows: list[dict[str, str]]


def undisturbed_worker(node: int, config: Path, folder: Path, variables: dict[str, str]) -> None:
    """The worker of a node in the run that is not disturbed."""
    os.environ.update(variables, NODE_RANK=str(node), LOCAL_RANK="0")
    torch.set_num_threads(1)
    main_of_command(["fit", "--config", str(config), "--run_folder", str(folder)])


def train_undisturbed(folder: Path) -> Ended:
    """A run without agents and kills."""
    run_processes(undisturbed_worker, (write_config(folder), folder, launcher_variables(NODES)), NODES)
    return Ended([], last_checkpoint(folder), rows_of(folder))


def train(folder: Path, kills: Sequence[tuple[int, Callable[[Run], float]]]) -> Ended:
    """Train with kills, given the step of each kill and the function that kills and returns seconds."""
    run = Run(folder)
    try:
        seconds = []
        for step, kill in kills:
            run.wait_for_step(step)
            seconds.append(kill(run))
        run.wait_for_end()
        return Ended(seconds, last_checkpoint(folder), rows_of(folder))
    finally:
        run.stop()


def is_same(found: Any, expected: Any) -> bool:
    """Whether two states are the same, bit by bit."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return bool(found == expected)


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of a weight between two checkpoints."""
    weights = expected["state_dict"]
    return max(float((found["state_dict"][name] - weights[name]).abs().max()) for name in weights)


def is_same_run(ended: Ended, expected: Ended, tolerance: float) -> bool:
    """Whether the steps and losses in metrics.csv are the same, up to a tolerance; the throughput may differ."""
    pairs = list(zip(ended.rows, expected.rows, strict=False))
    same_steps = len(ended.rows) == len(expected.rows) and all(row["step"] == other["step"] for row, other in pairs)
    losses = [abs(float(row["train/loss"]) - float(other["train/loss"])) for row, other in pairs]
    return same_steps and max(losses) <= tolerance


def kill_workers(choose: random.Random, kills: int) -> list[tuple[int, Callable[[Run], float]]]:
    """Kills of the workers of both nodes in turn, at random steps."""
    steps = sorted(choose.sample(range(2, STEPS - 6), kills))
    return [(step, partial(Run.kill, node=number % NODES)) for number, step in enumerate(steps)]


def main() -> None:
    options = arguments("Kills of workers and of the first node of a run on two nodes.")
    if options.device != "cpu":
        sys.exit("--device cuda: this benchmark runs on the CPU only.")
    kills_of_a_run = 1 if options.quick else 5
    choose, table = random.Random(0), []
    plans = {
        "workers": kill_workers(choose, kills_of_a_run),
        "first node, started again": [(STEPS // 2, partial(Run.kill_first_node, again=True))],
        "first node": [(STEPS // 2, partial(Run.kill_first_node, again=False))],
    }
    with tempfile.TemporaryDirectory() as folder:
        expected = train_undisturbed(Path(folder, "undisturbed"))
        if [row["step"] for row in expected.rows] != [str(step) for step in range(STEPS)]:
            sys.exit("elastic.py: metrics.csv of the undisturbed run is not complete.")
        for number, (killed, kills) in enumerate(plans.items()):
            ended = train(Path(folder, f"run{number}"), kills)
            keys = ("state_dict", "optimizer_states", "global_step", "epoch")
            tolerance = ROUNDING if killed == "first node" else 0.0
            row = {
                "killed": killed,
                "kills": len(kills),
                "restart": Timing(
                    statistics.median(ended.seconds), min(ended.seconds), max(ended.seconds), len(ended.seconds)
                ),
                "same weights": all(is_same(ended.checkpoint[key], expected.checkpoint[key]) for key in keys),
                "largest difference": largest_difference(ended.checkpoint, expected.checkpoint),
                "same metrics": is_same_run(ended, expected, tolerance),
            }
            table.append(row)
            if row["largest difference"] > tolerance or not row["same metrics"]:
                sys.exit(f"elastic.py: a run did not end as the undisturbed run: {row}.")
            if not tolerance and not row["same weights"]:
                sys.exit(f"elastic.py: the optimizer did not end as that of the undisturbed run: {row}.")
    title = f"Runs of {STEPS} steps on two nodes, whose workers or first node are killed"
    report(title, environment("cpu", "pytorch-lightning"), table, options.json)


if __name__ == "__main__":
    main()
