"""`lightning-retrieval search`: print the images of an index nearest to images or texts, or write them to a page.

The page is a single HTML file that needs no server, network connection or other file.
"""

import argparse
import base64
import io
import json
import os
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch

from lightning_retrieval.command_line import printable
from lightning_retrieval.files import new_file, not_written, reason
from lightning_retrieval.preparation.decoding import read_image
from lightning_retrieval.search.commands.embedding import UnreadableImage
from lightning_retrieval.search.commands.options import model_settings
from lightning_retrieval.search.commands.search_images import Hit, QueryResult, image_folder, search_images
from lightning_retrieval.search.commands.stores import opened_index
from lightning_retrieval.search.image_files import image_file
from lightning_retrieval.search.store.milvus_store import EmbeddingStore

LONGEST_SIDE = 320  # pixels of a picture in the page
SHARP_SIDE = 96  # pictures up to this size are enlarged without blurring
FONTS = (  # a browser uses the first installed font that has a character, so names of classes may be in any script
    *("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans"),
    *("Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Nirmala UI", "Noto Sans Thai", "Leelawadee UI"),
    *("Noto Color Emoji", "Apple Color Emoji", "Segoe UI Emoji", "sans-serif"),
)


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
            shown = json.dumps(_plain(results, unreadable, index), indent=1)
        else:
            shown = "\n\n".join(_table(result) for result in results)
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
        raise not_written("search", f"`--html` {page}", error) from None
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


