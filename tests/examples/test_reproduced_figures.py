"""examples/figures.py: each figure is drawn in less than a minute of CPU time, with named axes, and shows what its text
says. What is written on the page is what the code draws."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from lightning_retrieval.losses import blackbox_rank
from tests.examples.scripts import imported

EXAMPLES = Path(__file__).parents[2] / "examples"
WRITTEN = EXAMPLES.parent / "docs" / "images" / "reproduce"
NAMES = (
    *("indicator", "ap_error", "interpolation", "batch_ap", "collapse", "list_length", "bins_and_margin"),
    *("decomposability", "classes_in_a_batch", "triplets"),
)
TRAINED = ("batch_ap", "collapse", "decomposability", "classes_in_a_batch", "triplets")  # of networks trained for it

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with imported(EXAMPLES, "figures") as module:
        yield module
    torch.set_num_threads(threads)


def numbers(drawn, column):
    """The numbers of a column of a table, without its title."""
    return [float(row[column].replace(",", "").split()[0]) for row in drawn.table[1:]]


def shows_indicator(drawn):
    for tau, width in zip((0.01, 0.05, 0.1), numbers(drawn, 1), strict=True):
        assert width == pytest.approx(12 * tau, rel=0.01)  # not cut by the end of the interval


def shows_ap_error(drawn):
    errors = numbers(drawn, 1)
    assert errors[:5] == sorted(errors[:5], reverse=True)  # of falling temperatures
    assert errors[5:] == sorted(errors[5:], reverse=True)  # of rising numbers of bins


def shows_batch_ap(drawn):
    values = numbers(drawn, 1)
    assert values == sorted(values, reverse=True)


def shows_collapse(drawn):
    without, with_margin = numbers(drawn, 3)
    assert without < 0.05 < 0.5 < with_margin


def shows_bins_and_margin(drawn):
    widths, margins = numbers(drawn, 1), numbers(drawn, 2)
    assert margins == sorted(margins, reverse=True)
    for width, margin in zip(widths, margins, strict=True):
        assert 0.99 <= margin / width <= 2.01


def shows_interpolation(drawn):
    assert numbers(drawn, 2) == sorted(numbers(drawn, 2))


def shows_decomposability(drawn):
    for first in (1, 3):  # training images, other classes
        alone, both = (torch.tensor(list(map(float, row[3:]))) for row in drawn.table[first : first + 2])
        assert (alone.diff() < 0).all()
        gain = alone - both
        assert gain[0] > 0
        assert gain[4:].abs().max() < 0.0065  # from 256 images on


def shows_classes_in_a_batch(drawn):
    values = numbers(drawn, 1)
    assert values[:4] == sorted(values[:4])
    assert max(values) == values[3]  # 64 classes


def shows_list_length(drawn):
    shortest, _, longest = numbers(drawn, 1)
    assert 30 < longest / shortest < 1000  # of 100 times the length, on a machine that may do other work


def shows_triplets(drawn):
    (_, *by_ap), (_, *by_triplets) = drawn.table[1:]
    backward, forward, updates = ([int(row[n].replace(",", "")) for row in (by_ap, by_triplets)] for n in range(3))
    for ap, triplets in (backward, forward, updates):
        assert ap < triplets
    assert float(by_ap[4]) == pytest.approx(float(by_triplets[4]), abs=0.05)


SHOWS = {
    "indicator": shows_indicator,
    "list_length": shows_list_length,
    "classes_in_a_batch": shows_classes_in_a_batch,
    "ap_error": shows_ap_error,
    "batch_ap": shows_batch_ap,
    "collapse": shows_collapse,
    "bins_and_margin": shows_bins_and_margin,
    "interpolation": shows_interpolation,
    "decomposability": shows_decomposability,
    "triplets": shows_triplets,
}


def split_numbers(text):
    """A text without its decimal fractions and times, and the fractions."""
    text = re.sub(r"[\d.]+ s\b", "TIME", text)
    fraction = r"\d*\.\d+"
    return re.sub(fraction, "FRACTION", text), [float(number) for number in re.findall(fraction, text)]


def check_written(drawn, written, tolerance):
    """The finding and the table are those that are written, up to a tolerance of fractions, and times."""
    shape = [len(row) for row in drawn.table]
    assert shape == [len(row) for row in written["table"]]
    found_texts = [drawn.finding, *(cell for row in drawn.table for cell in row)]
    written_texts = [written["finding"], *(cell for row in written["table"] for cell in row)]
    for found, expected in zip(found_texts, written_texts, strict=True):
        (words, fractions), (expected_words, expected_fractions) = split_numbers(found), split_numbers(expected)
        assert words == expected_words, "draw it again: python examples/figures.py"
        assert fractions == pytest.approx(expected_fractions, abs=tolerance), (found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_has_named_axes_and_shows_what_its_text_says(name, figures):
    start = time.process_time()
    drawn = figures.FIGURES[name][1]()
    assert time.process_time() - start < 60
    axes = drawn.figure.get_axes()
    assert all(part.get_ylabel() for part in axes)
    assert all(part.get_xlabel() for part in axes if part.get_label() != "<colorbar>")
    colours = {line.get_color() for part in axes for line in part.get_lines()}
    assert len(colours) > 1 or name in ("classes_in_a_batch", "interpolation")
    assert {len(row) for row in drawn.table} == {len(drawn.table[0])}
    SHOWS[name](drawn)
    written = json.loads((WRITTEN / "figures.json").read_text(encoding="utf-8"))[name]
    # A network that is trained on a processor that rounds otherwise is another one.
    check_written(drawn, written, tolerance=0.02 if name in TRAINED else 0.005)


def test_all_figures_are_written_and_on_the_page(figures):
    written = json.loads((WRITTEN / "figures.json").read_text(encoding="utf-8"))
    assert tuple(written) == tuple(figures.FIGURES) == NAMES
    page = (EXAMPLES.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert (WRITTEN / f"{name}.png").stat().st_size > 5000
        assert f"(images/reproduce/{name}.png)" in page
        assert written[name]["title"] == figures.FIGURES[name][0]


def test_the_command_draws_the_figures_that_are_named(figures, tmp_path, capsys):
    figures.main(["indicator", "--output", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "indicator.png"]
    with pytest.raises(SystemExit, match=r"^2$"):
        figures.main(["no_figure", "--output", str(tmp_path)])


@pytest.mark.parametrize("lambda_", [3.0, 8.0])
def test_the_gradient_of_the_library_is_that_of_the_interpolation(figures, lambda_):
    """Of RaMBO's interpolated loss, by differences; it is linear on pieces, so a small step gives the exact slope."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 9, generator=generator, dtype=torch.float64).requires_grad_()
    relevant = torch.arange(9) < 3
    length, gradient = 9, relevant.double() / 3
    (blackbox_rank(scores, lambda_) / length @ gradient).sum().backward()
    steps = 1e-7 * torch.eye(9, dtype=torch.float64)
    above, below = (figures.interpolated_loss(scores.detach() + sign * steps, relevant, lambda_) for sign in (1, -1))
    assert torch.allclose((above - below) / 2e-7, scores.grad[0], atol=1e-6)
    assert scores.grad.any()
