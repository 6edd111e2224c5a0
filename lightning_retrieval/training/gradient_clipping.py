"""Clipping of gradients of which each process has only a slice."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.distributed import sum_over_ranks
from lightning_retrieval.training.full_sharding import is_sharded, local_slice


def clip_sharded_gradients(parameters: Sequence[Any], limit: float, algorithm: str) -> None:
    """Clip gradients in place, as `torch.nn.utils` clips those of one process.

    Args:
        parameters: some divided over all processes, the others the same on all.
        limit: largest norm, or largest value.
        algorithm: `"norm"` of all gradients together, or each `"value"`.
    """
    divided, whole = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local_slice(parameter.grad)
        if is_sharded(parameter.grad):
            divided.append(gradient)
        else:
            whole.append(gradient)
    if algorithm == "value":
        for gradient in (*divided, *whole):
            gradient.clamp_(-limit, limit)
        return
    norm = (sum_over_ranks(_squared_norm(divided)) + _squared_norm(whole)).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    for gradient in (*divided, *whole):
        gradient.mul_(factor.to(gradient))


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, in float32 or better."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
