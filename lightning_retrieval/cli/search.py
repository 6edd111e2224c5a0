"""`lightning-retrieval search`: print the images of an index nearest to query images, or write them to a page."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_retrieval.cli.embedding import UnreadableImage
from lightning_retrieval.cli.options import model_settings, printable
from lightning_retrieval.cli.page import result_page
from lightning_retrieval.cli.search_images import QueryResult, image_folder, search_images
from lightning_retrieval.cli.stores import opened_index
from lightning_retrieval.files import new_file
from lightning_retrieval.search.milvus_store import EmbeddingStore


def search(options: argparse.Namespace) -> Sequence[UnreadableImage]:
    """Run the command: print the results or write the page, and return the queries that could not be read."""
    page, images = options.html, options.images
    if page is not None:
        _page_target(page)  # raises before the search
    if images is not None and not images.is_dir():
        raise ValueError(
            f"search: `--images` must be the folder of the index's images, got {images}, which is not a folder."
        )
    with opened_index(options.index, options.store) as index:
        results, unreadable = _search_in(index, options)
    if options.json:
        print(json.dumps(_plain(results, unreadable), indent=1))
    else:
        print("\n\n".join(_table(result) for result in results))
    return unreadable


def _search_in(index: EmbeddingStore, options: argparse.Namespace) -> tuple[list[QueryResult], list[UnreadableImage]]:
    page, images = options.html, options.images
    if options.parameters is not None:
        index.set_parameters(options.parameters)
    if page is not None:
        images = image_folder(images, index)  # raises before the search
    wanted = {"where": options.where, "group_by": options.group_by, "threshold": options.threshold}
    results, unreadable = search_images(index, options.queries, options.k, **wanted, **model_settings(options))
    if page is not None:
        most = max(len(result.hits) for result in results)
        about = f"{most} nearest of {len(index)} images in {printable(str(options.index))}"
        _write_page(page, results, images, about)
    return results, unreadable


def _page_target(page: Path) -> Path:
    """The file to write the page to, with symbolic links resolved; raises unless it is a regular or a new file."""
    target = Path(os.path.realpath(page))
    if page.is_dir() or not target.parent.is_dir():
        raise ValueError(f"search: `--html` must be a file in an existing folder, got {page}.")
    is_special = page.exists() and not page.is_file()
    is_loop = target.is_symlink()
    if is_special or is_loop:
        raise ValueError(
            f"search: `--html` must be a regular file, got {page}, which is a FIFO, a socket, a device or a link to "
            "itself."
        )
    return target


def _write_page(page: Path, results: Sequence[QueryResult], images: Path, about: str) -> None:
    """Write the page, and print a warning if images of the results can no longer be read."""
    source, missing = result_page(results, images, about)
    try:
        with new_file(_page_target(page)) as file:
            file.write(source.encode())
    except OSError as error:
        raise OSError(f"search: `--html` cannot be written to {page} ({error.strerror}).") from None
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
    rows = [
        f"{hit.rank:>4}  {hit.similarity:>10.4f}  {hit.distance:>8.4f}  {printable(hit.path)}" for hit in result.hits
    ]
    return "\n".join([printable(result.query), "rank  similarity  distance  path", *rows])


def _plain(results: Sequence[QueryResult], unreadable: Sequence[UnreadableImage]) -> dict[str, Any]:
    """The results as plain values for JSON."""
    queries = []
    for result in results:
        hits = [{**vars(hit), "distance": hit.distance} for hit in result.hits]
        described: dict[str, Any] = {"query": result.query, "results": hits}
        if result.threshold is not None:
            described |= {"threshold": result.threshold, "nearest": result.nearest}
        queries.append(described)
    skipped = [{"path": image.path, "reason": image.reason} for image in unreadable]
    return {"queries": queries, "unreadable": skipped}
