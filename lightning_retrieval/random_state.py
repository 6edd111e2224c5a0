"""Random numbers of a training step depend on (seed, step, rank), and repeat in the second pass over a chunk."""

import functools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_or_default(seed: int | None) -> int:
    """Return `seed`; if `seed` is None, return the seed of Lightning's `seed_everything`, or 0 without such a seed."""
    if seed is None:
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))
    return seed


class RandomState:
    """A snapshot of the random states of the CPU, all accelerator devices, Python and NumPy, made at construction.

    All of these states are needed: the network may be on other devices than the inputs, and some networks use Python's
    or NumPy's generator to choose which layers to skip.
    """

    def __init__(self) -> None:
        self.states = _read()
        self.of_python, self.of_numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Context that repeats the random numbers drawn after construction; on exit, the state on entry is restored."""
        before = RandomState()
        self._restore()
        try:
            yield
        finally:
            before._restore()

    def _restore(self) -> None:
        _write(self.states)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


@contextmanager
def step_random_state(seed: int, step: int, rank: int) -> Iterator[None]:
    """Make random numbers a function of (seed, step, rank), so that a resumed run continues like an uninterrupted one.

    The random states of the CPU and of all devices are restored afterwards.

    Args:
        seed: the seed of the run.
        step: the global step.
        rank: rank of this process, or 0 for random numbers that are the same on all processes.
    """
    before = _read()
    _seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)
    try:
        yield
    finally:
        _write(before)


def _read() -> dict[torch.device, Tensor]:
    """The random state of each device; reading it does not wait for the device."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in _accelerator_devices():
        states[device] = torch.get_device_module(device).get_rng_state(*_argument(device))
    return states


def _write(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, *_argument(device))


def _seed(number: int) -> None:
    """Call `torch.manual_seed`; without an accelerator, avoid the milliseconds in which torch searches for one."""
    if has_accelerator():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@functools.cache
def has_accelerator() -> bool:
    """Whether this machine has an accelerator; cached, since it does not change while a process runs."""
    return torch.accelerator.is_available()


def _accelerator_devices() -> list[torch.device]:
    """The devices of the accelerator; an empty list before its first use, as reading a state would initialise it."""
    if not has_accelerator():  # checked first: without an accelerator, torch 2.6 raises at the next line
        return []
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    module: Any = torch.get_device_module(accelerator)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    """The device as a tuple of arguments for torch's random-state functions; empty for MPS, with its single device."""
    if device.type == "mps":
        return ()
    return (device,)
