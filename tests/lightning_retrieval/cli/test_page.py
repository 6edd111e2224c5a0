"""The page of search results: self-contained, safe, and usable with the keyboard in a browser."""

import base64
import io
import re
import shutil
from html.parser import HTMLParser

import pytest
from PIL import Image

from lightning_retrieval.cli.main import main
from lightning_retrieval.cli.page import result_page
from lightning_retrieval.cli.search_images import Hit, QueryResult
from tests.browser import Browser
from tests.lightning_retrieval.cli.glyph_commands import (
    STRANGE_NAME,
    command,
    indexing,
    paths_of,
)


class Page(HTMLParser):
    """What a page loads, its pictures' alternative texts, and its text."""

    def __init__(self, source):
        super().__init__()
        self.loads, self.alts, self.text, self.tags = [], [], "", []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.loads += [attributes[name] for name in ("src", "href", "srcset", "data") if name in attributes]
        if tag == "img":
            self.alts.append(attributes["alt"])

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(indexed):
    """The page of two queries, one of them with the odd name."""
    paths = paths_of(indexed / "images")
    queries = [str(indexed / "images" / paths[position]) for position in (0, 12)]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["search", "--index", str(indexed / "index"), *queries, "-k7", "--html", str(indexed / "results.html")])
    return indexed / "results.html"


def test_page_loads_nothing_and_escapes_file_names(page, indexed):
    assert not list(indexed.glob("*.part"))
    source = page.read_text(encoding="utf-8")
    found = Page(source)
    assert found.loads
    assert all(re.match(r"data:image/(png|jpeg);base64,|#q[12]$", target) for target in found.loads)
    assert not re.findall(r"url\(|@import|https?:|fetch\(|XMLHttp", source)
    assert found.tags.count("script") == 1
    assert found.tags.count("img") == len(found.alts) == 2 * 8
    odd = str(indexed / "images" / STRANGE_NAME)
    assert found.alts[0] == f"Query: {odd}"
    assert found.alts[1] == f"Result 1: {STRANGE_NAME}"
    assert odd in found.text
    assert len(re.findall(r"distance[\s\d.]+similarity", found.text)) == 2 * 7


def test_page_and_command_report_missing_images(indexed, tmp_path, capsys):
    shutil.copytree(indexed, tmp_path, dirs_exist_ok=True)
    command(capsys, *indexing(tmp_path, tmp_path / "index", "--overwrite"))
    shutil.rmtree(tmp_path / "images" / "2")
    query = tmp_path / "images" / paths_of(tmp_path / "images")[3]
    args = ["search", query, "--index", tmp_path / "index", "-k40", "--html", tmp_path / "page.html"]
    code, _, err = command(capsys, *args)
    assert code == 0
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert source.count("not readable now") == 10
    assert err.startswith(f"search: 10 of 40 results cannot be read in {tmp_path / 'images'}, the first: 2/deeper/2")
    assert err.endswith("; give the folder of the images with `--images`.\n")
    assert err.count("\n") == 1
    assert command(capsys, *args, "--images", indexed / "images")[::2] == (0, "")
    assert "not readable now" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def browser(page, tmp_path):
    """Chromium, which shows the page with all its pictures."""
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page.as_uri())
        browser.wait_for("document.readyState === 'complete' && document.documentElement.dataset.ready === '14'")
        yield browser
    finally:
        browser.close()


# The dialog tells of its end in an event, after the click.
KEYS = """new Promise((done) => {
const trace = [];
function press(...keys) {
  for (const key of keys) {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    const at = document.activeElement.closest(".card");
    trace.push(dialog.open ? document.getElementById("compared").textContent.split(":")[0]
      : at ? at.dataset.query + "." + at.dataset.rank : "-");
  }
}
press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "End", "ArrowRight", "Home", "a");
document.activeElement.click();
press("ArrowRight", "End", "ArrowRight");
trace.push(document.querySelectorAll("#left img, #right img").length);
dialog.addEventListener("close", () => {
  trace.push(document.activeElement.dataset.query + "." + document.activeElement.dataset.rank);
  done(trace);
});
dialog.querySelector("button").click();
})"""


def test_keys_move_between_results(browser):
    # Arrow right enters; a line of the window holds three cards; the dialog follows the arrows; closing it comes back.
    on_cards = ["-", "1.1", "1.2", "1.1", "1.4", "1.1", "1.7", "2.1", "2.1", "2.1"]
    trace = [*on_cards, "Query 2, rank 2", "Query 2, rank 7", "Query 2, rank 7", 2, "2.7"]
    assert browser.evaluate(KEYS) == trace


def test_cards_are_aligned_with_a_long_path_and_a_tall_picture(browser):
    script = """(async () => {
    const all = [...document.querySelectorAll("#q1 .card")];
    all[1].querySelector(".path").textContent = "long/".repeat(80) + "a.png";
    const own = (card) => { const box = card.getBoundingClientRect(), inner = card.children;
      return [...inner].slice(0, 4).map((part) => Math.round(part.getBoundingClientRect().top - box.top)).join(","); };
    const lines = all.map((card) => card.querySelector(".path"))
      .map((path) => path.getBoundingClientRect().height / parseFloat(getComputedStyle(path).lineHeight));
    const tops = [...new Set(all.map(own))].length;
    const tall = all[0].querySelector("img");
    tall.src = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='20' height='60'/>";
    await tall.decode();
    const over = tall.getBoundingClientRect().height - tall.parentNode.clientHeight;
    return { tops, lines: lines[1].toFixed(1), over, height: tall.naturalHeight };
    })()"""
    found = browser.evaluate(script)
    assert found["tops"] == 1
    assert found["lines"] == "4.0"
    assert found["height"] == 60
    assert found["over"] <= 1  # a tall picture is shown whole


def test_page_shows_its_pictures(browser, tmp_path):
    shown = "[...document.images].filter((image) => image.complete && image.naturalWidth > 0).length"
    assert browser.evaluate(shown) == 16
    browser.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (1000, 900)
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert len(colours) > 100  # text and pictures, not one empty sheet


def test_transparent_pixels_are_white_on_the_page(tmp_path):
    Image.new("RGBA", (4, 4), (9, 9, 9, 0)).save(tmp_path / "a.png")
    source, missing = result_page([QueryResult(str(tmp_path / "a.png"), [Hit(1, 0, "a.png", 1.0)])], tmp_path, "")
    assert not missing
    data = re.search(r"data:image/png;base64,([^\"]+)", source)[1]
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.getpixel((0, 0)) == (255, 255, 255)
