"""The page of a report: a single HTML file that needs no server, network connection or other file, and no script."""

from collections.abc import Iterable, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from string import Template

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.search.html_page import embedded_picture, shared_style
from lightning_retrieval.search.report.findings import ClassResult, ConfusedClasses, Duplicates, Findings, Suspect
from lightning_retrieval.search.report.images import ReportedImages

# The content security policy allows no script, and prevents the page from loading anything.
PAGE = Path(__file__).with_name("page.html")
SHOWN = 12  # number of classes, queries and pairs of classes that the page shows; the table has all of them
SHOWN_IMAGES = 24  # the same of images that may be mislabelled, of duplicates and of queries without a positive
OF_CLASS, OF_SUSPECT = 8, 5  # number of images that are shown of a class, and beside a suspect
SIDE = 160  # pixels of the longer side of a picture


class ReportPage:
    """Writes the sections of a page.

    Args:
        found: what is shown.
        images: names and pictures of the images.
        table: name of the file with the table, to which the page refers.
    """

    def __init__(self, found: Findings, images: ReportedImages, table: str) -> None:
        self.missing: dict[int, str] = {}  # why a picture cannot be read, by the id of the image
        self._found = found
        self._images = images
        self._table = table
        self._picture = cache(self._embedded)

    def source(self, title: str, about: str) -> str:
        """The page.

        Args:
            title: what was evaluated.
            about: a line that describes the model and the images.
        """
        sections = {
            "Metrics": self._metrics(),
            "Scores": self._histogram(),
            "Probably mislabelled": self._suspects(),
            "Near-duplicates": self._duplicates(),
            "Confused classes": self._confused(),
            "Worst classes": self._classes(),
            "Worst queries": self._queries(),
            "No positive": self._without_positive(),
        }
        links = []
        parts = []
        for number, (name, content) in enumerate(sections.items(), start=1):
            links.append(f'<a href="#s{number}">{name}</a>')
            parts.append(f'<section id="s{number}"><h2>{name}</h2>{content}</section>\n')
        return Template(PAGE.read_text(encoding="utf-8")).substitute(
            title=escape(title),
            about=escape(about),
            links="".join(links),
            sections="".join(parts),
            style=shared_style(),
        )

    def _metrics(self) -> str:
        rows = []
        for name, (mean, low, high) in self._found.means.items():
            interval = "none"
            if low <= high:
                interval = f"{low:.4f} to {high:.4f}"
            rows.append(f"<tr><td>{escape(name)}</td><td>{mean:.4f}</td><td>{interval}</td></tr>")
        queries = len(self._found.queries["ids"])
        skipped = len(self._found.without_positive)
        explained = (
            f"{_count(queries, 'query', 'queries')}, {skipped:,} of them without a positive, and "
            f"{_count(self._found.images, 'image')} in the gallery. The intervals are found by bootstrap over classes."
        )
        head = "<thead><tr><th>metric</th><th>mean</th><th>95 % interval</th></tr></thead>"
        return f"<p>{explained}</p><table>{head}<tbody>{''.join(rows)}</tbody></table>"

    def _histogram(self) -> str:
        found = self._found
        threshold = found.threshold
        explained = "No list has an image of another class, so there is no threshold."
        line = ""
        low, high = float(found.edges[0]), float(found.edges[-1])  # the last bin may end after 1
        if threshold is not None:
            miss = float(found.nearest.miss_rates(threshold))
            rate = float(found.nearest.false_match_rates(threshold))
            explained = (
                f"A search that shows nothing below the similarity {threshold:.4f} (the dashed line) shows an image of "
                f"another class for {rate:.1%} of the queries (wanted: at most {found.false_match_rate:.1%}), and no "
                f"image of their class for {miss:.1%}."
            )
            across = 1000 * min(1.0, max(0.0, (threshold - low) / max(high - low, 1e-12)))
            line = f'<path class="threshold" d="M{across:.1f} 0V100"/>'
        counts = found.counts.double()
        densities = (counts / counts.sum(1, keepdim=True).clamp(min=1)) / float(counts.max().clamp(min=1))
        densities = densities / densities.max().clamp(min=1e-12)
        kinds = []
        keys = []
        for kind, style, density, pairs in zip(
            ("positive", "negative"), ("right", "wrong"), densities, found.counts.sum(1).tolist()
        ):
            kinds.append(f'<path class="{kind}" d="{_stairs(density)}"/>')
            keys.append(f'<span class="key {style}"></span>{_count(pairs, f"{kind} pair")} &ensp; ')
        return (
            f'<p>{explained}</p><figure class="histogram"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" '
            f'role="img" aria-label="Densities of the similarities of positive and negative pairs">'
            f'{"".join(kinds)}{line}</svg><div class="ends"><span>{low:.2f}</span><span>cosine similarity</span>'
            f"<span>{min(1.0, high):.2f}</span></div><figcaption>{''.join(keys)}</figcaption></figure>"
        )

    def _suspects(self) -> str:
        blocks = map(self._suspect, self._found.suspects[:SHOWN_IMAGES])
        explained = "The nearest images of each of these images have one other label, and hardly any has its own."
        return self._shown(explained, len(self._found.suspects), blocks)

    def _suspect(self, suspect: Suspect) -> str:
        tiles = [self._tile(suspect.id, "query")]
        tiles += [self._tile(near, "wrong") for near in suspect.near[:OF_SUSPECT]]
        label = f"labelled {self._label(suspect.label)} ({suspect.own_share:.0%} of the nearest images)"
        other = f"perhaps {self._label(suspect.other)} ({suspect.other_share:.0%})"
        return _block(f"{label}, {other}", tiles)

    def _duplicates(self) -> str:
        blocks = map(self._pair_of_duplicates, self._found.duplicates[:SHOWN_IMAGES])
        explained = "These images of different classes or splits look the same to the model."
        return self._shown(explained, len(self._found.duplicates), blocks, "pairs")

    def _pair_of_duplicates(self, pair: Duplicates) -> str:
        tiles = []
        for id_ in (pair.first, pair.second):
            split = self._images.split(id_)
            if split:
                split = f" ({split})"
            tiles.append(self._tile(id_, "query", f"{self._name_of_class(id_)}{split}"))
        return _block(f"similarity <b>{pair.score:.4f}</b>", tiles)

    def _confused(self) -> str:
        blocks = map(self._pair_of_classes, self._found.confused[:SHOWN])
        explained = "Images of one class that are among the nearest of an image of the other, where its own should be."
        return self._shown(explained, len(self._found.confused), blocks)

    def _pair_of_classes(self, pair: ConfusedClasses) -> str:
        tiles = []
        for query, near in pair.examples:
            tiles.append(self._tile(query, "query", self._name_of_class(query)))
            tiles.append(self._tile(near, "wrong", self._name_of_class(near)))
        names = f"{self._label(pair.first)} and {self._label(pair.second)}"
        numbers = f"{_count(pair.count, 'confusion')}, {pair.share:.1%} of the nearest images of both"
        return _block(f"{names}: {numbers}", tiles)

    def _classes(self) -> str:
        blocks = map(self._class, self._found.classes[:SHOWN])
        return self._shown("The mean AP of the queries of a class, the lowest first.", len(self._found.classes), blocks)

    def _class(self, result: ClassResult) -> str:
        tiles = [self._tile(id_, "query") for id_ in result.queries[:OF_CLASS]]
        number = _count(len(result.queries), "query", "queries")
        return _block(f"{self._label(result.label)}: AP <b>{result.ap:.4f}</b>, {number}", tiles)

    def _queries(self) -> str:
        rows = self._found.worst_queries.tolist()
        blocks = map(self._query, rows[:SHOWN])
        return self._shown("The queries with the lowest AP, and their nearest images.", len(rows), blocks, "rows")

    def _query(self, row: int) -> str:
        queries, near = self._found.queries, self._found.neighbours
        label = int(near.labels[row])
        tiles = [self._tile(int(near.ids[row]), "query", self._images.label(label))]
        columns = zip(near.near[row].tolist(), near.near_labels[row].tolist(), near.scores[row].tolist())
        for rank, (id_, of_near, score) in enumerate(columns, start=1):
            if score == -torch.inf:
                continue
            style = "wrong"
            if of_near == label:
                style = "right"
            tiles.append(self._tile(id_, style, f"{rank}: {score:.3f} {self._images.label(of_near)}"))
        first = int(queries["first_hit"][row])
        numbers = f"AP <b>{float(queries['AP'][row]):.4f}</b>, first relevant image at rank {first:,}"
        return _block(f"{self._label(label)}: {numbers}", tiles)

    def _without_positive(self) -> str:
        queries_of: dict[str, list[int]] = {}
        for id_, reason in self._found.without_positive.items():
            queries_of.setdefault(reason, []).append(id_)
        blocks = []
        for reason in sorted(queries_of, key=lambda reason: -len(queries_of[reason])):
            blocks.append(self._queries_of_reason(reason, queries_of[reason]))
        explained = "The queries that are part of no mean, by the reason why no image of their list is relevant."
        return self._shown(explained, len(self._found.without_positive), blocks, "rows")

    def _queries_of_reason(self, reason: str, ids: Sequence[int]) -> str:
        tiles = [self._tile(id_, "query", self._name_of_class(id_)) for id_ in ids[:SHOWN_IMAGES]]
        return _block(f"{_count(len(ids), 'query', 'queries')}: {escape(reason)}", tiles)

    def _shown(self, explained: str, count: int, blocks: Iterable[str], arrangement: str = "blocks") -> str:
        """The content of a section: an explanation, and the first of all findings, in columns or in rows."""
        if count == 0:
            return "<p>None.</p>"
        all_in = f"All {count:,} are in {escape(self._table)}."
        return f'<p>{explained} {all_in}</p><div class="{arrangement}">{"".join(blocks)}</div>'

    def _label(self, label: int) -> str:
        return f"<b>{escape(self._images.label(label))}</b>"

    def _name_of_class(self, id_: int) -> str:
        """The name of the class of an image."""
        return self._images.label(self._found.label_of[id_])

    def _tile(self, id_: int, style: str, text: str = "") -> str:
        """An image with a text and its name. The text is escaped here."""
        words = ""
        if text:
            words = f"<span>{escape(text)}</span>"
        name = escape(self._images.name(id_))
        return f'<li class="{style}">{self._picture(id_)}{words}<span class="path">{name}</span></li>'

    def _embedded(self, id_: int) -> str:
        picture, problem = embedded_picture(partial(self._images.picture_of, id_), self._images.name(id_), SIDE)
        if problem:
            self.missing[id_] = problem
        return picture


def _block(head: str, tiles: Iterable[str]) -> str:
    """A finding: a heading in HTML, and its images."""
    return f"<div><h3>{head}</h3><ul>{''.join(tiles)}</ul></div>"


def _count(number: int, singular: str, plural: str = "") -> str:
    if number == 1:
        return f"1 {singular}"
    return f"{number:,} {plural or singular + 's'}"


def _stairs(heights: Float[Tensor, " bin"]) -> str:
    """The path of a histogram in SVG, 1000 wide and 100 high, for heights from 0 to 1."""
    width = 1000 / len(heights)
    steps: Iterable[str] = (f"V{100 - 98 * height:.2f}h{width:.3f}" for height in heights.tolist())
    return f"M0 100{''.join(steps)}V100Z"
