"""`lightning-retrieval search`: what it prints, its exit codes and its error messages."""

import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.models import Preparation
from tests.lightning_retrieval.cli.glyph_commands import (
    STRANGE_NAME,
    command,
    error_of,
    indexing,
    paths_of,
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


@pytest.mark.refusal
def test_a_missing_package_is_named(indexed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    error = error_of(capsys, "search", "--index", indexed / "index", "query.png")
    assert error == "RetrievalIndex: needs faiss, which cannot be imported; pip install faiss-cpu.\n"


@pytest.mark.refusal
def test_invalid_arguments_are_reported_in_one_sentence(indexed, tmp_path, capsys):
    query = indexed / "images" / paths_of(indexed / "images")[3]
    at = ["--index", indexed / "index"]
    printed = "search: `-k` must be at most the number of images in the index, 40, got 41; ask for fewer.\n"
    assert error_of(capsys, "search", query, *at, "-k41") == printed
    assert "`-k` must be an integer >= 1, got 0" in error_of(capsys, "search", query, *at, "-k0")
    sentence = f"must be a folder with manifest.json in it, got {tmp_path}; `lightning-retrieval index` writes one.\n"
    assert error_of(capsys, "search", query, "--index", tmp_path).endswith(sentence)
    RetrievalIndex(4).save(tmp_path / "other")
    printed = "search: `--index` must be an index of images that `lightning-retrieval index` made.\n"
    assert error_of(capsys, "search", query, "--index", tmp_path / "other") == printed


@pytest.mark.refusal
def test_an_index_is_searched_with_its_own_preparation_only(glyphs, indexed, tmp_path, capsys):
    """Whatever the command asks for, and whatever the checkpoint says today."""
    query = indexed / "images" / paths_of(indexed / "images")[3]
    at = ["--index", indexed / "index"]
    message = "search: `--transform` must be that of the model, which was evaluated with 'glyphs', got 'plain'; leave "
    assert error_of(capsys, "search", query, *at, "--transform=plain").startswith(message)
    changed = torch.load(glyphs[0] / "model.ckpt", weights_only=True)
    torch.save({**changed, "preparation": {"preparation": Preparation(64).as_dict()}}, tmp_path / "model.ckpt")
    error = error_of(capsys, "search", query, *at, "--checkpoint", tmp_path / "model.ckpt")
    assert "`--checkpoint` must be the one that the index was made with" in error


@pytest.mark.refusal
def test_output_and_image_folders_are_validated_first(indexed, tmp_path, capsys):
    query = indexed / "images" / STRANGE_NAME
    for page in (tmp_path / "gone" / "page.html", tmp_path):
        printed = error_of(capsys, "search", query, "--index", tmp_path / "none", "--html", page)
        assert printed == f"search: `--html` must be a file in an existing folder, got {page}.\n"
    printed = error_of(capsys, "search", query, "--index", tmp_path / "none", "--images", tmp_path / "gone")
    assert "`--images` must be the folder of the index's images, got " in printed


@pytest.fixture
def search_to(indexed, capsys):
    """Search for one image with `--html` and return the exit code, the output and the error output."""

    def run(page):
        query = indexed / "images" / STRANGE_NAME
        return command(capsys, "search", query, "--index", indexed / "index", "-k2", "--html", page)

    return run


@pytest.fixture
def terminal():
    """A device of this test alone."""
    ends = os.openpty()
    yield ends[1]
    for end in ends:
        os.close(end)


@pytest.mark.refusal
@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "socket", "device", "link to itself"])
def test_page_must_be_a_regular_file(kind, terminal, search_to, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    page = Path("page.html")
    if kind == "fifo":
        os.mkfifo(page)
    elif kind == "link to a fifo":
        os.mkfifo("fifo")
        page.symlink_to("fifo")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(page))
    elif kind == "device":
        page = Path(os.ttyname(terminal))  # a device that even a faulty search by root could not replace
    else:
        page.symlink_to(page.name)
    before = sorted(os.listdir())
    code, out, err = search_to(page)
    assert (code, out) == (2, "")
    assert err == (
        f"search: `--html` must be a regular file, got {page}, which is a FIFO, a socket, a device or a link to "
        "itself.\n"
    )
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("exists", [True, False])
def test_page_follows_a_symbolic_link(exists, search_to, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, page = tmp_path / "elsewhere" / "target.html", tmp_path / "page.html"
    if exists:
        target.write_text("old")
    page.symlink_to(Path("elsewhere", "target.html"))
    code, _, err = search_to(page)
    assert (code, err) == (0, "")
    assert page.is_symlink()
    assert "Search results" in target.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "page.html", "target.html"]


@pytest.mark.refusal
def test_link_into_a_missing_folder_is_an_error(search_to, tmp_path):
    page = tmp_path / "page.html"
    page.symlink_to(Path("gone", "target.html"))
    assert search_to(page) == (2, "", f"search: `--html` must be a file in an existing folder, got {page}.\n")


@pytest.mark.parametrize("failing", ["write", "replace", "interrupt"])
def test_page_that_cannot_be_written_leaves_the_old_one_and_nothing_else(failing, search_to, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full_disk(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(*args):
        raise KeyboardInterrupt

    if failing == "write":
        unwritable = ("\ud800" * 100_000, [])
        monkeypatch.setattr("lightning_retrieval.cli.page.result_page", lambda *args: unwritable)
        assert search_to(page)[0] == 2
    elif failing == "replace":
        monkeypatch.setattr(os, "replace", full_disk)
        message = f"search: `--html` cannot be written to {page} (No space left on device).\n"
        assert search_to(page) == (2, "", message)
    else:
        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search_to(page)
    assert page.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_default_is_ten_results_or_all_if_there_are_fewer(indexed, tmp_path, capsys):
    query = indexed / "images" / STRANGE_NAME
    _, out, _ = command(capsys, "search", query, "--index", indexed / "index", "--json")
    assert len(json.loads(out)["queries"][0]["results"]) == 10
    (tmp_path / "images").mkdir()
    for path in paths_of(indexed / "images")[:5]:
        shutil.copy(indexed / "images" / path, tmp_path / "images")
    shutil.copy(indexed / "model.ckpt", tmp_path)
    command(capsys, *indexing(tmp_path, tmp_path / "index"))
    page = tmp_path / "page.html"
    code, out, err = command(capsys, "search", query, "--index", tmp_path / "index", "--json", "--html", page)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["queries"][0]["results"]) == 5
    assert "5 nearest of 5 images" in page.read_text(encoding="utf-8")


def test_search_parameters_replace_those_of_the_index(indexed, tmp_path, capsys):
    command(capsys, *indexing(indexed, tmp_path / "index", "--factory=IVF10,Flat"))
    args = ["search", indexed / "images" / STRANGE_NAME, "--index", tmp_path / "index", "-k40", "--json"]
    counts = []
    for more in ([], ["--parameters=nprobe=10"]):
        _, out, _ = command(capsys, *args, *more)
        counts.append(len(json.loads(out)["queries"][0]["results"]))
    assert counts[0] < counts[1] == 40
    assert "got 'nope=1'" in error_of(capsys, *args, "--parameters=nope=1")