def _plain(
    results: Sequence[QueryResult], unreadable: Sequence[UnreadableImage], index: EmbeddingStore
) -> dict[str, Any]:
    """The results as plain values for JSON, with the metadata that the index has."""
    queries = []
    for result in results:
        hits = [{**vars(hit), "distance": hit.distance} for hit in result.hits]
        if hits and index.column_kinds:
            columns = index.columns(torch.tensor([hit.id for hit in result.hits]))
            for row, hit in enumerate(hits):
                hit["metadata"] = {name: values[row] for name, values in columns.items()}
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
    page = _PAGE.substitute(
        about=escape(about), queries=queries, links=navigation, sections="".join(sections), fonts=", ".join(FONTS)
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
    return (
        f'<li><button class="card" type="button" data-query="{query}" data-rank="{hit.rank}">{picture}'
        f'<span class="rank"><span class="hidden">Rank </span>{hit.rank}</span>'
        f'<span class="bar" aria-hidden="true"><i style="width:{percent:.1f}%"></i></span>'
        f'<span class="numbers"><span>distance <b>{hit.distance:.4f}</b></span>'
        f"<span>similarity <b>{hit.similarity:.4f}</b></span></span>"
        f'<span class="path">{escape(printable(hit.path))}</span></button></li>'
    )


def _picture(folder: Path | None, path: str, description: str) -> tuple[str, str]:
    """The HTML of an image as a data URI, and why the image can no longer be read, "" if it can.

    Args:
        folder: the folder that the image must be in; None for an image that the user has named.
        path: path of the image.
        description: the alternative text.
    """
    try:
        file = Path(path)
        if folder is not None:
            file = image_file(folder, path)
        image = read_image(file)
    except Exception as error:  # Pillow's readers raise errors of many types for damaged files
        return _missing_picture(description), reason(error)
    stream = io.BytesIO()
    if max(image.size) <= SHARP_SIDE:
        kind, style = "png", " sharp"
        image.save(stream, kind)
    else:
        kind, style = "jpeg", ""
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        image.save(stream, kind, quality=85)
    data = base64.b64encode(stream.getvalue()).decode()
    source = f"data:image/{kind};base64,{data}"
    return f'<span class="picture{style}"><img src="{source}" alt="{escape(description)}"></span>', ""


def _missing_picture(description: str) -> str:
    return f'<span class="picture gone" role="img" aria-label="{escape(description)}">not readable now</span>'


# The content security policy prevents the page from loading anything, even if the escaping of a file name failed.
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'">
<title>Search results: $queries</title>
<style>
:root { color-scheme: light dark; --paper: #f6f6f3; --card: #fff; --ink: #1c1d1f; --soft: #62656b; --line: #dddcd6;
  --accent: #1f5fd0; --query: #b4530a; --well: #ecebe6; }
@media (prefers-color-scheme: dark) { :root { --paper: #141517; --card: #1e2023; --ink: #ececea; --soft: #a2a6ad;
  --line: #34373c; --accent: #7fb0ff; --query: #f0a45d; --well: #292c30; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; padding: 1.5rem clamp(1rem, 3vw, 2.5rem) 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 $fonts; }
h1 { margin: 0; font-size: 1.45rem; letter-spacing: -0.01em; }
header p { margin: 0.25rem 0 0; color: var(--soft); }
kbd { padding: 0.05em 0.4em; border: 1px solid var(--line); border-bottom-width: 2px; border-radius: 4px;
  background: var(--card); color: var(--ink); font: 0.85em ui-monospace, monospace; }
nav { display: flex; flex-wrap: wrap; gap: 0.4rem; margin-top: 0.9rem; }
nav a { max-width: 16rem; overflow: hidden; padding: 0.15rem 0.7rem; border: 1px solid var(--line); border-radius: 99px;
  background: var(--card); color: inherit; text-decoration: none; text-overflow: ellipsis; white-space: nowrap; }
nav a:hover { border-color: var(--accent); }
section { display: grid; grid-template-columns: minmax(10rem, 14rem) 1fr; gap: 1.5rem; margin-top: 1.5rem;
  padding-top: 1.5rem; border-top: 1px solid var(--line); }
.query { position: sticky; top: 1rem; align-self: start; }
.query .picture { border: 3px solid var(--query); border-radius: 12px; }
h2 { margin: 0.6rem 0 0; font-size: 0.9rem; font-weight: 400; }
.label { display: block; color: var(--query); font-weight: 650; }
.path { overflow-wrap: anywhere; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 0.9rem; margin: 0; padding: 0;
  list-style: none; align-content: start; }
.card { position: relative; display: flex; flex-direction: column; justify-content: flex-start; align-items: stretch;
  width: 100%; height: 100%; padding: 0 0 0.6rem; overflow: hidden; border: 1px solid var(--line);
  border-radius: 12px; background: var(--card); color: inherit; font: inherit; text-align: left; cursor: zoom-in; }
.card > span { flex: none; }
.card > .numbers, .card > .path { margin: 0.35rem 0.7rem 0; }
.card:hover { border-color: var(--accent); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.picture { display: grid; grid-template: 100% / 100%; place-items: center; aspect-ratio: 1; overflow: hidden;
  background: var(--well); }
.picture img { display: block; width: 100%; height: 100%; object-fit: contain; }
.sharp img { image-rendering: pixelated; }
.words { padding: 0.8rem; font-size: 1.1rem; text-align: center; overflow-wrap: anywhere; }
.gone { color: var(--soft); font-size: 0.85rem; }
.rank { position: absolute; top: 0.5rem; left: 0.5rem; min-width: 1.7em; padding: 0 0.45em; border-radius: 99px;
  background: rgb(0 0 0 / 0.72); color: #fff; font-size: 0.85rem; font-weight: 650; line-height: 1.7em;
  text-align: center; }
.bar { display: block; height: 4px; background: var(--well); }
.bar i { display: block; height: 100%; background: var(--accent); }
.numbers { color: var(--soft); font-size: 0.8rem; font-variant-numeric: tabular-nums; }
.numbers span { display: flex; justify-content: space-between; }
.numbers b { color: var(--ink); font-weight: 600; }
.card .path { display: -webkit-box; overflow: hidden; font-size: 0.85rem; -webkit-box-orient: vertical;
  -webkit-line-clamp: 4; line-clamp: 4; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
dialog { width: min(92vw, 46rem); max-height: 92vh; padding: 1.2rem; border: 1px solid var(--line); border-radius: 14px;
  background: var(--card); color: var(--ink); }
dialog::backdrop { background: rgb(0 0 0 / 0.6); }
dialog h2 { margin: 0 0 0.8rem; }
dialog .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
dialog figure { margin: 0; }
dialog figcaption { margin-top: 0.4rem; font-size: 0.9rem; overflow-wrap: anywhere; }
dialog .picture { border-radius: 10px; }
dialog form { margin-top: 1rem; text-align: right; }
dialog button { padding: 0.3rem 0.9rem; border: 1px solid var(--line); border-radius: 8px; background: var(--well);
  color: inherit; font: inherit; cursor: pointer; }
@media (max-width: 40rem) { section { grid-template-columns: 1fr; } .query { position: static; max-width: 14rem; }
  ol { grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); } }
</style>
</head>
<body>
<header>
<h1>Search results</h1>
<p>$about</p>
<p><kbd>&larr;</kbd> <kbd>&rarr;</kbd> <kbd>&uarr;</kbd> <kbd>&darr;</kbd> move, <kbd>Home</kbd> <kbd>End</kbd> first
and last of a query, <kbd>Enter</kbd> show beside the query, <kbd>Esc</kbd> back</p>
$links
</header>
<main>
$sections</main>
<dialog aria-labelledby="compared">
<h2 id="compared" class="label"></h2>
<div class="pair"><figure id="left"></figure><figure id="right"></figure></div>
<form method="dialog"><button>Close</button></form>
</dialog>
<script>
"use strict";
const cards = [...document.querySelectorAll(".card")];
const dialog = document.querySelector("dialog");
let current = null;

function fill(figure, picture, words) {
  const caption = document.createElement("figcaption");
  caption.textContent = words;
  figure.replaceChildren(picture.cloneNode(true), caption);
}

function select(card) {
  current = card;
  if (!dialog.open) {
    card.focus();
    card.scrollIntoView({ block: "nearest" });
    return;
  }
  const query = document.getElementById("q" + card.dataset.query);
  const [distance, similarity] = card.querySelectorAll(".numbers b");
  document.getElementById("compared").textContent = "Query " + card.dataset.query + ", rank " + card.dataset.rank +
    ": distance " + distance.textContent + ", similarity " + similarity.textContent;
  fill(document.getElementById("left"), query.querySelector(".picture"), query.querySelector(".path").textContent);
  fill(document.getElementById("right"), card.querySelector(".picture"), card.querySelector(".path").textContent);
}

// The nearest card in the line above (sign -1) or below (sign 1): in the nearest line, the least step to the side.
function beyond(card, sign) {
  const here = card.getBoundingClientRect();
  const steps = cards.map((other) => {
    const there = other.getBoundingClientRect();
    return { other, down: sign * (there.top - here.top), aside: Math.abs(there.left - here.left) };
  }).filter((step) => step.down > 1);
  const least = Math.min(...steps.map((step) => step.down));
  return steps.filter((step) => step.down < least + 1).sort((a, b) => a.aside - b.aside)[0]?.other;
}

function target(key, card) {
  const mine = cards.filter((other) => other.dataset.query === card.dataset.query);
  switch (key) {
    case "ArrowRight": return cards[cards.indexOf(card) + 1];
    case "ArrowLeft": return cards[cards.indexOf(card) - 1];
    case "ArrowDown": return beyond(card, 1);
    case "ArrowUp": return beyond(card, -1);
    case "Home": return mine[0];
    case "End": return mine.at(-1);
  }
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const onCard = document.activeElement.closest(".card");
  const from = dialog.open ? current : onCard;
  if (!/^(Arrow|Home|End)/.test(event.key) || !(from || event.key === "ArrowRight")) return;
  const to = from ? target(event.key, from) : cards[0];
  event.preventDefault();
  if (to) select(to);
});
for (const card of cards) {
  card.addEventListener("click", () => { dialog.showModal(); select(card); });
}
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => current?.focus());
document.documentElement.dataset.ready = String(cards.length);
</script>
</body>
</html>
""")
