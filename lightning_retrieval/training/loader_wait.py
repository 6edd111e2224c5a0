"""Measures which part of the time of training steps the network waits for its images, and says what helps."""

import os
import time
from collections import deque
from typing import Any

import torch

LEAST_STEPS = 2  # measured steps of an epoch, below which nothing is said
MUCH = 0.1  # part of the time from which on something is advised


class LoaderWait:
    """The part of the time of consecutive steps that passes between the end of a step and the start of the next one.

    On a GPU these are times of its stream, which runs behind the host: the part of the time in which it had nothing to
    do. They are read when the GPU has reached them, so that nothing waits for it.
    """

    def __init__(self) -> None:
        self.steps = 0  # number of measured steps
        self.is_logged = False  # whether the fraction has been logged since the last restart
        self._waited = 0.0
        self._total = 0.0
        self._last_end: Any = None
        self._begin: Any = None
        self._pending: deque[tuple[Any, Any, Any]] = deque()  # end of a step; begin and end of the next one

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderWait, ()  # events of a GPU cannot be copied

    def restart(self) -> None:
        """Forget all steps."""
        self.__init__()  # type: ignore[misc]

    def pause(self) -> None:
        """Leave out what passes until the next step, such as a validation."""
        self._last_end = None

    def begin(self, device: torch.device) -> None:
        """Record that a step begins.

        Args:
            device: the device of the network.
        """
        self._begin = _now(device)

    def end(self, device: torch.device) -> None:
        """Record that a step ends.

        Args:
            device: the device of the network.
        """
        now = _now(device)
        if self._last_end is not None and self._begin is not None:
            self._pending.append((self._last_end, self._begin, now))
        self._last_end, self._begin = now, None
        while self._pending and _is_reached(self._pending[0][2]):
            last_end, begin, end = self._pending.popleft()
            self._waited += _seconds(last_end, begin)
            self._total += _seconds(last_end, end)
            self.steps += 1

    @property
    def fraction(self) -> float | None:
        """The part of the time, from 0 to 1; None if no step was measured."""
        if self._total <= 0:
            return None
        return self._waited / self._total

    def line(self, loader: Any) -> str | None:
        """One sentence about the steps so far; None if there are too few of them.

        Args:
            loader: the loader of the training images.
        """
        fraction = self.fraction
        if fraction is None or self.steps < LEAST_STEPS:
            return None
        line = f"the network waited for images in {100 * fraction:.0f} % of the time of the first epoch"
        if fraction >= MUCH:
            workers, cores = getattr(loader, "num_workers", None), _cores()
            cures = ["smaller images, which `lightning-retrieval shrink PHOTOS SMALL --size 288` writes"]
            if isinstance(workers, int) and workers < cores:
                cures.insert(0, f"more workers (num_workers={workers} now, {cores} cores)")
            line += f"; what helps: {', or '.join(cures)}"
        return f"{line}."


def _now(device: torch.device) -> Any:
    """The time on a device: an event of its stream, or seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_reached(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1000


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
