"""The table of metrics that is printed at the end of an evaluation."""

from collections.abc import Mapping

from lightning_retrieval.callbacks.best_values import is_count

_COLUMN_WIDTH = 12
_DIGITS = 4
# Titles of the columns before that of the trained network, and what they are of.
_BEFORE = {"backbone": "the pooled features of its backbone", "untrained": "the untrained network"}


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
        digits = _DIGITS
        if is_count(name):
            digits = 0
        line = f"{name:<{width}}"
        for values in columns.values():
            value = values.get(name, float("nan"))
            line += f"{value:>{_COLUMN_WIDTH}.{digits}f}"
        lines.append(line)
    return "\n".join(lines)


def worse_than_before(columns: Mapping[str, Mapping[str, float]]) -> str | None:
    """One sentence, with what to do, if training has made a network worse; None if it has not.

    Args:
        columns: as for `results_table`: `"backbone"` and `"untrained"`, where there are such, and the trained network.
    """
    trained = list(columns.values())[-1]
    for name in _leading_metrics(trained):
        after = round(trained[name], _DIGITS)
        for title, meaning in _BEFORE.items():
            before = round(columns.get(title, {}).get(name, float("nan")), _DIGITS)
            if after < before:
                return (
                    f"The trained network is worse than {meaning}: {name} is {after:.{_DIGITS}f}, and was "
                    f"{before:.{_DIGITS}f}; train for more epochs, try another learning rate, or begin with "
                    "pretrained weights if it did not."
                )
    return None


def _leading_metrics(results: Mapping[str, float]) -> list[str]:
    """The mAP of each set; the first metric where there is no mAP."""
    leading = [name for name in results if name.rpartition("/")[2] == "mAP"]
    return leading or [name for name in results if not is_count(name)][:1]
