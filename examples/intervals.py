"""Confidence intervals of paired differences, for the studies and `compare.py`."""

import statistics
from collections.abc import Sequence

# Quantile 0.975 of Student's t distribution for 1, 2, ... degrees of freedom; the last one also stands for more.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences, and the ends of its 95 % t-interval."""
    mean = statistics.fmean(differences)
    quantile = T_QUANTILES[min(len(differences) - 1, len(T_QUANTILES)) - 1]
    half = quantile * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def shown_interval(differences: Sequence[float]) -> str:
    """Return the mean of paired differences with its interval."""
    mean, low, high = interval(differences)
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
