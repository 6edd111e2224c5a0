"""Where a report may be written; no torch is imported, so that a command can check its options first."""

from pathlib import Path

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.search.html_page import check_page_target

SUFFIXES_OF_PAGES = (".html", ".htm")
COLUMNS = (
    *("finding", "value", "low", "high", "count"),
    *("image", "label", "split", "other_image", "other_label", "other_split", "reason"),
)  # of the table


def check_suffix(output: Path) -> Path:
    """Return the path of a page; raise unless it ends with .html."""
    if output.suffix.lower() not in SUFFIXES_OF_PAGES:
        rule = "must end with .html; the table is written beside it, with the ending .csv"
        raise InvalidValue(rule, argument="output", got=output)
    return output


def check_output(output: Path) -> None:
    """Raise unless a page and its table can be written, and replace nothing but an earlier page and its table.

    Args:
        output: path of the page.
    """
    header = ",".join(f'"{name}"' for name in COLUMNS)
    check_page_target("output", check_suffix(output), "report")
    check_page_target("output", table_of(output), "report", header)


def table_of(output: Path) -> Path:
    """The path of the table beside a page."""
    return output.with_suffix(".csv")
