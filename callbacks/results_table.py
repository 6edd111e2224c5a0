"""The table of metrics that is printed at the end of an evaluation."""

from collections.abc import Mapping

from lightning_retrieval.callbacks.best_values import is_count

_COLUMN_WIDTH = 12


def results_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Format metrics as a table with one row for each metric.

    Args:
        columns: title of each column, and its metrics by name. The last column decides which metrics are shown. Titles
            are shown if there are several columns.
    """
    names = list(list(columns.values())[-1])
    width = max(len(name) for name in names)
    lines = []
    if len(columns) > 1:
        titles = [f"{title:>{_COLUMN_WIDTH}}" for title in columns]
        lines.append(" " * width + "".join(titles))
    for name in names:
        digits = 4
        if is_count(name):
            digits = 0
        line = f"{name:<{width}}"
        for values in columns.values():
            value = values.get(name, float("nan"))
            line += f"{value:>{_COLUMN_WIDTH}.{digits}f}"
        lines.append(line)
    return "\n".join(lines)
