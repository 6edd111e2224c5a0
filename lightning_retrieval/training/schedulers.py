"""Learning-rate schedulers that keep the factors between the learning rates of parameter groups.

Most schedulers multiply the rate that each group has in the optimizer. `OneCycleLR`, `CyclicLR` and `SWALR` replace it
by numbers of their own, and `ReduceLROnPlateau` has a smallest rate for all groups. Such numbers are multiplied by the
factors of the groups, unless the scheduler was given a list with the factors in it.
"""

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.training.optimizers import FACTORS

WITH_RATES_OF_THEIR_OWN = (OneCycleLR, CyclicLR, SWALR, ReduceLROnPlateau)
RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # keys of a parameter group
RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")  # attributes: lists of a number for each group
TRIED_STEPS = 3  # a scheduler that ignores the rates of the groups in so many steps is taken to ignore them always


def make_scheduler(make: Callable[[Optimizer], Any], optimizer: Optimizer, factors: Sequence[float]) -> Any:
    """Create the scheduler of an optimizer so that the rates of the parameter groups keep their factors.

    Args:
        make: class or function that creates the scheduler from the optimizer.
        optimizer: the optimizer, whose rates have the factors.
        factors: rate of each parameter group divided by the learning rate of the optimizer.

    Raises:
        ValueError: if the scheduler sets rates that have other factors.
    """
    if set(factors) <= {1.0}:
        return make(optimizer)
    rates = _rates(optimizer.param_groups)
    scheduler = make(optimizer)
    parts = list(_parts(scheduler))
    _warn_of_floor(parts, rates)
    if any(isinstance(part, WITH_RATES_OF_THEIR_OWN) for part in parts):
        _multiply_rates(parts, optimizer, factors)
    elif isinstance(scheduler, LRScheduler):
        _check_factors(scheduler, make, rates, factors)
    return scheduler


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler and, for `SequentialLR` and `ChainedScheduler`, the schedulers inside it."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _warn_of_floor(parts: Sequence[Any], rates: Sequence[float]) -> None:
    """Warn if a scheduler with one `eta_min` for all groups would increase the rate of a group instead."""
    for part in parts:
        floor = getattr(part, "eta_min", 0.0)
        if min(rates) < floor:
            warnings.warn(
                f"{type(part).__name__}: `eta_min` must be at most the smallest learning rate of the "
                f"parameter groups, {min(rates):.3g}, so that it does not increase with time, got {floor}; give a "
                "smaller `eta_min`.",
                stacklevel=2,
            )


def _multiply_rates(parts: Sequence[Any], optimizer: Optimizer, factors: Sequence[float]) -> None:
    """Multiply all numbers that schedulers have set to the same value for each group by the factors of the groups."""
    name, groups = type(parts[0]).__name__, optimizer.param_groups
    for key in RATES_OF_GROUPS:
        if not all(key in group for group in groups):
            continue
        rates = _with_factors(name, _rates(groups, key), factors)
        for group, rate in zip(groups, rates):
            if isinstance(group[key], Tensor):
                group[key].fill_(rate)
            else:
                group[key] = rate
    for part in parts:
        for attribute in RATES_OF_SCHEDULERS:
            if hasattr(part, attribute):
                rates = list(map(float, getattr(part, attribute)))
                setattr(part, attribute, _with_factors(name, rates, factors))


def _with_factors(name: str, rates: list[float], factors: Sequence[float]) -> list[float]:
    """Rates as they are if they have the factors, else, if they are all equal, multiplied by the factors."""
    if _has_factors(rates, factors):
        return rates
    if len(set(rates)) > 1:
        raise _wrong_factors(name, rates, factors)
    return list(map(operator.mul, rates, factors))


def _has_factors(rates: Sequence[float], factors: Sequence[float]) -> bool:
    """Whether rates are the same number multiplied by the factors."""
    without = list(map(operator.truediv, rates, factors))
    return math.isclose(min(without), max(without), rel_tol=1e-6)


def _rates(groups: Sequence[dict[str, Any]], key: str = "lr") -> list[float]:
    return list(map(float, map(operator.itemgetter(key), groups)))


def _check_factors(
    scheduler: LRScheduler,
    make: Callable[[Optimizer], Any],
    rates: Sequence[float],
    factors: Sequence[float],
) -> None:
    """Raise if a scheduler sets rates without the factors, and ignores which rates the groups had before."""
    optimizer = scheduler.optimizer
    current = _rates(optimizer.param_groups)
    if _has_factors(current, factors):
        return
    without = list(map(operator.truediv, rates, factors))
    if _first_rates(make, optimizer, rates) == _first_rates(make, optimizer, without):
        raise _wrong_factors(type(scheduler).__name__, current, factors)


def _first_rates(make: Callable[[Optimizer], Any], optimizer: Optimizer, rates: Sequence[float]) -> list[list[float]]:
    """The rates of each group in the first steps, if an optimizer had these rates. The optimizer does not change."""
    other = copy.copy(optimizer)  # without the attributes that schedulers set, and with the same parameters
    other.param_groups = []
    for group, rate in zip(optimizer.param_groups, rates):
        settings = dict(group, lr=rate)
        settings.pop("initial_lr", None)
        other.param_groups.append(settings)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warning that this optimizer makes no steps
        scheduler = make(other)
        for _ in range(TRIED_STEPS):
            found.append(_rates(other.param_groups))
            scheduler.step()
    return found


def _wrong_factors(name: str, rates: Sequence[float], factors: Sequence[float]) -> ValueError:
    wanted, came = (", ".join(map("{:.6g}".format, numbers)) for numbers in (factors, rates))
    return InvalidValue(
        f"must keep the factors {wanted} between the learning rates of the parameter groups ({FACTORS})",
        argument="lr_scheduler",
        got=f"{name}, which sets {came}",
        cure="give it one number for all groups, a list with these factors, or use a scheduler that multiplies the "
        "rates of the optimizer",
    )
