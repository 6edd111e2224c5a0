"""`search`: what it prints, its page, which is self-contained and safe, its exit codes and its error messages."""

import base64
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.command_line import printable
from lightning_retrieval.models import Preparation
from lightning_retrieval.search.commands.demo import captioned
from lightning_retrieval.search.commands.search import result_page
from lightning_retrieval.search.commands.search_images import Hit, QueryResult, search_images
from lightning_retrieval.search.image_files import name_folder
from tests.browser import Browser
from tests.lightning_retrieval.search.commands.glyph_commands import STRANGE_NAME, command, error_of, indexing, paths_of


def test_search_ranks_as_the_model_does(glyphs, indexed, capsys):
    _, embeddings = glyphs
    paths = paths_of(indexed / "images")
    queries = [indexed / "images" / paths[position] for position in (7, 0)]
    code, out, err = command(capsys, "search", "--index", indexed / "index", *queries, "-k", 40, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["unreadable"] == []
    unit = embeddings.double() / embeddings.double().norm(dim=1, keepdim=True)
    for position, query, result in zip((7, 0), queries, found["queries"]):
        scores = dict(zip(paths, (unit @ unit[position]).tolist()))
        assert result["query"] == str(query)
        hits = result["results"]
        assert sorted(hit["path"] for hit in hits) == sorted(paths)
        assert [hit["rank"] for hit in hits] == list(range(1, 41))
        for hit in hits:
            assert hit["similarity"] == pytest.approx(scores[hit["path"]], abs=1e-5)
            assert hit["distance"] == pytest.approx(1 - scores[hit["path"]], abs=1e-5)
        assert sorted(hits, key=lambda hit: -hit["similarity"]) == hits
        assert hits[0]["path"] == paths[position]


ONLY_SEARCH = """
import sys
from lightning_retrieval.cli.main import main

main(sys.argv[1:])
unused = "pytorch_lightning lightning_fabric torchmetrics jsonargparse wandb matplotlib pandas pyarrow".split()
assert not sys.modules.keys() & set(unused), sys.modules.keys() & set(unused)
"""


def test_a_search_imports_neither_lightning_nor_other_packages_of_training(indexed):
    query = indexed / "images" / paths_of(indexed / "images")[3]
    program = [sys.executable, "-c", ONLY_SEARCH, "search", f"--index={indexed / 'index'}", "--device=cpu", str(query)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.posix
def test_a_query_may_have_a_name_that_no_list_of_images_may_have(indexed, tmp_path, capsys):
    query = tmp_path / "a\\..\\b.png"
    query.write_bytes((indexed / "images" / paths_of(indexed / "images")[3]).read_bytes())
    code, out, err = command(capsys, "search", "--index", indexed / "index", query, "-k1", "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)["queries"]
    assert found["query"] == str(query)
    assert found["results"][0]["path"] == paths_of(indexed / "images")[3]


def test_table(indexed, capsys, monkeypatch):
    monkeypatch.chdir(indexed / "images")
    query = paths_of(Path())[3]
    code, out, err = command(capsys, "search", "--index=../index", query, "-k2")
    assert (code, err) == (0, "")
    title, heads, first, second = out.splitlines()
    assert (title, heads.split()) == (query, ["rank", "similarity", "distance", "path"])
    assert first.split() == ["1", "1.0000", "0.0000", query]
    assert second.split()[0] == "2"


def test_unreadable_queries_are_named_and_the_others_searched(indexed, tmp_path, capsys):
    good = indexed / "images" / paths_of(indexed / "images")[3]
    missing, args = tmp_path / "gone.png", ["--index", indexed / "index", "-k1", "--json"]
    code, out, err = command(capsys, "search", good, missing, *args)
    assert code == 1
    assert err == f"search: cannot read the image {missing} (No such file or directory); skipped.\n"
    assert [result["query"] for result in json.loads(out)["queries"]] == [str(good)]
    assert json.loads(out)["unreadable"] == [{"path": str(missing), "reason": "No such file or directory"}]
    code, out, err = command(capsys, "search", missing, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"search: none of the 1 queries can be read, the first: cannot read the image {missing} (")
    folder = indexed / "images"
    for query, shown in ((folder, folder), (f"{folder}/", folder), ("", ".")):
        code, out, err = command(capsys, "search", query, *args)
        assert (code, out) == (2, "")
        assert err.endswith(f"(it is a folder, not a file); give the images in it, such as {shown}/*.\n")


@pytest.mark.refusal
def test_invalid_arguments_are_reported_in_one_sentence(indexed, tmp_path, capsys, monkeypatch):
    RetrievalIndex(4).save(tmp_path / "other")
    search = ["search", indexed / "images" / paths_of(indexed / "images")[3], "--index"]
    none = tmp_path / "none"
    for args, message in (
        ([indexed / "index", "-k41"], "search: `-k` must be at most the number of rows in the index, 40, got 41"),
        ([indexed / "index", "-k0"], "`-k` must be an integer >= 1, got 0"),
        ([tmp_path], f"must be a folder with manifest.json in it, got {tmp_path}; `lightning-retrieval index` writes"),
        ([tmp_path / "other"], "search: `--index` must be an index of images that `lightning-retrieval index` made."),
        ([none, "--html", tmp_path], f"search: `--html` must be a file in an existing folder, got {tmp_path}"),
        ([none, "--html", tmp_path / "gone" / "a.html"], "`--html` must be a file in an existing folder"),
        ([none, "--images", tmp_path / "gone"], "`--images` must be the folder of the index's images, got "),
    ):
        assert message in error_of(capsys, *search, *args)
    with pytest.raises(TypeError, match=r"^RetrievalIndex: `k` must be an integer >= 1, got 2\.5 \(float\)\.$"):
        search_images(RetrievalIndex.load(indexed / "index"), ["a.png"], k=2.5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    error = error_of(capsys, "search", "--index", indexed / "index", "query.png")
    assert error == "search: needs faiss, which cannot be imported; pip install faiss-cpu.\n"


@pytest.mark.refusal
def test_an_index_is_searched_with_its_model_and_its_preparation_only(glyphs, indexed, other_model, tmp_path, capsys):
    """Whatever the command asks for, and whatever the checkpoint says today."""
    recorded = RetrievalIndex.load(indexed / "index")
    recorded.about["checkpoint"] = str(tmp_path / "model.ckpt")
    recorded.save(tmp_path / "index")
    args = ["search", indexed / "images" / paths_of(indexed / "images")[3], "-k1", "--index", tmp_path / "index"]
    message = (
        f"`--checkpoint` must be given, because the checkpoint that the index was made with is no longer at {tmp_path}"
    )
    assert message in error_of(capsys, *args)
    assert command(capsys, *args, "--checkpoint", glyphs[0] / "model.ckpt")[0] == 0
    changed = torch.load(glyphs[0] / "model.ckpt", weights_only=True)
    torch.save({**changed, "preparation": {"preparation": Preparation(64).as_dict()}}, tmp_path / "model.ckpt")
    for more in ([], ["--checkpoint", other_model]):
        printed = error_of(capsys, *args, *more)
        assert printed.startswith("search: `--checkpoint` must be the one that the index was made with")
    message = "search: `--transform` must be that of the model, which was evaluated with 'glyphs', got 'plain'"
    more = ["--checkpoint", glyphs[0] / "model.ckpt", "--transform=plain"]
    assert error_of(capsys, *args, *more).startswith(message)


OLD_PAGE = '<meta name="generator" content="lightning-retrieval search">old'


@pytest.fixture
def search_to(indexed, capsys):
    """Search for one image with `--html` and return the exit code, the output and the error output."""

    def run(page):
        query = indexed / "images" / STRANGE_NAME
        return command(capsys, "search", query, "--index", indexed / "index", "-k2", "--html", page)

    return run


@pytest.mark.posix
@pytest.mark.refusal
def test_page_must_be_a_regular_file(search_to, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to fifo").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "into").symlink_to(Path("gone", "target.html"))
    before = sorted(os.listdir(tmp_path))
    irregular = "a regular file, got {}, which is a FIFO, a socket, a device or a link to itself."
    for name in ("fifo", "to fifo", "loop"):
        message = f"search: `--html` must be {irregular.format(tmp_path / name)}\n"
        assert search_to(tmp_path / name) == (2, "", message)
    message = f"search: `--html` must be a file in an existing folder, got {tmp_path / 'into'}.\n"
    assert search_to(tmp_path / "into") == (2, "", message)
    assert sorted(os.listdir(tmp_path)) == before


def test_page_follows_a_symbolic_link(search_to, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, page = tmp_path / "elsewhere" / "target.html", tmp_path / "page.html"
    page.symlink_to(Path("elsewhere", "target.html"))
    for _ in range(2):  # the second time, the target exists
        assert search_to(page)[::2] == (0, "")
        assert page.is_symlink()
        assert "Search results" in target.read_text(encoding="utf-8")
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "page.html", "target.html"]
        target.write_text(target.read_text(encoding="utf-8").replace("Search results", "old"), encoding="utf-8")


def test_page_that_cannot_be_written_leaves_the_old_one_and_nothing_else(search_to, tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / "page.html"
    page.write_text(OLD_PAGE)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_retrieval.search.commands.search.result_page", lambda *args: ("\ud800" * 100_000, []))
        assert search_to(page)[0] == 2
    monkeypatch.setattr(os, "replace", full_disk)
    message = (
        f"search: `--html` {page} cannot be written (No space left on device); what was saved there before is "
        "unchanged, so free space on the disk and save again.\n"
    )
    assert search_to(page) == (2, "", message)
    assert page.read_text() == OLD_PAGE
    assert os.listdir(tmp_path) == ["page.html"]


def test_default_is_ten_results_or_all_if_there_are_fewer(indexed, tmp_path, capsys):
    query = indexed / "images" / STRANGE_NAME
    _, out, _ = command(capsys, "search", query, "--index", indexed / "index", "--json")
    assert len(json.loads(out)["queries"][0]["results"]) == 10
    index = RetrievalIndex.load(indexed / "index")
    index.remove(index.ids[5:])
    index.save(tmp_path / "index")
    page = tmp_path / "page.html"
    code, out, err = command(capsys, "search", query, "--index", tmp_path / "index", "--json", "--html", page)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["queries"][0]["results"]) == 5
    assert "5 nearest of 5 images" in page.read_text(encoding="utf-8")


def test_only_an_earlier_page_is_replaced(indexed, tmp_path, capsys):
    page = tmp_path / "page.html"
    args = ["search", indexed / "images" / STRANGE_NAME, "--index", indexed / "index", "--html", page]
    assert [command(capsys, *args)[0] for _ in range(2)] == [0, 0]
    for content in (b"<!DOCTYPE html>mine", page.read_bytes().replace(b"retrieval search", b"retrieval report")):
        page.write_bytes(content)
        code, _, err = command(capsys, *args)
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"search: `--html` must be a new file, or a page that `search` wrote, got {page}, which")
        assert page.read_bytes() == content


def test_search_parameters_replace_those_of_the_index(indexed, tmp_path, capsys):
    command(capsys, *indexing(indexed, tmp_path / "index", "--factory=IVF10,Flat"))
    args = ["search", indexed / "images" / STRANGE_NAME, "--index", tmp_path / "index", "-k40", "--json"]
    counts = []
    for more in ([], ["--parameters=nprobe=10"]):
        _, out, _ = command(capsys, *args, *more)
        counts.append(len(json.loads(out)["queries"][0]["results"]))
    assert counts[0] < counts[1] == 40
    assert "got 'nope=1'" in error_of(capsys, *args, "--parameters=nope=1")


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
    """The page of two queries, one of them with the strange name."""
    paths = paths_of(indexed / "images")
    queries = [str(indexed / "images" / paths[position]) for position in (0, 12)]
    results, _ = search_images(RetrievalIndex.load(indexed / "index"), queries, 7, device="cpu")
    source, missing = result_page(results, indexed / "images", "7 nearest of 40 images")
    assert missing == []
    (indexed / "results.html").write_text(source, encoding="utf-8")
    return indexed / "results.html"


def test_page_loads_nothing_and_escapes_file_names(page, indexed):
    source = page.read_text(encoding="utf-8")
    found = Page(source)
    assert found.loads
    assert all(re.match(r"data:image/(png|jpeg);base64,|#q[12]$", target) for target in found.loads)
    assert not re.findall(r"url\(|@import|https?:|fetch\(|XMLHttp", source)
    assert found.tags.count("script") == 1
    assert found.tags.count("img") == len(found.alts) == 2 * 8
    strange = str(indexed / "images" / STRANGE_NAME)
    assert found.alts[0] == f"Query: {strange}"
    assert found.alts[1] == f"Result 1: {STRANGE_NAME}"
    assert strange in found.text
    assert len(re.findall(r"distance[\s\d.]+similarity", found.text)) == 2 * 7


def test_page_and_command_report_missing_images(indexed, tmp_path, capsys):
    shutil.copytree(indexed / "images", tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "2")
    query = tmp_path / "images" / paths_of(tmp_path / "images")[3]
    args = ["search", query, "--index", indexed / "index", "-k40", "--html", tmp_path / "page.html"]
    code, _, err = command(capsys, *args, "--images", tmp_path / "images")
    assert code == 0
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert source.count("not readable now") == 10
    assert err.startswith(f"search: 10 of 40 results cannot be read in {tmp_path / 'images'}, the first: 2/deeper/2")
    assert err.endswith("; give the folder of the images with `--images`.\n")
    assert err.count("\n") == 1
    assert command(capsys, *args)[::2] == (0, "")
    assert "not readable now" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def write_made_index(indexed, output, paths, **about):
    """An index that somebody has made by hand: of the same model, with other paths and another folder of images."""
    earlier = RetrievalIndex.load(indexed / "index")
    made = RetrievalIndex(earlier.dim, about={**earlier.about, **about})
    made.add(torch.randn(len(paths), earlier.dim), paths=paths)
    made.save(output)
    return output


@pytest.fixture
def private(tmp_path):
    """A folder of images that a command has been given, next to a private image that links in the folder lead to."""
    Image.new("L", (32, 32), 99).save(tmp_path / "private.png")
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("L", (32, 32), 200).save(folder / "a.png")
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    (folder / "linked").symlink_to(tmp_path)
    (tmp_path / "images-2").mkdir()
    shutil.copy(tmp_path / "private.png", tmp_path / "images-2" / "private.png")
    name_folder(folder)
    return tmp_path


@pytest.mark.hostile
@pytest.mark.refusal
def test_an_index_shows_no_file_outside_of_its_folder(indexed, private, capsys):
    outside = [
        "../private.png",
        "linked/private.png",
        "link.png",
        "a.png/../../private.png",
        str(private / "private.png"),
        "../images-2/private.png",
        "a\0.png",
    ]
    index = write_made_index(indexed, private / "index", ["a.png", *outside], images=str(private / "images"))
    query = indexed / "images" / STRANGE_NAME
    page = private / "page.html"
    for given in ([], ["--images", private / "images"]):
        code, _, err = command(capsys, "search", query, "--index", index, "-k8", "--html", page, *given)
        assert code == 0
        assert page.read_text(encoding="utf-8").count("<img") == 2  # the query and a.png
        assert err.startswith(f"search: 7 of 8 results cannot be read in {private / 'images'}, the first: ")
    captions = captioned([Hit(1, 0, path, 1.0) for path in ["a.png", *outside]], private / "images")
    assert [caption.endswith("(cannot be read)") for _, caption in captions] == [False] + [True] * 7


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.parametrize("kind", ["root", "parent", "another", "relative", "missing", "no text", "null"])
def test_an_index_does_not_choose_the_folder_whose_files_are_shown(indexed, private, capsys, monkeypatch, kind):
    """Only a folder whose images this user has embedded is shown without `--images`."""
    monkeypatch.chdir(private)
    images = {
        "root": "/",
        "parent": str(private),
        "another": str(private / "images-2"),
        "relative": ".",
        "missing": str(private / "images" / "gone"),
        "no text": 7,
        "null": "a\0",
    }[kind]
    paths = [str(private / "private.png").lstrip("/"), "private.png"]
    index = write_made_index(indexed, private / "index", paths, images=images)
    args = [indexed / "images" / STRANGE_NAME, "--index", index, "--html", private / "page.html"]
    error = error_of(capsys, "search", *args)
    assert error.startswith("search: `--images` must be given, because the index names the folder ")
    assert not (private / "page.html").exists()
    assert "`--images` must be given" in error_of(capsys, "demo", "--index", index)
    if kind == "parent":
        assert command(capsys, "search", *args, "--images", private)[0] == 0
        assert (private / "page.html").read_text(encoding="utf-8").count("<img") == 2


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

LONG_AND_TALL = """(async () => {
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


def test_the_page_in_a_browser(page, tmp_path):
    """Its pictures, its keys, and cards with a long path and a tall picture, which stay aligned."""
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page.as_uri())
        browser.wait_for("document.readyState === 'complete' && document.documentElement.dataset.ready === '14'")
        browser.picture(tmp_path / "page.png")
        shown = "[...document.images].filter((image) => image.complete && image.naturalWidth > 0).length"
        assert browser.evaluate(shown) == 16
        # Arrow right enters; a line of the window has three cards; the dialog follows the arrows; closing it returns.
        on_cards = ["-", "1.1", "1.2", "1.1", "1.4", "1.1", "1.7", "2.1", "2.1", "2.1"]
        trace = [*on_cards, "Query 2, rank 2", "Query 2, rank 7", "Query 2, rank 7", 2, "2.7"]
        assert browser.evaluate(KEYS) == trace
        found = browser.evaluate(LONG_AND_TALL)
    finally:
        browser.close()
    assert (found["tops"], found["lines"], found["height"]) == (1, "4.0", 60)
    assert found["over"] <= 1  # all of a tall picture is shown
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (1000, 900)
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert len(colours) > 100  # text and pictures, not one empty sheet


HOSTILE = [
    "<script>document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\">",
    "\"'><b data-rank=9>",
    "</span></button></li></ol><h1>",
    "a\nb\r\tc\0\x1b[31m",
    "${about} $sections {x} %s",
    "&lt;script&gt; &amp;",
    "\u202egpj.exe\u2066",
    "\u0645\u0631\u062d\u0628\u0627 abc",
    "\U0001f469\u200d\U0001f4bb",
    "\udc80",
]
METADATA = """[...document.querySelectorAll('.card')].map((card) =>
    [...card.querySelectorAll('.details bdi')].map((value) => value.textContent))"""
DIALOG = """(() => {
    const card = document.querySelectorAll(".card")[1];
    card.querySelector(".numbers").insertAdjacentHTML("afterbegin", "<span>size <b>12</b></span>");
    card.click();
    return [document.getElementById("compared").textContent, document.getElementById("right").textContent];
    })()"""


@pytest.mark.hostile
def test_metadata_are_only_text_on_the_page(tmp_path):
    """Also in the dialog, which names each value as the card does, whatever fields are before it."""
    images = tmp_path / "images"
    images.mkdir()
    Image.new("L", (8, 8)).save(images / "a.png")
    hits = [Hit(rank, rank, "a.png", 1 - rank / 8, {"title": text}) for rank, text in enumerate(HOSTILE[:4], 1)]
    hits.append(Hit(5, 5, "a.png", 0.1, {f"text{number}": text for number, text in enumerate(HOSTILE)}))
    hits.append(Hit(6, 6, "a.png", 0.1, {"<b>": "x" * 100_000, "title": "a\n" * 1000}))
    source, _ = result_page([QueryResult(str(images / "a.png"), hits)], images, "")
    (tmp_path / "page.html").write_text(source, encoding="utf-8")
    assert len(source) < 40_000
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069]", source)
    captions = [caption for _, caption in captioned(hits, images)]
    assert [caption.count("\n") for caption in captions] == [len(hit.metadata) for hit in hits]
    browser = Browser(tmp_path / "profile")
    try:
        browser.open((tmp_path / "page.html").as_uri(), 400)
        browser.wait_for("document.readyState === 'complete' && document.documentElement.dataset.ready === '6'")
        found = browser.evaluate(METADATA)
        heading, caption = browser.evaluate(DIALOG)
        assert browser.evaluate("document.title") == "Search results: 1 query"
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    finally:
        browser.close()
    expected = [printable(text) for text in HOSTILE]
    assert found[:4] == [[text] for text in expected[:4]]
    assert found[4] == expected
    assert found[5] == ["x" * 100 + "...", r"a\n" * 50 + "..."]
    assert heading == "Query 1, rank 2: distance 0.2500, similarity 0.7500"
    assert caption == f"a.pngtitle {HOSTILE[1]}"


@pytest.mark.hostile
def test_metadata_are_only_text_in_the_table(indexed, tmp_path, capsys):
    index = RetrievalIndex.load(indexed / "index")
    made = RetrievalIndex(index.dim, about=index.about)
    texts = [text for text in HOSTILE if text.isascii()]
    made.add(torch.eye(len(texts), index.dim), paths=["a.png"] * len(texts), columns={"title": texts})
    made.save(tmp_path / "index")
    code, out, err = command(capsys, "search", indexed / "images" / STRANGE_NAME, f"--index={tmp_path / 'index'}")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 2 + len(texts)
    assert all(line.isprintable() for line in out.splitlines())
    assert {line.split(maxsplit=4)[4] for line in out.splitlines()[2:]} == set(map(printable, texts))


def write_font(folder, family, characters):
    """Write a font that draws each of the characters as the same triangle."""
    pen = TTGlyphPen(None)
    for number, point in enumerate([(0, 0), (500, 800), (900, 0)]):
        (pen.lineTo if number else pen.moveTo)(point)
    pen.closePath()
    triangle = pen.glyph()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "triangle"])
    font.setupCharacterMap(dict.fromkeys(map(ord, characters), "triangle"))
    font.setupGlyf({".notdef": triangle, "triangle": triangle})
    font.setupHorizontalMetrics({".notdef": (1000, 0), "triangle": (1000, 0)})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": family, "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(folder / f"{family}.ttf")


NAMES_OF_CLASSES = {"Noto Sans CJK SC": "猫", "Noto Sans Devanagari": "बिल्ली", "Noto Sans Thai": "แมว"}


def test_names_of_classes_in_any_script_are_shown_in_a_font_of_the_script(tmp_path, monkeypatch):
    """The browser could take another font, such as an ornamental one, if the page named none for the script."""
    (tmp_path / "fonts").mkdir()
    write_font(tmp_path / "fonts", "A", "".join(NAMES_OF_CLASSES.values()))
    for family, name in NAMES_OF_CLASSES.items():
        write_font(tmp_path / "fonts", family, name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    hits = [Hit(rank, rank, f"{name}/1.jpg", 0.5) for rank, name in enumerate(NAMES_OF_CLASSES.values(), 1)]
    source, _ = result_page([QueryResult("a.jpg", hits)], tmp_path, "")
    (tmp_path / "page.html").write_text(source, encoding="utf-8")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait_for("document.readyState === 'complete' && document.documentElement.dataset.ready === '3'")
        browser.call("CSS.enable")
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        nodes = browser.call("DOM.querySelectorAll", nodeId=root, selector=".card .path")["nodeIds"]
        used = [browser.call("CSS.getPlatformFontsForNode", nodeId=node)["fonts"] for node in nodes]
    finally:
        browser.close()
    for fonts, family in zip(used, NAMES_OF_CLASSES, strict=True):
        families = {font["familyName"] for font in fonts}
        assert family in families
        assert "A" not in families


def test_transparent_pixels_are_white_on_the_page(tmp_path):
    Image.new("RGBA", (4, 4), (9, 9, 9, 0)).save(tmp_path / "a.png")
    source, missing = result_page([QueryResult(str(tmp_path / "a.png"), [Hit(1, 0, "a.png", 1.0)])], tmp_path, "")
    assert not missing
    data = re.search(r"data:image/png;base64,([^\"]+)", source)[1]
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.getpixel((0, 0)) == (255, 255, 255)
