"""`demo`: its arguments, and its errors before a page is served."""

import sys
from types import SimpleNamespace

import pytest

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli import demo as demo_page
from lightning_retrieval.cli.main import main
from tests.lightning_retrieval.cli.glyph_commands import error_of, save_checkpoint


@pytest.fixture
def served(monkeypatch):
    """What would be served."""
    calls = []

    def serve(searcher, images, **settings):
        calls.append((images, settings))
        return SimpleNamespace(local_url="http://127.0.0.1:7861/", close=lambda verbose: None)

    monkeypatch.setattr(demo_page, "serve_demo", serve)
    monkeypatch.setattr(demo_page, "delete_files_from_time_to_time", lambda folder: None)
    return calls


def test_the_folder_of_the_images_is_that_of_the_index(indexed, served, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["demo", "--index", str(indexed / "index"), "--port", "7861", "-k", "3", "--device", "cpu"])
    assert served == [(indexed / "images", {"k": 3, "host": "127.0.0.1", "port": 7861})]
    assert capsys.readouterr().out == "The page is at http://127.0.0.1:7861/; Ctrl-C ends it.\n"


def test_there_are_at_most_as_many_results_as_images(indexed, served):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["demo", "--index", str(indexed / "index"), "-k", "1000", "--device", "cpu"])
    assert served[0][1]["k"] == 40


@pytest.mark.refusal
def test_the_images_have_moved(indexed, served, capsys, tmp_path):
    error = error_of(capsys, "demo", "--index", indexed / "index", "--images", tmp_path / "moved")
    assert error == (
        f"demo: `--images` must be the folder of the index's images, got {tmp_path / 'moved'}, which is no folder.\n"
    )
    assert not served


@pytest.mark.refusal
def test_another_checkpoint(indexed, served, capsys, tmp_path):
    other = RetrievalModule(Embedder("glyph_net", embedding_dim=16), SmoothAPLoss())
    checkpoint = save_checkpoint(tmp_path / "other.ckpt", other)
    capsys.readouterr()
    error = error_of(capsys, "demo", "--index", indexed / "index", "--checkpoint", checkpoint)
    assert error.startswith("demo: `--checkpoint` must be the one that the index was made with, because embeddings")


@pytest.mark.refusal
def test_no_results(indexed, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["demo", "--index", str(indexed / "index"), "-k", "0"])
    assert "argument -k: must be an integer >= 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["demo", "--index", str(indexed / "index"), "-k", "many"])
    assert "argument -k: must be an integer >= 1, got many" in capsys.readouterr().err


@pytest.mark.refusal
@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_port_that_is_none(port, indexed, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["demo", "--index", str(indexed / "index"), f"--port={port}"])
    assert f"argument --port: must be an integer from 1 to 65535, got {port}\n" in capsys.readouterr().err


@pytest.mark.refusal
def test_the_index_of_a_data_set_without_image_files(indexed, served, capsys, tmp_path):
    index = RetrievalIndex.load(indexed / "index")
    del index.about["images"]  # as `predict` describes embeddings of such a data set
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
