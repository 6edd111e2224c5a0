"""Where the host waits for the device."""

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether the host gives work to this device without waiting for it, until it asks for a value."""
    return device.type != "cpu"


def to_host(values: Tensor) -> Tensor:
    """A copy on the CPU, without a graph.

    The host waits here until the device has computed the values, and meanwhile gives it no other work. So a training
    step calls this as rarely as possible, with all values that it needs in one tensor.
    """
    return values.detach().cpu()
