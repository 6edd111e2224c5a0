"""`search`: what it finds and prints, and its page, which is self-contained and safe."""

import base64
import errno
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.models import Preparation
from tests.browser import Browser
from tests.lightning_retrieval.search.commands.glyph_commands import (
    STRANGE_NAME,
    command,
    error_of,
    indexing,
    paths_of,
    run,
)


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
    # Without --json, the same for people.
    out = command(capsys, "search", "--index", indexed / "index", queries[0], "-k2")[1]
    assert str(queries[0]) in out
    assert "1.0000" in out
    assert out.count(paths[7]) == 2


def test_paths_of_every_option_may_begin_with_the_home_folder(glyphs, tmp_path, monkeypatch, capsys):
    """As in `--images=~/photos`, where no shell replaces it."""
    home, here = tmp_path / "home", tmp_path / "here"
    shutil.copytree(glyphs[0], home, ignore=shutil.ignore_patterns("index"))
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    for args in (
        ("embed", "--checkpoint=~/model.ckpt", "--images=~/images", "--output=~/rows", "--device=cpu"),
        ("index", "--embeddings=~/rows", "--output=~/index"),
        ("search", "--index=~/index", "~/images/0/deeper/01.PNG", "--html=~/page.html", "--device=cpu"),
    ):
        code, _, err = run(capsys, *args)
        assert (code, err) == (0, "")
    assert {"rows", "index", "page.html"} <= {path.name for path in home.iterdir()}
    assert not list(here.iterdir())


