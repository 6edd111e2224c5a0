"""Computing in float64: on the device itself, or on the CPU if the device has no float64.

Ranks are counted on the device of the labels, and metrics are computed from them in float64. Apple's GPUs (MPS) have no
float64: there the ranks, which are few compared with the scores, are copied to the CPU, and so are the metrics' values.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def float64_device(device: torch.device) -> torch.device:
    """The device that computes float64 numbers for tensors of this device: the device itself, or the CPU."""
    if device.type == "mps":
        return torch.device("cpu")
    return device


def to_float64(values: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The values in float64, on the CPU if their device has none.

    Example:
        >>> import torch
        >>> to_float64(torch.tensor([1, 2]))
        tensor([1., 2.], dtype=torch.float64)
    """
    return values.to(float64_device(values.device)).double()
