"""The report of `check()` on a data set: counts of images and classes, missing files and other problems."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_retrieval.checks import check_mapping, check_strings

Count = tuple[int, int]  # images and classes
MAX_SHOWN = 10  # missing files in the printed report
HEADER = ("split", "images", "classes", "published: images", "classes")


@dataclass
class DataReport:
    """What `check()` of a data module found: counts of each split with the published ones, and what is wrong.

    Args:
        splits: by name, the (images, classes) that were found, and the published (images, classes): an empty sequence
            if none were published, several if papers differ; the found counts may equal any of them.
        missing_files: paths of images that are listed but do not exist.
        problems: sentences about any other problem.

    Raises:
        TypeError: if `splits` is no dict, or `missing_files` or `problems` no sequence of strings.

    Example:
        >>> from lightning_retrieval.datamodules import DataReport
        >>> report = DataReport({"train": ((2, 1), [(3, 1), (4, 1)])}, missing_files=["cats/3.jpg"])
        >>> report.ok
        False
        >>> print(report)
        split  images  classes  published: images  classes
        train       2        1             3 or 4        1
        missing: cats/3.jpg

    Relations:
        Returned by `RetrievalDataModule.check` and printed by `lightning-retrieval check`.
    """

    splits: dict[str, tuple[Count, Sequence[Count]]] = field(default_factory=dict)
    missing_files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_mapping("DataReport", "splits", self.splits)
        check_strings("DataReport", "missing_files", self.missing_files)
        check_strings("DataReport", "problems", self.problems)

    @property
    def ok(self) -> bool:
        """Whether no file is missing, there is no other problem, and all counts are published ones."""
        for found, published in self.splits.values():
            if published and found not in published:
                return False
        return not self.missing_files and not self.problems

    def __str__(self) -> str:
        lines = _table_lines(self.splits)
        for path in self.missing_files[:MAX_SHOWN]:
            lines.append(f"missing: {path}")
        hidden = len(self.missing_files) - MAX_SHOWN
        if hidden > 0:
            lines.append(f"... and {hidden:,} more are missing")
        for problem in self.problems:
            lines.append(f"problem: {problem}")
        return "\n".join(lines)


def _table_lines(splits: dict[str, tuple[Count, Sequence[Count]]]) -> list[str]:
    rows = [HEADER]
    for name, ((images, classes), published) in splits.items():
        rows.append((name, f"{images:,}", f"{classes:,}", _alternatives(published, 0), _alternatives(published, 1)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        line = first.ljust(widths[0])
        for cell, width in zip(others, widths[1:]):
            line += "  " + cell.rjust(width)
        lines.append(line.rstrip())
    return lines


def _alternatives(published: Sequence[Count], position: int) -> str:
    """The different published numbers at a position of the counts, such as `1,000 or 1,200`."""
    shown: list[str] = []
    for count in published:
        number = f"{count[position]:,}"
        if number not in shown:
            shown.append(number)
    return " or ".join(shown)
