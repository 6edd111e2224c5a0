"""`demo`: its arguments, and its page in a real browser, in light and dark, and on a phone's width."""

import io
import json
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace

import httpx
import pytest
import torch
from PIL import Image

from benchmarks.timing import free_port
from lightning_retrieval import RetrievalIndex, RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import FrozenEmbedder, TextEmbedder
from lightning_retrieval.search.commands import demo
from lightning_retrieval.search.commands.demo import (
    INVITATION,
    MEGABYTES,
    NO_IMAGE,
    NO_TEXT,
    NOT_UPLOADED,
    SIDE,
    captioned,
    delete_old_files,
    is_allowed_host,
    random_pictures,
    thumbnail,
)
from lightning_retrieval.search.commands.search_images import Hit
from tests.browser import Browser
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of, paths_of, run, save_checkpoint
from tests.processes import start_processes

EXAMPLES = "document.querySelectorAll('#examples .thumbnail-item')"
INDEXED = "40 images of the folder images are indexed."
RESULTS = "document.querySelectorAll('#results .thumbnail-item')"
ABOUT = "document.querySelector('#about').innerText"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# Whether all pictures are loaded, and every caption is below its picture and within its frame.
DRAWN = """[...document.querySelectorAll('.pictures .thumbnail-item')].every(item => {
  const [picture, caption] = [item.querySelector("img"), item.querySelector(".caption-label")];
  const [above, below, frame] = [picture, caption, item].map(part => part.getBoundingClientRect());
  return picture.complete && picture.naturalWidth > 0 && above.bottom <= below.top + 1
    && below.bottom <= frame.bottom + 1 && caption.scrollWidth <= caption.clientWidth;
})"""


@pytest.fixture
def served(monkeypatch):
    """What would be served, until Ctrl-C is pressed at once."""
    calls = []

    def serve(searcher, images, **settings):
        calls.append((images, settings))
        return SimpleNamespace(local_url="http://127.0.0.1:7861/", close=lambda verbose: None)

    def press(folder):
        (folder / "upload.png").touch()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(demo, "serve_demo", serve)
    monkeypatch.setattr(demo, "delete_files_from_time_to_time", press)
    return calls


