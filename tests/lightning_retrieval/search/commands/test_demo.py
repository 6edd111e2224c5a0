"""`demo`: its page in a real browser and on a phone's width, and what visitors may do."""

import contextlib
import io
import json
import os
import signal
import socket
import time

import httpx
import pytest
import torch
from PIL import Image

from benchmarks.timing import free_port
from lightning_retrieval import RetrievalIndex, RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import FrozenEmbedder, TextEmbedder
from tests.browser import Browser
from tests.lightning_retrieval.search.commands.glyph_commands import command, paths_of, save_checkpoint
from tests.processes import start_processes

EXAMPLES = "document.querySelectorAll('#examples .thumbnail-item')"
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


def serve(rank, world_size, index, folder, port, *more):
    """Serve the page, on a machine behind proxies that do not know it."""
    os.environ.update(http_proxy="http://127.0.0.1:9", ALL_PROXY="socks5://127.0.0.1:9")
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "uploads")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"  # a program that leaves a mark
    (folder / "gs").write_text(f"#!/bin/sh\ntouch '{folder / 'started'}'\n")
    (folder / "gs").chmod(0o755)
    (folder / "pid").write_text(str(os.getpid()))
    main(["demo", f"--index={index}", f"--port={port}", "-k12", "--device=cpu", *more])


class Server:
    """A page that is being served."""

    def __init__(self, indexed, folder, *more, host="127.0.0.1"):
        port = free_port()
        self.address, self.folder, self.uploads = f"http://{host}:{port}", folder, folder / "uploads"
        self.uploads.mkdir()
        (folder / "process").mkdir()
        args = (indexed / "index", folder, port, *more)
        (self.started,) = start_processes(serve, 1, *args, folder=folder / "process")
        end = time.monotonic() + 120
        while self.address not in self.started.output():
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


def serve_on_a_port(rank, world_size, index, port):
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main(["demo", f"--index={index}", f"--port={port}", "--device=cpu"])
    return printed.getvalue()


@pytest.mark.slow
def test_a_port_that_is_in_use_is_named(indexed, run_alone):
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert str(port) in run_alone(serve_on_a_port, indexed / "index", port)


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address of IPv6")
@pytest.mark.parametrize("given", ["::1", "[::1]"])
def test_the_page_has_an_address_of_ipv6(given, indexed, tmp_path):
    pytest.importorskip("gradio")
    server = Server(indexed, tmp_path, f"--host={given}", host="[::1]")
    answers = [httpx.get(server.address, headers=headers) for headers in ({}, {"Host": "evil.example"})]
    server.started.end()
    assert [answer.status_code for answer in answers] == [200, 400]


@pytest.mark.slow
def test_other_hosts_large_files_and_addresses_are_refused(server):
    for path in ("", "config", "gradio_api/info", "gradio_api/queue/status"):
        answer = httpx.get(f"{server.address}/{path}", headers={"Host": "evil.example:7860"})
        assert 400 <= answer.status_code < 500
    assert server.upload("large.png", b"0" * (20 * 2**20 + 2**17)).status_code == 413
    assert not list(server.uploads.rglob("large.png"))
    for path in ("http://example.com/a.png", "HTTPS://example.com/a.png", None):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        for data in (file, [file], {"path": "/a.png", "more": [file]}):
            assert "upload" in server.search(data)["error"]


@pytest.mark.slow
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
        assert name.split("/")[-1].split(".")[0] in server.search_for(name, content)["error"]
    assert not (server.folder / "started").exists()
    assert not [*server.folder.glob("cat.png"), *server.folder.parent.glob("cat.png")]
    assert server.started.exit_code is None


@pytest.mark.slow
def test_a_program_gets_named_fields(server, indexed):
    path = paths_of(indexed / "images")[5]
    (found,) = server.search_for("query.png", (indexed / "images" / path).read_bytes())
    assert len(found) == 12
    assert (found[0]["file"], round(found[0]["score"], 3)) == (path, 1.0)
    assert all(row.keys() == {"file", "score", "metadata"} for row in found)


@pytest.mark.slow
def test_the_page_in_a_browser(server, indexed, tmp_path):
    """A random image, an example, an upload and a result are searched for; in light, in dark and on a phone's width."""
    path = paths_of(indexed / "images")[5]
    backgrounds = {}
    browser = Browser(tmp_path / "profile")
    try:
        for name, width, dark in (("light", 1100, False), ("dark", 1100, True), ("phone", 390, False)):
            browser.open(server.address, width, dark=dark)
            browser.wait_for("document.querySelector('input[type=file]') !== null", 60)
            browser.wait_for(f"{EXAMPLES}.length === 3 && {RESULTS}.length === 0 && {DRAWN}")
            if name == "dark":
                query = browser.evaluate(f"{EXAMPLES}[1].innerText")
                browser.evaluate(f"{EXAMPLES}[1].click()")
            else:
                query = ""
                browser.evaluate("document.querySelector('#random').click()")
            browser.wait_for(f"{RESULTS}.length === 12 && {EXAMPLES}.length === 0 && {DRAWN}")
            assert query in browser.evaluate(f"{RESULTS}[0].innerText")
            browser.choose_file("input[type=file]", indexed / "images" / path)
            browser.wait_for(f"{ABOUT}.startsWith({path.split('/')[-1]!r}) && {RESULTS}.length === 12 && {DRAWN}")
            assert browser.evaluate(f"{RESULTS}[0].innerText").split() == ["1.000", path]
            clicked = browser.evaluate(f"{RESULTS}[3].innerText").split(maxsplit=1)[1]
            browser.evaluate(f"{RESULTS}[3].click()")
            browser.wait_for(f"{ABOUT}.startsWith({clicked!r}) && {DRAWN}")
            assert browser.evaluate(f"{RESULTS}[0].innerText").split(maxsplit=1)[1] == clicked
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            backgrounds[name] = browser.evaluate(BACKGROUND)
        (tmp_path / "_notes_.png").write_text("no image")  # a name with Markdown in it
        browser.choose_file("input[type=file]", tmp_path / "_notes_.png")
        browser.wait_for(f"{ABOUT}.startsWith('_notes_.png')")
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
        type_words(browser, "red <b>shoes")
        browser.wait_for(f"{ABOUT}.startsWith('red <b>shoes') && {RESULTS}.length === 12 && {DRAWN}")
        assert browser.evaluate(f"{RESULTS}[0].innerText").split(maxsplit=1)[1] == nearest
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
        browser.evaluate(f"{RESULTS}[0].click()")
        browser.wait_for(f"{ABOUT}.startsWith({nearest!r}) && {DRAWN}")
    finally:
        browser.close()
        server.started.end()


@pytest.mark.slow
def test_files_of_visitors_are_private_and_deleted_at_the_end(server, indexed):
    image = (indexed / "images" / paths_of(indexed / "images")[5]).read_bytes()
    assert "error" not in server.search_for("5.png", image)
    (folder,) = server.uploads.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("5.png"))
    os.kill(int((server.folder / "pid").read_text()), signal.SIGTERM)
    assert server.started.wait(30) == 0
    assert list(server.uploads.iterdir()) == []
