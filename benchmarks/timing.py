"""What the benchmarks share: interleaved timings, peak memory, and the setting that every table states."""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing's runs."""

    median: float
    lowest: float
    highest: float
    runs: int

    def __str__(self) -> str:
        return f"{_seconds(self.median)} ({_seconds(self.lowest)} to {_seconds(self.highest)}, {self.runs} runs)"


def interleaved(
    functions: Mapping[str, Callable[[], Any]], runs: int, device: str, warm_up: int = 1
) -> dict[str, Timing]:
    """Time each function `runs` times, in turn, so that a slow moment of the machine falls on all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(-warm_up, runs):
        for name, function in functions.items():
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            if run >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(statistics.median(s), min(s), max(s), len(s)) for name, s in seconds.items()}


def peak_added_memory(setup: Callable[..., Callable[[], Any]], device: str, *args: Any) -> int:
    """Bytes that `setup(*args)()` takes at its peak over what `setup` left, measured in a process of its own.

    `setup` is a function of a module; it makes the inputs, and may run the thing small once, so that what is loaded at
    the first use is not counted.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
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
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is held now
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def setting(device: str, *packages: str) -> dict[str, str]:
    """Commit, versions, device and threads."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    name = torch.cuda.get_device_name() if device != "cpu" else _processor()
    return {
        "commit": found.stdout.strip() or "unknown",
        "versions": ", ".join(f"{p} {version(p)}" for p in ("lightning-retrieval", "torch", *packages)),
        "python": platform.python_version(),
        "device": f"{device}: {name}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def arguments(description: str) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one run: only to see that it works")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: there is no GPU here that torch can use.")
    return options


def report(title: str, where: Mapping[str, str], rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print the setting and one table; write both as JSON where a file is asked for."""
    print(title)
    for name, value in where.items():
        print(f"  {name:<9}{value}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print()
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if file is not None:
        results = [{k: asdict(v) if isinstance(v, Timing) else v for k, v in row.items()} for row in rows]
        file.write_text(json.dumps({"title": title, "setting": dict(where), "results": results}, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
