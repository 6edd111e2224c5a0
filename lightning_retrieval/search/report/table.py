"""The table of a report: a CSV file with all findings, from which labels can be corrected.

Programs for spreadsheets run a text that begins like a formula, so such a text gets an apostrophe in front of it. All
texts are in quotes, because some programs also divide fields at semicolons.
"""

import csv
import io
import re
from collections.abc import Iterator
from typing import Any

from lightning_retrieval.search.report.findings import Findings
from lightning_retrieval.search.report.images import ReportedImages
from lightning_retrieval.search.report.targets import COLUMNS

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def safe_text(text: str) -> str:
    """The text, with an apostrophe in front of what a program for spreadsheets would take for a formula.

    Example:
        >>> from lightning_retrieval.search.report.table import safe_text
        >>> safe_text("=cmd()"), safe_text("red-mug"), safe_text("-5")
        ("'=cmd()", 'red-mug', '-5')
    """
    if _FORMULA.match(text) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def report_table(found: Findings, images: ReportedImages) -> bytes:
    """The content of the file.

    Args:
        found: the findings, of which the page shows the first.
        images: names of the images.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    for row in _rows(found, images):
        writer.writerow({name: _shown(value) for name, value in row.items()})
    return text.getvalue().encode()


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return safe_text(value)
    if isinstance(value, float):
        return round(value, 6)
    return value


def _rows(found: Findings, images: ReportedImages) -> Iterator[dict[str, Any]]:
    """All rows. Each kind of finding has the columns that it needs."""
    for name, (mean, low, high) in found.means.items():
        yield {"finding": name, "value": mean, "low": low, "high": high}
    threshold = found.threshold
    if threshold is not None:
        yield {"finding": f"threshold of false-match rate {found.false_match_rate:g}", "value": threshold}
    for suspect in found.suspects:
        other = {"other_image": images.name(suspect.near[0]), "other_label": images.label(suspect.other)}
        yield {"finding": "mislabelled", "value": suspect.other_share, **_image(found, images, suspect.id), **other}
    for pair in found.duplicates:
        other = {f"other_{name}": value for name, value in _image(found, images, pair.second).items()}
        yield {"finding": "duplicate", "value": pair.score, **_image(found, images, pair.first), **other}
    for classes in found.confused:
        labels = {"label": images.label(classes.first), "other_label": images.label(classes.second)}
        yield {"finding": "confused", "value": classes.share, "count": classes.count, **labels}
    for result in found.classes:
        label = images.label(result.label)
        yield {"finding": "class", "value": result.ap, "count": len(result.queries), "label": label}
    for row in found.worst_queries.tolist():
        yield {"finding": "query", "value": float(found.queries["AP"][row]), **_query(found, images, row)}
    for id_, reason in found.without_positive.items():
        yield {"finding": "no positive", **_image(found, images, id_), "reason": reason}


def _image(found: Findings, images: ReportedImages, id_: int) -> dict[str, str]:
    return {"image": images.name(id_), "label": images.label(found.label_of[id_]), "split": images.split(id_)}


def _query(found: Findings, images: ReportedImages, row: int) -> dict[str, Any]:
    """A query with its nearest image and the rank of the first image of its class."""
    near = found.neighbours
    described: dict[str, Any] = _image(found, images, int(near.ids[row]))
    described["count"] = int(found.queries["first_hit"][row])
    other = int(near.near[row, 0])
    described |= {f"other_{name}": value for name, value in _image(found, images, other).items()}
    return described
