"""Plots the results of a metric, like the method `plot` of torchmetrics' metrics."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Tensor]


def plot_results(results: Results | Sequence[Results], ax: "Axes | None", *, title: str) -> "tuple[Figure, Axes]":
    """Plot a single result as bars, or several as lines over steps. Numbers of skipped queries are not drawn.

    Args:
        results: one result of `compute`, or several.
        ax: the axes to draw on; None for a new figure.
        title: title of the figure.
    """
    steps = _as_list(results)
    names = [name for name in steps[0] if "skipped_queries" not in name.split("/")]
    figure, ax = _axes(ax)
    if len(steps) == 1:
        values = [float(steps[0][name]) for name in names]
        bars = ax.bar(names, values)
        ax.bar_label(bars, fmt="%.3f", fontsize="small")
        ax.tick_params(axis="x", labelrotation=60)
    else:
        for name in names:
            ax.plot(range(len(steps)), [float(step[name]) for step in steps], marker="o", label=name)
        ax.set_xlabel("step")
        ax.legend()
    ax.set_ylim(bottom=0)
    ax.set_title(title)
    ax.grid(alpha=0.3, axis="y")
    return figure, ax


def _as_list(results: Any) -> list[Results]:
    """The results of all steps, each with the same names."""
    if isinstance(results, Mapping):
        return [results]
    if not isinstance(results, (list, tuple)) or len(results) == 0:
        raise InvalidType("must be what compute returned, or a list of that", argument="val", got=short_repr(results))
    for step in results:
        if list(step) != list(results[0]):
            rule = "must hold results with the same names"
            raise InvalidValue(rule, argument="val", got=f"{sorted(results[0])} and {sorted(step)}")
    return list(results)


def _axes(ax: Any) -> "tuple[Figure, Axes]":
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if ax is None:
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # avoids pyplot, which has global state
        return figure, figure.subplots()
    if not isinstance(ax, Axes):
        raise InvalidType("must be an Axes of matplotlib", argument="ax", got=type(ax).__name__)
    given: Any = ax.get_figure()
    return given, ax
