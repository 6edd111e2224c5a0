"""What `check()` says of a data set before training: counts beside the published ones, what is missing or odd."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Count = tuple[int, int]  # images and classes
Result = TypeVar("Result")


@dataclass
class LayoutReport:
    """What `check()` found: the splits with the published counts beside them, and files that are missing.

    Args:
        splits: name, (images, classes) found, and the published (images, classes): none, one, or several where papers
            differ, of which the found one may be any.
        missing: paths of images that are listed and not there.
        odd: sentences about anything else.

    Example:
        >>> from lightning_retrieval.datamodules import LayoutReport
        >>> report = LayoutReport({"train": ((2, 1), [(3, 1), (4, 1)])}, missing=["cats/3.jpg"])
        >>> report.ok
        False
        >>> print(report)
        split  images  classes  published: images  classes
        train       2        1             3 or 4        1
        missing: cats/3.jpg
    """

    splits: dict[str, tuple[Count, Sequence[Count]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is missing or odd, and the counts are published ones."""
        counts = all(found in published or not published for found, published in self.splits.values())
        return counts and not (self.missing or self.odd)

    def __str__(self) -> str:
        rows = [("split", "images", "classes", "published: images", "classes")]
        for name, (found, published) in self.splits.items():
            images, classes = (" or ".join(dict.fromkeys(f"{count[i]:,}" for count in published)) for i in (0, 1))
            rows.append((name, f"{found[0]:,}", f"{found[1]:,}", images, classes))
        first, *widths = (max(map(len, column)) for column in zip(*rows))
        lines = [
            row[0].ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths)) for row in rows
        ]
        shown = [f"missing: {path}" for path in self.missing[:10]]
        more = [f"... and {len(self.missing) - 10:,} more are missing"] if len(self.missing) > 10 else []
        return "\n".join([*(line.rstrip() for line in lines), *shown, *more, *(f"odd: {text}" for text in self.odd)])


def with_warnings(read: Callable[[], Result]) -> tuple[Result, list[str]]:
    """What `read()` gives, and the sentences that it warned of, which are warned of as ever."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = read()
    finally:  # also where reading then failed
        for warning in caught:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return result, [str(warning.message) for warning in caught]
