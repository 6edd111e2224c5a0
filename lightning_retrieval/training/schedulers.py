"""Learning-rate schedulers, which must keep the factors between the learning rates of parameter groups.

Most schedulers multiply the rate that each group has in the optimizer. `OneCycleLR`, `CyclicLR` and `SWALR` replace it
by rates of their own, which are the same for all groups unless they are given as a list.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.training.optimizers import FACTORS


def make_scheduler(make: Callable[[Optimizer], Any], optimizer: Optimizer, factors: Sequence[float]) -> Any:
    """Create the scheduler of an optimizer, which may set other rates, but must keep the factors between them.

    Args:
        make: class or function that creates the scheduler from the optimizer.
        optimizer: the optimizer, whose rates have the factors.
        factors: rate of each parameter group divided by the learning rate of the optimizer.

    Raises:
        ValueError: if the scheduler sets rates that have other factors.
    """
    if set(factors) <= {1.0}:
        return make(optimizer)
    wanted = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = make(optimizer)
    for rates in _rates_set_by(scheduler, optimizer):
        found = [float(rate) for rate in rates]
        if not _are_proportional(found, wanted):
            raise InvalidValue(
                f"must keep the factors between the learning rates of the parameter groups, {wanted} ({FACTORS})",
                argument="lr_scheduler",
                got=f"{type(scheduler).__name__}, which sets {found}",
                cure="give it a list with a rate for each group, such as OneCycleLR(max_lr=[0.01, 0.1]), or use a "
                "scheduler that multiplies the rates of the optimizer",
            )
    return scheduler


def _are_proportional(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether `found` is `wanted` multiplied by one number, which may be 0, as at the start of a warm-up."""
    pairs = zip(found, wanted)
    return all(math.isclose(rate * wanted[0], found[0] * other, rel_tol=1e-6) for rate, other in pairs)


def _rates_set_by(scheduler: Any, optimizer: Optimizer) -> Iterator[Sequence[Any]]:
    """Lists of a rate for each group: the present ones, and those between which a scheduler will move.

    Args:
        scheduler: a scheduler, which may have others inside it, as `SequentialLR` and `ChainedScheduler` do.
        optimizer: the optimizer of the scheduler.
    """
    for name in ("lr", "swa_lr"):
        if all(name in group for group in optimizer.param_groups):
            yield [group[name] for group in optimizer.param_groups]
    for name in ("base_lrs", "max_lrs"):
        if hasattr(scheduler, name):
            yield getattr(scheduler, name)
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _rates_set_by(part, optimizer)
