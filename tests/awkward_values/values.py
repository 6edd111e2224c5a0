"""The awkward values that take the place of a valid argument, each under the name that a failing test shows."""

from pathlib import Path

import torch


class WithoutRepr:
    """Its `repr` raises, as that of a half-built object does."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Anything:
    """A class that is made from any arguments."""

    def __init__(self, *arguments, **settings):
        pass


HUGE = 10**30  # does not fit into 64 bits
SIZES = (1e-300, 1e-45, 1e-38, 1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e30, 1e38, 1e300)
EXTREMES = (*SIZES, *(-size for size in SIZES))


def awkward_values(valid):
    """{name: value} for one argument. Tensors have the values of `valid` if that is a tensor.

    A meta tensor stands for a tensor on another device than the others. The file is written into the working directory.
    """
    tensor = torch.ones(2, 3)
    if isinstance(valid, torch.Tensor):
        tensor = valid.detach()
    folder = Path("a folder")
    file = folder / "a file"
    folder.mkdir(exist_ok=True)
    file.write_text("text")
    values = {
        "None": None,
        "'abc'": "abc",
        "''": "",
        "True": True,
        "-1": -1,
        "0": 0,
        "10**30": HUGE,
        "-10**30": -HUGE,
        "2**63": 2**63,  # one more than a tensor of int64 can hold
        "nan": float("nan"),
        "inf": float("inf"),
        "0.5": 0.5,
        "[]": [],
        "{}": {},
        "object()": object(),
        "an object without a repr": WithoutRepr(),
        "b'x'": b"x",
        "a lambda": lambda *arguments, **settings: None,
        "a missing file": Path("no/such/file"),
        "a file": file,
        "a folder": folder,
        "a path inside a file": file / "file",
        "a class": Anything,
        "an array": tensor.numpy(),
        "a meta tensor": tensor.to("meta"),
        "a sparse tensor": tensor.to_sparse(),
        "a float8 tensor": tensor.to(torch.float8_e4m3fn),
        "a complex tensor": tensor.to(torch.complex64),
        "a bool tensor": tensor > 0,
        "an empty tensor": tensor[:0],
        "a scalar tensor": torch.tensor(1, dtype=tensor.dtype),
    }
    if isinstance(valid, float):
        for number in EXTREMES:
            values[repr(number)] = number
    if tensor.is_floating_point():
        values["a tensor of nan"] = torch.full_like(tensor, torch.nan)
    return values
