"""The precision of the products whose order decides: IEEE float32, whatever precision training uses.

`torch.set_float32_matmul_precision("high")`, which Lightning recommends, lets every float32 product of a GPU run in
TF32, with 10 bits of mantissa. That is good enough for a network, but it makes scores equal that are not, and changes
the ranks of a third of the queries of a large set.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def ieee_products() -> Iterator[None]:
    """Compute float32 matrix products in IEEE float32 inside the `with` block, and restore the settings afterwards.

    The settings are those of the process, so another thread that multiplies meanwhile uses full precision as well.

    Example:
        >>> import torch
        >>> torch.set_float32_matmul_precision("high")
        >>> with ieee_products():
        ...     torch.get_float32_matmul_precision()
        'highest'
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> torch.set_float32_matmul_precision("highest")
    """
    with ExitStack() as restored:
        for backend in _backends_with_own_setting():
            restored.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
        previous = _precision_of_all_backends()
        if previous is None:
            for backend in _backends_with_own_setting():
                backend.fp32_precision = "ieee"
        elif previous != "highest":
            restored.callback(torch.set_float32_matmul_precision, previous)  # runs before those of the backends
            torch.set_float32_matmul_precision("highest")
        yield


def _backends_with_own_setting() -> list[Any]:
    """Where torch keeps the precision of products for each backend, in versions that have such settings."""
    backends = [torch.backends.cuda.matmul]
    if hasattr(torch.backends.mkldnn, "matmul"):
        backends.append(torch.backends.mkldnn.matmul)
    if hasattr(torch.backends.mkldnn, "fp32_precision"):
        return backends
    return []


def _precision_of_all_backends() -> str | None:
    """The setting of `torch.set_float32_matmul_precision`; None if the settings of the backends contradict it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