@pytest.mark.posix
def test_no_home_folder_is_needed(glyphs, tmp_path, monkeypatch, capsys):
    """As for a user of a container whom the system does not know."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    assert command(capsys, *indexing(glyphs[0], tmp_path / "index"))[0] == 0
    query, page = glyphs[0] / "images/0/deeper/01.PNG", f"--html={tmp_path / 'a.html'}"
    searching = ["search", f"--index={tmp_path / 'index'}", query, page]
    assert "--images" in error_of(capsys, *searching)  # which says that their folder is this user's
    assert command(capsys, *searching, f"--images={glyphs[0] / 'images'}")[0] == 0


@pytest.mark.posix
def test_a_query_may_have_a_name_that_no_list_of_images_may_have(indexed, tmp_path, capsys):
    query = tmp_path / "a\\..\\b.png"
    query.write_bytes((indexed / "images" / paths_of(indexed / "images")[3]).read_bytes())
    code, out, err = command(capsys, "search", "--index", indexed / "index", query, "-k1", "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)["queries"]
    assert found["query"] == str(query)
    assert found["results"][0]["path"] == paths_of(indexed / "images")[3]


def test_unreadable_queries_are_named_and_the_others_searched(indexed, tmp_path, capsys):
    good = indexed / "images" / paths_of(indexed / "images")[3]
    missing = tmp_path / "gone.png"
    code, out, err = command(capsys, "search", good, missing, "--index", indexed / "index", "-k1", "--json")
    assert code == 1
    assert str(missing) in err
    assert [result["query"] for result in json.loads(out)["queries"]] == [str(good)]
    assert [unreadable["path"] for unreadable in json.loads(out)["unreadable"]] == [str(missing)]


def test_an_index_is_searched_with_its_model_and_its_preparation_only(glyphs, indexed, other_model, tmp_path, capsys):
    """Also if its checkpoint was moved, and whatever the checkpoint says today."""
    recorded = RetrievalIndex.load(indexed / "index")
    recorded.about["checkpoint"] = str(tmp_path / "model.ckpt")
    recorded.save(tmp_path / "index")
    args = ["search", indexed / "images" / paths_of(indexed / "images")[3], "-k1", "--index", tmp_path / "index"]
    assert "`--checkpoint`" in error_of(capsys, *args)
    assert command(capsys, *args, "--checkpoint", glyphs[0] / "model.ckpt")[0] == 0
    changed = torch.load(glyphs[0] / "model.ckpt", weights_only=True)
    torch.save({**changed, "preparation": {"preparation": Preparation(64).as_dict()}}, tmp_path / "model.ckpt")
    for more in ([], ["--checkpoint", other_model]):
        assert "`--checkpoint`" in error_of(capsys, *args, *more)


@pytest.fixture
def search_to(indexed, capsys):
    """Search for one image with `--html` and return the exit code, the output and the error output."""

    def run(page):
        query = indexed / "images" / STRANGE_NAME
        return command(capsys, "search", query, "--index", indexed / "index", "-k2", "--html", page)

    return run


def test_page_follows_a_symbolic_link(search_to, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, page = tmp_path / "elsewhere" / "target.html", tmp_path / "page.html"
    page.symlink_to(Path("elsewhere", "target.html"))
    for _ in range(2):  # the second time, the target exists
        assert search_to(page)[::2] == (0, "")
        assert page.is_symlink()
        assert "<img" in target.read_text(encoding="utf-8")
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "page.html", "target.html"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(search_to, tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / "page.html"
    assert search_to(page)[0] == 0
    before = page.read_bytes()
    monkeypatch.setattr(os, "replace", full_disk)
    code, _, err = search_to(page)
    assert (code, "No space left on device" in err) == (2, True)
    assert page.read_bytes() == before
    assert os.listdir(tmp_path) == ["page.html"]


def test_only_an_earlier_page_of_this_command_is_replaced(search_to, tmp_path):
    page = tmp_path / "page.html"
    assert [search_to(page)[0] for _ in range(2)] == [0, 0]
    for content in (b"<!DOCTYPE html>mine", page.read_bytes().replace(b"retrieval search", b"retrieval report")):
        page.write_bytes(content)
        code, _, err = search_to(page)
        assert (code, "`--html`" in err) == (2, True)
        assert page.read_bytes() == content


def test_default_is_ten_results_or_all_if_there_are_fewer(indexed, tmp_path, capsys):
    query = indexed / "images" / STRANGE_NAME
    _, out, _ = command(capsys, "search", query, "--index", indexed / "index", "--json")
    assert len(json.loads(out)["queries"][0]["results"]) == 10
    index = RetrievalIndex.load(indexed / "index")
    index.remove(index.ids[5:])
    index.save(tmp_path / "index")
    code, out, err = command(capsys, "search", query, "--index", tmp_path / "index", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["queries"][0]["results"]) == 5


def test_search_parameters_replace_those_of_the_index(indexed, tmp_path, capsys):
    command(capsys, *indexing(indexed, tmp_path / "index", "--factory=IVF10,Flat"))
    args = ["search", indexed / "images" / STRANGE_NAME, "--index", tmp_path / "index", "-k40", "--json"]
    counts = []
    for more in ([], ["--parameters=nprobe=10"]):
        _, out, _ = command(capsys, *args, *more)
        counts.append(len(json.loads(out)["queries"][0]["results"]))
    assert counts[0] < counts[1] == 40


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


@pytest.mark.hostile
def test_the_page_loads_nothing_and_escapes_names_of_files(indexed, tmp_path, capsys):
    paths, page = paths_of(indexed / "images"), tmp_path / "page.html"
    queries = [indexed / "images" / paths[position] for position in (0, 12)]
    searching = ["search", *queries, "--index", indexed / "index", "-k7", "--html", page]
    assert command(capsys, *searching)[::2] == (0, "")
    source = page.read_text(encoding="utf-8")
    found = Page(source)
    assert found.loads
    assert all(re.match(r"data:image/(png|jpeg);base64,|#", target) for target in found.loads)
    assert not re.findall(r"url\(|@import|https?:|fetch\(|XMLHttp", source)
    assert found.tags.count("script") == 1
    assert found.tags.count("img") == 2 * 8
    assert str(queries[0]) in found.alts[0]
    assert found.alts[1].endswith(STRANGE_NAME)
    assert str(queries[0]) in found.text


def test_images_that_are_gone_are_counted_unless_their_folder_is_given(indexed, tmp_path, capsys):
    shutil.copytree(indexed / "images", tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "2")
    query = tmp_path / "images" / paths_of(tmp_path / "images")[3]
    args = ["search", query, "--index", indexed / "index", "-k40", "--html", tmp_path / "page.html"]
    code, _, err = command(capsys, *args, "--images", tmp_path / "images")
    assert (code, "10 of 40" in err, "2/deeper/2" in err) == (0, True, True)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<img") == 31
    assert command(capsys, *args)[::2] == (0, "")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<img") == 41


def write_made_index(indexed, output, paths, columns=None, **about):
    """An index that somebody has made by hand: of the same model, with other paths and another folder of images."""
    earlier = RetrievalIndex.load(indexed / "index")
    made = RetrievalIndex(earlier.dim, about={**earlier.about, **about})
    made.add(torch.randn(len(paths), earlier.dim), paths=paths, columns=columns)
    made.save(output)
    return output


@pytest.fixture
def private(indexed, tmp_path, capsys):
    """A folder of images that this user has embedded, next to a private image that links in the folder lead to."""
    Image.new("L", (32, 32), 99).save(tmp_path / "private.png")
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("L", (32, 32), 200).save(folder / "a.png")
    assert command(capsys, *indexing(indexed, tmp_path / "own", f"--images={folder}"))[0] == 0
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    (folder / "linked").symlink_to(tmp_path)
    (tmp_path / "images-2").mkdir()
    shutil.copy(tmp_path / "private.png", tmp_path / "images-2" / "private.png")
    return tmp_path


@pytest.mark.hostile
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
        assert "7 of 8" in err


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["root", "parent", "another", "relative"])
def test_an_index_does_not_choose_the_folder_whose_files_are_shown(indexed, private, capsys, monkeypatch, kind):
    """Only a folder whose images this user has embedded is shown without `--images`."""
    monkeypatch.chdir(private)
    images = {"root": "/", "parent": str(private), "another": str(private / "images-2"), "relative": "."}[kind]
    paths = [str(private / "private.png").lstrip("/"), "private.png"]
    index = write_made_index(indexed, private / "index", paths, images=images)
    args = [indexed / "images" / STRANGE_NAME, "--index", index, "--html", private / "page.html"]
    assert "`--images` must be given" in error_of(capsys, "search", *args)
    assert not (private / "page.html").exists()
    assert "`--images` must be given" in error_of(capsys, "demo", "--index", index)
    if kind == "parent":
        assert command(capsys, "search", *args, "--images", private)[0] == 0
        assert (private / "page.html").read_text(encoding="utf-8").count("<img") == 2


HOSTILE = [
    "<script>document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\">",
    "\"'><b data-rank=9>",
    "</span></button></li></ol><h1>",
    "a\nb\r\tc\x1b[31m",
    "${about} $sections {x} %s",
    "&lt;script&gt; &amp;",
    "\u202egpj.exe\u2066",
    "x" * 100_000,
]


@pytest.mark.hostile
def test_metadata_are_only_text_on_the_page_and_in_the_terminal(indexed, tmp_path, capsys):
    """The browser shows the pictures, runs none of the metadata, and moves from card to card by the keyboard."""
    paths, page = paths_of(indexed / "images")[1 : 1 + len(HOSTILE)], tmp_path / "page.html"
    index = write_made_index(indexed, tmp_path / "index", paths, {"title": HOSTILE})
    searching = ["search", indexed / "images" / paths[0], "--index", index, "--html", page]
    code, out, err = command(capsys, *searching)
    assert (code, err) == (0, "")
    assert all(line.isprintable() for line in out.splitlines())
    source = page.read_text(encoding="utf-8")
    assert "x" * 1000 not in source
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069\x1b]", source)
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page.as_uri(), 400)
        shown = "[...document.images].filter((image) => image.complete && image.naturalWidth > 0).length"
        browser.wait_for(f"document.readyState === 'complete' && {shown} === {len(paths) + 1}")
        assert browser.evaluate("document.title") != "run"
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
        text = browser.evaluate("document.body.textContent")
        press = (
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));"
        )
        first, second = (browser.evaluate(f"{press} document.activeElement.textContent") for _ in range(2))
        browser.evaluate("document.activeElement.click()")
        assert browser.evaluate("document.querySelector('dialog').open")
        assert browser.evaluate("document.title") != "run"
    finally:
        browser.close()
    for expected in HOSTILE[:4]:
        assert expected in text
    assert first != second
    assert first in text
    assert second in text


def test_transparent_pixels_are_white_on_the_page(indexed, tmp_path, capsys):
    Image.new("RGBA", (4, 4), (9, 9, 9, 0)).save(tmp_path / "a.png")
    page = tmp_path / "page.html"
    searching = ["search", tmp_path / "a.png", "--index", indexed / "index", "-k1", "--html", page]
    assert command(capsys, *searching)[::2] == (0, "")
    data = re.search(r"data:image/png;base64,([^\"]+)", page.read_text(encoding="utf-8"))[1]
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.getpixel((0, 0)) == (255, 255, 255)
