"""The page of a comparison of losses: its table, with a plot of the intervals. It needs no server and no other file."""

from html import escape
from pathlib import Path
from string import Template

from lightning_retrieval.files import new_file, writing
from lightning_retrieval.search.commands.comparison import ComparedLoss, Comparison
from lightning_retrieval.search.html_page import page_target, shared_style

PAGE = Path(__file__).with_name("comparison.html")
WIDTH, MARGIN, HEIGHT = 300, 10, 20  # of the plot of a row


def write_comparison(page: Path, found: Comparison) -> None:
    """Write the page of a comparison.

    Args:
        page: the file.
        found: the comparison.
    """
    ends = [0.0, *(end for row in found.losses for end in row.interval)]  # without the embeddings, which may be far off
    low, high = min(ends), max(ends)
    source = Template(PAGE.read_text(encoding="utf-8")).substitute(
        style=shared_style(),
        about=escape(found.about()),
        low=f"{low:+.3f}",
        high=f"{high:+.3f}",
        rows="".join(_row(row, low, high) for row in found.rows),
        said=escape(found.conclusion()).replace("\n", "<br>"),
    )
    with writing(page), new_file(page_target("html", page)) as file:
        file.write(source.encode())


def _row(row: ComparedLoss, low: float, high: float) -> str:
    """The HTML of a loss, whose plot reaches from the lowest to the highest end of all intervals."""
    scale = (WIDTH - 2 * MARGIN) / (high - low or 1.0)
    in_row = (0.0, row.interval[0], row.difference, row.interval[1])
    zero, start, mean, end = (MARGIN + scale * (min(max(value, low), high) - low) for value in in_row)
    lines = [_line("zero", zero, 0, zero, HEIGHT)]
    lines.append(_line("interval", start, HEIGHT / 2, end, HEIGHT / 2))
    lines.append(_line("mean", mean, HEIGHT / 2, mean, HEIGHT / 2))
    label = f"{row.difference:+.4f}, from {row.interval[0]:+.4f} to {row.interval[1]:+.4f}"
    plot = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(lines)}</svg>'
    numbers = [f"{row.mean_ap:.4f}", f"{row.r_at_1:.4f}", "", "", f"{row.seconds:.1f}"]
    if row.interval != (0, 0):  # of the best one
        numbers[2:4] = [f"{row.difference:+.4f}", f"{row.interval[0]:+.4f} to {row.interval[1]:+.4f}"]
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f'<tr><td>{escape(row.name)}</td><td class="plot">{plot}</td>{cells}</tr>\n'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
