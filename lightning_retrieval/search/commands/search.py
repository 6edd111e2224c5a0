"""`lightning-retrieval search`: print the images of an index nearest to images or texts, or write them to a page.

The page is a single HTML file that needs no server, network connection or other file.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image

from lightning_retrieval.command_line import printable
from lightning_retrieval.files import new_file, not_written
from lightning_retrieval.preparation.decoding import read_image
from lightning_retrieval.search.commands.embedding import UnreadableImage
from lightning_retrieval.search.commands.options import searcher_settings
from lightning_retrieval.search.commands.search_images import Hit, QueryResult, image_folder, search_images
from lightning_retrieval.search.commands.stores import opened_index
from lightning_retrieval.search.html_page import embedded_picture, page_target, shared_style
from lightning_retrieval.search.image_files import image_file
from lightning_retrieval.search.store.embedding_store import EmbeddingStore

# The content security policy prevents the page from loading anything, even if the escaping of a file name failed.
PAGE = Path(__file__).with_name("page.html")
NUMBERS = 3  # columns of the table, which are aligned on the right: rank, similarity and distance


def search(options: argparse.Namespace) -> Sequence[UnreadableImage]:
    """Run the command: print the results or write the page, and return the queries that could not be read.

    `check_options` has checked the options.
    """
    with opened_index(options.index, options.store) as index:
        results, unreadable = _search_in(index, options)
        if options.json:
            shown = json.dumps(_plain(results, unreadable), indent=1)
        else:
            shown = "\n\n".join(map(_table, results))
    print(shown)
    return unreadable


def _search_in(index: EmbeddingStore, options: argparse.Namespace) -> tuple[list[QueryResult], list[UnreadableImage]]:
    page, images = options.html, options.images
    if options.parameters is not None:
        index.set_parameters(options.parameters)
    if page is not None:
        images = image_folder(images, index)  # raises before the search
    wanted = {
        "texts": options.text,
        "where": options.where,
        "group_by": options.group_by,
        "threshold": options.threshold,
    }
    results, unreadable = search_images(index, options.queries, options.k, **wanted, **searcher_settings(options))
    if page is not None:
        most = max(len(result.hits) for result in results)
        about = f"{most} nearest of {len(index)} images in {printable(str(options.index))}"
        _write_page(page, results, images, about)
    return results, unreadable


def _write_page(page: Path, results: Sequence[QueryResult], images: Path, about: str) -> None:
    """Write the page, and print a warning if images of the results can no longer be read."""
    source, missing = result_page(results, images, about)
    try:
        with new_file(page_target("html", page)) as file:
            file.write(source.encode())
    except OSError as error:
        raise not_written(f"`html` {page}", error) from None
    if missing:
        hits = sum(len(result.hits) for result in results)
        print(
            f"search: {len(missing)} of {hits} results cannot be read in {printable(str(images))}, the first: "
            f"{missing[0]}; give the folder of the images with `--images`.",
            file=sys.stderr,
        )


def _table(result: QueryResult) -> str:
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


def _plain(results: Sequence[QueryResult], unreadable: Sequence[UnreadableImage]) -> dict[str, Any]:
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
