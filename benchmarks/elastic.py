"""Kills of a worker in a run on two nodes: whether torchrun goes on with it, in which time, and how it ends.

    python benchmarks/elastic.py

Two agents of `torchrun` on this machine stand for two nodes, with one worker each. They train GlyphNet on Glyphs by
`lightning-retrieval fit --run_folder`; the batches of 45 images are divided into 23 and 22. A worker of either node is
killed (`kill -9`) at a random step, five times in a run; torchrun then starts both again, and the run continues from
its newest checkpoint, which it finds by itself. "restart" is the time from the kill to the next row of metrics.csv.

The benchmark fails if a run does not end, if weights, optimizer or the number of steps are not, bit by bit, those of a
run that was not disturbed, or if metrics.csv does not have the same rows. That run has the same two workers, without
agents.
"""

import csv
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from timing import Timing, arguments, environment, report, run_processes

from lightning_retrieval.cli.main import main as main_of_command

REPOSITORY = Path(__file__).parents[1]
NODES, STEPS, PER_EPOCH = 2, 40, 20
if "--quick" in sys.argv:
    STEPS, PER_EPOCH = 16, 8
LONGEST = 180  # seconds in which a run must make progress

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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


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
    """A run on two agents of torchrun.

    Args:
        folder: of the run; the outputs of the agents are beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config, endpoint = write_config(folder), f"127.0.0.1:{free_port()}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", "1"),
            *("--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", folder.name),
            *("-m", "lightning_retrieval.cli", "fit", "--config", str(config), "--run_folder", str(folder)),
        ]
        settings = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else workers may meet at the address of the start before
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}",
        }
        self.agents = []
        for node in range(NODES):
            with folder.with_name(f"{folder.name}-node{node}.log").open("wb") as log:
                agent = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **settings})
            self.agents.append(agent)

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

    def wait_for_end(self) -> None:
        self._wait(lambda: all(agent.poll() is not None for agent in self.agents), "the end", may_end=True)
        codes = [agent.returncode for agent in self.agents]
        if any(codes):
            sys.exit(f"elastic.py: the agents ended with {codes}.\n{self._logs()}")

    def stop(self) -> None:
        """End the agents, which end their workers."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in self.agents:
            agent.wait()

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


def undisturbed_worker(node: int, config: Path, folder: Path, port: int) -> None:
    """The worker of a node in the run that is not disturbed."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NODES)}
    os.environ.update({**address, "NODE_RANK": str(node), "LOCAL_RANK": "0"})
    torch.set_num_threads(1)
    main_of_command(["fit", "--config", str(config), "--run_folder", str(folder)])


def train_undisturbed(folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The last checkpoint and the rows of a run without agents and kills."""
    run_processes(undisturbed_worker, (write_config(folder), folder, free_port()), NODES)
    return last_checkpoint(folder), rows_of(folder)


def train(folder: Path, kills: list[tuple[int, int]]) -> tuple[list[float], dict[str, Any], list[dict[str, str]]]:
    """Seconds of the restarts, the last checkpoint and the rows of a run, given the step and the node of each kill."""
    run = Run(folder)
    try:
        seconds = []
        for step, node in kills:
            run.wait_for_step(step)
            seconds.append(run.kill(node))
        run.wait_for_end()
        return seconds, last_checkpoint(folder), rows_of(folder)
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


def metrics(rows: list[dict[str, str]]) -> list[tuple[str, str]]:
    """What must be the same in metrics.csv: steps and losses, not the throughput."""
    return [(row["step"], row["train/loss"]) for row in rows]


def main() -> None:
    options = arguments("Kills of either worker of a run on two nodes.")
    if options.device != "cpu":
        sys.exit("--device cuda: this benchmark runs on the CPU only.")
    runs, kills_of_a_run = 2, 5
    if options.quick:
        runs, kills_of_a_run = 1, 1
    choose, table = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        expected, expected_rows = train_undisturbed(Path(folder, "undisturbed"))
        if [step for step, _ in metrics(expected_rows)] != [str(step) for step in range(STEPS)]:
            sys.exit("elastic.py: metrics.csv of the undisturbed run is not complete.")
        for number in range(runs):
            steps = sorted(choose.sample(range(2, STEPS - 6), kills_of_a_run))
            kills = [(step, (number + index) % NODES) for index, step in enumerate(steps)]
            seconds, found, rows = train(Path(folder, f"run{number}"), kills)
            keys = ("state_dict", "optimizer_states", "global_step", "epoch")
            row = {
                "kills": len(kills),
                "restart": Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds)),
                "longest restart": max(seconds),
                "same weights": all(is_same(found[key], expected[key]) for key in keys),
                "same metrics": metrics(rows) == metrics(expected_rows),
            }
            table.append(row)
    title = f"Runs of {STEPS} steps on two nodes, whose workers are killed in turn"
    report(title, environment("cpu", "pytorch-lightning"), table, options.json)
    if not all(row["same weights"] and row["same metrics"] for row in table):
        sys.exit("elastic.py: a run did not end as the undisturbed run.")


if __name__ == "__main__":
    main()
