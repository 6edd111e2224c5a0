"""Progress of long work, with its rate and the remaining time: a bar on a terminal, and lines in a log."""

import os
import sys
import time
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

SECONDS_BEFORE_BAR = 2
SECONDS_BEFORE_LINES = 30


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Progress:
    """Context that shows the progress of work on standard error.

    On a terminal, a bar appears after two seconds and vanishes at the end. Elsewhere, and below a live display of rich
    such as Lightning's `RichProgressBar`, a line is written after each tenth of the work, but none in the first 30
    seconds.

    Args:
        description: the work, such as `"Embedding"`.
        total: number of units of the work; if None, the number is unknown, and no lines are written.
        units: name of the units, such as `"images"`.
        hidden: whether nothing is shown, as on all processes but one.

    Example:
        >>> from lightning_retrieval.progress import Progress
        >>> with Progress("Embedding", total=3, units="images") as progress:
        ...     progress.update(3)
    """

    def __init__(self, description: str, *, total: int | None, units: str, hidden: bool = False) -> None:
        # A live display of rich replaces standard error, and would show each refresh of the bar on a line of its own.
        is_in_live_display = type(sys.stderr).__module__.startswith("rich.")
        self._unit = f" {units}"
        self._bar = tqdm(
            total=total,
            desc=description,
            unit=self._unit,
            delay=SECONDS_BEFORE_BAR,
            leave=False,
            disable=hidden or is_in_live_display or None,  # with None, tqdm shows the bar only on a terminal
        )
        self._writes_lines = bool(total) and self._bar.disable and not hidden
        self._description = description
        self._total = total or 0
        self._done = 0
        self._start = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Add a number of units that are done."""
        self._bar.update(count)
        if not self._writes_lines:
            return
        tenths_before = 10 * self._done // self._total
        self._done += count
        is_due = 10 * self._done // self._total > tenths_before
        seconds = time.monotonic() - self._start
        if is_due and seconds >= SECONDS_BEFORE_LINES:
            line = tqdm.format_meter(
                self._done, self._total, seconds, prefix=self._description, unit=self._unit, ncols=0
            )
            print(line, file=sys.stderr, flush=True)
