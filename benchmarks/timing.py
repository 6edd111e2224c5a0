"""Shared by the benchmarks: interleaved timings, peak memory, and the environment that every table states."""

import argparse
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds that the runs of one function took."""

    median: float
    lowest: float
    highest: float
    runs: int

    def __str__(self) -> str:
        return f"{_seconds(self.median)} ({_seconds(self.lowest)} to {_seconds(self.highest)}, {self.runs} runs)"


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    runs: int,
    device: str,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each function `runs` times, in turn, so that a slow moment of the machine affects all of them.

    With `cpu_clock`, other processes on the machine do not count either.
    """
    turns = timed_in_turn(functions, runs, device, warm_up, clock)
    timings = {}
    for name in functions:
        seconds = [turn[name] for turn in turns]
        timings[name] = Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
    return timings


def timed_in_turn(
    functions: Mapping[str, Callable[[], Any]],
    runs: int,
    device: str,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, float]]:
    """The seconds that each function took in each of `runs` turns, after some that are not counted."""
    turns = []
    for run in range(-warm_up, runs):
        seconds = {}
        for name, function in functions.items():
            _wait(device)
            start = clock()
            function()
            _wait(device)
            seconds[name] = clock() - start
        if run >= 0:
            turns.append(seconds)
    return turns


def cpu_clock(device: str) -> Callable[[], float]:
    """The CPU time of this process, so that other processes do not count; for other devices the time of day."""
    if device == "cpu":
        return time.process_time
    return time.perf_counter


def range_of(name: str, ratios: list[float]) -> dict[str, Any]:
    """Columns of the median of the ratios of each turn, and of the lowest and the highest of them."""
    return {name: statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def peak_added_memory(setup: Callable[..., Callable[[], Any]], device: str, *args: Any) -> int:
    """Peak memory of `setup(*args)()` in bytes, beyond what `setup` has left, measured in a separate process.

    `setup` is a function at the top of a module. It creates the inputs, and may run the measured function once on small
    inputs, so that what is loaded at its first use does not count.
    """
    with ProcessPoolExecutor(1, mp_context=process_context()) as pool:
        return pool.submit(_added, setup, device, torch.get_num_threads(), *args).result()


def _added(setup: Callable[..., Callable[[], Any]], device: str, threads: int, *args: Any) -> int:
    torch.set_num_threads(threads)
    function = setup(*args)
    if device != "cpu":
        _wait(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        _wait(device)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak to the memory in use
    before = memory_status("VmRSS")
    function()
    return memory_status("VmHWM") - before


def process_context() -> BaseContext:
    """Starts each process anew, so that nothing that another has loaded or freed affects its memory.

    With --quick, where the memory does not matter, processes are forked from this one, which has done the imports.
    """
    if "--quick" in sys.argv and sys.platform == "linux":
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


def run_processes(function: Callable[..., None], args: tuple[Any, ...], number: int) -> None:
    """Call `function(rank, *args)` in this number of processes, and wait for all of them."""
    method = process_context().get_start_method()
    torch.multiprocessing.start_processes(function, args, number, start_method=method)


def launcher_variables(number: int) -> dict[str, str]:
    """The environment variables that a launcher sets in each of its processes, without the rank of the process."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**address, "WORLD_SIZE": str(number), "NODE_RANK": "0"}


def free_port() -> int:
    """A free port of this machine, below those that systems give to connections, which could take it before its use."""
    dice = random.SystemRandom()
    while True:
        port = dice.randrange(20_000, 30_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def memory_status(field: str) -> int:
    """A size that Linux reports of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no field {field}.")


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def environment(device: str, *packages: str) -> dict[str, str]:
    """Commit, versions, device and threads."""
    git = ["git", "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent)
    versions = [f"{package} {version(package)}" for package in ("lightning-retrieval", "torch", *packages)]
    processor = _processor() if device == "cpu" else torch.cuda.get_device_name()
    return {
        "commit": described.stdout.strip() or "unknown",
        "versions": ", ".join(versions),
        "python": platform.python_version(),
        "device": f"{device}: {processor}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()


def arguments(description: str, **flags: str) -> argparse.Namespace:
    """The options of every benchmark, and flags of this one with their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one run: only to test that it works")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no GPU on this machine.")
    if options.quick:
        torch.set_num_threads(1)  # a process with several threads cannot be forked
    return options


def report(title: str, environment: Mapping[str, str], rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print the environment and one table; if a file is given, also write both to it as JSON."""
    print(title)
    for name, value in environment.items():
        print(f"  {name:<9}{value}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns]
    for row in rows:
        lines.append([_cell(row.get(column)) for column in columns])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    if file is not None:
        written = {"title": title, "environment": dict(environment), "results": rows}
        file.write_text(json.dumps(written, indent=2, default=asdict) + "\n")  # asdict: of the timings


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
