"""The report of `check()` on a data set: counts of images and classes, damaged files, problems and notes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_retrieval.checks import check_mapping, check_strings

Count = tuple[int, int]  # images and classes
MAX_SHOWN = 10  # missing or unreadable files in the printed report
HEADER = ("split", "images", "classes", "published: images", "classes")


@dataclass
class DataReport:
    """What `check()` of a data module found: counts of each split with the published ones, and what is wrong.

    Args:
        splits: by name, the (images, classes) that were found, and the published (images, classes): an empty sequence
            if none were published, several if papers differ; the found counts may equal any of them.
        missing_files: paths of images that are listed but do not exist.
        problems: sentences about any other problem.
        unreadable_files: paths of images that cannot be decoded, each with the reason.
        notes: sentences about what is worth knowing and no problem.

    Raises:
        TypeError: if `splits` is no dict, or one of the others is no sequence of strings.

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
    unreadable_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_mapping("DataReport", "splits", self.splits)
        check_strings("DataReport", "missing_files", self.missing_files)
        check_strings("DataReport", "problems", self.problems)
        check_strings("DataReport", "unreadable_files", self.unreadable_files)
        check_strings("DataReport", "notes", self.notes)

    @property
    def ok(self) -> bool:
        """Whether no file is missing or unreadable, there is no problem, and all counts are published ones."""
        for found, published in self.splits.values():
            if published and found not in published:
                return False
        return not (self.missing_files or self.unreadable_files or self.problems)

    def __str__(self) -> str:
        lines = _table_lines(self.splits)
        lines += _file_lines("missing", self.missing_files)
        lines += _file_lines("unreadable", self.unreadable_files)
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _file_lines(what: str, files: Sequence[str]) -> list[str]:
    """A line for each of the first files, and one that counts the others."""
    lines = [f"{what}: {file}" for file in files[:MAX_SHOWN]]
    hidden = len(files) - MAX_SHOWN
    if hidden > 0:
        lines.append(f"... and {hidden:,} more are {what}")
    return lines


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