def test_the_page_of_an_index(indexed, served, tmp_path, capsys, monkeypatch):
    """At most as many results as images, which are in the folder that the index records; nothing is left at the end."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    code, out, _ = command(capsys, "demo", "--index", indexed / "index", "--port=7861", "-k1000")
    assert (code, out) == (0, "The page is at http://127.0.0.1:7861/; Ctrl-C ends it.\n")
    assert served == [(indexed / "images", {"k": 40, "host": "127.0.0.1", "port": 7861})]
    assert list(tmp_path.iterdir()) == []
    assert os.environ["GRADIO_TEMP_DIR"] == str(tmp_path)


@pytest.mark.refusal
def test_invalid_arguments(indexed, served, capsys, tmp_path):
    for option, rule in (
        ("-k=0", "argument -k: must be an integer >= 1, got 0"),
        ("-k=many", "argument -k: must be an integer >= 1, got many"),
        ("--port=65536", "argument --port: must be an integer from 1 to 65535, got 65536"),
    ):
        code, _, err = run(capsys, "demo", "--index=none", option)
        assert (code, err.splitlines()[-1]) == (
            2,
            f"lightning-retrieval demo: error: {rule}. See lightning-retrieval demo --help.",
        )
    error = error_of(capsys, "demo", "--index", indexed / "index", "--images", tmp_path / "moved")
    assert error.startswith(f"demo: `--images` must be the folder of the index's images, got {tmp_path / 'moved'}")
    index = RetrievalIndex.load(indexed / "index")
    del index.about["images"]  # as `predict` describes embeddings of a data set without image files
    index.save(tmp_path / "index")
    sentence = "`--images` must be given, because the index does not say where its images are.\n"
    assert error_of(capsys, "demo", "--index", tmp_path / "index") == f"demo: {sentence}"
    args = ["--index", tmp_path / "index", "query.png", "--html", tmp_path / "page.html"]
    assert error_of(capsys, "search", *args) == f"search: {sentence}"
    assert not served


@pytest.mark.refusal
def test_gradio_is_not_installed(indexed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    error = error_of(capsys, "demo", "--index", indexed / "index")
    assert error == "demo: the page needs Gradio; install it with pip install 'lightning-retrieval[demo]'.\n"


def test_pixels_of_a_small_image_become_squares_and_a_large_image_is_made_smaller(tmp_path):
    image = Image.new("RGB", (10, 6), "white")
    image.putpixel((3, 2), (255, 0, 0))
    image.save(tmp_path / "small.png")
    shown = thumbnail(tmp_path / "small.png")
    assert shown.size == (320, 192)
    assert set(shown.getcolors()) == {(32 * 32, (255, 0, 0)), (320 * 192 - 32 * 32, (255, 255, 255))}
    for size, expected in (((200, 100), (200, 100)), ((1280, 640), (SIDE, SIDE // 2))):
        Image.new("RGB", size).save(tmp_path / "large.png")
        assert thumbnail(tmp_path / "large.png").size == expected


def test_random_pictures_are_different_images_that_can_be_read(tmp_path):
    """Of 40 images one in four is damaged; an index whose images are all gone has none to offer."""
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    index = RetrievalIndex(8)
    index.add(torch.randn(40, 8), paths=[f"{number}.png" for number in range(40)])
    for number in range(0, 40, 4):
        (tmp_path / f"{number}.png").write_text("no image")
    drawn = [random_pictures(index, tmp_path, 3) for _ in range(40)]
    assert all(len({path for _, path in pictures}) == 3 for pictures in drawn)
    for picture, path in [pair for pictures in drawn for pair in pictures]:
        assert picture.getpixel((0, 0)) == (int(path.removesuffix(".png")), 0, 0)
    assert random_pictures(index, tmp_path / "moved", 3) == []


def test_a_damaged_result_becomes_a_grey_square(tmp_path, monkeypatch):
    for name, side in (("good.png", 8), ("large.png", 40)):
        Image.new("RGB", (side, side)).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # DecompressionBombError, of neither OSError nor ValueError
    hits = [Hit(1, 0, "good.png", 0.5), Hit(2, 1, "large.png", 0.25), Hit(3, 2, "gone.png", 0.125)]
    shown = captioned(hits, tmp_path)
    texts = ["0.500  good.png", "0.250  large.png (cannot be read)", "0.125  gone.png (cannot be read)"]
    assert [text for _, text in shown] == texts
    assert [image.getpixel((0, 0)) for image, _ in shown] == [(0, 0, 0), (128, 128, 128), (128, 128, 128)]


@pytest.mark.parametrize(
    ("host", "allowed", "refused"),
    [
        ("127.0.0.1", ["localhost", "LocalHost.:80", "127.0.0.1:7860", "[::1]:1"], ["evil.example", "10.0.0.5:7860"]),
        ("localhost", ["localhost:7860"], ["localhost.evil.example", "localhost@evil.example", "localhost:80:80", ""]),
        ("10.0.0.5", ["10.0.0.5:7860"], ["localhost", "evil.example", "[10.0.0.5", "10.0.0.5 evil"]),
        ("photos.lan", ["photos.lan", "PHOTOS.lan:1"], ["lan", "10.0.0.5"]),
        ("0.0.0.0", ["localhost", "photos.lan:7860", "10.0.0.5"], []),
        ("::", ["[fd00::1]:7860", "photos.lan"], []),
    ],
)
def test_the_names_that_the_page_answers(host, allowed, refused):
    assert all(is_allowed_host([name], host) for name in allowed)
    assert not any(is_allowed_host([name], host) for name in refused)
    if refused:
        assert not is_allowed_host([], host)
        assert not is_allowed_host([allowed[0], "evil.example"], host)


def test_old_files_are_deleted_with_their_folders(tmp_path):
    for name in ("old/a.png", "tmp123", "new/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    time.sleep(0.05)
    begin = time.time()
    time.sleep(0.05)
    (tmp_path / "new" / "b.png").write_text("new")
    delete_old_files(tmp_path, begin)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b.png"]
    for _ in range(2):  # a folder is old once it has not changed for that time
        delete_old_files(tmp_path, time.time() + 1)
    assert list(tmp_path.iterdir()) == []


def serve_after_a_used_port(rank, world_size, index, folder, port, used, *more):
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "uploads")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"  # a program that leaves a mark
    (folder / "gs").write_text(f"#!/bin/sh\ntouch '{folder / 'started'}'\n")
    (folder / "gs").chmod(0o755)
    serve = demo.serve_demo

    def serve_twice(searcher, images, *, port, **settings):
        try:
            serve(searcher, images, port=used, **settings)
        except OSError as error:
            print(error, flush=True)
        return serve(searcher, images, port=port, **settings)

    demo.serve_demo = serve_twice
    (folder / "pid").write_text(str(os.getpid()))
    main(["demo", f"--index={index}", f"--port={port}", "-k12", "--device=cpu", *more])


class Server:
    """A page that is being served, after an attempt to serve it on a port that is in use."""

    def __init__(self, indexed, folder, *more):
        port = free_port()
        self.address, self.folder, self.uploads = f"http://127.0.0.1:{port}", folder, folder / "uploads"
        self.uploads.mkdir()
        (folder / "process").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as used:
            self.used = used.getsockname()[1]
            args = (indexed / "index", folder, port, self.used, *more)
            (self.started,) = start_processes(serve_after_a_used_port, 1, *args, folder=folder / "process")
            end = time.monotonic() + 120
            while f"The page is at {self.address}/; Ctrl-C ends it." not in self.started.output():
                assert self.started.exit_code is None, self.started.output()
                assert time.monotonic() < end, self.started.output()
                time.sleep(0.2)

    def search(self, *data):
        """What the route `search` answers."""
        route = f"{self.address}/gradio_api/call/search"
        event = httpx.post(route, json={"data": data}).json()["event_id"]
        _, answer = httpx.get(f"{route}/{event}", timeout=60).text.strip().splitlines()
        return json.loads(answer.removeprefix("data: "))

    def upload(self, name, content):
        """The answer to an upload."""
        return httpx.post(f"{self.address}/gradio_api/upload", files={"files": (name, content)}, timeout=60)

    def search_for(self, name, content):
        """The answer to an upload and a search for it."""
        (path,) = self.upload(name, content).json()
        return self.search({"path": path, "meta": {"_type": "gradio.FileData"}})


@pytest.fixture(scope="module")
def server(indexed, tmp_path_factory):
    """The page that the tests below share; the last of them ends it."""
    pytest.importorskip("gradio")
    server = Server(indexed, tmp_path_factory.mktemp("server"))
    yield server
    server.started.end()


@pytest.mark.slow
@pytest.mark.refusal
def test_a_port_that_is_in_use_and_invalid_requests_are_answered_with_a_sentence(server):
    message = f"the page cannot be served on port {server.used} of 127.0.0.1, which may be in use; give another"
    assert message in server.started.output()
    for path in ("", "config", "gradio_api/info", "gradio_api/queue/status"):
        answer = httpx.get(f"{server.address}/{path}", headers={"Host": "evil.example:7860"})
        assert (answer.status_code, answer.text[:32]) == (421, "demo: the page is for 127.0.0.1 ")
    large = server.upload("large.png", b"0" * (MEGABYTES * 2**20 + 2**17))
    assert large.status_code == 413
    assert large.text == "demo: an upload must have at most 20 MB, and say its size; choose a smaller image."
    assert not list(server.uploads.rglob("large.png"))
    assert server.search(None)[1] == NO_IMAGE
    assert server.search()["error"] == NO_IMAGE
    for path in ("http://example.com/a.png", "HTTPS://example.com/a.png", None):
        assert server.search({"path": path, "meta": {"_type": "gradio.FileData"}})["error"] == NOT_UPLOADED


@pytest.mark.slow
@pytest.mark.refusal
@pytest.mark.hostile
def test_visitors_see_no_other_files_and_start_no_program(server, indexed):
    """Files of the server are not served, searched for or shown, and an upload in PostScript is not an image."""
    image = str(indexed / "images" / paths_of(indexed / "images")[0])
    for path in ("/etc/passwd", image, f"{server.uploads}/../pid", "/dev/zero"):
        assert server.search({"path": path, "meta": {"_type": "gradio.FileData"}})["error"]
        for route in (f"gradio_api/file={path}", f"gradio_api/file/{path}", f"static/..{path}", f"..{path}"):
            assert httpx.get(f"{server.address}/{route}", timeout=10).status_code >= 400
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "png")
    cut = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(cut, "png")
    for name, content in {
        "cat.jpg": eps,
        "cat.eps": eps,
        "bomb.png": bomb.getvalue(),
        "cut.png": cut.getvalue()[:999],
        "../../cat.png": b"text",
    }.items():
        assert "cannot be read as an image" in server.search_for(name, content)[1]
    assert not (server.folder / "started").exists()
    assert not [*server.folder.glob("cat.png"), *server.folder.parent.glob("cat.png")]
    assert server.started.exit_code is None
    content = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(content, "PNG")
    answer = server.search_for("wide.png", content.getvalue())
    assert answer[1] == r"**wide\.png** has too many pixels; choose one of at most 64 megapixels."


def search_from_the_empty_page(browser, name):
    """Search for an example on one page, and for a random image on the others; the examples then make room."""
    if name == "dark":
        query = browser.evaluate(f"{EXAMPLES}[1].innerText")
        browser.evaluate(f"{EXAMPLES}[1].click()")
    else:
        query = ""
        browser.evaluate("document.querySelector('#random').click()")
    browser.wait_for(f"{RESULTS}.length === 12 && {EXAMPLES}.length === 0 && {DRAWN}")
    first = browser.evaluate(f"{RESULTS}[0].innerText").split(maxsplit=1)[1]
    browser.wait_for(f"{ABOUT} === {first + ': 12 nearest of 40 images. Click one to search for it.'!r}")
    assert first.startswith(query)


@pytest.mark.slow
def test_the_page_in_a_browser(server, indexed, tmp_path):
    paths = paths_of(indexed / "images")
    backgrounds = {}
    browser = Browser(tmp_path / "profile")
    try:
        for name, width, dark in (("light", 1100, False), ("dark", 1100, True), ("phone", 390, False)):
            browser.open(server.address, width, dark=dark)
            browser.wait_for("document.querySelector('input[type=file]') !== null", 60)
            browser.wait_for(f"{EXAMPLES}.length === 3 && {DRAWN}")
            assert browser.evaluate("document.querySelector('#indexed').innerText").split("\n")[-1] == INDEXED
            assert browser.evaluate(ABOUT) == INVITATION.format(k=12)
            assert browser.evaluate(f"{RESULTS}.length") == 0
            search_from_the_empty_page(browser, name)
            browser.choose_file("input[type=file]", indexed / "images" / paths[5])
            about = "12 nearest of 40 images. Click one to search for it."
            found = paths[5].split("/")[-1] + ": " + about
            browser.wait_for(f"{ABOUT} === {found!r} && {RESULTS}.length === 12 && {DRAWN}")
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
        (tmp_path / "_notes_.png").write_text("no image")  # a name with Markdown in it
        browser.choose_file("input[type=file]", tmp_path / "_notes_.png")
        browser.wait_for(f"{ABOUT} === '_notes_.png cannot be read as an image; choose another file.'")
        assert browser.evaluate(f"{RESULTS}.length") == 12
    finally:
        browser.close()
    assert backgrounds["light"] == backgrounds["phone"] != backgrounds["dark"]


def type_words(browser, words):
    """Type words into the field for them and press Enter, with the keyboard alone."""
    browser.evaluate("document.querySelector('#words textarea, #words input').focus()")
    browser.call("Input.insertText", text=words)
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )


@pytest.mark.slow
def test_words_are_searched_for_in_a_browser(indexed, tmp_path, capsys):
    pytest.importorskip("gradio")
    torch.manual_seed(0)
    frozen = FrozenEmbedder(checkpoint=RetrievalIndex.load(indexed / "index").about["checkpoint"])
    dim = RetrievalIndex.load(indexed / "index").dim
    texts = TextEmbedder("ngram_net", dim, backbone_args={"buckets": 500, "dim": 8})
    module = RetrievalModule(frozen, SmoothAPLoss(), sides=TwoNetworks(texts))
    checkpoint = save_checkpoint(tmp_path / "texts.ckpt", module)
    given = ["search", f"--index={indexed / 'index'}", f"--checkpoint={checkpoint}", "--text=red <b>shoes", "--json"]
    nearest = json.loads(command(capsys, *given)[1])["queries"][0]["results"][0]["path"]
    server = Server(indexed, tmp_path, f"--checkpoint={checkpoint}")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(server.address, 400)
        browser.wait_for("document.querySelector('#words textarea, #words input') !== null", 60)
        browser.wait_for(f"{EXAMPLES}.length === 3 && {DRAWN}")
        assert browser.evaluate(ABOUT).startswith("Type what you look for and press Enter.")
        type_words(browser, "red <b>shoes")
        about = "red <b>shoes: 12 nearest of 40 images. Click one to search for it."
        browser.wait_for(f"{ABOUT} === {about!r} && {RESULTS}.length === 12 && {DRAWN}")
        assert browser.evaluate(f"{RESULTS}[0].innerText").split(maxsplit=1)[1] == nearest
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
        browser.picture(tmp_path / "words.png")
        browser.evaluate(f"{RESULTS}[0].click()")
        browser.wait_for(f"{ABOUT}.startsWith({nearest!r}) && {DRAWN}")
        browser.evaluate("document.querySelector('#words textarea, #words input').select()")
        type_words(browser, "   ")
        browser.wait_for(f"{ABOUT} === {NO_TEXT!r}")
    finally:
        browser.close()
        server.started.end()


@pytest.mark.slow
def test_files_of_visitors_are_private_and_deleted_at_the_end(server, indexed):
    image = (indexed / "images" / paths_of(indexed / "images")[5]).read_bytes()
    assert "12 nearest of 40 images" in server.search_for("5.png", image)[1]
    (folder,) = server.uploads.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("5.png"))
    os.kill(int((server.folder / "pid").read_text()), signal.SIGTERM)
    assert server.started.wait(30) == 0
    assert list(server.uploads.iterdir()) == []
