"""The page of search results: self-contained, safe, and usable with the keyboard in a browser."""

import base64
import io
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from PIL import Image

from lightning_retrieval.cli.main import main
from lightning_retrieval.cli.page import result_page
from lightning_retrieval.cli.search_images import Hit, QueryResult
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
    command(capsys, *indexing(tmp_path, tmp_path / "index"))
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
    """Call Chromium on the page, with a script of the test's own behind it; the document that it makes of it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        assert os.environ.get("CI") != "true", "CI has to look at the page: install chromium"
        pytest.skip("there is no Chromium to look at the page with")

    def run(script, *more):
        source = page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
        (tmp_path / "page.html").write_text(source, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,900"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", *more]
        done = subprocess.run(
            [program, *flags, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


KEYS = """
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
  document.documentElement.dataset.trace = trace.join("|");
});
dialog.querySelector("button").click();
"""


def test_keys_move_between_results(browser):
    document = browser(KEYS, "--dump-dom", "--virtual-time-budget=10000")
    html = re.search(r"<html[^>]*>", document)[0]
    assert 'data-ready="14"' in html
    trace = re.search(r'data-trace="([^"]*)"', html)[1].split("|")
    # Arrow right enters; a line of the window holds three cards; the dialog follows the arrows; closing it comes back.
    on_cards = ["-", "1.1", "1.2", "1.1", "1.4", "1.1", "1.7", "2.1", "2.1", "2.1"]
    assert trace == [*on_cards, "Query 2, rank 2", "Query 2, rank 7", "Query 2, rank 7", "2", "2.7"]


def test_cards_are_aligned_with_a_long_path_and_a_tall_picture(browser):
    script = """const all = [...document.querySelectorAll("#q1 .card")];
    all[1].querySelector(".path").textContent = "long/".repeat(80) + "a.png";
    const own = (card) => { const box = card.getBoundingClientRect(), inner = card.children;
      return [...inner].slice(0, 4).map((part) => Math.round(part.getBoundingClientRect().top - box.top)).join(","); };
    const lines = all.map((card) => card.querySelector(".path"))
      .map((path) => path.getBoundingClientRect().height / parseFloat(getComputedStyle(path).lineHeight));
    document.documentElement.dataset.tops = [...new Set(all.map(own))].length;
    const tall = all[0].querySelector("img");
    tall.src = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='20' height='60'/>";
    addEventListener("load", () => {
      const over = tall.getBoundingClientRect().height - tall.parentNode.clientHeight;
      document.documentElement.dataset.overflow = over > 1;
    });
    document.documentElement.dataset.lines = lines[1].toFixed(1);"""
    html = re.search(r"<html[^>]*>", browser(script, "--dump-dom", "--virtual-time-budget=10000"))[0]
    assert 'data-tops="1"' in html
    assert 'data-lines="4.0"' in html
    assert 'data-overflow="false"' in html  # a tall picture is shown whole


def test_page_shows_its_pictures(browser, tmp_path):
    script = """document.documentElement.dataset.shown =
      [...document.images].filter((image) => image.complete && image.naturalWidth > 0).length;"""
    document = browser(f"addEventListener('load', () => {{ {script} }});", "--dump-dom", "--virtual-time-budget=10000")
    assert 'data-shown="16"' in document
    browser("", f"--screenshot={tmp_path / 'page.png'}")
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
