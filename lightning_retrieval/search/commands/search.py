"""How `lightning-retrieval search` shows its results: as a table, as plain values for JSON, or on a page.

The page is a single HTML file that needs no server, network connection or other file.
"""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image

from lightning_retrieval.command_line import printable
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.preparation.decoding import read_image
from lightning_retrieval.search.commands.embedding import UnreadableImage
from lightning_retrieval.search.commands.search_images import Hit, QueryResult
from lightning_retrieval.search.html_page import embedded_picture, page_target, shared_style
from lightning_retrieval.search.image_files import image_file

# The content security policy prevents the page from loading anything, even if the escaping of a file name failed.
PAGE = Path(__file__).with_name("page.html")
NUMBERS = 3  # columns of the table, which are aligned on the right: rank, similarity and distance


def write_page(page: Path, results: Sequence[QueryResult], images: Path, searched: str) -> None:
    """Write the page, and print a warning if images of the results can no longer be read.

    Args:
        page: the file.
        results: as for `result_page`.
        images: as for `result_page`.
        searched: the index, and how many images it has.
    """
    most = max(len(result.hits) for result in results)
    source, missing = result_page(results, images, f"{most} nearest {printable(searched)}")
    with writing(page), new_file(page_target("html", page)) as file:
        file.write(source.encode())
    if missing:
        hits = sum(len(result.hits) for result in results)
        print(
            f"search: {len(missing)} of {hits} results cannot be read in {printable(str(images))}, the first: "
            f"{missing[0]}; give the folder of the images with `--images`.",
            file=sys.stderr,
        )


def table(result: QueryResult) -> str:
    """The results of a query as lines of aligned columns."""
    if result.nothing_similar:
        return f"{printable(result.query)}\n{result.nothing_similar}"
    rows = [["rank", "similarity", "distance", "path", *(name for name, _ in result.hits[0].shown())]]
    for hit in result.hits:
        numbers = [str(hit.rank), f"{hit.similarity:.4f}", f"{hit.distance:.4f}"]
        rows.append([*numbers, printable(hit.path), *(text for _, text in hit.shown())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths[-1] = 0  # the last text of a line is not padded
    lines = [printable(result.query)]
    for row in rows:
        numbers = list(map(str.rjust, row[:NUMBERS], widths))
        texts = list(map(str.ljust, row[NUMBERS:], widths[NUMBERS:]))
        lines.append("  ".join([*numbers, *texts]))
    return "\n".join(lines)


def plain_results(results: Sequence[QueryResult], unreadable: Sequence[UnreadableImage]) -> dict[str, Any]:
    """The results as plain values for JSON."""
    queries = []
    for result in results:
        hits = [hit.plain() for hit in result.hits]
        described: dict[str, Any] = {"query": result.query, "results": hits}
        if result.is_text:
            described["is_text"] = True
        if result.threshold is not None:
            described |= {"threshold": result.threshold, "nearest": result.nearest}
        queries.append(described)
    skipped = [{"path": image.path, "reason": image.reason} for image in unreadable]
    return {"queries": queries, "unreadable": skipped}


def result_page(results: Sequence[QueryResult], images: Path, about: str) -> tuple[str, list[str]]:
    """The page, with all pictures embedded, and the paths of the results that can no longer be read, with the reasons.

    Args:
        results: the queries and their hits.
        images: folder that the paths of the hits are relative to.
        about: a line that describes the search.
    """
    missing: list[str] = []
    sections = []
    links = []
    for number, result in enumerate(results, start=1):
        section, missing_of_section = _section(number, result, images)
        sections.append(section)
        missing += missing_of_section
        links.append(f'<a href="#q{number}">{escape(_short_name(result))}</a>')
    queries = "1 query"
    navigation = ""
    if len(results) > 1:
        queries = f"{len(results)} queries"
        navigation = f'<nav aria-label="Queries">{"".join(links)}</nav>'
    page = Template(PAGE.read_text(encoding="utf-8")).substitute(
        about=escape(about), queries=queries, links=navigation, sections="".join(sections), style=shared_style()
    )
    return page, missing


def _section(number: int, result: QueryResult, images: Path) -> tuple[str, list[str]]:
    """The HTML of a query with its hits, and the paths of the hits that can no longer be read, each with the reason."""
    cards = []
    missing = []
    for hit in result.hits:
        path = printable(hit.path)
        description = f"Result {hit.rank}: {path}"
        picture, problem = _picture(images, hit.path, description)
        if problem:
            missing.append(f"{path} ({problem})")
        cards.append(_card(number, hit, picture))
    nothing = ""
    if result.nothing_similar:
        nothing = f"<p>{escape(result.nothing_similar)}</p>"
    query = printable(result.query)
    description = f"Query: {query}"
    if result.is_text:
        picture = f'<span class="picture words">{escape(query)}</span>'
    else:
        picture, _ = _picture(None, result.query, description)
    section = (
        f'<section id="q{number}" aria-labelledby="t{number}"><div class="query">{picture}'
        f'<h2 id="t{number}"><span class="label">Query {number}</span><span class="path">{escape(query)}</span></h2>'
        f"</div>{nothing}<ol>{''.join(cards)}</ol></section>\n"
    )
    return section, missing


def _short_name(result: QueryResult) -> str:
    """The name of a query in the list of queries: the name of the file, or the text."""
    if result.is_text:
        return printable(result.query)
    return printable(Path(result.query).name)


def _card(query: int, hit: Hit, picture: str) -> str:
    percent = 100 * min(1.0, max(0.0, hit.similarity))
    details = [f"<span>{escape(name)} <bdi>{escape(text)}</bdi></span>" for name, text in hit.shown()]
    return (
        f'<li><button class="card" type="button" data-query="{query}" data-rank="{hit.rank}"'
        f' data-distance="{hit.distance:.4f}" data-similarity="{hit.similarity:.4f}">{picture}'
        f'<span class="rank"><span class="hidden">Rank </span>{hit.rank}</span>'
        f'<span class="bar" aria-hidden="true"><i style="width:{percent:.1f}%"></i></span>'
        f'<span class="numbers"><span>distance <b>{hit.distance:.4f}</b></span>'
        f"<span>similarity <b>{hit.similarity:.4f}</b></span></span>"
        f'<span class="path">{escape(printable(hit.path))}</span><span class="details">{"".join(details)}</span>'
        "</button></li>"
    )


def _picture(folder: Path | None, path: str, description: str) -> tuple[str, str]:
    """The HTML of an image as a data URI, and why the image can no longer be read, "" if it can.

    Args:
        folder: the folder that the image must be in; None for an image that the user has named.
        path: path of the image.
        description: the alternative text.
    """

    def read() -> Image.Image:
        if folder is None:
            return read_image(Path(path))
        return read_image(image_file(folder, path))

    return embedded_picture(read, description)
