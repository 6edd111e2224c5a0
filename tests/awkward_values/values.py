"""The awkward values that take the place of a valid argument, each under the name that a failing test shows."""

from pathlib import Path

import torch


class WithoutRepr:
    """Its `repr` raises, as that of a half-built object does."""

    def __repr__(self):
        raise RuntimeError("no repr")


HUGE = 10**30  # does not fit into 64 bits


def awkward_values(valid):
    """{name: value} for one argument. Tensors have the values of `valid` if that is a tensor.

    A meta tensor stands for a tensor on another device than the others.
    """
    tensor = torch.ones(2, 3)
    if isinstance(valid, torch.Tensor):
        tensor = valid.detach()
    values = {
        "None": None,
        "'abc'": "abc",
        "''": "",
        "True": True,
        "-1": -1,
        "0": 0,
        "10**30": HUGE,
        "-10**30": -HUGE,
        "nan": float("nan"),
        "inf": float("inf"),
        "0.5": 0.5,
        "[]": [],
        "{}": {},
        "object()": object(),
        "an object without a repr": WithoutRepr(),
        "b'x'": b"x",
        "a lambda": lambda *arguments, **settings: None,
        "a Path": Path("no/such/file"),
        "a class": int,
        "an array": tensor.numpy(),
        "a meta tensor": tensor.to("meta"),
        "a sparse tensor": tensor.to_sparse(),
        "a float8 tensor": tensor.to(torch.float8_e4m3fn),
        "a complex tensor": tensor.to(torch.complex64),
        "a bool tensor": tensor > 0,
        "an empty tensor": tensor[:0],
        "a scalar tensor": torch.tensor(1, dtype=tensor.dtype),
    }
    if tensor.is_floating_point():
        values["a tensor of nan"] = torch.full_like(tensor, torch.nan)
    return values
