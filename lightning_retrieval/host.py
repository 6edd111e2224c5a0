"""Where the host waits for the device."""

from torch import Tensor


def to_host(values: Tensor) -> Tensor:
    """A copy on the CPU, without a graph.

    The host waits here until the device has computed the values, and meanwhile gives it no other work. So a training
    step calls this as rarely as possible, with all values that it needs in one tensor.
    """
    return values.detach().cpu()
