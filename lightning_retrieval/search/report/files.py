"""Writes the page of a report and, beside it, its table."""

from pathlib import Path

from lightning_retrieval.command_line import printable
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.search.html_page import page_target
from lightning_retrieval.search.report.findings import Findings
from lightning_retrieval.search.report.images import ReportedImages
from lightning_retrieval.search.report.page import ReportPage
from lightning_retrieval.search.report.table import report_table
from lightning_retrieval.search.report.targets import table_of


def write_report(output: Path, found: Findings, images: ReportedImages, *, title: str, about: str) -> list[str]:
    """Write the table and the page; each of them replaces an earlier one when it is complete.

    Args:
        output: path of the page.
        found: what is written.
        images: names and pictures of the images.
        title: what was evaluated.
        about: a line that describes the model and the images.

    Returns:
        The images whose pictures cannot be read, each with the reason.

    Raises:
        OSError: if a file cannot be written.
    """
    table = table_of(output)
    page = ReportPage(found, images, table.name)
    contents = {table: report_table(found, images), output: page.source(title, about).encode()}
    for path, content in contents.items():
        with writing(path), new_file(page_target("output", path)) as file:
            file.write(content)
    missing = []
    for id_, problem in page.missing.items():
        missing.append(f"{printable(images.name(id_))} ({problem})")
    return missing
