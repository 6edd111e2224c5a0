"""Limits of the networks that a file may describe: they are about as large as the weights that the file holds.

A description is short, whatever its numbers are. So the tensors that its constructors make are counted while they are
made, and each of them is compared with the limit before it takes memory.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_retrieval.checks import first_line
from lightning_retrieval.invalid import InvalidValue

BASE_WEIGHTS = "base_weights"  # key of a checkpoint: the mean absolute value of each pretrained parameter
# Constructors make more numbers than they keep: random numbers that are scaled, copies, tables of positions.
NUMBERS_PER_WEIGHT, FURTHER_NUMBERS = 8, 1 << 28
OPERATIONS_PER_TENSOR, FURTHER_OPERATIONS = 500, 5_000
UNKNOWN_NUMBERS, UNKNOWN_TENSORS = 1 << 33, 20_000  # of weights that are elsewhere: no public vision model has more


class _Limits(TorchDispatchMode):
    """Counts the operations and the numbers of new tensors, and raises before there are too many.

    Args:
        rule: the sentence of the error messages, without its end.
        tensors: number of tensors of the weights.
        numbers: number of numbers of the weights.
    """

    def __init__(self, rule: str, tensors: int, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rule = rule
        self.operations = FURTHER_OPERATIONS + OPERATIONS_PER_TENSOR * tensors
        self.numbers = FURTHER_NUMBERS + NUMBERS_PER_WEIGHT * numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations -= 1
        if self.operations < 0:
            raise InvalidValue(f"{self.rule} more layers than its weights have")
        if not func._schema.is_mutable and not func.is_view:
            numbers = _new_numbers(func, args, kwargs)
            self.numbers -= numbers
            if self.numbers < 0:
                raise InvalidValue(f"{self.rule} too many numbers, {numbers:,} in one tensor")
        return func(*args, **kwargs)


def _new_numbers(func: Any, args: Any, kwargs: Any) -> int:
    """About how many numbers the result of an operation has, without running it; 0 on the meta device."""
    tensors: list[Tensor] = [value for value in args if isinstance(value, Tensor)]
    if any(tensor.is_meta for tensor in tensors) or str(kwargs.get("device")) == "meta":
        return 0
    name = func._schema.name.removeprefix("aten::")
    if not tensors and any(argument.name == "device" for argument in func._schema.arguments):
        made: Tensor = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
        return made.numel()
    if name.startswith("new_"):
        return math.prod(map(int, args[1]))
    if name == "repeat":
        return tensors[0].numel() * math.prod(map(int, args[1]))
    numbers = max(map(Tensor.numel, tensors), default=0)
    try:
        return max(numbers, int(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel()))
    except RuntimeError:  # no elementwise operation
        return numbers


def weights_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The tensors of a checkpoint by name; None if it has only adapters, whose pretrained weights are elsewhere."""
    if checkpoint.get(BASE_WEIGHTS):
        return None
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, Mapping):
        return {}
    return weights


@contextmanager
def limited_to(weights: Mapping[str, Any] | None) -> Iterator[None]:
    """Context in which a network that a file describes must not be much larger than its weights.

    Args:
        weights: the tensors of the file by name; None if they are elsewhere, as the pretrained weights below adapters.

    Raises:
        ValueError: if the constructors make more tensors or numbers, or raise an error of another type.
    """
    tensors, numbers, shown = UNKNOWN_TENSORS, UNKNOWN_NUMBERS, "the largest public networks"
    if weights is not None:
        sizes = [value.numel() for value in weights.values() if isinstance(value, Tensor)]
        tensors, numbers = len(sizes), sum(sizes)
        shown = f"its weights ({tensors:,} tensors with {numbers:,} numbers)"
    rule = f"a file must describe a network of about the size of {shown}, got a description that asks for"
    with _Limits(rule, tensors, numbers):
        try:
            yield
        except (MemoryError, OverflowError) as error:
            raise InvalidValue(f"{rule} more than the memory of this machine ({first_line(error)})") from None
        except (OSError, ImportError, ValueError):
            raise
        except Exception as error:  # constructors raise errors of many types
            text = first_line(error)
            if any(word in text.lower() for word in ("memory", "overflow")):
                raise InvalidValue(f"{rule} more than the memory of this machine ({text})") from None
            if isinstance(error, TypeError):
                raise
            got = f"one whose constructor raises {type(error).__name__} ({text})"
            raise InvalidValue("a file must describe a network that can be built", got=got) from None
