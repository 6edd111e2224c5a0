"""The page of `demo`, in a real browser: upload, search by a result, errors, in light and dark, on a phone's width."""

import socket
import subprocess
import sys
import time

import pytest
from PIL import Image

from lightning_retrieval.cli.demo_page import SIDE, captioned, thumbnail
from lightning_retrieval.cli.search_images import Hit
from tests.browser import Browser
from tests.lightning_retrieval.cli.glyph_commands import paths_of
from tests.processes import StartedCommand

RESULTS = "document.querySelectorAll('#results .thumbnail-item')"
ABOUT = "document.querySelector('#about').innerText"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# Whether all pictures are loaded, and every caption is below its picture and within its frame.
DRAWN = f"""[...{RESULTS}].every(item => {{
  const [picture, caption] = [item.querySelector("img"), item.querySelector(".caption-label")];
  const [above, below, frame] = [picture, caption, item].map(part => part.getBoundingClientRect());
  return picture.complete && picture.naturalWidth > 0 && above.bottom <= below.top + 1
    && below.bottom <= frame.bottom + 1 && caption.scrollWidth <= caption.clientWidth;
}})"""


def test_pixels_of_a_small_image_become_squares(tmp_path):
    image = Image.new("RGB", (10, 6), "white")
    image.putpixel((3, 2), (255, 0, 0))
    image.save(tmp_path / "small.png")
    shown = thumbnail(tmp_path / "small.png")
    assert shown.size == (320, 192)
    assert set(shown.getcolors()) == {(32 * 32, (255, 0, 0)), (320 * 192 - 32 * 32, (255, 255, 255))}


@pytest.mark.parametrize(("size", "shown"), [((200, 100), (200, 100)), ((1280, 640), (SIDE, SIDE // 2))])
def test_a_large_image_is_made_smaller(size, shown, tmp_path):
    Image.new("RGB", size).save(tmp_path / "large.png")
    assert thumbnail(tmp_path / "large.png").size == shown


def test_a_damaged_result_becomes_a_grey_square(tmp_path, monkeypatch):
    for name, side in (("good.png", 8), ("large.png", 40)):
        Image.new("RGB", (side, side)).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # DecompressionBombError, of neither OSError nor ValueError
    hits = [Hit(1, 0, "good.png", 0.5), Hit(2, 1, "large.png", 0.25), Hit(3, 2, "gone.png", 0.125)]
    shown = captioned(hits, tmp_path)
    texts = ["0.500  good.png", "0.250  large.png (cannot be read)", "0.125  gone.png (cannot be read)"]
    assert [text for _, text in shown] == texts
    assert [image.getpixel((0, 0)) for image, _ in shown] == [(0, 0, 0), (128, 128, 128), (128, 128, 128)]


@pytest.mark.slow
def test_a_port_that_is_in_use(indexed):
    pytest.importorskip("gradio")
    program = [sys.executable, "-m", "lightning_retrieval.cli", "demo", f"--index={indexed / 'index'}", "--device=cpu"]
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        done = subprocess.run([*program, f"--port={port}"], capture_output=True, text=True, timeout=300)
    where = f"port {port} of 127.0.0.1, which may be in use"
    assert done.returncode == 2
    assert done.stderr.endswith(f"demo: the page cannot be served on {where}; give another `--port` or `--host`.\n")


@pytest.fixture
def address(indexed, tmp_path):
    """A page that is being served."""
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "lightning_retrieval.cli", "demo", f"--index={indexed / 'index'}", "-k12"]
    started = StartedCommand([*program, f"--port={port}", "--device=cpu"], tmp_path)
    end = time.monotonic() + 120
    while f"The page is at http://127.0.0.1:{port}/; Ctrl-C ends it." not in started.output():
        assert started.process.poll() is None, started.output()
        assert time.monotonic() < end, started.output()
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    started.end()


@pytest.mark.slow
def test_the_page_in_a_browser(address, indexed, tmp_path):
    paths = paths_of(indexed / "images")
    backgrounds = {}
    browser = Browser(tmp_path / "profile")
    try:
        for name, width, dark in (("light", 1100, False), ("dark", 1100, True), ("phone", 390, False)):
            browser.open(address, width, dark=dark)
            browser.wait_for("document.querySelector('input[type=file]') !== null", 60)
            assert browser.evaluate(ABOUT) == "Choose an image file to see the nearest of 40 images."
            browser.choose_file("input[type=file]", indexed / "images" / paths[5])
            browser.wait_for(f"{RESULTS}.length === 12 && {DRAWN}")
            about = "12 nearest of 40 images. Click one to search for it."
            assert browser.evaluate(ABOUT) == f"{paths[5].split('/')[-1]}: {about}"
            assert browser.evaluate(f"{RESULTS}[0].innerText").split() == ["1.000", paths[5]]
            clicked = browser.evaluate(f"{RESULTS}[3].innerText").split(maxsplit=1)[1]
            browser.evaluate(f"{RESULTS}[3].scrollIntoView()")
            if name == "phone":
                assert browser.evaluate("window.scrollY") > 0
            browser.evaluate(f"{RESULTS}[3].click()")
            browser.wait_for(f"{ABOUT} === {clicked + ': ' + about!r} && {DRAWN}")
            browser.wait_for("window.scrollY === 0")  # where the new query is
            assert browser.evaluate(f"{RESULTS}[0].innerText").split(maxsplit=1)[1] == clicked
            assert browser.evaluate("document.querySelectorAll('.thumbnail-item.selected').length") == 0
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            backgrounds[name] = browser.evaluate(BACKGROUND)
            browser.picture(tmp_path / f"{name}.png")
        (tmp_path / "notes.png").write_text("no image")
        browser.choose_file("input[type=file]", tmp_path / "notes.png")
        browser.wait_for(f"{ABOUT} === 'notes.png cannot be read as an image; choose another file.'")
        assert browser.evaluate(f"{RESULTS}.length") == 12
    finally:
        browser.close()
    assert backgrounds["light"] == backgrounds["phone"] != backgrounds["dark"]
