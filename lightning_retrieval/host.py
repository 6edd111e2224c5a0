"""Where the host waits for the device, and how much work it gives to the device at a time."""

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether the host gives work to this device without waiting for it, until it asks for a value."""
    return device.type != "cpu"


def size_for(device: torch.device, *, cpu: int, accelerator: int) -> int:
    """The size of a piece of work on a device: one that fits a CPU's caches, or one that is worth a launch.

    It is a function of the type of the device only, so that a run can be reproduced on another machine.
    """
    if is_accelerator(device):
        return accelerator
    return cpu


def to_host(values: Tensor) -> Tensor:
    """A copy on the CPU, without a graph.

    The host waits here until the device has computed the values, and meanwhile gives it no other work. So a training
    step calls this as rarely as possible, with all values that it needs in one tensor.
    """
    return values.detach().cpu()
