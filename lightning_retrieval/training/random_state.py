"""Random numbers of a training step: a function of (seed, step, rank), and replayed in the second pass over a chunk."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomState:
    """The random state of the CPU and of one device at the time of construction.

    Args:
        device: where the inputs are. Inputs on the CPU may be embedded on a GPU, which is then the current one.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.of_cpu, self.of_device = self._read()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside this context, repeat the random numbers that followed construction; restore the state on exit."""
        before = self._read()
        self._write(self.of_cpu, self.of_device)
        try:
            yield
        finally:
            self._write(*before)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        if self.device.type == "cpu":
            return torch.get_rng_state(), None
        return torch.get_rng_state(), torch.get_device_module(self.device).get_rng_state(self.device)

    def _write(self, of_cpu: Tensor, of_device: Tensor | None) -> None:
        torch.set_rng_state(of_cpu)
        if of_device is not None:
            torch.get_device_module(self.device).set_rng_state(of_device, self.device)


@contextmanager
def step_random_state(seed: int, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Make random numbers a function of (seed, step, rank), so that a resumed run continues as it would have.

    Args:
        seed: of the run.
        step: the global step.
        rank: of this process, or 0 for numbers that all processes share.
        device: the device whose state is set and restored, besides that of the CPU.
    """
    devices, device_type = [device], device.type
    if device.type == "cpu":
        devices, device_type = [], "cuda"  # without devices the type is not used
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)
        yield
